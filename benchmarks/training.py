"""Training speed of t5-small's shape: this project's trainer against two others, on the same rows.

The original pads both sides to 96 tokens and trains in FP32 through a plain Trainer (SYSTEMS: the published CML
notebooks). transformers' own trainer has all its switches for speed on. Rounds of all three alternate in one
process, so that a noisy neighbour slows them all.
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

ROUNDS, BATCH = 3, 32
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
    control: list[float] = []
    known = ("FP32", "BF16") if multiplies_bf16() else ("FP32",)
    ours, stock = ({precision: list[float]() for precision in known} for _ in range(2))
    for _ in range(ROUNDS):
        control += timed_steps(_control(data.train, work), 2)
        for precision, seconds in ours.items():
            model = random_t5(known_config("t5-small"), seed=0)
            seconds += timed_steps(our_trainer(model, task, precision, work), 9)
            stock[precision] += timed_steps(_stock(data, precision, work), 9)
    name = "t5-small training, batch 32, {} over the original's recipe"
    figures = [ratio(name.format(p), control, seconds, "14 (BF16)", what) for p, seconds in ours.items()]
    own = "t5-small training, batch 32, {} over transformers' trainer"
    figures += [ratio(own.format(p), stock[p], seconds, "1.8 (BF16)", what) for p, seconds in ours.items()]
    figures.append(Figure(name="the original's recipe", value=BATCH / float(np.median(control)), unit="samples/s"))
    if "BF16" not in ours:
        figures.append(Figure(name=name.format("BF16"), value=None, unit="x", asked="14", note=NO_BF16))
    return figures


def timed_steps(trainer: Trainer, count: int) -> list[float]:
    """Seconds of `count` steps after one that warms up."""
    clock = _Clock()
    trainer.add_callback(clock)
    trainer.args.max_steps = count + 1
    trainer.train()
    return clock.seconds[1:]


def _control(rows: TokenizedSplit, work: Path) -> Seq2SeqTrainer:
    model = T5ForConditionalGeneration(T5Config.from_dict(known_config("t5-small")))
    arguments = trainer_arguments(work)
    return Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows, data_collator=padded_to_96)


def _stock(data: Prepared, precision: str, work: Path) -> Seq2SeqTrainer:
    model = T5ForConditionalGeneration(T5Config.from_dict(known_config("t5-small")))
    arguments = trainer_arguments(
        work, bf16=precision == "BF16", train_sampling_strategy="group_by_length", optim="adamw_torch_fused"
    )
    from datasets import load_from_disk  # The control on a GPU does not need it.

    rows = load_from_disk(str(data.folder / "train"))
    collator = DataCollatorForSeq2Seq(data.tokenizer, model)
    return Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)


def our_trainer(model: PreTrainedModel, task: Task, precision: str, work: Path, **how: Any) -> Trainer:
    """This project's trainer, in FP32 or in BF16 with FP32 master weights; `how` is passed to `trainer_arguments`."""
    suit_cpu(model)
    masters, arguments = precision == "BF16", trainer_arguments(work, **how)
    meter = Meter(work, RankMeasurement(rank=0, host=""), interval=0, age_seconds=0.0)
    trainer = MeasuredTrainer(task, meter, model=round_to_bf16(model) if masters else model, args=arguments)
    optimizer = MasterAdamW if masters else torch.optim.AdamW
    trainer.optimizer_cls_and_kwargs = (optimizer, {"lr": arguments.learning_rate, "fused": True})
    return trainer


def trainer_arguments(work: Path, rows: int = BATCH, rate: float = 1e-4, **switches: Any) -> Seq2SeqTrainingArguments:
    """Arguments of a trainer that neither saves nor reports its steps."""
    quiet: dict[str, Any] = {
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "remove_unused_columns": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 10_000,
    }
    return Seq2SeqTrainingArguments(
        str(work / "trainer"), per_device_train_batch_size=rows, learning_rate=rate, **{**quiet, **switches}
    )


def padded_to_96(rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Pad both sides to 96 tokens; pads are labels and are attended to, as in the original."""

    def side(index: int) -> torch.Tensor:
        padded = np.zeros((len(rows), 96), dtype=np.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row[index])] = row[index]
        return torch.from_numpy(padded)

    return {"input_ids": side(0), "labels": side(1)}
