"""Files and folders that appear whole, are held by one process, and hold nothing that runs when it is read."""

from __future__ import annotations

import argparse
import codecs
import fcntl
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zeropods.errors import UserError
from zeropods.programs import variable_set

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

# Files and folders that appear whole or not at all.


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it, so that a reader sees the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with writing(path), os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Give an `OSError` without a name, as of a full disk, the name of the file that was being written."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as `write_text` does; NaN and infinity raise `ValueError`."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def given_path(text: str) -> Path:
    """A path that a flag names; an empty one, which would be the current folder, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name; '.' is the folder in which you are")
    return Path(text)


def is_path(name: str) -> bool:
    """Whether a name is none that a hub may have, such as `gpt2` or `organisation/name`, whatever folders there are."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is None


def check_utf8(text: str, flag: str) -> None:
    """Refuse a name that could not be written into a record."""
    if text != text.encode("utf-8", "replace").decode():
        raise UserError(f"{flag} {text!r}: is not UTF-8; give another name")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, as whoever writes in it does; `BlockingIOError` where another process holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


# JSON: a file of one object, and one object per line; what is wrong with a line is said with its number.


def sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; `UserError` where there is none, its line ends with the remedy."""
    try:
        return validated(dict[str, Any], path, path.read_bytes(), remedy)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from None


MEND = "correct it, or fetch the file again"


def validated_lines(kind: type[T], path: Path, remedy: str = MEND) -> Iterator[tuple[str, T]]:
    """Place and value of every line, each `validated`; the last may be blank. An empty file raises `UserError` too."""
    is_empty, blank = True, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                blank = blank or number
                continue
            is_empty = False
            if blank:
                raise UserError(f"{path}:{blank}: the line is empty; remove it")
            yield f"{path}:{number}", validated(kind, f"{path}:{number}", line, remedy)
    if is_empty:
        raise UserError(f"{path}: the file is empty; expected one JSON object per line")


def validated(kind: type[T], place: Path | str, content: bytes, remedy: str = MEND) -> T:
    """A dataclass or an object of the JSON in a text in UTF-8, with a byte order mark or without, by pydantic.

    `UserError` says the first fault: place, key, value, remedy.
    """
    from pydantic import ValidationError  # A pod's agent reads this module, and may have no such package.

    try:
        # JSON, since a strict dataclass takes no dictionary from Python.
        found: T = _adapter(kind).validate_json(content.removeprefix(codecs.BOM_UTF8))  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise UserError(f"{place}: broken JSON: {first['ctx']['error']}; {remedy}") from None
        key = ".".join(map(str, first["loc"])) or "it"
        shown = "" if first["type"] == "missing" else f" is {first['input']!r:.60}"
        raise UserError(f"{place}: {key}{shown}: {first['msg']}; {remedy}") from None
    return found


@cache
def _adapter(kind: type[object]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# A folder that one process at a time writes into, and that holds what it should.


@contextmanager
def folder_locked(folder: Path, lock: str, *, signs: Sequence[str], kind: str, flag: str) -> Iterator[None]:
    """Hold a lock of a folder, which is made where it is missing; a second writer is refused with the holder's name.

    A folder that was made here is removed if nothing but locks came to be in it; of one that was empty, the lock.

    Args:
        lock: name of the lock's file in it.
        signs: names of which one tells that a folder with something in it is of this kind.
        kind: what it is, for messages: `run`.
        flag: by which the user named it, for the remedy.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; choose another {flag}")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    was_empty = not any(folder.iterdir())
    if not was_empty and not any((folder / name).exists() for name in signs):
        raise UserError(f"{folder}: holds something that is no {kind}; choose another {flag}")
    with open(folder / lock, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:
                raise BlockingIOError  # Its holder has just removed the folder.
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"{folder}: in use by {holder}; wait for it, or choose another {flag}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            if was_empty and all(path.suffix == ".lock" for path in folder.iterdir()):
                shutil.rmtree(folder) if is_new else (folder / lock).unlink()


# Weights are read from safetensors files only: any other format may run a program when it is read.

SUFFIX = ".safetensors"
SUMS = "SHA256SUMS"
"""In a model folder: what `sha256sum` says of its weights and its tokenizer, and `sha256sum -c` compares."""
TOKENIZER = "tokenizer.json"


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weights that may be read."""
    return bool(list(folder.glob(f"*{SUFFIX}")))


def check_weights(folder: Path) -> None:
    """Refuse a model folder without weights, or whose index or configuration names weights of another format.

    transformers takes such a file even where it was asked for safetensors. What is no folder is not looked at.
    """
    if folder.is_dir() and not has_weights(folder):
        remedy = "a model folder has them beside config.json"
        raise UserError(f"{folder}: no weights (*.safetensors) in this folder; {remedy}")
    for path in [*sorted(folder.glob("*.index.json")), folder / "config.json"]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # What cannot be read is refused by whoever loads it.
        found = found if isinstance(found, dict) else {}
        weights = found.get("weight_map")
        for name in [*(weights.values() if isinstance(weights, dict) else ()), found.get("transformers_weights")]:
            if name is not None and not str(name).endswith(SUFFIX):
                raise UserError(f"{path}: names {name!r} as weights; expected *{SUFFIX}: convert the model first")


def seal_model(folder: Path) -> None:
    """Keep the digests of a model's weights and tokenizer beside them: from then on `check_digests` knows them."""
    found = sorted(folder.glob(f"*{SUFFIX}")) + [path for path in [folder / TOKENIZER] if path.is_file()]
    write_text(folder / SUMS, "".join(f"{sha256(path)}  {path.name}\n" for path in found))


def check_digests(folder: Path, *, weights: bool = True) -> None:
    """Refuse a model whose files are not those that were saved; one that came without digests is taken as it is.

    Args:
        weights: False for the tokenizer alone; weights may take minutes.
    """
    if not (folder / SUMS).is_file():
        return
    sums = (folder / SUMS).read_text(encoding="utf-8", errors="replace").split()
    # Models that were saved before have no digest of their tokenizer.
    tokenizer = [folder / name for name in {TOKENIZER} & set(sums)]
    for path in [*tokenizer, *(folder.glob(f"*{SUFFIX}") if weights else ())]:
        if not path.is_file() or sha256(path) not in sums:
            remedy = f"copy it again or export a checkpoint; if you changed it on purpose, remove {SUMS}"
            what = "its bytes have changed" if path.is_file() else "it is gone"
            raise UserError(f"{path}: {what} since it was saved; {remedy}")


def open_to_readers(folder: Path) -> None:
    """Let everybody read a model's weights who may read its folder: their library makes them private."""
    for path in folder.glob(f"*{SUFFIX}"):
        path.chmod(folder.stat().st_mode & 0o666)


# Files of torch's that hold tensors and plain values, and nothing that runs when it is loaded.


@contextmanager
def plain_values_only() -> Iterator[None]:
    """Every `torch.load` in this block, DeepSpeed's too, makes tensors and plain values and nothing else."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # Python 3.11.2 (Debian 12's) pickles a stage as `getattr` of its class; no other attribute is given.
    stage = (lambda _, name: ZeroStageEnum[name], "builtins.getattr")
    allowed: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, stage]
    with variable_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"), torch.serialization.safe_globals(allowed):
        yield


def foreign_object(error: pickle.UnpicklingError) -> str:
    """What a file holds that was refused: the name of its class, else what torch says first."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else first_line(error)


def first_line(error: Exception) -> str:
    """What an error of torch's or DeepSpeed's says first."""
    return str(error).strip().split("\n")[0][:200]


# A disk that is full or may not be written, in one line, from whichever library met it.

TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "Parent directory")
"""In what torch's writer of files says; it has no exception of its own."""


