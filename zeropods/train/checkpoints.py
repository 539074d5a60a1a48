"""Checkpoints that are complete, or do not count. Nothing here imports torch.

How `checkpoints/checkpoint-STEP` of a run folder comes to count:

    rank 0: make_room -> all ranks write -> all ranks: hashed(their share) -> rank 0: mark_complete

A writer may be killed at any moment: without its manifest, which is written last, a checkpoint does
not count. The caller of `make_room`, `mark_complete` or `prune` holds the run's lock.
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
"""File that names the checkpoint saved last, for a reader whose listing of a shared folder is a
minute old. It is a hint: the checkpoint that it names is verified like any other."""
STATE = "trainer_state.json"
UNIVERSAL = "universal"
"""Folder, within `checkpoints/`, of checkpoints in the form that any number of ranks can load. They
are made when they are needed."""
NAME = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
NUMBERED = re.compile(r"(?:pp_rank_|rng_state_)(\d+)")
"""Names, with the rank, of the files that DeepSpeed and transformers write on each rank. Rank 0
writes the others."""
DIVIDED = "_optim_states.pt"
"""End of the names of DeepSpeed's files with a rank's shard: of the FP32 weights, and of the
optimizer's states."""
THREADS = 4
"""Threads that hash files. Hashing releases the GIL; a disk or a server is seldom faster than four
cores can hash."""
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of network file systems that cannot sync a folder; entries are on their server already."""


class UnsoundError(Exception):
    """A checkpoint does not count; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run and model that a checkpoint belongs to.

    A checkpoint's manifest holds that of the run that saved it. A run that may resume compares it
    with the origin that its own checkpoints have, the wanted one.
    """

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
            value = self.model.get(key)
            expected = wanted.model.get(key)
            if value != expected:
                return f"belongs to another model: {key} {value}, expected {expected}"
        return None

    def other_run(self, wanted: Origin) -> str | None:
        """Why a checkpoint of this origin does not belong to the wanted run. Runs with the same
        settings are the same run, whatever their ids.

        Returns:
            None where both the model and the settings are the same.
        """
        fault = self.other_model(wanted)
        if fault is not None:
            return fault
        if self.settings != wanted.settings:
            return f"belongs to run {self.run_id}, which has other settings"
        return None


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
        fields = asdict(self)
        del fields["digest"]
        return replace(self, digest=digest(fields))

    def shards(self) -> str | None:
        """The folder of the shards that ZeRO's ranks saved, relative to the checkpoint.

        Returns:
            None for a checkpoint without ZeRO.
        """
        for name in self.files:
            if name.endswith(DIVIDED):
                return str(Path(name).parent)
        return None


def digest(document: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    text = json.dumps(
        document,
        sort_keys=True,
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def name_of(step: int) -> str:
    """The folder that a step is saved in: the name that transformers gives it."""
    return f"checkpoint-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of all folders with a checkpoint's name, complete or not, newest first.

    Args:
        folder: `checkpoints/` of a run folder; it may be missing.
    """
    names = {path.name for path in folder.glob("*")}
    # The pointer is only a hint: where it is missing or damaged, the listing has to do.
    with suppress(OSError, ValueError, KeyError, TypeError):
        newest = str(json.loads((folder / POINTER).read_bytes())["checkpoint"])
        # The listing of a shared folder may be old on this machine, so this name is looked up by
        # itself.
        if (folder / newest).is_dir():
            names.add(newest)
    steps = []
    for name in names:
        match = NAME.fullmatch(name)
        if match:
            steps.append(int(match[1]))
    return sorted(steps, reverse=True)


# Saving


