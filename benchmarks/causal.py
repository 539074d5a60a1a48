"""Causal training: padding of packed text, speed against the workshop's recipe, and steps that a
resumed run repeats.

The workshop (SYSTEMS: BLOOM and SQuAD) pads every question to 512 tokens, takes the inputs as
labels, and trains in FP32 through a plain Trainer. Rounds of all variants alternate in one process,
so that a noisy neighbour slows them all.
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

ROUNDS = 3
BATCH = 4
PASSES = 4
LENGTH = 512
"""Tokens to which the workshop pads a question, and of a block of packed text."""
QUESTIONS = 500
"""Number of questions that the models are trained on."""
CONTROL_STEPS = 1
OUR_STEPS = 3
"""Number of timed steps of each round; ours are several, since they are that much faster."""
TRAINER_SETTINGS: dict[str, Any] = {
    "rows": BATCH,
    "rate": 5e-5,
    "gradient_accumulation_steps": PASSES,
    "weight_decay": 0.01,
}
"""What all trainers are given, for `trainer_arguments`."""
SHAPE = {
    "model_type": "bloom",
    "hidden_size": 256,
    "n_layer": 6,
    "n_head": 8,
    "vocab_size": 50_304,
}
"""A BLOOM with 17.6 M parameters, for the 50,257 tokens of gpt2."""
SAVE_STEPS = 5
KILLED_AT = 13
"""Step at which a run is killed: between two checkpoints."""
RUN_SECONDS = 300.0
"""Most seconds to wait for that step, and for the end of the run that goes on."""
POLL_SECONDS = 0.005
ASKED_TIMES = "4"
"""How many times faster than the workshop's recipe ours was to be."""


def measure(work: Path) -> list[Figure]:
    """Padding, speed-ups over the workshop's recipe, and steps done twice."""
    return [_padding(work), *_speed(work), _resume(work)]


def _padding(work: Path) -> Figure:
    """Share of the positions in the batches of training steps that hold padding and no token."""
    data, tokenizer, what = raw_data(work, "lm")
    preparation = Preparation(task="lm", data=data, tokenizer=tokenizer, max_seq_length=LENGTH)
    manifest, _ = prepare(preparation, work / "text")
    lengths = Prepared.read(work / "text").train.lengths()
    order = LengthGroupedSampler(lengths, BATCH, seed=0).order()
    # (batches, rows): the tokens of each row, which are all in the source.
    tokens_of_rows = lengths[:, 0][order]
    positions = float(tokens_of_rows.max(axis=1).sum() * BATCH)
    share = 100 * (1 - tokens_of_rows.sum() / positions)
    statistics = manifest.splits["train"]
    left_out = statistics.leftover_tokens or 0
    tokens = statistics.source.total + left_out
    return Figure(
        name="lm: padding",
        value=float(share),
        unit="%",
        asked="under 1",
        note=(
            f"{what}, {len(lengths):,} blocks of {LENGTH}; {left_out} of {tokens:,} tokens left out"
        ),
    )


def _speed(work: Path) -> list[Figure]:
    """The speed of the workshop's recipe, and how many times faster ours is in each precision."""
    sets, what = _question_sets(work)
    precisions = ["FP32"]
    if multiplies_bf16():
        precisions.append("BF16")
    control_seconds: list[float] = []
    our_seconds: dict[tuple[str, str], list[float]] = {}
    for loss_on in sets:
        for precision in precisions:
            our_seconds[precision, loss_on] = []
    # In turns, so that a machine that slows down favours none.
    for _ in range(ROUNDS):
        control_seconds += timed_steps(_control(sets["all"], work), CONTROL_STEPS)
        for (precision, loss_on), seconds in our_seconds.items():
            seconds += timed_steps(_ours(sets[loss_on], precision, work), OUR_STEPS)
    figures = []
    for (precision, loss_on), seconds in our_seconds.items():
        name = _name(precision, loss_on)
        figures.append(ratio(name, control_seconds, seconds, ASKED_TIMES, what))
    rate = BATCH * PASSES / float(np.median(control_seconds))
    figures.append(Figure(name="the workshop's recipe", value=rate, unit="samples/s", note=what))
    if "BF16" not in precisions:
        for loss_on in sets:
            name = _name("BF16", loss_on)
            figures.append(Figure(name=name, value=None, unit="x", asked=ASKED_TIMES, note=NO_BF16))
    return figures


