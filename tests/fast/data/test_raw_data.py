"""Readers of WikiSQL, SQuAD and text name the place of every fault; prompt, sample and blocks are what they say."""

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.hub_wikisql import as_arrow, as_json, as_parquet, hub_row
from zeropods.data.download import DATASETS, RECORD
from zeropods.data.sample import write_sample
from zeropods.data.squad import SquadExample, answer_in, read_squad, squad_prompt, squad_splits
from zeropods.data.text import articles, cut, folder_corpus, join, open_corpus, split_by_hash
from zeropods.data.wikisql import (
    count_examples,
    read_split,
    read_tables,
    source_files,
    split_of,
    table_ids,
    table_titles,
    wikisql_splits,
)
from zeropods.errors import UserError
from zeropods.sql.query import execute

# WikiSQL.

TABLE = {"id": "t", "header": ["Name", "Age"], "types": ["text", "real"], "rows": [["Ann", 30]]}
SQL = {"sel": 1, "agg": 0, "conds": [[0, 0, "Ann"], [1, 1, 30.0]]}
NAN, INFINITY = float("nan"), float("inf")
EXAMPLE = {"phase": 1, "table_id": "t", "question": "How old is Ann?", "sql": SQL}


def write(folder: Path, tables: list[Any], examples: list[Any]) -> Path:
    for name, documents in (("train.tables.jsonl", tables), ("train.jsonl", examples)):
        lines = [d if isinstance(d, bytes) else json.dumps(d).encode() for d in documents]
        (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def test_an_example_comes_with_its_table_and_query_whose_numbers_become_text(tmp_path: Path) -> None:
    (example,) = read_split(write(tmp_path, [TABLE], [EXAMPLE]), "train")
    assert (example.index, example.table.header) == (0, ("Name", "Age"))
    assert [condition.value for condition in example.query.conds] == ["Ann", "30.0"]


@pytest.mark.parametrize(
    ("tables", "examples", "said"),
    [
        ([], [b"{broken"], "train.jsonl:2: broken JSON"),
        ([], [b"[]"], "train.jsonl:2: it is []"),
        ([], [EXAMPLE | {"table_id": "u"}], "train.jsonl:2: table_id 'u' is missing"),
        ([], [EXAMPLE | {"question": " "}], "train.jsonl:2: question is ' '"),
        ([], [EXAMPLE | {"sql": SQL | {"sel": 2}}], "train.jsonl:2: Query(sel=2"),
        ([], [EXAMPLE | {"sql": SQL | {"sel": True}}], "train.jsonl:2: sql.sel is True"),
        ([], [EXAMPLE | {"sql": SQL | {"conds": [[5, 0, "x"]]}}], "its table t has 2 columns"),
        ([], [EXAMPLE | {"sql": SQL | {"conds": [[0, 4, "x"]]}}], "train.jsonl:2: sql.conds.0.1 is 4"),
        ([], [EXAMPLE | {"sql": SQL | {"conds": [[0, 0]]}}], "train.jsonl:2: sql.conds.0"),
        ([TABLE], [], "tables.jsonl:2: table id 't' occurs twice"),
        ([TABLE | {"id": "u", "rows": [["Ann"]]}], [], "tables.jsonl:2: 2 columns, but a row or its types have 1"),
        ([TABLE | {"id": "u", "types": ["text", "date"]}], [], "tables.jsonl:2: types.1 is 'date'"),
        ([TABLE | {"id": "u", "header": []}], [], "tables.jsonl:2: header is []"),
        ([TABLE | {"id": "u", "rows": [["Ann", NAN]]}], [], "tables.jsonl:2: NaN is not a number of JSON; write null"),
        ([TABLE | {"id": "u", "rows": [["Ann", -INFINITY]]}], [], "tables.jsonl:2: -Infinity is not a number of JSON"),
        ([], [EXAMPLE | {"sql": SQL | {"conds": [[1, 1, INFINITY]]}}], "train.jsonl:2: Infinity is not a number of"),
        ([], [EXAMPLE | {"sql": SQL | {"conds": [[1, 1, NAN]]}}], "write null where there is no value, a number, or a"),
        ([], [b'{"NaN": NaN'], "train.jsonl:2: broken JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tables: list[Any], examples: list[Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        list(read_split(write(tmp_path, [TABLE, *tables], [EXAMPLE, *examples]), "train"))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_nan_and_infinity_are_texts_like_others(tmp_path: Path) -> None:
    table = TABLE | {"rows": [["NaN", 30], ["Infinity", None]]}
    example = EXAMPLE | {"question": "How old is NaN?", "sql": SQL | {"conds": [[0, 0, "NaN"]]}}
    (read,) = read_split(write(tmp_path, [table], [example]), "train")
    assert read.table.rows == (("NaN", 30), ("Infinity", None))
    assert read.query.conds[0].value == "NaN"


# The same questions in the layout of the hub, as `datasets` leaves it on disk.


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded data set, in the official layout."""
    folder = tmp_path_factory.mktemp("official")
    write_sample(folder)
    return folder


HUB_FILES = [
    (as_json, "{}.jsonl"),
    (as_json, "{}.json"),
    (as_parquet, "{}.parquet"),
    (as_parquet, "data/{}-00000-of-00001.parquet"),
    (as_parquet, "default/{}/0000.parquet"),
    (as_arrow, "{}/data-00000-of-00001.arrow"),
]


@pytest.mark.parametrize(("write_rows", "name"), HUB_FILES, ids=[name for _, name in HUB_FILES])
def test_the_hub_s_layout_holds_the_same_questions(
    official: Path, tmp_path: Path, write_rows: Callable[[list[dict[str, Any]], Path], None], name: str
) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    for split, theirs in {"train": "train", "dev": "validation"}.items():
        examples = list(islice(read_split(official, split), 40))
        write_rows([hub_row(example) for example in examples], hub / name.format(theirs))
        read = list(read_split(hub, split))
        assert [(e.index, e.question, e.query) for e in read] == [(e.index, e.question, e.query) for e in examples]
        for one, other in zip(read, examples, strict=True):
            assert (one.table.id, one.table.header, one.table.types) == (
                other.table.id, other.table.header, other.table.types,
            )  # fmt: skip
            assert execute(one.query, one.table) == execute(other.query, other.table)
        assert len({id(e.table) for e in read}) == len({e.table.id for e in read})
        assert table_ids(hub, split) == {e.table.id for e in examples}
        assert set(table_titles(hub, split).values()) == {f"Page of {e.table.id}" for e in examples}
        assert (count_examples(hub, split, None), count_examples(hub, split, 3)) == (40, 3)
    assert wikisql_splits(hub) == ["train", "dev"]
    for split in ("train", "dev"):
        (path,) = source_files(hub, split)
        assert split_of(str(path.relative_to(hub))) == split


CONDS = {"column_index": [0], "operator_index": [0], "condition": ["Ann"]}
HUB_ROW = {"question": "How old is Ann?", "table": TABLE, "sql": {"sel": 1, "agg": 0, "conds": CONDS}}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"sql": {"sel": 1, "agg": 0, "conds": CONDS | {"condition": []}}}, "sql.conds: its lists differ in length"),
        ({"sql": {"sel": 1, "agg": 0, "conds": [[0, 0, "Ann"]]}}, "sql.conds is [[0, 0, 'Ann']]"),
        ({"sql": {"sel": 1, "agg": 9, "conds": CONDS}}, "agg is 9"),
        ({"sql": {"sel": 2, "agg": 0, "conds": CONDS}}, "its table t has 2 columns"),
        ({"table": TABLE | {"header": ["Name", "Years"]}}, "table id 't' is another table in an earlier row"),
        ({"table": TABLE | {"id": "u", "rows": [["Ann"]]}}, "2 columns, but a row or its types have 1"),
        ({"table": TABLE | {"id": "u", "rows": [["Ann", NAN]]}}, "NaN is not a number of JSON"),
        ({"table": None}, "table is None"),
    ],
)
def test_a_bad_row_of_the_hub_s_layout_is_named(tmp_path: Path, second: dict[str, Any], said: str) -> None:
    as_json([HUB_ROW, HUB_ROW | second], tmp_path / "train.jsonl")
    with pytest.raises(UserError) as raised:
        list(read_split(tmp_path, "train"))
    assert "train.jsonl:2: " in str(raised.value) and said in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_no_parquet_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("question,table")
    with pytest.raises(UserError, match=r"train\.parquet: cannot be read \(.*\); fetch the file again"):
        list(read_split(tmp_path, "train"))


def test_a_prepared_set_is_not_taken_for_raw_data(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "data-00000-of-00001.arrow").touch()
    message = "a prepared set, which keeps no questions; give the raw data that it was made from"
    with pytest.raises(UserError, match=message):
        list(read_split(tmp_path, "dev"))
    with pytest.raises(UserError, match=message):
        list(read_squad(tmp_path, "dev"))


def test_a_split_that_is_empty_or_missing_is_named(tmp_path: Path) -> None:
    for split, said in {
        "train": "train.jsonl: the file is empty",
        "dev": "zeropods data get wikisql",
    }.items():
        with pytest.raises(UserError, match=said):
            list(read_split(write(tmp_path, [TABLE], []), split))


def test_all_of_the_real_data_is_read(shared_data: Path) -> None:
    assert sum(1 for _ in read_split(shared_data / "wikisql", "dev")) == 8_421
    assert len(read_tables(shared_data / "wikisql" / "dev.tables.jsonl")) == 2_716


# SQuAD.

QUESTION = {"id": "q1", "question": "Where is Ann?", "answers": [{"text": "in Rome", "answer_start": 7}]}
DOCUMENT = {
    "version": "1.1",
    "data": [{"title": "Ann", "paragraphs": [{"context": "Ann is in Rome.", "qas": [QUESTION]}]}],
}


def write_squad(folder: Path, document: Any, name: str = "train-v1.1.json") -> Path:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    (folder / name).write_bytes(content)
    return folder


def fault(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        list(read_squad(folder, "train"))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def changed(**changes: Any) -> dict[str, Any]:
    document = deepcopy(DOCUMENT)
    document["data"][0]["paragraphs"][0]["qas"][0] |= changes
    return document


def test_a_question_comes_with_its_context_and_answers(tmp_path: Path) -> None:
    (example,) = read_squad(write_squad(tmp_path, DOCUMENT), "train")
    assert example == SquadExample(0, "q1", "Where is Ann?", "Ann is in Rome.", ("in Rome",), (7,))


def test_a_file_of_another_name_is_found_by_its_split_and_two_are_refused(tmp_path: Path) -> None:
    write_squad(tmp_path, DOCUMENT, "train-a.json")
    assert (squad_splits(tmp_path), len(list(read_squad(tmp_path, "train")))) == (["train"], 1)
    write_squad(tmp_path, DOCUMENT, "train-b.json")
    assert "train-a.json, train-b.json all belong to split 'train'" in fault(tmp_path)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (changed(answers=[{"text": "in Oslo", "answer_start": 7}]), "'q1': answer 'in Oslo' is not in its context"),
        (changed(answers=[{"text": "in Rome", "answer_start": 6}]), "'in Rome' is not at answer_start 6 but at 7"),
        (changed(answers=[{"text": " ", "answer_start": 3}]), "answers.0.text is ' '"),
        (changed(answers=[]), "answers is []"),
        (changed(question="half \ud800"), "train-v1.1.json: broken JSON"),
        (b'{"data":\n [}', "train-v1.1.json: broken JSON: expected value at line 2 column 3"),
        ([], "train-v1.1.json: it is []"),
        ({"data": []}, "train-v1.1.json: contains no questions"),
        ({"data": DOCUMENT["data"] * 2}, "id 'q1' occurs twice"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, document: Any, said: str) -> None:
    assert said in fault(write_squad(tmp_path, document))


def test_the_prompt_ends_where_the_answer_begins_and_an_answer_is_the_first_line_after_it() -> None:
    assert squad_prompt(" Where? ", "Here.\n") == "Question: Where? Context: Here. Answer:"
    assert answer_in(" in Rome \nQuestion: Who?") == "in Rome"


def test_the_sample_is_read_without_a_fault_and_dev_asks_of_other_contexts(tmp_path: Path) -> None:
    summary = write_sample(tmp_path / "squad", task="squad")
    read = {split: list(read_squad(tmp_path / "squad", split)) for split in ("train", "dev")}
    found = {split: len(examples) for split, examples in read.items()}
    assert found == summary["questions"] == {"train": 800, "dev": 160}
    assert not {e.context for e in read["train"]} & {e.context for e in read["dev"]}


@pytest.mark.parametrize(("split", "questions"), [("train", 11_877), ("dev", 10_570)])
def test_every_real_question_is_read(shared_data: Path, split: str, questions: int) -> None:
    assert sum(1 for _ in read_squad(shared_data / "squad", split)) == questions


# Text: which documents a folder of it has, and how they become blocks.

WIKITEXT = " \n = Ann = \n \n Ann sings . \n \n = = Life = = \n \n = x = \n y \n \n = Bob = \n \n Bob . \n"


def write_files(folder: Path, **files: str | bytes | pyarrow.Table) -> Path:
    """Files by name; `_` stands for a dot."""
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        if isinstance(content, pyarrow.Table):
            parquet.write_table(content, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def by_split(folder: Path, field: str = "text") -> dict[str, list[str]]:
    corpus = folder_corpus(folder, field)
    return {split: list(corpus.documents(split)) for split in corpus.splits}


def lines(*texts: str, field: str = "text") -> str:
    return "".join(json.dumps({"url": "x", field: text}) + "\n" for text in texts)


@given(st.lists(st.sampled_from([" \n", " = Ann = \n", " = = Life = = \n", " = 1 , x = \n", "text\n"])))
def test_articles_joined_are_the_lines_again(text: list[str]) -> None:
    assert "".join(articles(text)) == "".join(text)


@pytest.mark.parametrize(
    ("files", "field", "documents"),
    [
        (
            {"a_txt": "one\r\n\n two", "b_txt": "three", "README_md": "no"},
            "text",
            {"train": ["one\r\n\n two", "three"]},
        ),
        (
            {"c4-train_00000-of-2_jsonl": lines("a"), "c4-validation_jsonl": lines("b"), "test_jsonl": lines("c")},
            "text",
            {"train": ["a"], "dev": ["b"], "test": ["c"]},
        ),
        ({"train_parquet": pyarrow.table({"body": ["a\n", "b"], "n": [1, 2]})}, "body", {"train": ["a\n", "b"]}),
        # A text alone is train, whatever its hash says.
        ({"book_txt": "document 4"}, "text", {"train": ["document 4"]}),
    ],
    ids=["text", "splits by name", "parquet", "alone"],
)
def test_documents_are_read_by_split(
    tmp_path: Path, files: dict[str, str], field: str, documents: dict[str, list[str]]
) -> None:
    assert by_split(write_files(tmp_path, **files), field) == documents


@pytest.mark.parametrize("names", [("train_txt", "valid_txt"), ("wiki_train_tokens", "wiki_valid_tokens")])
def test_wikitexts_files_are_read_by_article_from_its_title_to_the_next(tmp_path: Path, names: tuple[str, str]) -> None:
    found = by_split(write_files(tmp_path, **dict.fromkeys(names, WIKITEXT)))
    assert found["train"] == found["dev"]
    assert [article.split(" = ")[1] for article in found["train"]] == ["Ann", "Bob"]


def test_one_document_in_twenty_is_dev_where_no_name_tells_a_split_the_same_in_every_release(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(400)]
    found = by_split(write_files(tmp_path, all_jsonl=lines(*texts)))
    assert 10 < len(found["dev"]) < 32 and sorted(found["train"] + found["dev"]) == sorted(texts)
    assert [number for number in range(60) if split_by_hash(f"document {number}") == "dev"] == [4, 11, 12, 25, 44]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "contains no text; expected files named *.txt, *.tokens, *.raw, *.jsonl, *.parquet"),
        ({"a_txt": "a", "b_jsonl": lines("b")}, "holds a.txt and b.jsonl; keep files of one kind"),
        ({"wiki_train_raw": "a", "wiki_train_tokens": "b"}, "holds wiki.train.raw and wiki.train.tokens"),
        ({"train_txt": "a", "notes_txt": "b"}, "notes.txt: its name mentions no split, but train.txt does"),
        ({"test_txt": "a"}, "has test.txt but no file for train"),
        ({"train-test_txt": "a"}, "its name mentions test and train"),
        ({"train_txt": b"good\nbad \xff"}, "train.txt:2: byte 0xff is not UTF-8"),
        ({"train_jsonl": ""}, "train.jsonl: the file is empty"),
        ({"train_jsonl": lines("a") + "{"}, "train.jsonl:2: broken JSON"),
        ({"train_jsonl": '{"text": "\\ud800"}'}, "train.jsonl:1: broken JSON"),
        ({"train_jsonl": lines("a") + lines("b", field="body")}, "train.jsonl:2: no text in 'text'; give the field"),
        ({"train_parquet": "no parquet"}, "train.parquet: not a readable Parquet file"),
        (
            {"train_parquet": pyarrow.table({"b": ["a"]})},
            "train.parquet, row 1: no text in 'text'; give the field that",
        ),
        ({"train_parquet": pyarrow.table({"text": ["a", None]})}, "train.parquet, row 2: no text in 'text'"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        by_split(write_files(tmp_path, **files))
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "config", "said"),
    [
        *((path, None, "no such folder") for path in ("/nowhere/text", "a/b/c", "../nothing", "tests/nothing")),
        (".", "en", "dataset_config 'en'"),
    ],
)
def test_what_is_no_folder_and_no_id_is_not_asked_of_the_hub(data: str, config: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_corpus(data, config, "text")


def test_what_data_get_leaves_is_read(tmp_path: Path) -> None:
    (archive,) = DATASETS["wikitext-2"]
    for name in (*archive.members.values(), RECORD):
        (tmp_path / name).write_text("{}")
    assert folder_corpus(tmp_path, "text").splits == ["train", "dev", "test"]
    for source in DATASETS["squad"]:
        write_squad(tmp_path, DOCUMENT, source.filename)
    assert squad_splits(tmp_path) == ["train", "dev"]


def test_all_articles_of_wikitext_are_found(shared_data: Path) -> None:
    found = by_split(shared_data / "wikitext-2")
    assert (len(found["train"]), len(found["dev"])) == (600, 60)


# Blocks.

tokens = st.lists(st.integers(0, 50_000), max_size=80).map(lambda ids: np.array(ids, np.int32))
END = 99_999


def flat(blocks: list[np.ndarray]) -> list[int]:
    return [token for block in blocks for token in block.tolist()]


@given(st.lists(tokens, max_size=8), st.integers(2, 20))
def test_documents_are_joined_by_the_end_token_and_cut_without_a_loss(documents: list[np.ndarray], length: int) -> None:
    ids = join(documents, END)
    assert ids.tolist() == [token for document in documents for token in [END, *document.tolist()]][1:]
    blocks, leftover = cut(ids, length, whole=True)
    assert leftover < length and all(len(block) == length for block in blocks)
    assert flat(blocks) == ids[: len(ids) - leftover].tolist()
    # Of an evaluation every token but the first is predicted once.
    blocks, _ = cut(ids, length, whole=False)
    assert flat([block[1:] for block in blocks]) == ids[1:].tolist()
    assert all(len(block) == length for block in blocks[:-1]) and all(2 <= len(block) <= length for block in blocks)
