"""One run of a training script, from its flags to its record."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from zeropods import atomic
from zeropods.measure import environment
from zeropods.measure.run_folder import CONFIG, Opening, locked, open_run
from zeropods.train import processes
from zeropods.train.attempt import attempt
from zeropods.train.interrupt import terminable
from zeropods.train.job import Job, check_call, run_config
from zeropods.train.precision import choose_tf32
from zeropods.train.run_arguments import RunArguments
from zeropods.train.same_run import check_same_run
from zeropods.train.save_signal import SaveSignal, save_signal_heard
from zeropods.train.settings import suited_to, training_arguments


def fine_tune(arguments: RunArguments, argv: list[str], age_seconds: float = 0.0) -> None:
    """Train, evaluate, save, and leave a record; `UserError` and Ctrl-C leave one too.

    Args:
        age_seconds: how long ago the run's own process began; 0 where it is one among others of a process.
    """
    with save_signal_heard() as asked:
        _fine_tune(arguments, argv, age_seconds, asked)


def _fine_tune(arguments: RunArguments, argv: list[str], age_seconds: float, asked: SaveSignal) -> None:
    began = time.monotonic() - age_seconds
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    job = check_call(arguments)
    choose_tf32(arguments.tf32)
    settings = training_arguments(job)
    try:
        with _rank_zero_lock(job.folder), terminable(saving=asked.number):
            job = job.with_data()
            suited_to(settings, job)
            hosts = list(dict.fromkeys(processes.gathered(environment.host())))
            opening = processes.on_rank_zero(lambda: _open(job, argv, hosts))
            if not opening.finished:
                attempt(job, settings, opening, time.monotonic() - began, asked)
            elif processes.rank() == 0:
                print(f"{job.folder}: this run is finished; nothing to do", file=sys.stderr)
    except processes.SharedError:
        processes.leave()
        raise
    processes.leave()


@contextlib.contextmanager
def _rank_zero_lock(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        processes.on_rank_zero(lambda: stack.enter_context(locked(folder)))
        yield


def _open(job: Job, argv: list[str], hosts: list[str]) -> Opening:
    check_same_run(job)
    opening = open_run(job.folder, job.identity(), again=job.arguments.resume == "never")
    if not opening.finished:
        atomic.write_json(job.folder / CONFIG, run_config(job, argv, opening, hosts))
    return opening
