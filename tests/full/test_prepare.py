"""Preparation of the sample and of real WikiSQL."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.tokenizers import load_tokenizer
from zeropods.errors import UserError
from zeropods.train.sampler import load_split


def test_rows_are_stored_without_padding_end_with_the_end_token_and_are_counted(prepared: Path) -> None:
    split = load_split(prepared, "train")
    assert split is not None and len(split) == 64
    lengths = [len(row) for row in split.sources]
    assert len(set(lengths)) > 5
    assert all(row[-1] == 1 and 0 not in row for row in [*split.sources, *split.targets])
    statistics = read_manifest(prepared).splits["train"]
    assert (statistics.source.total, statistics.source.max) == (sum(lengths), max(lengths))


def test_a_second_call_does_nothing_and_the_same_data_give_the_same_tokenizer(
    sample: Path, prepared: Path, tmp_path: Path
) -> None:
    before = (prepared / "manifest.json").stat().st_mtime_ns
    wanted = Preparation(data=sample, tokenizer="t5-tiny", limit=64)
    manifest, made = prepare(wanted, prepared)
    assert not made and (prepared / "manifest.json").stat().st_mtime_ns == before
    assert prepare(wanted, tmp_path / "again") == (manifest, True)


def test_other_settings_replace_the_set(sample: Path, tmp_path: Path) -> None:
    prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=20), tmp_path / "set")
    manifest, made = prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=10), tmp_path / "set")
    assert made
    assert manifest.splits["train"].rows == 10


def test_truncation_is_counted_and_keeps_the_end_token(sample: Path, tmp_path: Path) -> None:
    wanted = Preparation(data=sample, tokenizer="t5-tiny", limit=30, max_source_tokens=12)
    manifest, _ = prepare(wanted, tmp_path / "short")
    split = load_split(tmp_path / "short", "train")
    assert split is not None
    assert manifest.splits["train"].source.truncated_rows == 30
    assert all(len(row) == 12 and row[-1] == 1 for row in split.sources)


def test_a_fault_in_the_data_leaves_the_old_set(sample: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "set"
    shutil.copytree(sample, data)
    old, _ = prepare(Preparation(data=data, tokenizer="t5-tiny", limit=20), out)
    with open(data / "dev.jsonl", "r+", encoding="utf-8") as file:
        file.write("{broken")
    with pytest.raises(UserError, match=r"dev.jsonl:1: broken JSON"):
        prepare(Preparation(data=data, tokenizer="t5-tiny", limit=20), out)
    assert read_manifest(out) == old
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_foreign_folder_is_refused_and_untouched(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="no prepared data set"):
        prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=5), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("source", "said"), [("nowhere/nothing", "hub did not give it"), (__file__, "not a SentencePiece model")]
)
def test_a_tokenizer_that_is_none_is_named(source: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_tokenizer(source)


def test_missing_characters_survive_in_the_completed_vocabulary_and_when_it_is_read_again(
    shared_data: Path, tmp_path: Path
) -> None:
    model = str(shared_data / "t5" / "spiece.model")
    text = "SELECT a FROM table WHERE x{1} < ~2 AND y^2 <3"
    for complete, expected in ((True, text), (False, "SELECT a FROM table WHERE x1 2 AND y2 3")):
        tokenizer = load_tokenizer(model, complete=complete)
        decoded = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
        assert " ".join(decoded.split()) == expected
    tokenizer = load_tokenizer(model)
    assert len(tokenizer) <= 32_128
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again("a < b ~ c").input_ids == tokenizer("a < b ~ c").input_ids


def test_wikisql_is_prepared_and_little_of_it_lost(shared_data: Path, tmp_path: Path) -> None:
    wanted = Preparation(
        data=shared_data / "wikisql", tokenizer=str(shared_data / "t5" / "spiece.model"), prompt="question", limit=4_000
    )
    manifest, _ = prepare(wanted, tmp_path / "set")
    train, dev = manifest.splits["train"], manifest.splits["dev"]
    assert (train.rows, dev.rows) == (4_000, 4_000)
    assert (train.targets_lost + dev.targets_lost) / 8_000 < 0.025
    assert abs(train.source.mean - 20.0) < 0.1
    assert json.loads((tmp_path / "set" / "manifest.json").read_text())["prompt"] == "question"


def test_ids_by_words_are_the_tokenizers_own(shared_data: Path) -> None:
    from zeropods.data.encoding import Encoder
    from zeropods.data.wikisql import read_split, source_text

    tokenizer = load_tokenizer(str(shared_data / "t5" / "spiece.model"))
    examples = itertools.islice(read_split(shared_data / "wikisql", "dev"), 0, None, 8)
    texts = [source_text("schema", e.question, e.table.header, e.table.types) for e in examples]
    texts += ["", "  two  spaces ", "a\u00a0b\tc", "e\u0301 \u0308x < ~y"]
    expected = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts)]
    assert [ids.tolist() for ids in Encoder(tokenizer)(texts)] == expected
