"""Checkpoints that are complete or do not count: files, manifest, pointer, the newest one that verifies, pruning."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeropods import files
from zeropods import files as atomic
from zeropods.errors import UserError
from zeropods.measure.record import STRICT

if TYPE_CHECKING:
    from pydantic import TypeAdapter


# What reaches the disk: files and folders are forced down; what is thrown away goes at once.

DISCARDED = ".discarded-"
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Some network file systems force no folder down; a folder's entries are on their server already."""


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


def sync_tree(folder: Path) -> None:
    """Force down the entries of a folder and of all below it, the innermost first."""
    for root, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(root))


def discard(folder: Path) -> None:
    """Take a folder away: its name is free at once, its content goes after that."""
    shutil.rmtree(put_away(folder), ignore_errors=True)


def put_away(folder: Path) -> Path:
    """Give a folder a name that counts for nothing, and return that; `sweep_up` removes it where nobody else does."""
    # A new name takes no room, so this works on a full disk.
    away = folder.with_name(f"{DISCARDED}{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, away)
    return away


def sweep_up(folder: Path) -> None:
    """Remove what killed writers have left: folders half discarded, files under temporary names."""
    for left in folder.glob(f"{DISCARDED}*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(".latest.json.*"):
        left.unlink(missing_ok=True)


# What a checkpoint belongs to: a run, its settings, its model.


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Of a manifest: who saved it. Of a run: what it may go on from."""

    __pydantic_config__ = STRICT

    run_id: str
    settings: str
    """`digest` of everything that must be equal for two calls to mean the same run."""
    model: dict[str, int | str | bool | None]
    """What must be equal for the files to fit at all: shape, precision, technique."""
    world_size: int
    """Ranks that wrote it."""

    def other_model(self, wanted: Origin) -> str | None:
        """Why a checkpoint of this origin does not fit the wanted model; None where it does."""
        keys = sorted(self.model.keys() | wanted.model.keys())
        for key in keys:
            if self.model.get(key) != wanted.model.get(key):
                return f"of another model: {key} {self.model.get(key)}, expected {wanted.model.get(key)}"
        return None

    def other_run(self, wanted: Origin) -> str | None:
        """Why it is none of the wanted run; None where settings and model are the same."""
        if self.settings != wanted.settings:
            return self.other_model(wanted) or f"of run {self.run_id}, which has other settings"
        return self.other_model(wanted)


def digest(document: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


# The files of a checkpoint: which there are, who answers for which, their sizes and digests.

MANIFEST = "manifest.json"
THREADS = 4
"""Hashing leaves the interpreter's lock; a disk or a server is seldom faster than four cores hash."""
NUMBERED = re.compile(r"(?:pp_rank_|rng_state_)(\d+)")
"""Names that DeepSpeed and transformers give to what one rank writes; rank 0 writes the others."""

DIVIDED = "_optim_states.pt"
"""How names of files end in which DeepSpeed keeps a rank's share of the FP32 weights and of the optimizer's states."""


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint."""

    __pydantic_config__ = STRICT

    bytes: int
    sha256: str


def names_in(checkpoint: Path) -> set[str]:
    """Paths of the files below a checkpoint, relative, with `/`; links to folders count as files.

    Names that begin with a dot are left out: network file systems keep deleted files so, and writers unfinished ones.
    """
    found = set()
    for root, folders, inner in os.walk(checkpoint, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        inside = Path(root).relative_to(checkpoint)
        found |= {(inside / name).as_posix() for name in [*inner, *links] if not name.startswith(".")}
    return found - {MANIFEST}


def share(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """The files that a rank hashes: its own, which its machine still has in memory.

    Each file is some rank's, also one with a name of no known kind.
    """
    return sorted(name for name in names if _writer(name) % world_size == rank)


def zero_folders(names: Iterable[str]) -> set[str]:
    """The folders in a checkpoint that hold what ZeRO's ranks have divided; none without ZeRO."""
    return {str(Path(name).parent) for name in names if name.endswith(DIVIDED)}


def measured(checkpoint: Path, names: Iterable[str]) -> dict[str, Shard]:
    """Force files down to the disk and take their sizes and digests; `OSError` where one cannot be read."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: shard(checkpoint / name, sync=True), names), strict=True))


def shard(path: Path, *, sync: bool = False) -> Shard:
    """Size and digest of a file as it is now; a link, a pipe or a folder raises `OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(0, "no plain file", str(path))
        if sync:
            os.fsync(handle)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Shard(os.fstat(handle).st_size, sha256)


def _writer(name: str) -> int:
    found = NUMBERED.search(name)
    return int(found[1]) if found else 0


def _raise(error: OSError) -> None:
    raise error


# The manifest of a checkpoint: written last, and proof of every file in it.


class UnsoundError(Exception):
    """Why a checkpoint does not count."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`manifest.json` of a checkpoint."""

    __pydantic_config__ = STRICT

    writer: Literal["zeropods"] = "zeropods"
    """Files of others are never opened: some of them are pickles."""
    schema_version: Literal[1] = 1
    step: int
    origin: Origin
    files: dict[str, Shard]
    """By path, relative to the checkpoint."""

    def digest(self) -> str:
        """SHA-256 of all of it; stored beside it, so that a manifest proves itself too."""
        return digest(asdict(self))


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest; from then on the checkpoint counts."""
    atomic.write_json(checkpoint / MANIFEST, {**asdict(manifest), "digest": manifest.digest()})
    sync_folder(checkpoint)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint; `UnsoundError` where there is none, or one that cannot be believed."""
    try:
        document = json.loads((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise UnsoundError(f"no {MANIFEST}: its save did not end, or something else wrote it") from None
    except OSError as error:
        raise UnsoundError(f"{MANIFEST}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UnsoundError(f"{MANIFEST}: damaged ({error})") from None
    return _believed(document)


def _believed(document: Any) -> Manifest:
    from pydantic import ValidationError

    if not isinstance(document, dict):
        raise UnsoundError(f"{MANIFEST}: damaged (no JSON object)")
    stored = document.pop("digest", None)
    if document.get("writer") != "zeropods" or document.get("schema_version") != 1:
        shown = f"writer {document.get('writer')!r:.40}, schema_version {document.get('schema_version')!r:.40}"
        raise UnsoundError(f"{MANIFEST}: {shown}; expected 'zeropods', 1")
    try:
        # JSON, since a strict dataclass takes no dictionary from Python.
        manifest = _adapter().validate_json(json.dumps(document))
    except (ValidationError, ValueError, RecursionError) as error:
        raise UnsoundError(f"{MANIFEST}: damaged ({str(error).splitlines()[0]})") from None
    if manifest.digest() != stored:
        raise UnsoundError(f"{MANIFEST}: damaged (its digest is another)")
    return manifest


@cache
def _adapter() -> TypeAdapter[Manifest]:
    from pydantic import TypeAdapter

    return TypeAdapter(Manifest)


# Names of checkpoints in the `checkpoints/` of a run folder.

NAME = re.compile(r"checkpoint-(\d{1,18})(\.previous)?", re.ASCII)


def name_of(step: int) -> str:
    """The folder that a step is saved in: the name that transformers gives it."""
    return f"checkpoint-{step}"


def previous_of(step: int) -> str:
    """Where a complete checkpoint of the same step waits until its successor is complete."""
    return f"checkpoint-{step}.previous"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None where it is no such name."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else None


def names_of(folder: Path) -> set[str]:
    """Names of all that look like checkpoints; none where the folder is not there."""
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if step_of(path.name) is not None}


def newest_first(names: set[str]) -> list[str]:
    """By step; what was saved again comes before what it replaces."""
    return sorted(names, key=lambda name: (-(step_of(name) or 0), len(name), name))


# `latest.json`: the name of the checkpoint that was saved last.
#
# A hint, and never believed: it names a checkpoint to a reader whose view of a shared folder is a minute old, and
# what it
# names is verified like any other.

POINTER = "latest.json"


@dataclass(frozen=True)
class Pointer:
    """What `latest.json` says."""

    checkpoint: str
    manifest: str
    """The manifest's digest."""


def write_pointer(folder: Path, checkpoint: str, manifest: Manifest) -> None:
    """Point to a checkpoint that is complete."""
    files.write_json(folder / POINTER, {"checkpoint": checkpoint, "manifest": manifest.digest()})
    sync_folder(folder)


def read_pointer(folder: Path) -> Pointer | None:
    """The pointer; None where there is none yet, `UnsoundError` where it says nothing of use."""
    try:
        said = json.loads((folder / POINTER).read_bytes())
        pointer = Pointer(str(said["checkpoint"]), str(said["manifest"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsoundError(f"cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnsoundError("damaged") from None
    if step_of(pointer.checkpoint) is None:
        raise UnsoundError(f"names {pointer.checkpoint!r:.60}, which is no checkpoint's name")
    return pointer


# Whether a checkpoint counts: every file of its manifest is there, unchanged, and nothing else is.


def fault(checkpoint: Path, refused: Callable[[Origin], str | None]) -> str | None:
    """Why a checkpoint does not count; None where it is whole. What is cheap is looked at first.

    Args:
        refused: why a checkpoint of such an origin is not wanted; None where it is.
    """
    try:
        verified(checkpoint, refused)
    except UnsoundError as unsound:
        return str(unsound)
    return None


def verified(checkpoint: Path, refused: Callable[[Origin], str | None]) -> Manifest:
    """The manifest of a checkpoint that counts; `UnsoundError` where it does not."""
    manifest = read_manifest(checkpoint)
    unwanted = refused(manifest.origin)
    if unwanted is not None:
        raise UnsoundError(unwanted)
    try:
        _same_files(checkpoint, manifest)
        _same_sizes(checkpoint, manifest)
        _same_bytes(checkpoint, manifest)
    except OSError as error:
        raise UnsoundError(f"{_shown(checkpoint, error.filename)}: cannot be read ({error.strerror})") from None
    return manifest


def _same_files(checkpoint: Path, manifest: Manifest) -> None:
    """The manifest's names are those that are found below the folder, so none of them can lead out of it."""
    there = names_in(checkpoint)
    for name in sorted(manifest.files.keys() - there):
        raise UnsoundError(f"{name}: missing")
    for name in sorted(there - manifest.files.keys()):
        raise UnsoundError(f"{name}: not in the manifest")


def _same_sizes(checkpoint: Path, manifest: Manifest) -> None:
    for name, expected in sorted(manifest.files.items()):
        size = os.lstat(checkpoint / name).st_size
        if size != expected.bytes:
            raise UnsoundError(f"{name}: {size} bytes, expected {expected.bytes}")


def _same_bytes(checkpoint: Path, manifest: Manifest) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: shard(checkpoint / name), manifest.files)
        for (name, expected), now in zip(manifest.files.items(), found, strict=True):
            _same_shard(name, now, expected)


def _same_shard(name: str, now: Shard, expected: Shard) -> None:
    if now != expected:
        raise UnsoundError(f"{name}: its bytes have changed since it was saved (SHA-256)")


def _shown(checkpoint: Path, path: str | None) -> str:
    return os.path.relpath(path, checkpoint) if path else checkpoint.name


# The newest checkpoint that counts, and why newer ones do not.


@dataclass(frozen=True)
class Found:
    """What a run can go on from."""

    path: Path | None
    """None where there is nothing."""
    skipped: tuple[tuple[str, str], ...]
    """Names, newest first, each with the reason why it does not count; `latest.json` where it misleads."""
    manifest: Manifest | None = field(default=None, compare=False)
    """Of what is at `path`."""


def newest_good(folder: Path, origin: Origin) -> Found:
    """Verify the checkpoints of a run, newest first, until one is whole.

    The listing of a shared folder may be old on this machine. A name that the pointer gives is looked up by itself.

    Args:
        folder: `checkpoints/` of a run folder; it may be missing.
        origin: of the run that wants to go on.
    """
    skipped: list[tuple[str, str]] = []
    pointer = None
    try:
        pointer = read_pointer(folder)
    except UnsoundError as unsound:
        skipped.append((POINTER, str(unsound)))
    for name in newest_first(names_of(folder) | ({pointer.checkpoint} if pointer else set())):
        try:
            manifest = _one(folder / name, origin)
        except UnsoundError as unsound:
            skipped.append((name, str(unsound)))
            continue
        return Found(folder / name, (*skipped, *_misled(pointer, name, manifest)), manifest)
    return Found(None, tuple(skipped))


def _one(checkpoint: Path, origin: Origin) -> Manifest:
    if not checkpoint.is_dir():
        raise UnsoundError("gone" if not checkpoint.exists() else "no folder")
    manifest = verified(checkpoint, lambda found: found.other_run(origin))
    if manifest.step != step_of(checkpoint.name):
        raise UnsoundError(f"is of step {manifest.step}, under another name")
    return manifest


def _misled(pointer: Pointer | None, good: str, manifest: Manifest) -> list[tuple[str, str]]:
    """What is wrong with a pointer, now that the newest good checkpoint is known."""
    if pointer is None:
        return []
    if (step_of(pointer.checkpoint) or 0) < manifest.step:
        return [(POINTER, f"names {pointer.checkpoint}; {good} is newer and complete")]
    if pointer.checkpoint == good and pointer.manifest != manifest.digest():
        return [(POINTER, f"names another save of {good}")]
    return []


# Checkpoints for any number of ranks: `checkpoints/universal/N`, made of `checkpoint-N`, which stays as it is.
#
# One that is there is whole: it is built under a name that counts for nothing, and renamed after its own manifest.

UNIVERSAL = "universal"
SOURCE = "source.json"
"""In a universal checkpoint: the manifest of what it was made of."""
BUILDING = ".building-"
WHOLE = ("trainer_state.json", "scheduler.pt")
"""What each checkpoint holds undivided, and resuming reads."""

Convert = Callable[[Path, Path], None]
"""Makes a folder of DeepSpeed's universal form of a folder of shards."""


def universal_of(folder: Path, step: int) -> Path:
    """Where the universal form of a step is, below `checkpoints/`."""
    return folder / UNIVERSAL / str(step)


def check_universal(place: Path, checkpoint: Path) -> None:
    """`UnsoundError` where a universal checkpoint is not whole, or was made of another save."""
    verified(place, lambda _: None)
    if (place / SOURCE).read_bytes() != (checkpoint / MANIFEST).read_bytes():
        raise UnsoundError(f"{SOURCE}: of another save of the step")


def make_universal(place: Path, checkpoint: Path, manifest: Manifest, convert: Convert) -> None:
    """Make the universal form of a checkpoint that verifies, by one who has the run's lock.

    Args:
        place: where it goes; what is there is replaced.
        manifest: of the checkpoint.
        convert: is given the folder of shards and the folder to make.

    Raises:
        UnsoundError: nothing in it was divided by ZeRO.
    """
    divided = zero_folders(manifest.files)
    if len(divided) != 1:
        raise UnsoundError(f"holds the shards of {len(divided)} steps, expected those of 1")
    shards = divided.pop()
    place.parent.mkdir(exist_ok=True)
    building = place.with_name(f"{BUILDING}{place.name}-{secrets.token_hex(4)}")
    building.mkdir()
    try:
        for name in WHOLE:
            if name in manifest.files:
                shutil.copyfile(checkpoint / name, building / name)
        shutil.copyfile(checkpoint / MANIFEST, building / SOURCE)
        convert(checkpoint / shards, building / f"{shards}_{UNIVERSAL}")
        _complete(building, place, manifest)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _complete(building: Path, place: Path, manifest: Manifest) -> None:
    files = measured(building, sorted(names_in(building)))
    sync_tree(building)
    write_manifest(building, Manifest(step=manifest.step, origin=manifest.origin, files=files))
    if place.exists():
        discard(place)
    os.rename(building, place)
    sync_folder(place.parent)


def sweep_universal(folder: Path) -> None:
    """Remove universal checkpoints whose checkpoint is gone, and those that a killed run did not end.

    Args:
        folder: `checkpoints/` of a run folder, by one who has the run's lock.
    """
    for path in (folder / UNIVERSAL).glob("*"):
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.isdecimal() and not (folder / name_of(int(path.name))).is_dir():
            shutil.rmtree(put_away(path), ignore_errors=True)


# Older checkpoints go once a newer one has been read back whole.


@dataclass(frozen=True)
class Retired:
    """What came of a wish to keep no more than so many."""

    gone: tuple[str, ...] = ()
    """Names of what was deleted, oldest first."""
    fault: str | None = None
    """Why the newest one does not count, so that nothing was deleted."""


def retire(folder: Path, step: int, origin: Origin, keep: int, best: str | None = None) -> Retired:
    """Delete what lies before the checkpoint of `step` and goes beyond `keep`, by one who has the run's lock.

    The newest ones stay, and the best one instead of the oldest of these; with `keep` 1 both the newest and the best
    stay. Nothing goes where the checkpoint of `step` does not verify, byte by byte. What has no manifest of this
    run was made by another, or by a save that did not end, and is not counted or touched.

    Whoever is killed here leaves each checkpoint whole under its name, or under a name that counts for nothing.

    Args:
        folder: `checkpoints/` of a run folder.
        step: of the checkpoint that was saved last.
        keep: how many may stay, at least 1.
        best: name of the best model's checkpoint, where one is known.
    """
    older = _older(folder, step, origin)
    spared = {best, _pointed_at(folder)} & set(older)
    room = max(0, keep - 1 - len(spared))
    surplus = [name for name in older if name not in spared][room:]
    if not surplus:
        return Retired()
    why = fault(folder / name_of(step), lambda found: found.other_run(origin))
    if why is not None:
        return Retired(fault=why)
    for name in reversed(surplus):
        away = put_away(folder / name)
        # Were the new name lost in a power cut and files already gone, a broken checkpoint would be there again.
        sync_folder(folder)
        shutil.rmtree(away, ignore_errors=True)
    sweep_universal(folder)
    return Retired(gone=tuple(reversed(surplus)))


def _older(folder: Path, step: int, origin: Origin) -> list[str]:
    """Names of this run's checkpoints before a step, newest first."""
    names = (name for name in newest_first(names_of(folder)) if (step_of(name) or 0) < step)
    return [name for name in names if _is_of(folder / name, origin)]


def _is_of(checkpoint: Path, origin: Origin) -> bool:
    try:
        manifest = read_manifest(checkpoint)
    except UnsoundError:
        return False
    return manifest.origin.run_id == origin.run_id and manifest.step == step_of(checkpoint.name)


def _pointed_at(folder: Path) -> str | None:
    try:
        pointer = read_pointer(folder)
    except UnsoundError:
        return None
    return pointer.checkpoint if pointer else None


# How a checkpoint comes to count.
#
#     rank 0: make_room -> all ranks write -> all ranks: `shards.measured` of their share -> rank 0: complete
#
# A writer may be killed at any moment: without its manifest, which is last, a checkpoint is not there.


def make_room(folder: Path, step: int) -> Path:
    """The empty folder that a step is to be written in, by one who has the run's lock.

    What a killed save has left there is removed, lest its files mix with the new ones. A complete checkpoint of
    the same step is put aside, and counts until the new one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep_up(folder)
    sweep_universal(folder)
    place, previous = folder / name_of(step), folder / previous_of(step)
    if (place / MANIFEST).is_file():
        if previous.exists():
            discard(previous)
        os.rename(place, previous)
    elif place.exists():
        discard(place)
    place.mkdir()
    return place


def complete(folder: Path, step: int, origin: Origin, files: dict[str, Shard]) -> None:
    """Make a checkpoint count, once all ranks have written and measured their files.

    Everything but the manifest is on the disk before it, and it before the pointer.

    Args:
        files: of all ranks.

    Raises:
        UserError: there are other files than were measured.
    """
    place = folder / name_of(step)
    strange = sorted(names_in(place) ^ files.keys())
    if strange:
        raise UserError(f"{place}: {strange[0]} came or went while the step was saved; let nothing else write there")
    sync_tree(place)
    sync_folder(folder)
    sync_folder(folder.parent)
    manifest = Manifest(step=step, origin=origin, files=dict(sorted(files.items())))
    write_manifest(place, manifest)
    write_pointer(folder, place.name, manifest)
    previous = folder / previous_of(step)
    if previous.exists():
        discard(previous)
