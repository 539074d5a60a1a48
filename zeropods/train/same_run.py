"""Whether a call may go on with the run in its folder on this number of processes."""

from __future__ import annotations

from typing import Any

from zeropods.errors import UserError
from zeropods.measure.records import read_json
from zeropods.measure.run_folder import CONFIG
from zeropods.train import processes
from zeropods.train.deepspeed_config import technique
from zeropods.train.job import Job

UNDIVIDED = ("none", "ddp")
"""Techniques that keep the same files."""


def check_same_run(job: Job) -> None:
    """Refuse another technique than the run's, and other rows a step; both may be meant for another number of pods.

    Other differences are `open_run`'s to find.
    """
    if job.arguments.resume == "never" or not (job.folder / CONFIG).is_file():
        return
    before = read_json(job.folder / CONFIG)
    _check_technique(job, before)
    _check_batch(job, before)


def _check_technique(job: Job, before: dict[str, Any]) -> None:
    was, now = before["technique"], technique(job.deepspeed, processes.world_size())
    if was != now and not (was in UNDIVIDED and now in UNDIVIDED):
        raise UserError(
            f"{job.folder}: holds a run of technique {was}, this call is of {now}; give the run's own --deepspeed, "
            "or choose another --outputdir"
        )


def _check_batch(job: Job, before: dict[str, Any]) -> None:
    was, now = before["effective_batch_size"], job.effective_batch_size()
    if was == now:
        return
    arguments, ranks = job.arguments, processes.world_size()
    rows, passes = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    said = f"{rows} rows x {passes} passes x {ranks} processes = {now}"
    raise UserError(
        f"{job.folder}: holds a run of {was} rows a step, this call has {said}; {fitting(was, rows, ranks)}"
    )


def fitting(effective: int, rows: int, ranks: int) -> str:
    """The flags by which so many processes train on an effective batch, or which numbers of them would do.

    Args:
        effective: rows of a step.
        rows: of a process and pass, as asked for; no more are proposed, since memory was enough for these.
    """
    share, rest = divmod(effective, ranks)
    if rest:
        numbers = ", ".join(str(n) for n in range(1, min(effective, 64) + 1) if effective % n == 0)
        return f"{effective} does not divide by {ranks}: take {numbers} processes"
    most = max(n for n in range(1, min(rows, share) + 1) if share % n == 0)
    return f"give --per_device_train_batch_size {most} --gradient_accumulation_steps {share // most}"
