"""A trained model and a split in, a prediction file out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from zeropods.data.wikisql import read_split
from zeropods.errors import UserError
from zeropods.evaluate.generate import Answerer, Generation, Speed, timed_answers
from zeropods.evaluate.predictions import write_predictions


def predict(
    model: Path,
    data: Path,
    split: str,
    out: Path,
    how: Generation,
    *,
    precision: str = "fp32",
    prompt: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> Speed:
    """Write a prediction for each example of a split (its first `limit`), atomically, and time it."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}; expected at least 1")
    examples = list(itertools.islice(read_split(data, split), limit))
    answerer = Answerer.load(model, precision, prompt)
    answers, speed = timed_answers(answerer, examples, how, progress)
    write_predictions(Path(out), answers)
    return speed
