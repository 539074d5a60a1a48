"""One run of `textsql_train.py`, from its flags to its record."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zeropods import atomic
from zeropods.measure.run_folder import CONFIG, Opening, locked, open_run
from zeropods.train import processes
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.attempt import attempt
from zeropods.train.job import Job, check_call, run_config
from zeropods.train.settings import training_arguments


def fine_tune(arguments: TextToSQLArguments, argv: list[str]) -> None:
    """Train, evaluate, save, and leave a record; `UserError` and Ctrl-C leave one too."""
    began = time.time()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    job = check_call(arguments)
    settings = training_arguments(job)
    try:
        with _rank_zero_lock(job.folder), _terminable():
            opening = processes.on_rank_zero(lambda: _open(job, argv))
            if opening.finished:
                print(f"{job.folder}: this run is finished; nothing to do", file=sys.stderr)
            else:
                attempt(job, settings, opening, began)
    finally:
        if sys.exc_info()[0] is None:
            processes.leave()


@contextlib.contextmanager
def _rank_zero_lock(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        processes.on_rank_zero(lambda: stack.enter_context(locked(folder)))
        yield


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, so that its record is written."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _open(job: Job, argv: list[str]) -> Opening:
    opening = open_run(job.folder, job.identity(), again=job.arguments.resume == "never")
    if not opening.finished:
        atomic.write_json(job.folder / CONFIG, run_config(job, argv, opening))
    return opening
