"""Checkpoints that are complete or do not count. No torch.

How `checkpoints/checkpoint-STEP` of a run folder comes to count:

    rank 0: make_room -> all ranks write -> all ranks: hashed(their share) -> rank 0: complete

A writer may be killed at any moment: without its manifest, which is written last, a checkpoint is not there. Whoever
calls `make_room`, `complete`, `prune` or `make_universal` holds the run's lock.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zeropods.errors import UserError
from zeropods.files import write_json
from zeropods.measure.record import STRICT

MANIFEST = "manifest.json"
POINTER = "latest.json"
"""The name of the checkpoint that was saved last. It is a hint: it names a checkpoint to a reader whose listing of a
shared folder is a minute old, and what it names is verified like any other."""
STATE = "trainer_state.json"
NAME = re.compile(r"checkpoint-(\d{1,18})(\.previous)?", re.ASCII)
NUMBERED = re.compile(r"(?:pp_rank_|rng_state_)(\d+)")
"""Names that DeepSpeed and transformers give to what one rank writes; rank 0 writes the others."""
DIVIDED = "_optim_states.pt"
"""How names of files end in which DeepSpeed keeps a rank's share of the FP32 weights and of the optimizer's states."""
UNIVERSAL = "universal"
SOURCE = "source.json"
"""In a universal checkpoint: the manifest of the checkpoint that it was made of."""
UNDIVIDED = (STATE, "scheduler.pt")
"""What each checkpoint holds undivided, and resuming reads."""
THREADS = 4
"""Hashing leaves the interpreter's lock; a disk or a server is seldom faster than four cores hash."""
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Some network file systems force no folder down; a folder's entries are on their server already."""


class UnsoundError(Exception):
    """Why a checkpoint does not count."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a checkpoint belongs to: who saved it, or what a run may go on from."""

    __pydantic_config__ = STRICT

    run_id: str
    settings: str
    """`digest` of everything that must be equal for two calls to mean the same run."""
    model: dict[str, int | str | bool | None]
    """What must be equal for the files to fit at all: shape, precision, technique."""
    world_size: int
    """Number of ranks that wrote it."""

    def other_model(self, wanted: Origin) -> str | None:
        """Why a checkpoint of this origin does not fit the wanted model; None where it does."""
        for key in sorted(self.model.keys() | wanted.model.keys()):
            if self.model.get(key) != wanted.model.get(key):
                return f"of another model: {key} {self.model.get(key)}, expected {wanted.model.get(key)}"
        return None

    def other_run(self, wanted: Origin) -> str | None:
        """Why it does not belong to the wanted run; None where settings and model are the same."""
        other = self.other_model(wanted)
        return other or (
            None if self.settings == wanted.settings else f"of run {self.run_id}, which has other settings"
        )


Refuse = Callable[[Origin], str | None]
"""Why a checkpoint of such an origin is not wanted; None where it is."""


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

    def digest(self) -> str:
        """SHA-256 of all of it; stored beside it, so that a manifest proves itself too."""
        return digest(asdict(self))

    def shards(self) -> str | None:
        """The folder that holds what ZeRO's ranks have divided; None without ZeRO."""
        return next((str(Path(name).parent) for name in self.files if name.endswith(DIVIDED)), None)


