"""A run over pods that goes on by itself with the pods that are left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods import atomic
from zeropods.launch.again import End, Restarts, changed_flags, next_attempt
from zeropods.launch.child import check_timeout
from zeropods.launch.command import Launch, runner_argv
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.run import run_launch

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster
    from zeropods.pods.state import Pod

JOURNAL = "restarts.json"
"""In the run folder: what ended the attempts of the last launch that went on by itself, and with what it went on."""
ANSWER_SECONDS = 5.0


def run_restarting(
    planned: Launch,
    cluster: Cluster,
    restarts: Restarts,
    *,
    export: Sequence[str] = (),
    show: Callable[[str], object] = lambda line: None,
    argv: Callable[[Launch, Path], list[str]] = runner_argv,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
) -> dict[str, Any]:
    """Run a launch; after a lost pod or a killed rank, go on with the pods that are left. Returns the last record.

    The effective batch stays as it is. Every attempt but the last has its record in `attempts/`.

    Args:
        export: what the launch was planned with.
        show: gets every line that the ranks write, from another thread.
        argv: makes the launcher's command from the launch and its hostfile.
        timeout_seconds: of all attempts together.
        step_timeout: as `launch` has it.
    """
    check_timeout(timeout_seconds)
    restarts.check(planned)
    began, opened, journal = time.monotonic(), False, list[dict[str, Any]]()
    current, left = planned, cluster
    while True:
        seconds = timeout_seconds and max(1.0, timeout_seconds - (time.monotonic() - began))
        end = _attempt(current, left, show, argv, seconds, step_timeout)
        if not end.calls_for_another or current.restarts >= restarts.most:
            return end.result()
        opened = opened or end.record is not None
        left = replace(left, pods=_answering(left, end))
        again = next_attempt(planned, left, restarts, export, opened=opened)
        if isinstance(again, str):
            print(f"{planned.folder}: does not go on by itself: {again}", file=sys.stderr)
            return end.result()
        current = replace(again, restarts=current.restarts + 1)
        journal.append(_entry(end, current, left))
        atomic.write_json(planned.folder / JOURNAL, {"restarts": journal})
        print(f"{planned.folder}: {_said(journal[-1], current.restarts, restarts.most)}", file=sys.stderr)


def _attempt(
    planned: Launch,
    cluster: Cluster,
    show: Callable[[str], object],
    argv: Callable[[Launch, Path], list[str]],
    timeout_seconds: float | None,
    step_timeout: float | None,
) -> End:
    end = End()

    def look() -> None:
        end.found_unix_seconds = time.time()

    try:
        end.record = run_launch(planned, cluster, show, argv, timeout_seconds, step_timeout, look)
    except UnopenedError as error:
        end.unopened = error
    return end


def _answering(cluster: Cluster, end: End) -> tuple[Pod, ...]:
    """Pods whose agents answer now; not one that was lost, whatever it says."""
    told = cluster.statuses(ANSWER_SECONDS)
    there = (pod for pod, said in zip(cluster.pods, told, strict=True) if said["status"] == "ready")
    return tuple(pod for pod in there if pod.name != end.lost)


def _entry(end: End, again: Launch, left: Cluster) -> dict[str, Any]:
    names = [pod.name for pod in left.pods]
    used = len(again.hosts)
    return {**end.entry(), "pods": names[:used], "unused": names[used:], "flags": changed_flags(again)}


def _said(entry: dict[str, Any], number: int, most: int) -> str:
    pod, reason = entry["pod"], entry["reason"]
    why = reason if pod is None or reason.startswith(pod) else f"{pod}: {reason}"
    unused = f", without {', '.join(entry['unused'])}" if entry["unused"] else ""
    flags = "".join(f" --{name} {value}" for name, value in entry["flags"].items())
    goes_on = f"restart {number} of {most} on {', '.join(entry['pods'])}{unused}{' with' if flags else ''}{flags}"
    return f"{entry['status']}: {why}; {goes_on}"
