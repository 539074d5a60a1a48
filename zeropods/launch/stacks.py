"""The stacks of all ranks of a run that stands still, in `stacks/N.txt` of its folder."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from zeropods.measure.beat import Beat
from zeropods.pods.agent.descendants import variable
from zeropods.pods.agent.stacks import ask_for_stacks, is_stopped
from zeropods.pods.processes import Process, read_process

ANSWER_SECONDS = 3.0
PAUSE_SECONDS = 0.1
PY_SPY_SECONDS = 10.0


def save_stacks(
    folder: Path, beats: Mapping[int, Beat], ask: Callable[[], object], ours: Callable[[Process], bool]
) -> None:
    """Ask the ranks for their stacks, and write down for those that do not answer what is known otherwise.

    Args:
        ask: lets every rank get the signal.
        ours: whether a process of this machine is of this run.
    """
    ask()
    deadline = time.monotonic() + ANSWER_SECONDS
    while (left := _unanswered(folder, beats)) and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    # A disk that takes no more keeps no run from ending.
    with suppress(OSError):
        for rank in left:
            _file(folder, rank).parent.mkdir(exist_ok=True)
            with open(_file(folder, rank), "a", encoding="utf-8") as file:
                file.write(_known_otherwise(beats[rank], ours))


def ask_below(pid: int) -> None:
    """Ask the processes below one of this machine."""
    from zeropods.pods.agent.descendants import Tree

    ask_for_stacks(Tree.read().below(pid))


def carries(run: str) -> Callable[[Process], bool]:
    """Whether a process carries a run's mark."""
    from zeropods.launch.exported import RUN

    return lambda process: variable(process, RUN) == run


def _unanswered(folder: Path, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not _is_written(_file(folder, rank))]


def _is_written(path: Path) -> bool:
    """Whether a dump is there and has come to its end: the main thread's comes last."""
    with suppress(OSError):
        size = path.stat().st_size
        time.sleep(PAUSE_SECONDS / 2)
        return 0 < size == path.stat().st_size
    return False


def _known_otherwise(beat: Beat, ours: Callable[[Process], bool]) -> str:
    process = read_process(beat.pid)
    here = process is not None and ours(process)
    how = "is stopped" if here and process is not None and is_stopped(process) else "does not answer"
    spied = _spied(beat.pid) if here else ""
    lines = [f"rank {beat.rank}, process {beat.pid}: {how}; its main thread when it last gave a sign, innermost first:"]
    return "\n".join([*lines, *(f"  {place}" for place in beat.stack), spied]).rstrip() + "\n"


def _spied(pid: int) -> str:
    """What py-spy sees of a process of this machine; nothing where it is not installed, or may not look."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.TimeoutExpired):
        seen = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False)
        return f"\npy-spy:\n{seen.stdout}" if seen.returncode == 0 else ""
    return ""


def _file(folder: Path, rank: int) -> Path:
    return folder / "stacks" / f"{rank}.txt"
