"""The original's recipe on one device: both sides padded to 96, FP32 without TF32, a plain Trainer,
batch 32.

    python -m benchmarks.gpu.control --model t5-small --set DIR --out FILE --steps 100 --seconds 60

Pads carry a loss and are attended to, and logits are computed everywhere, as in the published CML
notebooks. AdamW is the fused one, which transformers uses by default: it is a little faster than
the original's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Seq2SeqTrainer,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from benchmarks.training import padded_to_96, trainer_arguments
from zeropods import files
from zeropods.errors import guarded
from zeropods.measure import environment
from zeropods.plan.known_models import known_config
from zeropods.train.device import gpu_name, synchronize
from zeropods.train.meter import StepClock, Tokens
from zeropods.train.sampler import Prepared, TokenizedSplit


class _Clock(TrainerCallback):
    """Times steps without waiting for the device, and ends training when the time is up."""

    def __init__(self, seconds: float) -> None:
        self.clock = StepClock()
        self.most_seconds = seconds
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.monotonic()
        self.clock.restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.lap(Tokens(0, 0, 0))
        # The trainer has already set this at its last step.
        control.should_training_stop |= time.monotonic() - self.began >= self.most_seconds


def main() -> None:
    """Train, and write what was measured; running out of memory is a result too."""
    flags = _flags()
    rows = Prepared.read(flags.set).train
    torch.manual_seed(0)
    measured: dict[str, Any] = {
        "status": "ok",
        "gpu": gpu_name(),
        "versions": environment.versions(),
    }
    clock = _Clock(flags.seconds)
    try:
        with tempfile.TemporaryDirectory(prefix="zeropods-control-") as work:
            _trainer(flags, rows, clock, Path(work)).train()
    except torch.OutOfMemoryError as error:
        reason, _, _ = str(error).partition("\n")
        measured |= {"status": "oom", "reason": reason}
    synchronize()
    peak = None
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    measured["step_seconds"] = clock.clock.steps()["seconds"].tolist()
    measured["tf32"] = torch.backends.cuda.matmul.allow_tf32
    measured["peak_allocated_bytes"] = peak
    measured["tokens_per_sample"] = rows.lengths().mean(axis=0).tolist()
    files.write_json(flags.out, measured)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--seconds", type=float, required=True, help="after which it ends, steps or not"
    )
    return parser.parse_args()


def _trainer(
    flags: argparse.Namespace, rows: TokenizedSplit, clock: _Clock, work: Path
) -> Seq2SeqTrainer:
    arguments = trainer_arguments(
        work,
        flags.batch,
        max_steps=flags.steps,
        # The original logs every 500 steps, too.
        logging_steps=500,
        use_cpu=not torch.cuda.is_available(),
    )
    return Seq2SeqTrainer(
        model=T5ForConditionalGeneration(T5Config.from_dict(known_config(flags.model))),
        args=arguments,
        train_dataset=rows,
        data_collator=padded_to_96,
        callbacks=[clock],
    )


if __name__ == "__main__":
    sys.exit(guarded(main))
