"""Runs of a training script on this machine, one after the other."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.launch import planning
from zeropods.launch.child import run_child
from zeropods.launch.command import Launch, find_script, runner_argv
from zeropods.launch.local import LAST_LINES, following, run_to_end, stamp, train_arguments
from zeropods.launch.planning import PROJECT, check_arguments
from zeropods.measure.run_folder import LAUNCH_LOCK, RECORD, locked
from zeropods.pods.hostfile import Host
from zeropods.pods.processes import ending_in_order
from zeropods.programs import free_port
from zeropods.report.run import Run

SEPARATOR = "--"


def train_series(script: str | Path, runs: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Run a training script on this machine for each set of flags, and return the runs whatever came of them.

    A run that is finished already is returned as it is. One that fails, out of memory for instance, leaves a record
    that says so, and the next begins. Without GPUs all are forks of one process, which imports torch once; CUDA does
    not survive a fork.

    Args:
        runs: the script's flags, without their dashes, `outputdir` among them, and `slots`: processes of the run, 1
            if not given. None leaves a flag out.

    Raises:
        UserError: a run that could not begin; those before it stay.
    """
    planned = [_planned(script, flags) for flags in runs]
    for launch in planned:
        check_arguments(launch)
    waiting = [launch for launch in planned if not _is_finished(launch)]
    with ending_in_order(), ExitStack() as stack:
        for launch in waiting:
            stack.enter_context(locked(launch.folder, LAUNCH_LOCK))
        if waiting:
            (_each_alone if _has_gpus() else _by_forks)(waiting)
    return [Run(launch.folder) for launch in planned]


def series_argv(launches: Sequence[Launch]) -> list[str]:
    """The command that runs some launches of one script by forks."""
    words = [sys.executable, "-m", "zeropods.launch.forks", str(launches[0].script)]
    for launch in launches:
        words += [SEPARATOR, str(launch.world_size), str(launch.folder), *launch.arguments]
    return words


def _planned(script: str | Path, flags: Mapping[str, Any]) -> Launch:
    given = dict(flags)
    slots, folder = given.pop("slots", 1), Path(given.pop("outputdir")).resolve()
    return Launch(
        script=find_script(script, Path.cwd(), PROJECT),
        arguments=tuple(train_arguments(**given, outputdir=folder)),
        folder=folder,
        hosts=(Host(socket.gethostname(), slots),),
        master_port=0,
        launcher="none",
    )


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


def _each_alone(launches: Sequence[Launch]) -> None:
    """Each run in processes of its own."""
    for launch in launches:
        argv = [sys.executable, str(launch.script), *launch.arguments]
        if launch.world_size > 1:
            argv = runner_argv(replace(launch, master_port=free_port()), Path())
        ended = run_to_end(argv, launch.folder)
        if ended.record is None and ended.status != 0:
            raise UserError(_not_begun(launch.folder.name, ended.lines))
        _remember(launch)


def _by_forks(launches: Sequence[Launch]) -> None:
    with tempfile.TemporaryFile() as output:
        with _following_each([launch.folder for launch in launches]) as tick:
            status = run_child(series_argv(launches), output, tick)
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").strip().splitlines()
    if status != 0:
        raise UserError(_not_begun("a run", lines))
    for launch in launches:
        _remember(launch)


def _remember(launch: Launch) -> None:
    """So that the next call need not ask the script whether it is finished."""
    if Run(launch.folder).record.status == "ok":
        planning.remember(launch)


def _not_begun(what: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{what} did not begin; what was said last:", *lines[-LAST_LINES:]])


@contextmanager
def _following_each(folders: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """A progress bar over the steps of a run, then of the next; call what it yields now and then."""
    left = list(folders)
    with ExitStack() as bar:
        before, current = stamp(left[0] / RECORD), bar.enter_context(following(left[0]))

        def tick() -> None:
            nonlocal before, current
            current()
            if len(left) > 1 and stamp(left[0] / RECORD) != before:
                bar.close()
                del left[0]
                before, current = stamp(left[0] / RECORD), bar.enter_context(following(left[0]))

        yield tick
