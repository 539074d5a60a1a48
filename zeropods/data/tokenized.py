"""Examples -> token ids without padding, and what was lost on the way."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zeropods.data.building import Progress, dataset_of, token_statistics
from zeropods.data.encode import Encoder, Ids
from zeropods.data.manifest import SplitStatistics, TokenStatistics
from zeropods.data.prompts import source_text
from zeropods.data.wikisql import Example
from zeropods.sql.text import format_query

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

CHUNK = 8_192


def tokenize(
    examples: Iterator[Example],
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    limits: tuple[int, int],
    progress: Progress,
) -> tuple[Dataset, SplitStatistics]:
    """Rows of `input_ids` and `labels`, and their statistics.

    Args:
        limits: the most source and target tokens of a row, the end token included.
    """
    sources, targets, lost = _Side(limits[0]), _Side(limits[1]), 0
    encode, backend = Encoder(tokenizer), tokenizer.backend_tokenizer
    while chunk := list(itertools.islice(examples, CHUNK)):
        texts = [target_of(e) for e in chunk]
        ids = encode(texts)
        sources.extend(encode([source_of(e, prompt) for e in chunk]))
        targets.extend(ids)
        decoded = backend.decode_batch(ids, skip_special_tokens=True)
        lost += sum(_folded(a) != _folded(b) for a, b in zip(texts, decoded, strict=True))
        progress(len(chunk))
    end, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id
    statistics = SplitStatistics(
        rows=len(sources.rows),
        source=sources.finish(end, unknown),
        target=targets.finish(end, unknown),
        targets_lost=lost,
    )
    return dataset_of(input_ids=sources.flat(), labels=targets.flat()), statistics


def source_of(example: Example, prompt: str) -> str:
    """What the model reads of an example."""
    return source_text(prompt, example.question, example.table.header, example.table.types)


def target_of(example: Example) -> str:
    """What the model shall write."""
    return format_query(example.query, example.table.header)


class _Side:
    """The token ids of one side of a split, cut at `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: list[Ids] = []

    def extend(self, rows: list[Ids]) -> None:
        self.rows += rows

    def finish(self, end: int, unknown: int) -> TokenStatistics:
        """Cut what is too long, keeping the end token last, and count."""
        truncated = 0
        for number, row in enumerate(self.rows):
            if len(row) > self.limit:
                self.rows[number] = np.append(row[: self.limit - 1], np.int32(end))
                truncated += 1
        unknowns = [np.count_nonzero(row == unknown) for row in self.rows]
        return token_statistics([len(row) for row in self.rows], truncated, unknowns)

    def flat(self) -> tuple[NDArray[np.int64], Ids]:
        """Tokens of each row, and all ids, one row behind the other."""
        return np.array([len(row) for row in self.rows]), np.concatenate(self.rows)


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())
