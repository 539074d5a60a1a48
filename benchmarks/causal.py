"""Causal training: padding of packed text, speed against the workshop's recipe, and steps that a resumed run repeats.

The workshop (SYSTEMS: BLOOM and SQuAD) pads every question to 512 tokens, takes the inputs as labels, and trains in
FP32 through a plain Trainer. Rounds of all variants alternate in one process, so that a noisy neighbour slows them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BloomForCausalLM, Trainer

from benchmarks.data import ROOT, raw_data
from benchmarks.figure import Figure, ratio
from benchmarks.training import NO_BF16, our_trainer, timed_steps, trainer_arguments
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.sample import write_sample
from zeropods.data.tokenizers import GPT_TINY
from zeropods.launch.logs import LINE
from zeropods.launch.script_call import train_arguments
from zeropods.measure.record import read_record
from zeropods.train.causal import Causal, causal_config, random_causal
from zeropods.train.device import multiplies_bf16
from zeropods.train.flags import CausalArguments
from zeropods.train.sampler import LengthGroupedSampler, Prepared

ROUNDS, BATCH, PASSES, LENGTH = 3, 4, 4, 512
HOW: dict[str, Any] = {"rows": BATCH, "rate": 5e-5, "gradient_accumulation_steps": PASSES, "weight_decay": 0.01}
SHAPE = {"model_type": "bloom", "hidden_size": 256, "n_layer": 6, "n_head": 8, "vocab_size": 50_304}
"""A BLOOM with 17.6 M parameters, for the 50,257 tokens of gpt2."""
SAVE_STEPS, KILLED_AT = 5, 13


def measure(work: Path) -> list[Figure]:
    """Padding, speed-ups over the workshop's recipe, and steps done twice."""
    return [*_padding(work), *_speed(work), _resume(work)]


def _padding(work: Path) -> list[Figure]:
    """Share of the positions in the batches of training steps that hold padding and no token."""
    data, tokenizer, what = raw_data(work, "lm")
    wanted = Preparation(task="lm", data=data, tokenizer=tokenizer, max_seq_length=LENGTH)
    manifest, _ = prepare(wanted, work / "text")
    train, statistics = Prepared.read(work / "text").train, manifest.splits["train"]
    lengths = train.lengths()[:, 0]
    order = LengthGroupedSampler(train.lengths(), BATCH, seed=0).order()
    padded = float(lengths[order].max(axis=1).sum() * BATCH)
    left = statistics.leftover_tokens or 0
    share = 100 * (1 - lengths[order].sum() / padded)
    note = f"{what}, {len(lengths):,} blocks of {LENGTH}; {left} of {statistics.source.total + left:,} tokens left out"
    return [Figure(name="lm: padding", value=float(share), unit="%", asked="under 1", note=note)]


def _speed(work: Path) -> list[Figure]:
    data, tokenizer, what = raw_data(work, "squad")
    sets = {}
    for loss_on in ("answer", "all"):
        wanted = Preparation(
            task="squad", data=data, tokenizer=tokenizer, max_seq_length=LENGTH, loss_on=loss_on, limit=500
        )
        prepare(wanted, work / loss_on)
        sets[loss_on] = Prepared.read(work / loss_on)
    precisions = ["FP32", *(["BF16"] if multiplies_bf16() else [])]
    ours: dict[tuple[str, str], list[float]] = {(p, loss_on): [] for loss_on in sets for p in precisions}
    control: list[float] = []
    for _ in range(ROUNDS):
        control += timed_steps(_control(sets["all"], work), 1)
        for (precision, loss_on), seconds in ours.items():
            seconds += timed_steps(_ours(sets[loss_on], precision, work), 3)
    name = "training, small bloom, loss on {1}, {0} against the workshop's"
    figures = [ratio(name.format(*way), control, seconds, "4", what) for way, seconds in ours.items()]
    rate = BATCH * PASSES / float(np.median(control))
    figures.append(Figure(name="the workshop's recipe", value=rate, unit="samples/s", note=what))
    if "BF16" not in precisions:
        figures += [Figure(name=name.format("BF16", on), value=None, unit="x", asked="4", note=NO_BF16) for on in sets]
    return figures


def _control(data: Prepared, work: Path) -> Trainer:
    """A trainer of plain transformers: every row is padded to 512 tokens, and pads are labels too."""
    pad = data.tokenizer.pad_token_id

    def collate(rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
        ids, mask = np.full((len(rows), LENGTH), pad), np.zeros((len(rows), LENGTH), dtype=np.int64)
        for number, (row, _) in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        inputs = torch.from_numpy(ids)
        return {"input_ids": inputs, "attention_mask": torch.from_numpy(mask), "labels": inputs.clone()}

    model = BloomForCausalLM(causal_config(SHAPE))
    return Trainer(model=model, args=trainer_arguments(work, **HOW), train_dataset=data.train, data_collator=collate)


def _ours(data: Prepared, precision: str, work: Path) -> Trainer:
    task = Causal(CausalArguments(data=str(data.folder)))
    return our_trainer(random_causal(causal_config(SHAPE), seed=0), task, precision, work, **HOW)


def _resume(work: Path) -> Figure:
    """Kill a run between two checkpoints; the next attempt repeats at most the steps that lie between them."""
    write_sample(work / "sample", task="lm")
    flags: dict[str, Any] = {
        **{"task": "lm", "data": work / "sample", "max_seq_length": 64, "init": "random"},
        **{"model_name_or_path": GPT_TINY, "save_steps": SAVE_STEPS, "logging_steps": 1, "eval_steps": 0},
        **{"max_train_steps": 40, "outputdir": work / "killed", "threads": 1},
    }
    argv = [sys.executable, str(ROOT / "causal_train.py"), *train_arguments(**flags)]
    reached = _killed(argv, work / "killed" / "train.log")
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
    first = read_record(work / "killed").ranks[0].first_step
    note = f"killed after step {reached}, went on after step {first}; a checkpoint each {SAVE_STEPS} steps"
    return Figure(
        name="steps that a resumed run does again", value=reached - first, unit="steps", asked=f"at most {SAVE_STEPS}",
        note=note,
    )  # fmt: skip


def _killed(argv: list[str], log: Path, seconds: float = 300) -> int:
    """Start a run and kill it after some steps; returns the last step that it logged."""
    run = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + seconds
    try:
        while run.poll() is None and _last_step(log) < KILLED_AT and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    return _last_step(log)


def _last_step(log: Path) -> int:
    lines = log.read_text("utf-8").splitlines() if log.is_file() else []
    return max((int(found[1]) for found in map(LINE.search, lines) if found), default=0)
