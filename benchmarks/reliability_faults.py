"""What is broken in a run over local pods: processes, the network, checkpoints, the disk. All for real."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from zeropods.checkpoints.manifest import read_manifest
from zeropods.checkpoints.names import names_of, newest_first
from zeropods.checkpoints.shards import MANIFEST
from zeropods.launch.fault import kill_pod, worker_of
from zeropods.measure.beat import read_beats
from zeropods.pods.agent.descendants import Tree
from zeropods.pods.backends.namespaces import Namespaces
from zeropods.pods.cluster import Cluster
from zeropods.pods.processes import send

FILLER = "filler"
"""In the folder of the disk, beside the run: it takes the room."""
FREE_BYTES = 10_000_000
"""At most so much is left on a full disk: less than a checkpoint of the tiny model takes."""
COMMAND_SECONDS = 10.0


@dataclass(frozen=True)
class Scene:
    """A run that trains."""

    cluster: Cluster
    used: tuple[str, ...]
    """Names of the pods on which it runs, in the order of ranks."""
    folder: Path
    """The run folder, on a disk of its own."""
    launch: int
    """The process of `zeropods launch`."""
    random: Random

    def address(self, pod: str) -> str:
        """Of a pod, by its name."""
        return next(each.address for each in self.cluster.pods if each.name == pod)


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


def _kill_rank(scene: Scene) -> str:
    rank, beat = scene.random.choice(sorted(read_beats(scene.folder).items()))
    os.kill(beat.pid, signal.SIGKILL)
    return f"rank {rank}"


def _stop_rank(scene: Scene) -> str:
    rank, beat = scene.random.choice(sorted(read_beats(scene.folder).items()))
    os.kill(beat.pid, signal.SIGSTOP)
    return f"rank {rank}"


def _kill_agent(scene: Scene) -> str:
    pod = scene.random.choice(scene.used)
    warden = worker_of(scene.cluster, pod)
    assert warden is not None
    os.kill(Tree.read().children(warden.pid)[0].pid, signal.SIGKILL)
    return pod


def _kill_warden(scene: Scene) -> str:
    pod = scene.random.choice(scene.used)
    warden = worker_of(scene.cluster, pod)
    assert warden is not None
    os.kill(warden.pid, signal.SIGKILL)
    return pod


def _kill_pod(scene: Scene) -> str:
    pod = scene.random.choice(scene.used)
    kill_pod(scene.cluster, pod)
    return pod


def _kill_supervisor(scene: Scene) -> None:
    os.kill(scene.launch, signal.SIGKILL)


def _kill_pdsh(scene: Scene) -> None:
    for process in Tree.read().below(scene.launch):
        # Debian's `pdsh` is a script that becomes `pdsh.bin`.
        if process.name.startswith("pdsh"):
            send(process, signal.SIGKILL)


def _cut_pod(scene: Scene) -> str:
    pod = scene.random.choice(scene.used)
    Namespaces(scene.cluster.folder).cut(scene.address(pod))
    return pod


def _restore_pods(scene: Scene) -> None:
    for pod in scene.cluster.pods:
        Namespaces(scene.cluster.folder).restore(pod.address)


def _cut_between(scene: Scene) -> None:
    """Each rank's packets to the other come to nothing; the supervisor still reaches both agents."""
    _routes(scene, "add")


def _restore_between(scene: Scene) -> None:
    _routes(scene, "del")


def _routes(scene: Scene, verb: str) -> None:
    here, there = (scene.address(pod) for pod in scene.used)
    for address, other in ((here, there), (there, here)):
        command = ["ip", "route", verb, "blackhole", f"{other}/32"]
        subprocess.run(
            Namespaces(scene.cluster.folder).command(address, command), timeout=COMMAND_SECONDS, check=verb == "add"
        )


def _flip(path: Path, random: Random) -> None:
    with open(path, "r+b") as file:
        file.seek(random.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))