def make_room(folder: Path, step: int) -> Path:
    """Make the empty folder that a step is to be written into, and return it.

    Anything that was there is removed, so that files of a killed save do not mix with the new ones.
    So are checkpoints in universal form, which are needed only until an attempt has loaded one, and
    what killed processes have left in `folder`.

    Args:
        folder: `checkpoints/` of a run folder; it is made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for discarded in folder.glob(".discarded-*"):
        shutil.rmtree(discarded, ignore_errors=True)
    for unfinished in folder.glob(f".{POINTER}.*"):
        unfinished.unlink(missing_ok=True)
    place = folder / name_of(step)
    discard(folder / UNIVERSAL)
    discard(place)
    place.mkdir()
    return place


def names_in(checkpoint: Path) -> set[str]:
    """Paths of the files below a checkpoint, except its manifest, relative to it and with `/`.

    Names that begin with a dot are left out: network file systems' deleted files, and writers'
    unfinished ones.
    """
    names = set()
    for path in checkpoint.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            names.add(path.relative_to(checkpoint).as_posix())
    return names - {MANIFEST}


def hashed(
    checkpoint: Path, rank: int = 0, world_size: int = 1, *, sync: bool = True
) -> dict[str, SavedFile]:
    """Sizes and digests of a rank's share of the files below a checkpoint.

    A rank's share is what it wrote, which its machine still has in memory; every file belongs to
    some rank, even one whose name is of no known kind.

    Args:
        sync: whether these files are forced to the disk.

    Returns:
        The files by path, relative to the checkpoint, in the order of these paths.

    Raises:
        OSError: a file cannot be read.
    """

    def hash_file(name: str) -> SavedFile:
        handle = os.open(checkpoint / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            if sync:
                os.fsync(handle)
            size = os.fstat(handle).st_size
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return SavedFile(size, sha256)

    share = []
    for name in sorted(names_in(checkpoint)):
        # By the remainder a file is hashed even if its name has a rank that this run lacks.
        if _writer_of(name) % world_size == rank:
            share.append(name)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(share, pool.map(hash_file, share), strict=True))


def _writer_of(name: str) -> int:
    """The rank that wrote a file, as its name says; 0 for a name without a rank."""
    match = NUMBERED.search(name)
    if match is None:
        return 0
    return int(match[1])


def mark_complete(folder: Path, step: int, origin: Origin, files: dict[str, SavedFile]) -> None:
    """Make a checkpoint count, once all ranks have written and hashed their files.

    Everything else is on the disk before the manifest is written, and the manifest before the
    pointer.

    Args:
        files: the files of all ranks.

    Raises:
        UserError: the files in the folder are not those that were hashed.
    """
    place = folder / name_of(step)
    changed_names = sorted(names_in(place) ^ files.keys())
    if changed_names:
        raise UserError(
            f"{place}: {changed_names[0]} appeared or disappeared while the step was being saved; "
            "make sure nothing else writes there"
        )
    in_order = dict(sorted(files.items()))
    manifest = CheckpointManifest(step=step, origin=origin, files=in_order).sealed()
    written_folders = [Path(root) for root, _, _ in os.walk(place, topdown=False)]
    # The last two may be new as well, and hold the entries of the ones below them.
    for written in [*written_folders, folder, folder.parent]:
        sync_folder(written)
    write_json(place / MANIFEST, asdict(manifest))
    sync_folder(place)
    write_json(folder / POINTER, {"checkpoint": place.name, "manifest": manifest.digest})
    sync_folder(folder)


def discard(folder: Path) -> None:
    """Remove a folder, if it exists.

    It is renamed, so that its name is free at once, and then its content is deleted. The new name
    is no checkpoint's, and needs no room on a full disk. What cannot be deleted stays under the new
    name; `make_room` tries again.

    Raises:
        OSError: the folder cannot be renamed.
    """
    if not folder.exists():
        return
    away = folder.with_name(f".discarded-{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, away)
    # If a power cut undid the rename once files were deleted, there would be a broken checkpoint
    # under the old name.
    sync_folder(folder.parent)
    shutil.rmtree(away, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, where its file system can.

    Without this, a renamed file may be gone after a power cut.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def prune(folder: Path, step: int, origin: Origin, keep: int, best: str | None = None) -> list[str]:
    """Delete checkpoints older than that of `step` until `keep` are left.

    The newest ones stay, with the best one in place of the oldest of these; with `keep` 1 both the
    newest and the best stay. A checkpoint without a manifest of this run was made by another run,
    or by a save that did not finish: it is neither counted nor touched.

    Args:
        folder: `checkpoints/` of a run folder.
        step: the step that was saved last.
        origin: the origin of this run's checkpoints.
        keep: number of checkpoints that may stay, that of `step` included; at least 1.
        best: name of the best model's checkpoint, where one is known.

    Returns:
        The names of those that were deleted, oldest first.

    Raises:
        UnsoundError: the checkpoint of `step` does not verify, byte by byte; nothing was deleted.
    """
    older = []
    for saved in saved_steps(folder):
        if saved < step and _is_of_run(folder, saved, origin.run_id):
            older.append(name_of(saved))
    # The checkpoint of `step` takes one of the places, and the best one another.
    kept_older = keep - 1
    if best in older:
        kept_older -= 1
    newest_first = [name for name in older if name != best]
    # With `keep` 1 and an older best checkpoint, the number is -1.
    surplus = newest_first[max(0, kept_older) :]
    surplus.reverse()
    if surplus:
        verified(folder / name_of(step), lambda saved_by: saved_by.other_run(origin))
    for name in surplus:
        discard(folder / name)
    return surplus


def _is_of_run(folder: Path, step: int, run_id: str) -> bool:
    """Whether a step's checkpoint has a sound manifest of this run; its files are not looked at."""
    try:
        manifest = read_manifest(folder / name_of(step))
    except UnsoundError:
        return False
    return manifest.origin.run_id == run_id and manifest.step == step


