"""A run over pods that goes on by itself with the pods that are left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods import files
from zeropods.errors import UserError
from zeropods.launch.child import check_timeout
from zeropods.launch.command import PASSES, ROWS, Batch, Launch, batch_of, flag_values, runner_argv, with_flags
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.planning import plan_launch
from zeropods.launch.supervisor import run_launch
from zeropods.measure.record import Record
from zeropods.train.checkpoints import MANIFEST

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster
    from zeropods.pods.state import Pod


# How an attempt of a run ended, and the next one as data: on the pods that are left, with the same effective batch.


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often, and on how few pods, a run may go on by itself."""

    most: int = 0
    min_pods: int = 1

    def __post_init__(self) -> None:
        if self.most < 0 or self.min_pods < 1:
            raise UserError(f"--restarts {self.most} --min-pods {self.min_pods}; expected at least 0 and at least 1")

    def check(self, planned: Launch) -> None:
        """Refuse what could not go on when it has to."""
        if not self.most:
            return
        if self.min_pods > len(planned.hosts):
            raise UserError(f"--min-pods {self.min_pods}: the run begins on {len(planned.hosts)}; give no more")
        if batch_of(planned.script, planned.arguments) is None:
            remedy = f"give --{ROWS} and --{PASSES}, by which the batch is kept"
            raise UserError(f"--restarts {self.most}: {planned.script.name} is no script of ours; {remedy}")


@dataclass
class End:
    """How an attempt ended."""

    record: Record | None = None
    """None where its ranks had not opened the run."""
    unopened: UnopenedError | None = None
    found_unix_seconds: float = field(default_factory=time.time)
    """When the supervisor looked last: it found the end then."""

    @property
    def calls_for_another(self) -> bool:
        """Whether what ended it was none of the script's own errors, which would only come again.

        A pod was lost; or a rank left no measurement, which it does after every error that Python can tell of: it was
        killed; or no rank says that it failed: the launcher was ended. Never after `oom`, `timeout` or Ctrl-C.
        """
        if self.record is None:
            return self.unopened is not None and self.unopened.status == "pod_lost"
        if self.record.status != "failed":
            return self.record.status == "pod_lost"
        told, ranks = [rank.status for rank in self.record.ranks], self.record.world_size
        return len(told) < ranks or not {"failed", "oom"} & set(told)

    @property
    def lost(self) -> str | None:
        """The pod that was lost, if one was."""
        return self.record.pod if self.record and self.record.status == "pod_lost" else None

    def result(self) -> Record:
        """The record; `UnopenedError` where there is none."""
        if self.record is None:
            assert self.unopened is not None
            raise self.unopened
        return self.record

    def entry(self) -> dict[str, Any]:
        """What the journal says of it."""
        unopened = {"status": "pod_lost", "pod": None, "reason": self.unopened and self.unopened.reason, "steps": 0}
        said = vars(self.record) if self.record else unopened
        kept = {name: said[name] for name in ("status", "pod", "reason", "steps")}
        return {**kept, "found_unix_seconds": self.found_unix_seconds}


def next_attempt(
    asked: Launch, left: Cluster, restarts: Restarts, export: Sequence[str] = (), *, opened: bool
) -> Launch | str:
    """The launch on as many pods as keep the effective batch; or why there is none.

    Args:
        asked: the launch as it began.
        left: the cluster with the pods that still answer.
        opened: whether an attempt of this launch has opened the run.
    """
    pods = min(len(left.pods), len(asked.hosts))
    if pods < restarts.min_pods:
        return f"{len(left.pods)} pods are left, --min-pods {restarts.min_pods}"
    batch = batch_of(asked.script, asked.arguments)
    assert batch is not None
    numbers = range(pods, restarts.min_pods - 1, -1)
    fitting = _fitting(batch, asked.world_size, [pod.slots for pod in left.pods], numbers)
    if fitting is None:
        rows = batch.rows * batch.passes * asked.world_size
        fewer = f", nor among fewer down to {restarts.min_pods}" if len(numbers) > 1 else ""
        return f"an effective batch of {rows} rows does not divide among {pods} pods{fewer}"
    number, same = fitting
    arguments = with_flags(asked.arguments, {**same.flags(batch), **_resuming(asked, opened=opened)})
    return replace(plan_launch(left, asked.script, arguments, pods=number, export=export), asked=asked)


def changed_flags(launch: Launch) -> dict[str, str]:
    """What the script is told otherwise than was asked for."""
    before = {} if launch.asked is None else flag_values(launch.asked.arguments)
    return {name: value for name, value in flag_values(launch.arguments).items() if before.get(name) != value}


def _fitting(batch: Batch, ranks: int, slots: Sequence[int], numbers: Sequence[int]) -> tuple[int, Batch] | None:
    """The first of these numbers of pods on which the effective batch can stay, and how."""
    for number in numbers:
        same = batch.on(ranks, sum(slots[:number]))
        if same is not None:
            return number, same
    return None


def _resuming(asked: Launch, *, opened: bool) -> dict[str, str]:
    """`--resume auto` where something else was asked for, which this launch has done already."""
    resume = flag_values(asked.arguments).get("resume", "auto")
    saved = next((asked.folder / "checkpoints").glob(f"checkpoint-*/{MANIFEST}"), None)
    is_done = opened and (resume == "never" or saved is not None)
    return {"resume": "auto"} if resume != "auto" and is_done else {}


# A run over pods that goes on by itself with the pods that are left.

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
) -> Record:
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
        files.write_json(planned.folder / JOURNAL, {"restarts": journal})
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
    there = (pod for pod, said in zip(cluster.pods, told, strict=True) if said.is_ready)
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
