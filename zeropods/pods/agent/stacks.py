"""Processes asked for the stacks of their threads."""

from __future__ import annotations

from collections.abc import Iterable

from zeropods.pods.processes import PROC, Process, send
from zeropods.pods.signals import STACKS


def ask_for_stacks(processes: Iterable[Process]) -> int:
    """Send `STACKS` to those that catch it, and to no other: it would end them. Returns how many got it."""
    return sum(send(process, STACKS) for process in processes if catches(process, STACKS))


def catches(process: Process, number: int) -> bool:
    """Whether a process has a handler of its own for a signal (`SigCgt`, proc(5))."""
    caught = _status(process).get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def is_stopped(process: Process) -> bool:
    """Whether a process was stopped by SIGSTOP or the like."""
    return _status(process).get("State", "?")[0] in "Tt"


def _status(process: Process) -> dict[str, str]:
    try:
        lines = (PROC / str(process.pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
