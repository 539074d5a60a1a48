"""What the embedded sample data set promises."""

import hashlib
import json
from pathlib import Path

import pytest

from zeropods.data.manifest import SPLITS
from zeropods.data.sample import write_sample
from zeropods.data.wikisql import read_split, read_tables
from zeropods.errors import UserError


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_summary_counts_what_the_files_hold(tmp_path):
    summary = write_sample(tmp_path)
    assert contents(tmp_path).keys() == {
        f"{split}.{suffix}" for split in SPLITS for suffix in ("jsonl", "tables.jsonl")
    }
    assert summary == {
        "folder": str(tmp_path),
        "written": True,
        "seed": 0,
        "questions": {split: len(list(read_split(tmp_path, split))) for split in SPLITS},
        "tables": {split: len(read_tables(tmp_path / f"{split}.tables.jsonl")) for split in SPLITS},
        "held_out_questions": {"dev": 120, "test": 120},
    }
    line = (tmp_path / "dev.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(line).keys() == {"phase", "table_id", "question", "sql"}


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(content for _, content in sorted(contents(folder).items()))).hexdigest()[:16]


def test_the_bytes_of_seed_0_never_change(tmp_path):
    for task in ("text2sql", "squad", "lm"):
        write_sample(tmp_path / task, task=task)
    found = {path.name: digest(path) for path in tmp_path.iterdir()}
    assert found == {"text2sql": "afb468841421dd80", "squad": "c2d63e897c87ab3f", "lm": "4a904dcbc2f9d396"}


@pytest.mark.parametrize("task", ["squad", "lm"])
def test_a_sample_is_written_once_and_not_over_anything_else(task, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert write_sample(out, task=task)["written"]  # An empty folder is filled.
    assert not write_sample(out, task=task)["written"]
    with pytest.raises(UserError, match=r"than the sample of seed 7 \(train.*\); name a new folder"):
        write_sample(out, seed=7, task=task)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"something else than the sample .*; name a new folder"):
        write_sample(tmp_path, task=task)
    with pytest.raises(NotADirectoryError):
        write_sample(tmp_path / "thesis.txt", task="lm")
    assert (tmp_path / "thesis.txt").read_text() == "mine"
