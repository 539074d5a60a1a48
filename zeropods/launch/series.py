"""Runs of a training script on this machine, one after the other, by forks of one process that has imported torch.

Importing takes longer than a small run. The process that is forked never trains itself: DeepSpeed does not begin twice
in one process, and threads of OpenMP do not survive a fork. CUDA does not survive it either: with GPUs every run gets
processes of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zeropods.errors import UserError, guarded
from zeropods.launch import planning
from zeropods.launch.child import POLL_SECONDS, bind
from zeropods.launch.command import Launch, runner_argv, train_arguments
from zeropods.launch.local import CommandEnd, end_if_hanging, hang_detector, run_to_end, to_end
from zeropods.launch.log import following
from zeropods.measure.run_folder import LAUNCH_LOCK, locked
from zeropods.pods.processes import deferred, ending_in_order
from zeropods.programs import free_port, own_programs_first, use_own_cache, wait_passively
from zeropods.report.run import Run

if TYPE_CHECKING:
    from zeropods.train.tasks import Task

GRACE_SECONDS = 20.0
"""From SIGTERM to SIGKILL for the ranks that are left when one has failed."""
IMPORTED = ("zeropods.train.run", "zeropods.train.text2sql", "zeropods.train.causal")
"""What every rank needs; DeepSpeed beside it where a run has a configuration of it."""


def train_series(script: str | Path, runs: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Run a training script of ours for each set of flags, and return the runs whatever came of them.

    A run that is finished already is returned as it is. One that fails, out of memory for instance, leaves a record
    that says so, and the next begins.

    Args:
        runs: the script's flags, without their dashes, `outputdir` among them, and `slots`: processes of the run, 1
            if not given. None leaves a flag out.

    Raises:
        UserError: a run that could not begin; those before it stay.
    """
    launches = [_planned(script, **flags) for flags in runs]
    waiting = [launch for launch in launches if not _is_finished(launch)]
    with ending_in_order(), ExitStack() as stack:
        for launch in waiting:
            stack.enter_context(locked(launch.folder, LAUNCH_LOCK))
        run = _alone if _has_gpus() else _forked
        for launch in waiting:
            ended = run(launch)
            if ended.record is None and ended.status != 0:
                lines = "\n".join(ended.lines)
                raise UserError(f"{launch.folder.name} did not begin; what was said last:\n{lines}")
            # So that the next call need not ask the script whether it is finished.
            if Run(launch.folder).record.status == "ok":
                planning.remember(launch)
    return [Run(launch.folder) for launch in launches]


def _planned(script: str | Path, *, outputdir: str | Path, slots: int = 1, **flags: Any) -> Launch:
    arguments = train_arguments(**flags, outputdir=Path(outputdir).resolve())
    return planning.plan_alone(script, arguments, slots)


def _is_finished(launch: Launch) -> bool:
    """Whether it is known without asking the script, which refuses a folder that holds another finished run."""
    if planning.remembered(launch.folder) != planning.identity(launch):
        return False
    return planning.record_of(launch) is not None


def _has_gpus() -> bool:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


def _alone(launch: Launch) -> CommandEnd:
    """A run in processes of its own."""
    argv = [sys.executable, str(launch.script), *launch.arguments]
    if launch.world_size > 1:
        argv = runner_argv(replace(launch, master_port=free_port()), Path())
    return run_to_end(argv, launch.folder)


def _forked(launch: Launch) -> CommandEnd:
    """A run of which every rank is a fork of the process that has imported everything."""
    return to_end(partial(_train, launch), launch.folder)


def _train(launch: Launch, output: IO[bytes]) -> int:
    """Fork the ranks of a run and wait for them; returns the status of the first that failed, else 0."""
    port, count, hangs = free_port(), launch.world_size, hang_detector(launch.folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *(["deepspeed"] if "--deepspeed" in launch.arguments else [])])
    wait_passively()
    use_own_cache()
    words = [str(launch.script), *launch.arguments]
    ranks = [
        context.Process(target=_rank, args=(words, _variables(rank, count, port), output.name), name=f"rank {rank}")
        for rank in range(count)
    ]
    with following(launch.folder) as tick:
        with deferred():
            for rank in ranks:
                rank.start()
        try:
            while True:
                left = [rank for rank in ranks if rank.is_alive()]
                failed = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
                tick()
                if failed or not left:
                    return failed
                wait([rank.sentinel for rank in left], POLL_SECONDS)
                end_if_hanging(hangs)
        finally:
            _end(ranks)


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End what is left of a run, such as ranks that wait for one that is gone; they write their records."""
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()


def task_of(script: str) -> type[Task]:
    """What runs of one of our scripts have of their own."""
    from zeropods.train.arguments import CausalArguments, arguments_of

    kind = arguments_of(script)
    if kind is None:
        raise UserError(f"{script}: runs by forks are for this project's own training scripts")
    if kind is CausalArguments:
        from zeropods.train.causal import Causal

        return Causal
    from zeropods.train.text2sql import TextToSQL

    return TextToSQL


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """The environment of a rank: this process's, and what a launcher gives."""
    here = {**os.environ, "PATH": own_programs_first(os.environ.get("PATH"))}
    if processes == 1:
        return here
    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    # torchrun and DeepSpeed's launcher have two names for it; accelerate takes the first to be 1 where it is not there.
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(processes))
    return {**here, **own, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _rank(argv: list[str], variables: dict[str, str], output: str) -> None:
    """Become a rank: what a training script is as a process of its own."""
    from zeropods.train.script import run_parsed

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bind(os.getppid(), signal.SIGTERM)
    with open(output, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(variables)
    sys.exit(guarded(lambda: run_parsed(task_of(argv[0]), argv)))
