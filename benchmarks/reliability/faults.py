"""What is broken in a run over local pods: processes, the network, checkpoints, the disk. All for real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.reliability.cuts import cut_between, cut_pod, restore_between, restore_pods
from benchmarks.reliability.damage import after_kill, delete, flip, truncate
from benchmarks.reliability.disk import empty_disk, fill_disk, lock_folder, unlock_folder
from benchmarks.reliability.kills import (
    kill_agent,
    kill_pdsh,
    kill_pod,
    kill_rank,
    kill_supervisor,
    kill_warden,
    stop_rank,
)
from benchmarks.reliability.scene import Scene


@dataclass(frozen=True)
class Fault:
    """One way to break it."""

    means: str
    """What is done, for those who read the page."""
    act: Callable[[Scene], str | None]
    """Does it; returns what was lost or damaged, where there is a choice."""
    heal: Callable[[Scene], object] = lambda scene: None
    """What a person does before the run is started again."""
    costs_a_pod: bool = False
    ends_a_pod: bool = False
    """All of its processes must be gone."""
    intervals: int = 1
    """How many intervals of steps may be lost."""
    needs_networks: bool = False


AT_A_POD: dict[str, Any] = {"costs_a_pod": True, "ends_a_pod": True}
DAMAGE: dict[str, Any] = {"intervals": 2}
FAULTS: dict[str, Fault] = {
    "rank killed": Fault("SIGKILL for one of the two ranks", kill_rank),
    "agent killed": Fault("SIGKILL for a pod's agent; its warden ends the pod", kill_agent, **AT_A_POD),
    "warden killed": Fault("SIGKILL for a pod's warden; its agent ends the pod", kill_warden, **AT_A_POD),
    "pod killed": Fault("SIGKILL for all processes of a pod at once", kill_pod, **AT_A_POD),
    "supervisor killed": Fault("SIGKILL for `zeropods launch`; the same command is called again", kill_supervisor),
    "pdsh killed": Fault("SIGKILL for pdsh, which leaves its remote processes running", kill_pdsh),
    "rank stopped": Fault("SIGSTOP for one of the two ranks", stop_rank),
    "pod cut off": Fault(
        "a pod's network cable is pulled", cut_pod, restore_pods, costs_a_pod=True, needs_networks=True
    ),
    "ranks cut off": Fault(
        "the ranks do not reach each other; the supervisor reaches both", cut_between, restore_between,
        needs_networks=True,
    ),
    "file flipped": Fault("both ranks killed; a bit of the newest checkpoint flipped", after_kill(flip), **DAMAGE),
    "file truncated": Fault("both ranks killed; a file of it truncated", after_kill(truncate), **DAMAGE),
    "file deleted": Fault("both ranks killed; a file of it deleted", after_kill(delete), **DAMAGE),
    "disk full": Fault("less room is left than a checkpoint takes", fill_disk, empty_disk),
    "folder read-only": Fault("nothing can be made in `checkpoints/`", lock_folder, unlock_folder),
}  # fmt: skip
SUPERVISOR = "supervisor killed"
DAMAGED = ("file flipped", "file truncated", "file deleted")
ON_A_DISK = ("disk full", "folder read-only")
"""They need a disk of the run's own, which root may mount."""
