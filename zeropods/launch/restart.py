"""The restart policy of a run over pods: when it goes on by itself, and with what, on the pods that are left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.launch.command import Launch, batch_of, flag_values, plan_launch, with_flags
from zeropods.launch.outcome import UnopenedError
from zeropods.measure.record import Record
from zeropods.train.arguments import PASSES, ROWS, batch_on
from zeropods.train.checkpoints import MANIFEST

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

JOURNAL = "restarts.json"
"""In the run folder: what ended the attempts of the last launch that went on by itself, and with what it went on."""


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
        if self.most and self.min_pods > len(planned.hosts):
            raise UserError(f"--min-pods {self.min_pods}: the run begins on {len(planned.hosts)}; give no more")
        if self.most and batch_of(planned.script, planned.arguments) is None:
            remedy = f"give --{ROWS} and --{PASSES}, by which the batch is kept"
            raise UserError(f"--restarts {self.most}: {planned.script.name} is no script of ours; {remedy}")


@dataclass
class AttemptEnd:
    """How an attempt ended."""

    record: Record | None = None
    """None where its ranks had not opened the run."""
    unopened: UnopenedError | None = None
    found_unix_seconds: float = field(default_factory=time.time)
    """When the supervisor found that the attempt was over."""

    @property
    def calls_for_another(self) -> bool:
        """Whether the run goes on, if it may: `calls_for_another`, or a pod was lost before the ranks had begun."""
        if self.record is None:
            return self.unopened is not None and self.unopened.status == "pod_lost"
        return calls_for_another(self.record)

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


def calls_for_another(record: Record) -> bool:
    """Whether what ended an attempt was none of the script's own errors, which would only come again.

    A pod was lost; or a rank left no measurement, which it does after every error that Python can tell of: it was
    killed; or no rank says that it failed: the launcher was ended. Never after `oom`, `timeout` or Ctrl-C.
    """
    if record.status != "failed":
        return record.status == "pod_lost"
    told = [rank.status for rank in record.ranks]
    return len(told) < record.world_size or not {"failed", "oom"} & set(told)


def next_attempt(asked: Launch, left: Cluster, restarts: Restarts, *, opened: bool) -> Launch | str:
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
    effective = batch.rows * batch.passes * asked.world_size
    numbers = range(pods, restarts.min_pods - 1, -1)
    for number in numbers:
        same = batch_on(sum(pod.slots for pod in left.pods[:number]), effective, batch.rows)
        if same is not None:
            changes = {name: str(value) for name, value in same.flags.items() if value != batch.flags[name]}
            arguments = with_flags(asked.arguments, changes | _resuming(asked, opened=opened))
            return replace(plan_launch(left, asked.script, arguments, pods=number, export=asked.export), asked=asked)
    fewer = f", nor among fewer down to {restarts.min_pods}" if len(numbers) > 1 else ""
    return f"an effective batch of {effective} rows does not divide among {pods} pods{fewer}"


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """What ended an attempt, and with what the run went on."""

    status: str
    pod: str | None
    reason: str | None
    steps: int
    """Number of optimizer steps that were done."""
    found_unix_seconds: float
    pods: tuple[str, ...]
    """Names of the pods on which the run goes on."""
    unused: tuple[str, ...]
    """Names of those that answer and are left out, so that the batch divides."""
    flags: dict[str, str]
    """What the script is told otherwise than was asked for."""

    @classmethod
    def of(cls, end: AttemptEnd, following: Launch, left: Sequence[str]) -> JournalEntry:
        """The entry of an attempt that has ended; `left`: names of the pods that still answer."""
        used = len(following.hosts)
        return cls(
            status=end.record.status if end.record else "pod_lost",
            pod=end.record.pod if end.record else None,
            reason=end.record.reason if end.record else str(end.unopened and end.unopened.reason),
            steps=end.record.steps if end.record else 0,
            found_unix_seconds=end.found_unix_seconds,
            pods=tuple(left[:used]),
            unused=tuple(left[used:]),
            flags=changed_flags(following),
        )

    def line(self, number: int, most: int) -> str:
        """The entry as a person reads it: restart `number` of `most`."""
        reason = self.reason or ""
        why = reason if self.pod is None or reason.startswith(self.pod) else f"{self.pod}: {reason}"
        unused = f", without {', '.join(self.unused)}" if self.unused else ""
        flags = "".join(f" --{name} {value}" for name, value in self.flags.items())
        goes_on = f"restart {number} of {most} on {', '.join(self.pods)}{unused}{' with' if flags else ''}{flags}"
        return f"{self.status}: {why}; {goes_on}"


def changed_flags(launch: Launch) -> dict[str, str]:
    """What the script is told otherwise than was asked for."""
    before = {} if launch.asked is None else flag_values(launch.asked.arguments)
    return {name: value for name, value in flag_values(launch.arguments).items() if before.get(name) != value}


def _resuming(asked: Launch, *, opened: bool) -> dict[str, str]:
    """`--resume auto` where something else was asked for, which this launch has done already."""
    resume = flag_values(asked.arguments).get("resume", "auto")
    saved = next((asked.folder / "checkpoints").glob(f"checkpoint-*/{MANIFEST}"), None)
    is_done = opened and (resume == "never" or saved is not None)
    return {"resume": "auto"} if resume != "auto" and is_done else {}
