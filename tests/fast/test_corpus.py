"""Which documents a folder of text has, what is said of one that has none, and how documents become blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from zeropods.data.download import DATASETS, RECORD
from zeropods.data.text import FolderCorpus, articles, join, open_corpus, overlap, pack, split_by_hash
from zeropods.errors import UserError

LINES = [" \n", " = Ann = \n", " = = Life = = \n", " = 1 , x = \n", "text\n"]


def write(folder: Path, **files: str | bytes) -> Path:
    """Files by name; `_` stands for a dot."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("_", ".")).write_bytes(data)
    return folder


def documents(folder: Path, split: str = "train", field: str = "text") -> list[str]:
    return list(FolderCorpus(folder, field).documents(split))


def fault(folder: Path, field: str = "text") -> str:
    with pytest.raises(UserError) as raised:
        documents(folder, field=field)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def lines(*texts: str, field: str = "text") -> str:
    return "".join(json.dumps({"url": "x", field: text}) + "\n" for text in texts)


def test_an_article_reaches_from_its_title_to_the_next() -> None:
    text = " \n = Ann = \n \n Ann sings . \n \n = = Life = = \n \n = x = \n y \n \n = Bob = \n \n Bob . \n"
    found = list(articles(text.splitlines(keepends=True)))
    assert [article.split(" = ")[1] for article in found] == ["Ann", "Bob"]


@given(st.lists(st.sampled_from(LINES)))
def test_articles_joined_are_the_lines_again(text: list[str]) -> None:
    assert "".join(articles(text)) == "".join(text)


@pytest.mark.parametrize("names", [("train_txt", "valid_txt"), ("wiki_train_tokens", "wiki_valid_tokens")])
def test_wikitexts_files_are_read_by_article(tmp_path: Path, names: tuple[str, str]) -> None:
    text = " \n = Ann = \n \n Ann . \n \n = Bob = \n \n Bob . \n"
    write(tmp_path, **dict.fromkeys(names, text))
    assert (len(documents(tmp_path)), len(documents(tmp_path, "dev"))) == (2, 2)


def test_a_text_file_is_a_document_and_keeps_its_lines(tmp_path: Path) -> None:
    write(tmp_path, a_txt="one\r\n\n two", b_txt="three", README_md="no text", source_json="{}")
    assert documents(tmp_path) == ["one\r\n\n two", "three"]


def test_splits_are_told_by_words_in_the_names(tmp_path: Path) -> None:
    files = {"c4-train_00000-of-2_jsonl": lines("a"), "c4-validation_jsonl": lines("b"), "test_jsonl": lines("c")}
    corpus = FolderCorpus(write(tmp_path, **files), "text")
    assert {split: list(corpus.documents(split)) for split in corpus.splits} == {
        "train": ["a"],
        "dev": ["b"],
        "test": ["c"],
    }


def test_one_document_in_twenty_is_dev_where_no_name_tells_a_split(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(400)]
    write(tmp_path, all_jsonl=lines(*texts))
    dev = documents(tmp_path, "dev")
    assert 10 < len(dev) < 32
    assert sorted(documents(tmp_path) + dev) == sorted(texts)


def test_a_document_is_on_the_same_side_in_every_release() -> None:
    assert [number for number in range(60) if split_by_hash(f"document {number}") == "dev"] == [4, 11, 12, 25, 44]