def _truncate(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def _delete(path: Path, random: Random) -> None:
    path.unlink()


def _after_kill(damage: Callable[[Path, Random], None]) -> Callable[[Scene], str]:
    """Both ranks are killed, so that nothing newer is saved; then a file of the newest checkpoint is damaged."""

    def act(scene: Scene) -> str:
        for beat in read_beats(scene.folder).values():
            os.kill(beat.pid, signal.SIGKILL)
        newest = newest_complete(scene.folder)
        files = read_manifest(newest).files
        path = newest / scene.random.choice(sorted(name for name, shard in files.items() if shard.bytes))
        damage(path, scene.random)
        return str(path.relative_to(newest.parent))

    return act


def newest_complete(folder: Path) -> Path:
    """The newest checkpoint of a run that has a manifest."""
    saved = folder / "checkpoints"
    return next(saved / name for name in newest_first(names_of(saved)) if (saved / name / MANIFEST).is_file())


def _fill_disk(scene: Scene) -> str:
    left = scene.random.randrange(200_000, FREE_BYTES)
    with open(scene.folder.parent / FILLER, "wb") as file:
        while not _takes_all_but(left, file.fileno()):
            pass
    return f"{left} bytes left"


def _takes_all_but(left: int, file: int) -> bool:
    """Whether the room could be taken; not where the run took some of it at the same moment."""
    room = os.fstatvfs(file)
    try:
        os.posix_fallocate(file, 0, max(1, room.f_bavail * room.f_frsize - left))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def _empty_disk(scene: Scene) -> None:
    (scene.folder.parent / FILLER).unlink(missing_ok=True)


def _lock_folder(scene: Scene) -> None:
    """Root passes by permissions, and nobody by this attribute."""
    _chattr("+i", scene)


def _unlock_folder(scene: Scene) -> None:
    _chattr("-i", scene)


def _chattr(change: str, scene: Scene) -> None:
    subprocess.run(["chattr", change, str(scene.folder / "checkpoints")], timeout=COMMAND_SECONDS, check=True)


AT_A_POD: dict[str, Any] = {"costs_a_pod": True, "ends_a_pod": True}
DAMAGE: dict[str, Any] = {"intervals": 2}
FAULTS: dict[str, Fault] = {
    "rank killed": Fault("SIGKILL for one of the two ranks", _kill_rank),
    "agent killed": Fault("SIGKILL for a pod's agent; its warden ends the pod", _kill_agent, **AT_A_POD),
    "warden killed": Fault("SIGKILL for a pod's warden; its agent ends the pod", _kill_warden, **AT_A_POD),
    "pod killed": Fault("SIGKILL for all processes of a pod at once", _kill_pod, **AT_A_POD),
    "supervisor killed": Fault("SIGKILL for `zeropods launch`; the same command is called again", _kill_supervisor),
    "pdsh killed": Fault("SIGKILL for pdsh, which leaves its remote processes running", _kill_pdsh),
    "rank stopped": Fault("SIGSTOP for one of the two ranks", _stop_rank),
    "pod cut off": Fault(
        "a pod's network cable is pulled", _cut_pod, _restore_pods, costs_a_pod=True, needs_networks=True
    ),
    "ranks cut off": Fault(
        "the ranks do not reach each other; the supervisor reaches both", _cut_between, _restore_between,
        needs_networks=True,
    ),
    "file flipped": Fault("both ranks killed; a bit of the newest checkpoint flipped", _after_kill(_flip), **DAMAGE),
    "file truncated": Fault("both ranks killed; a file of it truncated", _after_kill(_truncate), **DAMAGE),
    "file deleted": Fault("both ranks killed; a file of it deleted", _after_kill(_delete), **DAMAGE),
    "disk full": Fault("less room is left than a checkpoint takes", _fill_disk, _empty_disk),
    "folder read-only": Fault("nothing can be made in `checkpoints/`", _lock_folder, _unlock_folder),
}  # fmt: skip
SUPERVISOR = "supervisor killed"
DAMAGED = ("file flipped", "file truncated", "file deleted")
ON_A_DISK = ("disk full", "folder read-only")
"""They need a disk of the run's own, which root may mount."""
