"""The base model as it comes with the package, asked real questions about tables that it never saw."""

import re
import shutil
from pathlib import Path

from zeropods.cli import main
from zeropods.evaluate.score import score
from zeropods.measure.score_json import QueryScore
from zeropods.shipped_models import MODELS

EVERY = 8
"""One of so many dev questions is asked; the file begins with the harder ones."""
CARD = MODELS / "t5-tiny" / "README.md"


def test_the_shipped_weights_reach_what_their_card_says(shared_data: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    questions = (shared_data / "wikisql" / "dev.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "dev.jsonl").write_text("".join(questions[::EVERY]), encoding="utf-8")
    shutil.copy(shared_data / "wikisql" / "dev.tables.jsonl", tmp_path)
    words = ["predict", "--model", MODELS / "t5-tiny", "--task", "text2sql", "--data", tmp_path, "--split", "dev"]
    assert main([str(word) for word in (*words, "--precision", "fp32", "--out", answers)]) == 0
    measured = score(answers, tmp_path, "dev")
    assert isinstance(measured, QueryScore) and measured.examples == -(-len(questions) // EVERY)
    logical_form = re.search(r"^\| dev \| 8,421 \| (0\.\d{3}) \[", CARD.read_text(encoding="utf-8"), re.MULTILINE)
    assert logical_form is not None
    low, high = measured.intervals["logical_form_accuracy"]
    assert low < float(logical_form[1]) < high, measured.logical_form_accuracy
