"""Checkpoints that are complete, or do not count. Nothing here imports torch.

How `checkpoints/checkpoint-STEP` of a run folder comes to count:

    rank 0: make_room -> all ranks write -> all ranks: hashed(their share) -> rank 0: complete

A writer may be killed at any moment: without its manifest, which is written last, a checkpoint does not count. The
caller of `make_room`, `complete` or `prune` holds the run's lock.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zeropods.errors import UserError
from zeropods.files import write_json
from zeropods.measure.record import STRICT

MANIFEST = "manifest.json"
POINTER = "latest.json"
"""File that names the checkpoint saved last, for a reader whose listing of a shared folder is a minute old. It is a
hint: the checkpoint that it names is verified like any other."""
STATE = "trainer_state.json"
UNIVERSAL = "universal"
"""Folder of checkpoints in the form that any number of ranks can load; they are made when they are needed."""
NAME = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
NUMBERED = re.compile(r"(?:pp_rank_|rng_state_)(\d+)")
"""Names, with the rank, of the files that DeepSpeed and transformers write on each rank; rank 0 writes the others."""
DIVIDED = "_optim_states.pt"
"""End of the names of DeepSpeed's files with a rank's shard of the FP32 weights and of the optimizer's states."""
THREADS = 4
"""Threads that hash files. Hashing releases the GIL; a disk or a server is seldom faster than four cores can hash."""
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of network file systems that cannot sync a folder, whose entries are on their server already."""


class UnsoundError(Exception):
    """A checkpoint does not count; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run and model that a checkpoint belongs to: those that saved it, or those that a run may resume from."""

    __pydantic_config__ = STRICT

    run_id: str
    settings: str
    """`digest` of everything that must be equal for two calls to mean the same run."""
    model: dict[str, int | str | bool | None]
    """Values that must be equal for the files to fit at all: parameters, precision, technique."""
    world_size: int
    """Number of ranks that wrote it."""

    def other_model(self, wanted: Origin) -> str | None:
        """Why a checkpoint of this origin does not fit the wanted model; None where it does."""
        for key in sorted(wanted.model):
            if self.model.get(key) != wanted.model.get(key):
                return f"belongs to another model: {key} {self.model.get(key)}, expected {wanted.model.get(key)}"
        return None

    def other_run(self, wanted: Origin) -> str | None:
        """Why such a checkpoint does not belong to the wanted run; None where settings and model are the same."""
        other = None if self.settings == wanted.settings else f"belongs to run {self.run_id}, which has other settings"
        return self.other_model(wanted) or other


Refuse = Callable[[Origin], str | None]
"""A function that says why a checkpoint of an origin is not wanted; it returns None where it is."""


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint."""

    __pydantic_config__ = STRICT

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """`manifest.json` of a checkpoint: written last, and proof of every file in it."""

    __pydantic_config__ = STRICT

    writer: Literal["zeropods"] = "zeropods"
    """Files of other writers are never opened: some of them are pickles."""
    schema_version: Literal[1] = 1
    step: int
    origin: Origin
    files: dict[str, SavedFile]
    """The files by path, relative to the checkpoint."""
    digest: str = ""
    """Digest of all other fields, so that a manifest proves itself too."""

    def sealed(self) -> CheckpointManifest:
        """The same manifest with the digest that it should have."""
        return replace(self, digest=digest({key: value for key, value in asdict(self).items() if key != "digest"}))

    def shards(self) -> str | None:
        """The folder, relative to the checkpoint, of the shards that ZeRO's ranks saved; None without ZeRO."""
        return next((str(Path(name).parent) for name in self.files if name.endswith(DIVIDED)), None)


