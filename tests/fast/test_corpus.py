"""Which documents a folder of text has, what is said of one that has none, and how documents become blocks."""

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

WIKITEXT = " \n = Ann = \n \n Ann sings . \n \n = = Life = = \n \n = x = \n y \n \n = Bob = \n \n Bob . \n"


def write(folder: Path, **files: str | bytes | pyarrow.Table) -> Path:
    """Files by name; `_` stands for a dot."""
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        if isinstance(content, pyarrow.Table):
            parquet.write_table(content, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def by_split(folder: Path, field: str = "text") -> dict[str, list[str]]:
    corpus = FolderCorpus(folder, field)
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
    assert by_split(write(tmp_path, **files), field) == documents


@pytest.mark.parametrize("names", [("train_txt", "valid_txt"), ("wiki_train_tokens", "wiki_valid_tokens")])
def test_wikitexts_files_are_read_by_article_from_its_title_to_the_next(tmp_path: Path, names: tuple[str, str]) -> None:
    found = by_split(write(tmp_path, **dict.fromkeys(names, WIKITEXT)))
    assert found["train"] == found["dev"]
    assert [article.split(" = ")[1] for article in found["train"]] == ["Ann", "Bob"]


def test_one_document_in_twenty_is_dev_where_no_name_tells_a_split_the_same_in_every_release(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(400)]
    found = by_split(write(tmp_path, all_jsonl=lines(*texts)))
    assert 10 < len(found["dev"]) < 32 and sorted(found["train"] + found["dev"]) == sorted(texts)
    assert [number for number in range(60) if split_by_hash(f"document {number}") == "dev"] == [4, 11, 12, 25, 44]


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
        ({"train_jsonl": '{"text": "\\ud800"}'}, "train.jsonl:1: broken JSON"),
        ({"train_jsonl": lines("a") + lines("b", field="body")}, "train.jsonl:2: no text in 'text'; name the field"),
        ({"train_parquet": "no parquet"}, "train.parquet: no Parquet can be read there"),
        (
            {"train_parquet": pyarrow.table({"b": ["a"]})},
            "train.parquet, row 1: no text in 'text'; name the field that",
        ),
        ({"train_parquet": pyarrow.table({"text": ["a", None]})}, "train.parquet, row 2: no text in 'text'"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        by_split(write(tmp_path, **files))
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
    assert FolderCorpus(tmp_path, "text").splits == ["train", "dev", "test"]


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
    blocks, leftover = pack(ids, length)
    assert leftover < length and all(len(block) == length for block in blocks)
    assert flat(blocks) == ids[: len(ids) - leftover].tolist()
    # Of an evaluation every token but the first is predicted once.
    blocks = overlap(ids, length)
    assert flat([block[1:] for block in blocks]) == ids[1:].tolist()
    assert all(len(block) == length for block in blocks[:-1]) and all(2 <= len(block) <= length for block in blocks)
