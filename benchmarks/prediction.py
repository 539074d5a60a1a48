"""Prediction speed for equally many new tokens, against transformers' `generate` and against one
question at a time."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from benchmarks.data import prepared_questions, raw_data
from benchmarks.figure import Figure, ratio
from benchmarks.training import NO_BF16
from zeropods.data.wikisql import Example, read_split, source_of
from zeropods.evaluate.generate import Generation, QueryAnswerer
from zeropods.plan.known_models import known_config
from zeropods.train.device import multiplies_bf16
from zeropods.train.text2sql import random_t5

TOKENS = 22
"""Number of tokens of every answer, which is the mean of WikiSQL's targets."""
ROUNDS = 6
BATCH = 64
ONE_AT_A_TIME = 8
"""Number of questions that are answered one at a time."""
COMPARED = 16
"""Number of questions whose answers in a batch are compared with those one at a time."""


def measure(work: Path) -> list[Figure]:
    """Ratios of seconds per question."""
    raw, _, what = raw_data(work)
    prepared, _ = prepared_questions(work)
    examples = list(itertools.islice(read_split(raw, "dev"), BATCH))
    model = work / "model"
    _save_random_model(prepared, model)
    answerer = QueryAnswerer.load(model)
    return [
        *_batches(answerer, model, examples, what),
        _constraint(answerer, examples),
        *_against_stock(model, examples),
    ]


def _save_random_model(prepared: Path, out: Path) -> None:
    model = random_t5(known_config("t5-small"), seed=0)
    model.config.prompt = "question"
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(prepared / "tokenizer").save_pretrained(out)


def _batches(
    answerer: QueryAnswerer, model: Path, examples: list[Example], what: str
) -> list[Figure]:
    """Speed of answers in batches, against those one at a time, and whether they are the same."""
    single = []
    batched = []
    in_bf16 = []
    for _ in range(ROUNDS):
        single.append(_seconds(answerer, examples[:ONE_AT_A_TIME], 1))
        batched.append(_seconds(answerer, examples, BATCH))
        if multiplies_bf16():
            in_bf16.append(_seconds(QueryAnswerer.load(model, "bf16"), examples, BATCH))
    name = "prediction, FP32, batches against one at a time"
    figures = [
        ratio(name, single, batched, "10", what),
        _identical(answerer, examples),
    ]
    name = "prediction, BF16, batches against one at a time, FP32"
    if in_bf16:
        figures.append(ratio(name, single, in_bf16, "30", what))
    else:
        figures.append(Figure(name=name, value=None, unit="x", asked="30", note=NO_BF16))
    return figures


def _seconds(
    answerer: QueryAnswerer, examples: list[Example], batch: int, constrained: bool = False
) -> float:
    """Seconds per question, with all answers exactly `TOKENS` tokens long."""
    generation = _generation(batch, constrained=constrained)
    began = time.perf_counter()
    answerer.answer(examples, generation)
    return (time.perf_counter() - began) / len(examples)


def _generation(batch: int, *, constrained: bool) -> Generation:
    return Generation(
        max_new_tokens=TOKENS,
        batch_size=batch,
        constrained=constrained,
        fixed_length=True,
    )


def _identical(answerer: QueryAnswerer, examples: list[Example]) -> Figure:
    """Share of answers in a batch whose texts are those of answers one at a time."""

    def texts(batch: int) -> list[str | None]:
        answers = answerer.answer(examples[:COMPARED], _generation(batch, constrained=False))
        return [answer.text for answer in answers]

    pairs = zip(texts(1), texts(COMPARED), strict=True)
    same = sum(alone == in_batch for alone, in_batch in pairs)
    return Figure(
        name="answers in batches identical to those one at a time",
        value=same / COMPARED,
        unit="",
        asked="1",
    )


def _constraint(answerer: QueryAnswerer, examples: list[Example]) -> Figure:
    """Ratio of constrained to unconstrained seconds per question."""
    plain = []
    constrained = []
    for _ in range(ROUNDS):
        plain.append(_seconds(answerer, examples, BATCH))
        constrained.append(_seconds(answerer, examples, BATCH, constrained=True))
    name = "prediction, constrained: seconds over unconstrained"
    return ratio(name, constrained, plain, "at most 1.15")


def _against_stock(folder: Path, examples: list[Example]) -> list[Figure]:
    """Speed of this project's constrained answers against transformers' unconstrained ones to the
    same questions."""
    figures = []
    for precision, dtype, asked in (
        ("fp32", torch.float32, "1.9"),
        ("bf16", torch.bfloat16, "1.3"),
    ):
        name = f"prediction, constrained {precision.upper()} over transformers' free"
        if precision == "bf16" and not multiplies_bf16():
            figures.append(Figure(name=name, value=None, unit="x", asked=asked, note=NO_BF16))
            continue
        answerer = QueryAnswerer.load(folder, precision)
        stock = T5ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        theirs = []
        ours = []
        for _ in range(ROUNDS):
            theirs.append(_stock_seconds(stock, answerer, examples))
            ours.append(_seconds(answerer, examples, BATCH, constrained=True))
        figures.append(ratio(name, theirs, ours, asked))
    return figures


def _stock_seconds(
    model: T5ForConditionalGeneration, answerer: QueryAnswerer, examples: list[Example]
) -> float:
    """Seconds per question of transformers' own `generate`, the shortest questions first."""
    began = time.perf_counter()
    questions = [source_of(example, answerer.prompt) for example in examples]
    questions.sort(key=len)
    for start in range(0, len(questions), BATCH):
        batch = answerer.tokenizer(
            questions[start : start + BATCH], padding=True, return_tensors="pt"
        )
        ids = model.generate(**batch, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        answerer.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return (time.perf_counter() - began) / len(examples)
