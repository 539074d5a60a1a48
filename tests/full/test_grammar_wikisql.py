"""The grammar against WikiSQL's own queries, in the segmentation of T5's tokenizer."""

from __future__ import annotations

import os
import unicodedata
from itertools import islice
from pathlib import Path

import pytest

from zeropods.data.tokenizers import load_tokenizer
from zeropods.data.wikisql import Example, read_split
from zeropods.sql.grammar import QueryAutomaton, Vocabulary
from zeropods.sql.query import Condition, Query, format_query, parse_query

STEP = {"train": 1, "dev": 1} if os.environ.get("ZEROPODS_TEST_ALL") else {"train": 32, "dev": 4}
"""Every 32nd train query (1,762) and every fourth of dev (2,106); with ZEROPODS_TEST_ALL=1 all 64,776.

Of all, 64,721 are found again. 47 others differ in the case of letters that have no piece in either case; 4
questions have several spans of unknown characters, and `<unk>` does not say which (♂ and ☪); 4 values end
inside a word (`block i` for `the block is I`).
"""


@pytest.fixture(scope="module")
def tokenizer(shared_data):
    return load_tokenizer(str(shared_data / "t5" / "spiece.model"))


def examples(folder: Path, split: str) -> list[Example]:
    return list(islice(read_split(folder, split), 0, None, STEP[split]))


def normal(query: Query | None) -> Query | None:
    """The query with its values after NFKC, the form that T5's tokenizer gives them."""
    if query is None:
        return None
    conditions = (Condition(column, op, _text(value)) for column, op, value in query.conds)
    return Query(query.sel, query.agg, tuple(conditions))


def _text(value: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", value).split())


@pytest.mark.parametrize("split", ["train", "dev"])
def test_998_of_1000_queries_are_found_again(shared_data, tokenizer, split):
    vocabulary = Vocabulary.of(tokenizer)
    found = examples(shared_data / "wikisql", split)
    ids = tokenizer([format_query(e.query, e.table.header) for e in found]).input_ids
    same = 0
    for example, row in zip(found, ids, strict=True):
        state = QueryAutomaton(vocabulary, example.table.header, example.question).follow(row)
        same += state is not None and normal(state.query) == normal(example.query)
    assert len(found) > 1_700
    assert same >= 0.998 * len(found)


def test_97_5_percent_of_dev_survive_the_tokenizer(shared_data, tokenizer):
    found = examples(shared_data / "wikisql", "dev")
    ids = tokenizer([format_query(e.query, e.table.header) for e in found]).input_ids
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    parsed = [parse_query(text, e.table.header) for text, e in zip(texts, found, strict=True)]
    same = sum(normal(query) == normal(e.query) for query, e in zip(parsed, found, strict=True))
    assert same >= 0.975 * len(found)