def test_parquet_is_read_by_its_text_column(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"content": ["a\n", "b"], "n": [1, 2]}), tmp_path / "train.parquet")
    assert documents(tmp_path, field="content") == ["a\n", "b"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no text there; expected files named *.txt, *.tokens, *.raw, *.jsonl, *.parquet"),
        ({"a_txt": "a", "b_jsonl": lines("b")}, "holds a.txt and b.jsonl; keep files of one kind"),
        ({"wiki_train_raw": "a", "wiki_train_tokens": "b"}, "holds wiki.train.raw and wiki.train.tokens"),
        ({"train_txt": "a", "notes_txt": "b"}, "notes.txt: no split in its name, but one in train.txt"),
        ({"test_txt": "a"}, "no file of train, but test.txt"),
        ({"train-test_txt": "a"}, "its name tells test and train"),
        ({"train_txt": b"good\nbad \xff"}, "train.txt:2: byte 0xff is not UTF-8"),
        ({"train_jsonl": ""}, "train.jsonl: the file is empty"),
        ({"train_jsonl": lines("a") + "{"}, "train.jsonl:2: broken JSON"),
        ({"train_jsonl": lines("a") + lines("b", field="body")}, "train.jsonl:2: no text in 'text'; name the field"),
        ({"train_jsonl": '{"text": "\\ud800"}'}, r"train.jsonl:1: text holds '\ud800', half a character"),
        ({"train_parquet": "no parquet"}, "train.parquet: no Parquet can be read there"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    assert said in fault(write(tmp_path, **files))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"content": ["a"]}, "no text in 'text'; name the field that holds it (--text-field), of 'content'"),
        ({"text": [1]}, "no text in 'text'"),
        ({"text": ["a", None]}, "row 2: no text in 'text'"),
    ],
)
def test_parquet_without_text_is_named(tmp_path: Path, columns: dict[str, list[object]], said: str) -> None:
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    assert "train.parquet, row " in fault(tmp_path) and said in fault(tmp_path)


@pytest.mark.parametrize("data", ["/nowhere/text", "a/b/c", "../nothing"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(data: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_corpus(data, None, "text")


def test_a_configuration_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dataset_config 'en'"):
        open_corpus(write(tmp_path, train_txt="a"), "en", "text")


def test_what_data_get_leaves_is_read(tmp_path: Path) -> None:
    (archive,) = DATASETS["wikitext-2"]
    for name in (*archive.members.values(), RECORD):
        (tmp_path / name).write_text("{}")
    assert FolderCorpus(tmp_path, "text").splits == ["train", "dev", "test"]


@pytest.mark.parametrize(("split", "number"), [("train", 600), ("dev", 60)])
def test_all_articles_of_wikitext_are_found(shared_data: Path, split: str, number: int) -> None:
    assert len(documents(shared_data / "wikitext-2", split)) == number


def test_a_text_alone_is_train_whatever_its_hash_says(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("document 4")
    corpus = open_corpus(tmp_path, None, "text")
    assert (split_by_hash("document 4"), corpus.splits, list(corpus.documents("train"))) == (
        "dev",
        ["train"],
        ["document 4"],
    )


# Blocks.

tokens = st.lists(st.integers(0, 50_000), max_size=80).map(lambda ids: np.array(ids, np.int32))
END = 99_999


def flat(blocks: list[np.ndarray]) -> list[int]:
    return [token for block in blocks for token in block.tolist()]


@given(tokens, st.integers(2, 20))
def test_packing_loses_no_token_but_the_leftover(ids: np.ndarray, length: int) -> None:
    blocks, leftover = pack(ids, length)
    assert leftover < length and all(len(block) == length for block in blocks)
    assert flat(blocks) == ids[: len(ids) - leftover].tolist()


@given(st.lists(tokens, max_size=8))
def test_documents_are_joined_by_the_end_token(documents: list[np.ndarray]) -> None:
    expected = [token for document in documents for token in [END, *document.tolist()]][1:]
    assert join(documents, END).tolist() == expected


@given(tokens, st.integers(2, 20))
def test_every_token_of_an_evaluation_but_the_first_is_predicted_once(ids: np.ndarray, length: int) -> None:
    blocks = overlap(ids, length)
    assert flat([block[1:] for block in blocks]) == ids[1:].tolist()
    assert all(len(block) == length for block in blocks[:-1]) and all(2 <= len(block) <= length for block in blocks)
