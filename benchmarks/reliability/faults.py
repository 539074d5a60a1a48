"""Faults in a run over local pods: in its processes, network, checkpoints and disk. None of them is
simulated."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.reliability.seen import until
from tests.full.faults import give_order
from tests.namespaces import Namespaces
from zeropods.launch.command import OVER_AGENTS
from zeropods.launch.notebook import kill_pod, warden_of
from zeropods.measure.heartbeat import read_beats
from zeropods.pods.cluster import Cluster
from zeropods.pods.processes import descendants, send
from zeropods.train.checkpoints import MANIFEST, name_of, read_manifest, saved_steps

COMMAND_SECONDS = 10.0


@dataclass(frozen=True)
class Scene:
    """A run that is training over local pods when a fault strikes."""

    cluster: Cluster
    used: tuple[str, ...]
    """Names of the pods on which it runs, in the order of ranks."""
    folder: Path
    """The run folder, on a disk of its own."""
    launch: int
    """Process id of `zeropods launch`."""
    random: Random

    def address(self, pod: str) -> str:
        """Address of a pod, by the pod's name."""
        addresses = {known.name: known.address for known in self.cluster.pods}
        return addresses[pod]


# Signals to the processes of a run.


def _signal_rank(scene: Scene, number: signal.Signals) -> str:
    rank, beat = scene.random.choice(sorted(read_beats(scene.folder).items()))
    os.kill(beat.pid, number)
    return f"rank {rank}"


def _order_rank(scene: Scene, fault: str) -> str:
    """Let a rank do a fault of `tests/full/faulty_library` by itself."""
    rank = scene.random.randrange(len(scene.used))
    give_order(scene.folder, rank, fault)
    return f"rank {rank}"


def _kill_half(scene: Scene, *, of_agent: bool) -> str:
    """Send SIGKILL to the agent of a pod that is in use, or to its warden."""
    pod = scene.random.choice(scene.used)
    warden = warden_of(scene.cluster, pod)
    assert warden is not None
    victim = warden
    if of_agent:
        victim = warden.children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    return pod


def _kill_pod(scene: Scene) -> str:
    """Send SIGKILL to all processes of a pod, as if its power were cut."""
    pod = scene.random.choice(scene.used)
    kill_pod(scene.cluster, pod)
    return pod


def _kill_supervisor(scene: Scene) -> None:
    os.kill(scene.launch, signal.SIGKILL)


def _kill_pdsh(scene: Scene) -> None:
    for process in descendants(scene.launch):
        # Debian's `pdsh` is a script that becomes `pdsh.bin`.
        is_pdsh = process.name().startswith("pdsh")
        if is_pdsh or OVER_AGENTS in process.cmdline():
            send(process, signal.SIGKILL)


# Pulled network cables, where each pod has a network of its own.


def _cut_pod(scene: Scene) -> str:
    pod = scene.random.choice(scene.used)
    _network(scene).cut(scene.address(pod))
    return pod


def _restore_pods(scene: Scene) -> None:
    for pod in scene.cluster.pods:
        _network(scene).restore(pod.address)


def _cut_between(scene: Scene) -> None:
    """Drop the packets between the ranks; the supervisor still reaches all agents."""
    _routes(scene, "add")


def _restore_between(scene: Scene) -> None:
    _routes(scene, "del")


def _routes(scene: Scene, verb: str) -> None:
    """Add or delete, in each pod, a route that drops what goes to another one.

    Args:
        verb: `add` or `del`; a route that is to be deleted may be gone with its pod.
    """
    for address, other in permutations(map(scene.address, scene.used), 2):
        command = ["ip", "route", verb, "blackhole", f"{other}/32"]
        argv = _network(scene).command(address, command)
        subprocess.run(argv, timeout=COMMAND_SECONDS, check=verb == "add")


def _network(scene: Scene) -> Namespaces:
    return Namespaces(scene.cluster.folder, scene.cluster.settings)


# Damaged files of the newest checkpoint.

SAVED_SECONDS = 60.0
"""Most seconds to wait for the first checkpoint of a run."""


def _flip(path: Path, random: Random) -> None:
    """Change one bit of a file, chosen at random."""
    with open(path, "r+b") as file:
        file.seek(random.randrange(path.stat().st_size))
        (byte,) = file.read(1)
        bit = 1 << random.randrange(8)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ bit]))


