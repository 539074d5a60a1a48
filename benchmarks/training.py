"""Training speed of t5-small's shape: this project's trainer against two others, on the same rows.

The original pads both sides to 96 tokens and trains in FP32 through a plain Trainer (SYSTEMS: the
published CML notebooks). transformers' own trainer has all its switches for speed on. Rounds of all
three alternate in one process, so that a noisy neighbour slows them all.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from benchmarks.data import prepared_questions
from benchmarks.figure import Figure, ratio
from zeropods.measure.record import RankMeasurement
from zeropods.plan.known_models import known_config
from zeropods.train.device import multiplies_bf16, suit_cpu
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.job import Task
from zeropods.train.master_adamw import MasterAdamW, round_to_bf16
from zeropods.train.meter import Meter
from zeropods.train.sampler import Prepared, TokenizedSplit
from zeropods.train.text2sql import TextToSQL, random_t5
from zeropods.train.trainer import MeasuredTrainer

ROUNDS = 3
BATCH = 32
ORIGINAL_LENGTH = 96
"""Tokens to which the original pads both sides."""
CONTROL_STEPS = 2
FAST_STEPS = 9
"""Number of timed steps of each round, of the original's recipe and of the two faster trainers."""
NO_BF16 = "this CPU has no BF16 arithmetic: PyTorch emulates it 200 times slower than FP32"


class _Clock(TrainerCallback):
    """Seconds of each optimizer step, data loading included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mark = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.mark)
        self.mark = now


def measure(work: Path) -> list[Figure]:
    """Speed-ups over the original's recipe and over transformers' own trainer."""
    folder, what = prepared_questions(work)
    task = TextToSQL(TextToSQLArguments(dataset_path=str(folder)))
    data = task.data
    precisions = ["FP32"]
    if multiplies_bf16():
        precisions.append("BF16")
    control: list[float] = []
    ours: dict[str, list[float]] = {precision: [] for precision in precisions}
    stock: dict[str, list[float]] = {precision: [] for precision in precisions}
    for _ in range(ROUNDS):
        control += timed_steps(_control(data.train, work), CONTROL_STEPS)
        for precision in precisions:
            model = random_t5(known_config("t5-small"), seed=0)
            trainer = our_trainer(model, task, precision, work)
            ours[precision] += timed_steps(trainer, FAST_STEPS)
            stock[precision] += timed_steps(_stock(data, precision, work), FAST_STEPS)
    over_original = "t5-small training, batch 32, {} over the original's recipe"
    over_stock = "t5-small training, batch 32, {} over transformers' trainer"
    figures = []
    for precision, seconds in ours.items():
        name = over_original.format(precision)
        figures.append(ratio(name, control, seconds, "14 (BF16)", what))
    for precision, seconds in ours.items():
        name = over_stock.format(precision)
        figures.append(ratio(name, stock[precision], seconds, "1.8 (BF16)", what))
    rate = BATCH / float(np.median(control))
    figures.append(Figure(name="the original's recipe", value=rate, unit="samples/s"))
    if "BF16" not in precisions:
        name = over_original.format("BF16")
        figures.append(Figure(name=name, value=None, unit="x", asked="14", note=NO_BF16))
    return figures


def timed_steps(trainer: Trainer, count: int) -> list[float]:
    """Seconds of `count` steps after one that warms up."""
    clock = _Clock()
    trainer.add_callback(clock)
    trainer.args.max_steps = count + 1
    trainer.train()
    return clock.seconds[1:]


def _control(rows: TokenizedSplit, work: Path) -> Seq2SeqTrainer:
    """The original's trainer."""
    return Seq2SeqTrainer(
        model=_stock_model(),
        args=trainer_arguments(work),
        train_dataset=rows,
        data_collator=padded_to_96,
    )


def _stock(data: Prepared, precision: str, work: Path) -> Seq2SeqTrainer:
    """transformers' trainer with its switches for speed."""
    model = _stock_model()
    arguments = trainer_arguments(
        work,
        bf16=precision == "BF16",
        train_sampling_strategy="group_by_length",
        optim="adamw_torch_fused",
    )
    from datasets import load_from_disk  # The control on a GPU does not need it.

    return Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=load_from_disk(str(data.folder / "train")),
        data_collator=DataCollatorForSeq2Seq(data.tokenizer, model),
    )


def _stock_model() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config.from_dict(known_config("t5-small")))


def our_trainer(
    model: PreTrainedModel, task: Task, precision: str, work: Path, **settings: Any
) -> Trainer:
    """This project's trainer, in FP32 or in BF16 with FP32 master weights; `settings` are passed to
    `trainer_arguments`."""
    suit_cpu(model)
    arguments = trainer_arguments(work, **settings)
    meter = Meter(work, RankMeasurement(rank=0, host=""), interval=0, age_seconds=0.0)
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    if precision == "BF16":
        model = round_to_bf16(model)
        optimizer = MasterAdamW
    trainer = MeasuredTrainer(task, meter, model=model, args=arguments)
    options = {"lr": arguments.learning_rate, "fused": True}
    trainer.optimizer_cls_and_kwargs = (optimizer, options)
    return trainer


def trainer_arguments(
    work: Path, rows: int = BATCH, rate: float = 1e-4, **switches: Any
) -> Seq2SeqTrainingArguments:
    """Arguments of a trainer that neither saves nor reports its steps."""
    settings: dict[str, Any] = {
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "remove_unused_columns": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 10_000,
        **switches,
    }
    return Seq2SeqTrainingArguments(
        str(work / "trainer"),
        per_device_train_batch_size=rows,
        learning_rate=rate,
        **settings,
    )


def padded_to_96(rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Pad both sides to 96 tokens; pads are labels and are attended to, as in the original."""

    def side(index: int) -> torch.Tensor:
        padded = np.zeros((len(rows), ORIGINAL_LENGTH), dtype=np.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row[index])] = row[index]
        return torch.from_numpy(padded)

    return {"input_ids": side(0), "labels": side(1)}
