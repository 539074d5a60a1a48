"""Files of the newest checkpoint that are not what they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.reliability.scene import Scene
from benchmarks.reliability.seen import until
from zeropods.measure.heartbeat import read_beats
from zeropods.train.checkpoints import MANIFEST, newest_first, read_manifest

SAVED_SECONDS = 60.0
"""For the first checkpoint of a run."""


def flip(path: Path, random: Random) -> None:
    with open(path, "r+b") as file:
        file.seek(random.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))


def truncate(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def delete(path: Path, random: Random) -> None:
    path.unlink()


def after_kill(damage: Callable[[Path, Random], None]) -> Callable[[Scene], str]:
    """Both ranks are killed, so that nothing newer is saved; then a file of the newest checkpoint is damaged.

    The first save of a run may still be under way: it is waited for.
    """

    def act(scene: Scene) -> str:
        until(lambda: bool(complete(scene.folder)), SAVED_SECONDS)
        for beat in read_beats(scene.folder).values():
            os.kill(beat.pid, signal.SIGKILL)
        newest = complete(scene.folder)[0]
        files = read_manifest(newest).files
        path = newest / scene.random.choice(sorted(name for name, saved in files.items() if saved.bytes))
        damage(path, scene.random)
        return str(path.relative_to(newest.parent))

    return act


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a run that have a manifest, the newest first."""
    saved = folder / "checkpoints"
    return [saved / name for name in newest_first(saved) if (saved / name / MANIFEST).is_file()]