def _truncate(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def _delete(path: Path, random: Random) -> None:
    path.unlink()


def _damage(damage: Callable[[Path, Random], None], scene: Scene) -> str:
    """Kill all ranks, so that nothing newer is saved, then damage a file of the newest checkpoint.

    Where the run has no checkpoint yet, its first one is waited for.
    """
    until(lambda: bool(_complete_checkpoints(scene.folder)), SAVED_SECONDS)
    for beat in read_beats(scene.folder).values():
        os.kill(beat.pid, signal.SIGKILL)
    newest = _complete_checkpoints(scene.folder)[0]
    saved_files = read_manifest(newest).files
    # An empty file has nothing to flip or to cut off.
    names = sorted(name for name, saved in saved_files.items() if saved.bytes)
    path = newest / scene.random.choice(names)
    damage(path, scene.random)
    return str(path.relative_to(newest.parent))


def _complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that have a manifest, the newest first."""
    saved = folder / "checkpoints"
    places = [saved / name_of(step) for step in saved_steps(saved)]
    return [place for place in places if (place / MANIFEST).is_file()]


# A full disk and a read-only folder: both need a disk of the run's own.

FILLER = "filler"
"""Name of the file that takes up the room on the disk, beside the run folder."""
FREE_BYTES = 10_000_000
"""Limit on the bytes left on a full disk: less than a checkpoint of the tiny model takes."""


def may_mount() -> bool:
    """Whether a disk can be filled and a folder made read-only: both need root and a kernel that
    allows it."""
    if os.geteuid() != 0 or shutil.which("chattr") is None:
        return False
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return done.returncode == 0


def _fill_disk(scene: Scene) -> str:
    left = scene.random.randrange(200_000, FREE_BYTES)
    with open(scene.folder.parent / FILLER, "wb") as file:
        is_full = False
        while not is_full:
            is_full = _takes_all_but(left, file.fileno())
    return f"{left} bytes left"


def _takes_all_but(left: int, file: int) -> bool:
    """Take all room but `left` bytes; False where the run took some of it at the same moment."""
    disk = os.fstatvfs(file)
    room = disk.f_bavail * disk.f_frsize
    try:
        os.posix_fallocate(file, 0, max(1, room - left))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def _empty_disk(scene: Scene) -> None:
    (scene.folder.parent / FILLER).unlink(missing_ok=True)


def _change_folder(scene: Scene, attribute: str) -> None:
    """Change an attribute of `checkpoints/`: permissions do not stop root, but the attribute `+i`
    does."""
    checkpoints = str(scene.folder / "checkpoints")
    subprocess.run(["chattr", attribute, checkpoints], timeout=COMMAND_SECONDS, check=True)


# All faults.


RANK = "rank"
POD = "pod"


@dataclass(frozen=True)
class Named:
    """What a run must say of a fault that has ended an attempt."""

    status: str
    words: str
    """A regular expression for what the reason must contain."""
    what: str | None = None
    """`RANK` or `POD`: whether the rank that was chosen must be named, with its pod, or the pod;
    None: any rank or none."""


@dataclass(frozen=True)
class Fault:
    """One way to break a run."""

    means: str
    """What the fault is, for readers of the page."""
    act: Callable[[Scene], str | None]
    """Function that breaks the run; returns what was lost or damaged, where there is a choice."""
    heal: Callable[[Scene], object] = lambda scene: None
    """Function that does what a person would do before starting the run again."""
    named: Named | None = None
    """What must be said of it; None where nobody is left to say anything."""
    costs_a_pod: bool = False
    ends_a_pod: bool = False
    """Whether all processes of the chosen pod must be gone afterwards."""
    intervals: int = 1
    """Number of intervals between checkpoints whose steps may be lost."""
    needs_networks: bool = False


AT_A_POD: dict[str, Any] = {"costs_a_pod": True, "ends_a_pod": True}
LOST = Named("pod_lost", "has not answered|has ended|no answer", POD)
KILLED = Named("failed", "left no measurement: .*SIGKILL", RANK)
ANY_KILLED = Named("failed", "left no measurement: .*SIGKILL")


def _in_a_rank(*, fault: str, means: str, status: str, words: str) -> Fault:
    """A fault that one rank does by itself."""
    return Fault(
        means=means,
        act=partial(_order_rank, fault=fault),
        named=Named(status, words, RANK),
    )


FAULTS: dict[str, Fault] = {
    "rank killed": Fault(
        means="SIGKILL for one rank",
        act=partial(_signal_rank, number=signal.SIGKILL),
        named=KILLED,
    ),
    "rank asked to end": Fault(
        means="SIGTERM for one rank, by somebody else",
        act=partial(_signal_rank, number=signal.SIGTERM),
        named=Named("failed", "was asked to end, and not by this launch: SIGTERM", RANK),
    ),
    "rank crashed": _in_a_rank(
        fault="segmentation fault",
        means="a segmentation fault in one rank",
        status="failed",
        words="left no measurement: killed by SIGSEGV",
    ),
    "rank left": _in_a_rank(
        fault="os._exit(3)",
        means="`os._exit(3)` in one rank",
        status="failed",
        words="left no measurement: ended with status 3",
    ),
    "rank left as if well": _in_a_rank(
        fault="os._exit(0)",
        means="`os._exit(0)` in one rank",
        status="failed",
        words="left no measurement: ended with status 0 before",
    ),
    "library exited": _in_a_rank(
        fault="exit",
        means="`sys.exit()` in a library of one rank",
        status="failed",
        words="exit\\(\\) was called at",
    ),
    "rank failed": _in_a_rank(
        fault="exception",
        means="an exception in one rank",
        status="failed",
        words="ValueError: row 7 is damaged",
    ),
    "rank out of memory": _in_a_rank(
        fault="torch out of memory",
        means="more memory is asked for in one rank than there is",
        status="oom",
        words="can't allocate memory",
    ),
    "rank's disk full": _in_a_rank(
        fault="disk full",
        means="one rank writes to a disk that is full",
        status="failed",
        words="No space left on device",
    ),
    "rank hung": _in_a_rank(
        fault="hang",
        means="one rank sleeps",
        status="timeout",
        words="is at tests/full/faulty_library",
    ),
    "agent killed": Fault(
        means="SIGKILL for a pod's agent; its warden ends the pod",
        act=partial(_kill_half, of_agent=True),
        named=LOST,
        **AT_A_POD,
    ),
    "warden killed": Fault(
        means="SIGKILL for a pod's warden; its agent ends the pod",
        act=partial(_kill_half, of_agent=False),
        named=LOST,
        **AT_A_POD,
    ),
    "pod killed": Fault(
        means="SIGKILL for all processes of a pod at once",
        act=_kill_pod,
        named=LOST,
        **AT_A_POD,
    ),
    "supervisor killed": Fault(
        means="SIGKILL for `zeropods launch`; the same command is called again",
        act=_kill_supervisor,
    ),
    "pdsh killed": Fault(
        means="SIGKILL for pdsh, which leaves its remote processes running; "
        "by the pods' agents for the command in its place",
        act=_kill_pdsh,
        named=Named("failed", "launcher"),
    ),
    "rank stopped": Fault(
        means="SIGSTOP for one rank",
        act=partial(_signal_rank, number=signal.SIGSTOP),
        named=Named("timeout", "is stopped at", RANK),
    ),
    "pod cut off": Fault(
        means="a pod's network cable is pulled",
        act=_cut_pod,
        heal=_restore_pods,
        named=LOST,
        costs_a_pod=True,
        needs_networks=True,
    ),
    "ranks cut off": Fault(
        means="the ranks do not reach each other; the supervisor reaches all",
        act=_cut_between,
        heal=_restore_between,
        named=Named("timeout|failed", "no progress|lost their connections"),
        needs_networks=True,
    ),
    "file flipped": Fault(
        means="all ranks killed; a bit of the newest checkpoint flipped",
        act=partial(_damage, _flip),
        named=ANY_KILLED,
        intervals=2,
    ),
    "file truncated": Fault(
        means="all ranks killed; a file of it truncated",
        act=partial(_damage, _truncate),
        named=ANY_KILLED,
        intervals=2,
    ),
    "file deleted": Fault(
        means="all ranks killed; a file of it deleted",
        act=partial(_damage, _delete),
        named=ANY_KILLED,
        intervals=2,
    ),
    "disk full": Fault(
        means="less room is left than a checkpoint takes",
        act=_fill_disk,
        heal=_empty_disk,
        named=Named("failed", "No space left on device"),
    ),
    "folder read-only": Fault(
        means="nothing can be made in `checkpoints/`",
        act=partial(_change_folder, attribute="+i"),
        heal=partial(_change_folder, attribute="-i"),
        named=Named("failed", "Operation not permitted|cannot be written"),
    ),
}
SUPERVISOR = "supervisor killed"
DAMAGED = ("file flipped", "file truncated", "file deleted")
ON_A_DISK = ("disk full", "folder read-only")
"""Faults that need a disk of the run's own, which root may mount."""
