"""The data that benchmarks run on: the real sets where they are present, otherwise the samples."""

from __future__ import annotations

import os
from pathlib import Path

from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.tokenizers import GPT_TINY, TINY
from zeropods.measure.score_json import LM, SQUAD, TEXT2SQL

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("ZEROPODS_TEST_DATA", ROOT.parent / "shared" / "data"))
REAL = {
    TEXT2SQL: ("wikisql", "t5/spiece.model", TINY),
    SQUAD: ("squad", "gpt2", GPT_TINY),
    LM: ("wikitext-2", "gpt2", GPT_TINY),
}
"""Folder and tokenizer of the real set of each task, and the tokenizer of its sample."""


def raw_data(work: Path, task: str = TEXT2SQL) -> tuple[Path, str, str]:
    """Return (raw folder, tokenizer, description of the data)."""
    name, tokenizer, sample_tokenizer = REAL[task]
    if (SHARED / name).is_dir():
        return SHARED / name, str(SHARED / tokenizer), name
    write_sample(work / name, task=task)
    return work / name, sample_tokenizer, f"sample data, since there is no {name} here"


def prepared_questions(work: Path) -> tuple[Path, str]:
    """Prepare a set with prompt `question`; returns its folder and a description of its data."""
    raw, tokenizer, what = raw_data(work)
    folder = work / "question"
    prepare(Preparation(data=raw, tokenizer=tokenizer, prompt="question"), folder)
    return folder, what