def digest(document: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def name_of(step: int) -> str:
    """The folder that a step is saved in: the name that transformers gives it."""
    return f"checkpoint-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of everything that looks like a checkpoint, newest first, including the one that the pointer names."""
    names = {path.name for path in folder.glob("*")}
    with suppress(OSError, ValueError, KeyError, TypeError):
        pointed = str(json.loads((folder / POINTER).read_bytes())["checkpoint"])
        # The listing of a shared folder may be old on this machine, so this name is looked up by itself.
        names |= {pointed} if (folder / pointed).is_dir() else set()
    return sorted((int(found[1]) for found in map(NAME.fullmatch, names) if found), reverse=True)


# Saving


def make_room(folder: Path, step: int) -> Path:
    """Make the empty folder that a step is to be written into, and return it.

    Anything that was there is removed, so that files of a killed save do not mix with the new ones. So are checkpoints
    in universal form, made for other numbers of ranks, which are needed only at the beginning of an attempt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".discarded-*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f".{POINTER}.*"):
        left.unlink(missing_ok=True)
    place = folder / name_of(step)
    discard(folder / UNIVERSAL)
    discard(place)
    place.mkdir()
    return place


def names_in(checkpoint: Path) -> set[str]:
    """Paths of the files below a checkpoint but its manifest, relative, with `/`.

    Names that begin with a dot are left out: network file systems' deleted files, and writers' unfinished ones.
    """
    paths = (path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(checkpoint).as_posix() for path in paths} - {MANIFEST}


def hashed(checkpoint: Path, rank: int = 0, world_size: int = 1, *, sync: bool = True) -> dict[str, SavedFile]:
    """Sizes and digests of a rank's share of the files below a checkpoint; `sync` forces these files to the disk.

    A rank's share is what it wrote, which its machine still has in memory; every file belongs to some rank, even one
    whose name is of no known kind. `OSError` where a file cannot be read.
    """

    def one(name: str) -> SavedFile:
        with os.fdopen(os.open(checkpoint / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if sync:
                os.fsync(file.fileno())
            return SavedFile(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())

    numbers = {name: NUMBERED.search(name) for name in sorted(names_in(checkpoint))}
    names = [name for name, found in numbers.items() if (int(found[1]) if found else 0) % world_size == rank]
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def complete(folder: Path, step: int, origin: Origin, files: dict[str, SavedFile]) -> None:
    """Make a checkpoint count, once all ranks have written and hashed their files.

    Everything else is on the disk before the manifest is written, and the manifest before the pointer.

    Args:
        files: the files of all ranks.

    Raises:
        UserError: the files in the folder are not those that were hashed.
    """
    place = folder / name_of(step)
    strange = sorted(names_in(place) ^ files.keys())
    if strange:
        raise UserError(
            f"{place}: {strange[0]} appeared or disappeared while the step was being saved; "
            "make sure nothing else writes there"
        )
    manifest = CheckpointManifest(step=step, origin=origin, files=dict(sorted(files.items()))).sealed()
    for each in (*(Path(root) for root, _, _ in os.walk(place, topdown=False)), folder, folder.parent):
        sync_folder(each)
    write_json(place / MANIFEST, asdict(manifest))
    sync_folder(place)
    write_json(folder / POINTER, {"checkpoint": place.name, "manifest": manifest.digest})
    sync_folder(folder)


def discard(folder: Path) -> None:
    """Remove a folder, if it exists: rename it, so that its name is free at once, then delete its content.

    The new name is no checkpoint's, and takes no room on a full disk; `make_room` removes what a killed process left.
    """
    if not folder.exists():
        return
    away = folder.with_name(f".discarded-{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, away)
    # If a power cut undid the rename once files were deleted, there would be a broken checkpoint under the old name.
    sync_folder(folder.parent)
    shutil.rmtree(away, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk: without this, a renamed file may be gone after a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def prune(folder: Path, step: int, origin: Origin, keep: int, best: str | None = None) -> list[str]:
    """Delete checkpoints older than that of `step` until `keep` are left; return their names, oldest first.

    The newest ones stay, with the best one in place of the oldest of these; with `keep` 1 both the newest and the best
    stay. A checkpoint without a manifest of this run was made by another run, or by a save that did not finish: it is
    neither counted nor touched.

    Args:
        folder: `checkpoints/` of a run folder.
        step: the step that was saved last.
        keep: number of checkpoints that may stay, at least 1.
        best: name of the best model's checkpoint, where one is known.

    Raises:
        UnsoundError: the checkpoint of `step` does not verify, byte by byte; nothing was deleted.
    """

    def is_ours(saved: int) -> bool:
        with suppress(UnsoundError):
            manifest = read_manifest(folder / name_of(saved))
            return manifest.origin.run_id == origin.run_id and manifest.step == saved
        return False

    older = [name_of(saved) for saved in saved_steps(folder) if saved < step and is_ours(saved)]
    room = keep - 1
    if best in older:
        room -= 1
    newest_first = [name for name in older if name != best]
    surplus = newest_first[max(0, room) :]
    surplus.reverse()
    if surplus:
        verified(folder / name_of(step), lambda found: found.other_run(origin))
    for name in surplus:
        discard(folder / name)
    return surplus


# Verifying


def newest_good(
    folder: Path, refused: Refuse, passed_over: Callable[[Path, str], None] = lambda path, why: None
) -> tuple[Path, CheckpointManifest] | None:
    """The newest whole checkpoint of a run, with its manifest; None where there is none.

    Args:
        folder: `checkpoints/` of a run folder; it may be missing.
        passed_over: called with each newer checkpoint, newest first, and the reason why it does not count.
    """
    for step in saved_steps(folder):
        place = folder / name_of(step)
        try:
            return place, verified(place, refused)
        except UnsoundError as unsound:
            passed_over(place, str(unsound))
    return None


def verified(checkpoint: Path, refused: Refuse) -> CheckpointManifest:
    """The manifest of a checkpoint that holds all of its files, unchanged, and no others; else `UnsoundError`.

    The manifest's names must be those found below the folder, so none of them can lead out of it.
    """
    if not checkpoint.is_dir():
        raise UnsoundError("no such checkpoint")
    manifest = read_manifest(checkpoint)
    fault = refused(manifest.origin)
    if fault is not None:
        raise UnsoundError(fault)
    if NAME.fullmatch(checkpoint.name) and checkpoint.name != name_of(manifest.step):
        raise UnsoundError(f"holds step {manifest.step}, but its folder has another name")
    on_one_side = sorted(manifest.files.keys() ^ names_in(checkpoint))
    if on_one_side:
        name = on_one_side[0]
        what = "missing" if name in manifest.files else "not in the manifest"
        raise UnsoundError(f"{name}: {what}")
    try:
        # Sizes come first: a truncated file is found without reading the others.
        for name, expected in manifest.files.items():
            size = (checkpoint / name).stat().st_size
            if size != expected.bytes:
                raise UnsoundError(f"{name}: {size} bytes, expected {expected.bytes}")
        for name, found in hashed(checkpoint, sync=False).items():
            if found != manifest.files.get(name):
                raise UnsoundError(f"{name}: its bytes have changed since it was saved (SHA-256)")
    except OSError as error:
        place = os.path.relpath(error.filename, checkpoint) if error.filename else checkpoint.name
        raise UnsoundError(f"{place}: cannot be read ({error.strerror})") from None
    return manifest


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint; `UnsoundError` where it is missing, cannot be read or is damaged."""
    from pydantic import TypeAdapter, ValidationError

    try:
        manifest = TypeAdapter(CheckpointManifest).validate_json((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise UnsoundError(f"no {MANIFEST}: the save did not finish, or something else wrote it") from None
    except OSError as error:
        raise UnsoundError(f"{MANIFEST}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise UnsoundError(f"{MANIFEST}: damaged ({error.errors()[0]['msg']})") from None
    if manifest.sealed() != manifest:
        raise UnsoundError(f"{MANIFEST}: damaged (its digest does not match)")
    return manifest
