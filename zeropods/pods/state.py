"""What is kept of a cluster in `.zeropods/NAME/`: what was asked for, who is there, and who may change it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from zeropods import files
from zeropods.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HOME = "ZEROPODS_HOME"
STATE = "state.json"
T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod that is ready."""

    name: str
    worker: str
    address: str
    hostname: str
    slots: int
    host_key: str
    control_port: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for: two calls of `up` that differ in it mean two clusters."""

    count: int
    slots: int | None
    backend: str
    lease: str
    lease_seconds: float
    cpu: float
    memory: float
    nvidia_gpu: int
    hosts: tuple[str, ...] = ()
    """Lines of the user's hostfile, where the hosts are the user's own."""
    ssh_config: str | None = None
    """The ssh configuration by which they are reached; None for the user's usual one."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A cluster on disk. It is complete once it has pods; the file before that says what to clean up."""

    name: str
    settings: Settings
    workers: tuple[str, ...] = ()
    """Ids of the workers that were started."""
    ssh_port: int = 0
    pods: tuple[Pod, ...] = ()


def home() -> Path:
    """The folder of all clusters: `$ZEROPODS_HOME`, else `.zeropods` in the project."""
    return Path(os.environ.get(HOME) or ROOT / ".zeropods").absolute()


def folder_of(name: str) -> Path:
    """The folder of a cluster; `UserError` for a name that is none."""
    if not NAME.fullmatch(name):
        raise UserError(f"cluster name {name!r}: expected 1 to 40 letters, digits, '-' or '_', a letter or digit first")
    return home() / name


def names() -> list[str]:
    """Names of all clusters that have a folder, whether they are complete or not."""
    if not home().is_dir():
        return []
    return sorted(path.name for path in home().iterdir() if (path / STATE).is_file() and NAME.fullmatch(path.name))


def write_state(folder: Path, state: State) -> None:
    """Write a cluster's state; whoever reads it meanwhile sees the old one."""
    files.write_json(folder / STATE, asdict(state))


def read_state(folder: Path) -> State | None:
    """The state of a cluster, None where there is none; `UserError` for a file that is not one of ours."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        pods = tuple(_exactly(Pod, pod) for pod in document.pop("pods"))
        asked = document.pop("settings")
        settings = _exactly(Settings, {**asked, "hosts": tuple(asked["hosts"])})
        workers = tuple(document.pop("workers"))
        return State(**document, settings=settings, workers=workers, pods=pods)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"not a cluster's state ({error})"
        raise UserError(f"{path}: {problem}; end its pods and remove {folder}") from None


def _exactly(kind: type[T], values: dict[str, Any]) -> T:
    if set(values) != {field.name for field in fields(kind)}:  # type: ignore[arg-type]
        raise ValueError(f"{kind.__name__} with {', '.join(values)}")
    return kind(**values)


@contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a cluster's folder, made with mode 700 where there is none; `UserError` where another process holds it.

    The lock is on the folder itself, so that it leaves no file, and ends with the process that holds it.
    """
    deadline = time.monotonic() + seconds
    while (held := _try_lock(folder)) is None:
        if time.monotonic() >= deadline:
            raise UserError(f"cluster {folder.name}: another process starts or ends it; wait for that one")
        time.sleep(0.1)
    try:
        yield
    finally:
        os.close(held)
        # Nothing came to be in it: then it was only made to be locked.
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _try_lock(folder: Path) -> int | None:
    """The locked folder's descriptor; None where another process holds the lock or has just removed the folder."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    held = None
    with suppress(BlockingIOError, FileNotFoundError):
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it before may have removed it: then this is the lock of a folder that is gone.
        if os.path.samestat(os.fstat(held), os.stat(folder)):
            return held
    if held is not None:
        os.close(held)
    return None