# Verifying


def newest_good(
    folder: Path,
    refused: Refuse,
    passed_over: Callable[[Path, str], None] = lambda path, why: None,
) -> tuple[Path, CheckpointManifest] | None:
    """The newest whole checkpoint of a run, with its manifest; None where there is none.

    Args:
        folder: `checkpoints/` of a run folder; it may be missing.
        refused: says why a checkpoint does not belong to the run.
        passed_over: called with each newer checkpoint, newest first, and the reason why it does not
            count.
    """
    for step in saved_steps(folder):
        place = folder / name_of(step)
        try:
            return place, verified(place, refused)
        except UnsoundError as unsound:
            passed_over(place, str(unsound))
    return None


def verified(checkpoint: Path, refused: Refuse) -> CheckpointManifest:
    """The manifest of a checkpoint that holds all of its files, unchanged, and no others.

    The manifest's names must be those found below the folder, so none of them can lead out of it.

    Args:
        refused: says why a checkpoint of its origin is not wanted.

    Raises:
        UnsoundError: the checkpoint does not count; the message says why.
    """
    if not checkpoint.is_dir():
        raise UnsoundError("no such checkpoint")
    manifest = read_manifest(checkpoint)
    fault = refused(manifest.origin)
    if fault is not None:
        raise UnsoundError(fault)
    if NAME.fullmatch(checkpoint.name) and checkpoint.name != name_of(manifest.step):
        raise UnsoundError(f"holds step {manifest.step}, but its folder has another name")
    differing_names = sorted(manifest.files.keys() ^ names_in(checkpoint))
    if differing_names:
        name = differing_names[0]
        fault = "missing" if name in manifest.files else "not in the manifest"
        raise UnsoundError(f"{name}: {fault}")
    try:
        _check_content(checkpoint, manifest)
    except OSError as error:
        place = checkpoint.name
        if error.filename:
            place = os.path.relpath(error.filename, checkpoint)
        raise UnsoundError(f"{place}: cannot be read ({error.strerror})") from None
    return manifest


def _check_content(checkpoint: Path, manifest: CheckpointManifest) -> None:
    """Refuse files that do not have the sizes and the digests of the manifest.

    Raises:
        UnsoundError: a file has changed.
        OSError: a file cannot be read.
    """
    # Sizes come first: a truncated file is seen without reading the others.
    for name, expected in manifest.files.items():
        size = (checkpoint / name).stat().st_size
        if size != expected.bytes:
            raise UnsoundError(f"{name}: {size} bytes, expected {expected.bytes}")
    for name, file in hashed(checkpoint, sync=False).items():
        if file != manifest.files.get(name):
            raise UnsoundError(f"{name}: its bytes have changed since it was saved (SHA-256)")


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint.

    Raises:
        UnsoundError: it is missing, cannot be read or is damaged.
    """
    from pydantic import TypeAdapter, ValidationError

    path = checkpoint / MANIFEST
    try:
        manifest = TypeAdapter(CheckpointManifest).validate_json(path.read_bytes())
    except FileNotFoundError:
        fault = f"no {MANIFEST}: the save did not finish, or something else wrote it"
        raise UnsoundError(fault) from None
    except OSError as error:
        raise UnsoundError(f"{MANIFEST}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise UnsoundError(f"{MANIFEST}: damaged ({error.errors()[0]['msg']})") from None
    if manifest.sealed() != manifest:
        raise UnsoundError(f"{MANIFEST}: damaged (its digest does not match)")
    return manifest