def _question_sets(work: Path) -> tuple[dict[str, Prepared], str]:
    """The questions prepared with each kind of loss, by its name; and what data they are."""
    data, tokenizer, what = raw_data(work, "squad")
    sets = {}
    for loss_on in ("answer", "all"):
        preparation = Preparation(
            task="squad",
            data=data,
            tokenizer=tokenizer,
            max_seq_length=LENGTH,
            loss_on=loss_on,
            limit=QUESTIONS,
        )
        prepare(preparation, work / loss_on)
        sets[loss_on] = Prepared.read(work / loss_on)
    return sets, what


def _name(precision: str, loss_on: str) -> str:
    """The name of the figure that compares our trainer with the workshop's."""
    return f"training, small bloom, loss on {loss_on}, {precision} against the workshop's"


def _control(data: Prepared, work: Path) -> Trainer:
    """A trainer of plain transformers: every row is padded to 512 tokens, and pads are labels
    too."""
    pad = data.tokenizer.pad_token_id

    def collate(rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
        ids = np.full((len(rows), LENGTH), pad)
        mask = np.zeros((len(rows), LENGTH), dtype=np.int64)
        for number, (row, _) in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
        inputs = torch.from_numpy(ids)
        return {
            "input_ids": inputs,
            "attention_mask": torch.from_numpy(mask),
            "labels": inputs.clone(),
        }

    return Trainer(
        model=BloomForCausalLM(causal_config(SHAPE)),
        args=trainer_arguments(work, **TRAINER_SETTINGS),
        train_dataset=data.train,
        data_collator=collate,
    )


def _ours(data: Prepared, precision: str, work: Path) -> Trainer:
    task = Causal(CausalArguments(data=str(data.folder)))
    model = random_causal(causal_config(SHAPE), seed=0)
    return our_trainer(model, task, precision, work, **TRAINER_SETTINGS)


def _resume(work: Path) -> Figure:
    """Kill a run between two checkpoints; the next attempt repeats at most the steps that lie
    between them."""
    write_sample(work / "sample", task="lm")
    folder = work / "killed"
    flags: dict[str, Any] = {
        "task": "lm",
        "data": work / "sample",
        "max_seq_length": 64,
        "init": "random",
        "model_name_or_path": GPT_TINY,
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        "eval_steps": 0,
        "max_train_steps": 40,
        "outputdir": folder,
        "threads": 1,
    }
    argv = [sys.executable, str(ROOT / "causal_train.py"), *train_arguments(**flags)]
    reached = _killed(argv, folder / "train.log")
    subprocess.run(
        argv,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=RUN_SECONDS,
    )
    first = read_record(folder).ranks[0].first_step
    return Figure(
        name="steps that a resumed run does again",
        value=reached - first,
        unit="steps",
        asked=f"at most {SAVE_STEPS}",
        note=(
            f"killed after step {reached}, went on after step {first}; "
            f"a checkpoint each {SAVE_STEPS} steps"
        ),
    )


def _killed(argv: list[str], log: Path) -> int:
    """Start a run and kill it after some steps; returns the last step that it logged."""
    run = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while run.poll() is None and _last_step(log) < KILLED_AT and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    return _last_step(log)


def _last_step(log: Path) -> int:
    """The last step that a log names; 0 where it names none."""
    if not log.is_file():
        return 0
    last = 0
    for line in log.read_text("utf-8").splitlines():
        match = LINE.search(line)
        if match:
            last = max(last, int(match[1]))
    return last