def digest(document: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def name_of(step: int) -> str:
    """The folder that a step is saved in: the name that transformers gives it."""
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None where it is no such name."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else None


def newest_first(folder: Path, *more: str) -> list[str]:
    """Names of all that look like checkpoints, and more, by step; what was saved again precedes what it replaces."""
    found = {path.name for path in folder.glob("*")} | set(more)
    names = [name for name in found if step_of(name) is not None]
    return sorted(names, key=lambda name: (-(step_of(name) or 0), len(name), name))


# Saving.


def make_room(folder: Path, step: int) -> Path:
    """The empty folder that a step is to be written in.

    What a killed save has left there is removed, so that its files do not mix with the new ones. A complete checkpoint
    of the same step is renamed, and counts until the new one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".discarded-*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f".{POINTER}.*"):
        left.unlink(missing_ok=True)
    _sweep_universal(folder)
    place, previous = folder / name_of(step), _previous(folder, step)
    if (place / MANIFEST).is_file():
        discard(previous)
        os.rename(place, previous)
    discard(place)
    place.mkdir()
    return place


def names_in(checkpoint: Path) -> set[str]:
    """Paths of the files below a checkpoint, relative, with `/`.

    Names that begin with a dot are left out: network file systems keep deleted files so, and writers unfinished ones.
    """
    paths = (path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(checkpoint).as_posix() for path in paths} - {MANIFEST}


def share(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """The files that a rank hashes: its own, which its machine still has in memory.

    Each file belongs to some rank, also one with a name of no known kind.
    """
    numbers = {name: NUMBERED.search(name) for name in names}
    return sorted(name for name, found in numbers.items() if (int(found[1]) if found else 0) % world_size == rank)


def hashed(checkpoint: Path, names: Iterable[str], *, sync: bool = True) -> dict[str, SavedFile]:
    """Sizes and digests of files, which are forced down to the disk; `OSError` where one cannot be read."""

    def one(name: str) -> SavedFile:
        with os.fdopen(os.open(checkpoint / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if sync:
                os.fsync(file.fileno())
            return SavedFile(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())

    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def complete(folder: Path, step: int, origin: Origin, files: dict[str, SavedFile]) -> None:
    """Make a checkpoint count, once all ranks have written and hashed their files.

    Everything but the manifest is on the disk before it, and it before the pointer.

    Args:
        files: the files of all ranks.

    Raises:
        UserError: there are other files than were hashed.
    """
    place = folder / name_of(step)
    strange = sorted(names_in(place) ^ files.keys())
    if strange:
        raise UserError(f"{place}: {strange[0]} came or went while the step was saved; let nothing else write there")
    manifest = CheckpointManifest(step=step, origin=origin, files=dict(sorted(files.items())))
    sync_folder(folder)
    sync_folder(folder.parent)
    write_manifest(place, manifest)
    write_json(folder / POINTER, {"checkpoint": place.name, "manifest": manifest.digest()})
    sync_folder(folder)
    discard(_previous(folder, step))


def write_manifest(checkpoint: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest when all else is on the disk; from then on the checkpoint counts."""
    for root, _, _ in os.walk(checkpoint, topdown=False):
        sync_folder(Path(root))
    write_json(checkpoint / MANIFEST, {**asdict(manifest), "digest": manifest.digest()})
    sync_folder(checkpoint)


def discard(folder: Path) -> None:
    """Remove a folder, where there is one: its name is free at once, its content goes after that.

    The new name counts for nothing, and takes no room on a full disk; `make_room` removes what a killed process left.
    """
    if not folder.exists():
        return
    away = folder.with_name(f".discarded-{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, away)
    # Were the new name lost in a power cut and files already gone, a broken checkpoint would be there again.
    sync_folder(folder.parent)
    shutil.rmtree(away, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries down: without it a renamed file may be gone after a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def _previous(folder: Path, step: int) -> Path:
    """Where a complete checkpoint of the same step waits until its successor is complete."""
    return folder / f"{name_of(step)}.previous"


# Verifying.


def newest_good(
    folder: Path, refused: Refuse, passed_over: Callable[[Path, str], None] = lambda path, why: None
) -> tuple[Path, CheckpointManifest] | None:
    """The newest checkpoint of a run that is whole; None where there is none.

    The listing of a shared folder may be old on this machine. The name that the pointer gives is looked up by itself.

    Args:
        folder: `checkpoints/` of a run folder; it may be missing.
        passed_over: is told of each newer one, newest first, and why it does not count.
    """
    try:
        pointed = _pointed_at(folder)
    except UnsoundError as unsound:
        passed_over(folder / POINTER, str(unsound))
        pointed = None
    for name in newest_first(folder, *([pointed] if pointed else [])):
        try:
            return folder / name, verified_step(folder / name, refused)
        except UnsoundError as unsound:
            passed_over(folder / name, str(unsound))
    return None


def verified_step(checkpoint: Path, refused: Refuse) -> CheckpointManifest:
    """The manifest of a checkpoint that is whole, and of the step that its name says; else `UnsoundError`."""
    if not checkpoint.is_dir():
        raise UnsoundError("no such checkpoint")
    manifest = verified(checkpoint, refused)
    if manifest.step != step_of(checkpoint.name):
        raise UnsoundError(f"is of step {manifest.step}, under another name")
    return manifest


def verified(checkpoint: Path, refused: Refuse) -> CheckpointManifest:
    """The manifest of a checkpoint of which every file is there, unchanged, and nothing else is; else `UnsoundError`.

    The manifest's names are those that are found below the folder, so none of them can lead out of it.
    """
    manifest = read_manifest(checkpoint)
    unwanted = refused(manifest.origin)
    if unwanted is not None:
        raise UnsoundError(unwanted)
    for name in sorted(manifest.files.keys() ^ names_in(checkpoint)):
        raise UnsoundError(f"{name}: {'missing' if name in manifest.files else 'not in the manifest'}")
    try:
        # Sizes first, which cost nothing.
        for name, expected in manifest.files.items():
            size = os.lstat(checkpoint / name).st_size
            if size != expected.bytes:
                raise UnsoundError(f"{name}: {size} bytes, expected {expected.bytes}")
        for name, found in hashed(checkpoint, manifest.files, sync=False).items():
            if found != manifest.files[name]:
                raise UnsoundError(f"{name}: its bytes have changed since it was saved (SHA-256)")
    except OSError as error:
        place = os.path.relpath(error.filename, checkpoint) if error.filename else checkpoint.name
        raise UnsoundError(f"{place}: cannot be read ({error.strerror})") from None
    return manifest


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint; `UnsoundError` where there is none, or one that cannot be believed."""
    from pydantic import TypeAdapter

    try:
        document = json.loads((checkpoint / MANIFEST).read_bytes())
        if document.get("writer") != "zeropods" or document.get("schema_version") != 1:
            shown = f"writer {document.get('writer')!r:.40}, schema_version {document.get('schema_version')!r:.40}"
            raise UnsoundError(f"{MANIFEST}: {shown}; expected 'zeropods', 1")
        stored = document.pop("digest", None)
        # JSON, since a strict dataclass takes no dictionary from Python. Its errors are `ValueError`s.
        manifest = TypeAdapter(CheckpointManifest).validate_json(json.dumps(document))
    except FileNotFoundError:
        raise UnsoundError(f"no {MANIFEST}: its save did not end, or something else wrote it") from None
    except OSError as error:
        raise UnsoundError(f"{MANIFEST}: cannot be read ({error.strerror})") from None
    except AttributeError:
        raise UnsoundError(f"{MANIFEST}: damaged (no JSON object)") from None
    except (ValueError, RecursionError) as error:
        raise UnsoundError(f"{MANIFEST}: damaged ({str(error).splitlines()[0]})") from None
    if manifest.digest() != stored:
        raise UnsoundError(f"{MANIFEST}: damaged (its digest is another)")
    return manifest


def _pointed_at(folder: Path) -> str | None:
    """The checkpoint that the pointer names; None where there is no pointer yet."""
    try:
        name = str(json.loads((folder / POINTER).read_bytes())["checkpoint"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsoundError(f"cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnsoundError("damaged") from None
    if step_of(name) is None:
        raise UnsoundError(f"names {name!r:.60}, which is no checkpoint's name")
    return name


# Pruning: older checkpoints go once a newer one has been read back whole.


def prune(folder: Path, step: int, origin: Origin, keep: int, best: str | None = None) -> list[str]:
    """Delete what lies before the checkpoint of `step` and goes beyond `keep`; returns the names, oldest first.

    The newest ones stay, and the best one instead of the oldest of these; with `keep` 1 both the newest and the best
    stay. What has no manifest of this run was made by another, or by a save that did not end, and is neither counted
    nor touched. Whoever is killed here leaves each checkpoint whole under its name, or under one that counts for
    nothing.

    Args:
        folder: `checkpoints/` of a run folder.
        step: the step that was saved last.
        keep: how many may stay, at least 1.
        best: name of the best model's checkpoint, where one is known.

    Raises:
        UnsoundError: the checkpoint of `step` does not verify, byte by byte; nothing was deleted.
    """
    older = [name for name in newest_first(folder) if (step_of(name) or 0) < step and _is_of(folder / name, origin)]
    try:
        spared = {best, _pointed_at(folder)} & set(older)
    except UnsoundError:
        spared = {best} & set(older)
    room = max(0, keep - 1 - len(spared))
    surplus = [name for name in older if name not in spared][room:][::-1]
    if surplus:
        verified(folder / name_of(step), lambda found: found.other_run(origin))
    for name in surplus:
        discard(folder / name)
    _sweep_universal(folder)
    return surplus


def _is_of(checkpoint: Path, origin: Origin) -> bool:
    try:
        manifest = read_manifest(checkpoint)
    except UnsoundError:
        return False
    return manifest.origin.run_id == origin.run_id and manifest.step == step_of(checkpoint.name)


# The universal form, for any number of ranks: `checkpoints/universal/STEP`, made of `checkpoint-STEP`.


def check_universal(place: Path, checkpoint: Path) -> None:
    """`UnsoundError` where a universal checkpoint is not whole, or was made of another save."""
    verified(place, lambda _: None)
    if (place / SOURCE).read_bytes() != (checkpoint / MANIFEST).read_bytes():
        raise UnsoundError(f"{SOURCE}: of another save of the step")


def make_universal(
    place: Path, checkpoint: Path, manifest: CheckpointManifest, convert: Callable[[Path, Path], None]
) -> None:
    """Make the universal form of a checkpoint that verifies.

    It is built under a name that counts for nothing, and renamed when its own manifest is written: one that is there
    is whole.

    Args:
        place: where it goes, in `checkpoints/universal/`; what is there is replaced.
        manifest: the checkpoint's.
        convert: is given the folder of shards and the folder to make.

    Raises:
        UnsoundError: nothing in it was divided by ZeRO.
    """
    shards = manifest.shards()
    if shards is None:
        raise UnsoundError("holds no shards of ZeRO")
    building = place.with_name(f".building-{place.name}-{secrets.token_hex(4)}")
    building.mkdir(parents=True)
    try:
        for name in UNDIVIDED:
            if name in manifest.files:
                shutil.copyfile(checkpoint / name, building / name)
        shutil.copyfile(checkpoint / MANIFEST, building / SOURCE)
        convert(checkpoint / shards, building / f"{shards}_{UNIVERSAL}")
        files = hashed(building, sorted(names_in(building)))
        write_manifest(building, CheckpointManifest(step=manifest.step, origin=manifest.origin, files=files))
        discard(place)
        os.rename(building, place)
        sync_folder(place.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _sweep_universal(folder: Path) -> None:
    """Remove universal checkpoints whose checkpoint is gone, and what killed processes left beside them."""
    for path in (folder / UNIVERSAL).glob("*"):
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.isdecimal() and not (folder / name_of(int(path.name))).is_dir():
            discard(path)
