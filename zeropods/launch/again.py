"""How an attempt of a run ended, and the next one as data: on the pods that are left, with the same effective batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zeropods.checkpoints.shards import MANIFEST
from zeropods.errors import UserError
from zeropods.launch.batch import PASSES, ROWS, Batch, batch_of, with_flags
from zeropods.launch.command import Launch
from zeropods.launch.flags import flag_values
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.planning import plan_launch

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster


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

    record: dict[str, Any] | None = None
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
        if self.record["status"] != "failed":
            return bool(self.record["status"] == "pod_lost")
        told, ranks = [rank["status"] for rank in self.record["ranks"]], self.record["world_size"]
        return len(told) < ranks or not {"failed", "oom"} & set(told)

    @property
    def lost(self) -> str | None:
        """The pod that was lost, if one was."""
        return self.record["pod"] if self.record and self.record["status"] == "pod_lost" else None

    def result(self) -> dict[str, Any]:
        """The record; `UnopenedError` where there is none."""
        if self.record is None:
            assert self.unopened is not None
            raise self.unopened
        return self.record

    def entry(self) -> dict[str, Any]:
        """What the journal says of it."""
        unopened = {"status": "pod_lost", "pod": None, "reason": self.unopened and self.unopened.reason, "steps": 0}
        said = self.record or unopened
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
