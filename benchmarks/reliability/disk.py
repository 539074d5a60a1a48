"""A disk that is full, and a folder that may not be written: both need a disk of the run's own."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

from benchmarks.reliability.scene import Scene

FILLER = "filler"
"""In the folder of the disk, beside the run: it takes the room."""
FREE_BYTES = 10_000_000
"""At most so much is left on a full disk: less than a checkpoint of the tiny model takes."""
COMMAND_SECONDS = 10.0


def may_mount() -> bool:
    """Whether a disk can be made full, and a folder read-only: both need root and a kernel that lets it."""
    if os.geteuid() != 0 or shutil.which("chattr") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def fill_disk(scene: Scene) -> str:
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


def empty_disk(scene: Scene) -> None:
    (scene.folder.parent / FILLER).unlink(missing_ok=True)


def lock_folder(scene: Scene) -> None:
    """Root passes by permissions, and nobody by this attribute."""
    _chattr("+i", scene)


def unlock_folder(scene: Scene) -> None:
    _chattr("-i", scene)


def _chattr(change: str, scene: Scene) -> None:
    subprocess.run(["chattr", change, str(scene.folder / "checkpoints")], timeout=COMMAND_SECONDS, check=True)
