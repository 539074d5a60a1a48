"""The data that benchmarks run on: real WikiSQL where it is, else the sample."""

from __future__ import annotations

import os
from pathlib import Path

from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("ZEROPODS_TEST_DATA", ROOT.parent / "shared" / "data"))


def raw_wikisql(work: Path) -> tuple[Path, str, str]:
    """(raw folder, tokenizer, what it is)."""
    if (SHARED / "wikisql" / "train.jsonl").is_file():
        return SHARED / "wikisql", str(SHARED / "t5" / "spiece.model"), "WikiSQL"
    write_sample(work / "sample")
    return work / "sample", "t5-tiny", "sample data, since there is no WikiSQL here"


def prepared_questions(work: Path) -> tuple[Path, str]:
    """A set with prompt `question`, and what it is."""
    raw, tokenizer, what = raw_wikisql(work)
    wanted = Preparation(data=raw, tokenizer=tokenizer, prompt="question")
    prepare(wanted, work / "question")
    return work / "question", what
