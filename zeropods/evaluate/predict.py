"""A trained model and a split in, a prediction file out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from zeropods.data.squad import read_squad
from zeropods.data.wikisql import read_split
from zeropods.errors import UserError
from zeropods.evaluate.generate import Answerer, Generation, Speed, timed_answers
from zeropods.evaluate.predictions import write_answers, write_predictions
from zeropods.evaluate.saved import load_causal_answerer, trained_length

Progress = Callable[[int], object]
DEFAULT_LENGTH = 512
"""Tokens of a prompt and its answer, for a model that does not say what it was trained on."""


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
    progress: Progress = lambda rows: None,
) -> Speed:
    """Write a query for each example of a split (its first `limit`), atomically, and time it."""
    _check_limit(limit)
    examples = list(itertools.islice(read_split(data, split), limit))
    answerer = Answerer.load(model, precision, prompt)
    answers, speed = timed_answers(answerer, examples, how, progress)
    write_predictions(Path(out), answers)
    return speed


def predict_answers(
    model: Path,
    data: Path,
    split: str,
    out: Path,
    how: Generation,
    *,
    precision: str = "fp32",
    max_seq_length: int | None = None,
    limit: int | None = None,
    progress: Progress = lambda rows: None,
) -> Speed:
    """Write an answer to each of SQuAD's questions of a split (its first `limit`), atomically, and time it.

    Args:
        model: run folder, model folder or hub id of a causal model.
        max_seq_length: tokens of prompt and answer together; if not given, what the run was trained on, else 512.
    """
    _check_limit(limit)
    examples = list(itertools.islice(read_squad(data, split), limit))
    saved = load_causal_answerer(model, precision)
    from zeropods.evaluate.causal_generate import QuestionAnswerer

    length = max_seq_length or trained_length(Path(model)) or DEFAULT_LENGTH
    answerer = QuestionAnswerer(saved, min(length, saved.positions or length))
    answers, speed = timed_answers(answerer, examples, how, progress)
    write_answers(Path(out), answers)
    return speed


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}; expected at least 1")