@contextmanager
def said_in_one_line(folder: Path, what: str, remedy: str) -> Iterator[None]:
    """Turn an error of writing into a `UserError` that names the folder.

    Args:
        what: is written.
        remedy: what to do about it.
    """
    from safetensors import SafetensorError  # A pod's agent reads this module, and has no such package.

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) else first_line(error)
        # What is not of the system, such as a damaged archive, is no matter of the disk.
        if cause is None or (isinstance(error, RuntimeError) and not any(word in cause for word in TORCH_WRITER)):
            raise
        if not isinstance(error, OSError):
            # These libraries keep the system's reason to themselves, or say it in Rust: it is asked again.
            try:
                with tempfile.TemporaryFile(dir=folder) as file:
                    os.posix_fallocate(file.fileno(), 0, 2**20)
            except OSError as system:
                cause = system.strerror or cause
        raise UserError(f"{folder}: {what} cannot be written ({cause}); {remedy}") from error


# The folder of what outlives a command: clusters, what was learned of machines and of runs.

HOME = "ZEROPODS_HOME"
ROOT = Path(__file__).resolve().parents[1]
PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)
"""Paths that every program below takes as they are."""


def home() -> Path:
    """That folder: `$ZEROPODS_HOME`, else `.zeropods` in the project.

    Where pdsh cannot be told the project's path, it is one elsewhere that this user alone can read.
    """
    usual = Path(os.environ.get(HOME) or ROOT / ".zeropods").absolute()
    if os.environ.get(HOME) or PLAIN.fullmatch(str(usual)):
        return usual
    folder = Path("/tmp", f"zeropods-{os.geteuid()}-{hashlib.sha256(os.fsencode(usual)).hexdigest()[:12]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UserError(f"{folder}: is not this user's alone; remove it, or set {HOME}")
    return folder
