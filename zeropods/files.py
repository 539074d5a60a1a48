"""Files and folders that appear whole, are locked by one process, and hold only data.

Nothing in them runs when it is read.
"""

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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from zeropods.errors import UserError
from zeropods.programs import variable_set

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Validated = TypeVar("Validated")

# Files and folders that appear whole or not at all.


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and the folders that lead to it, through a temporary file beside it.

    A reader sees either the old or the new content. Everybody may read the file.
    """
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
    """Add the file's name to an `OSError` that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as `write_text` does; NaN and infinity raise `ValueError`."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n")


def given_path(text: str) -> Path:
    """A path that a flag names; an empty one, which would be the current folder, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name; '.' means the current folder")
    return Path(text)


def no_file(path: str | Path) -> str:
    """Why a path is not a file: `a folder` or `no such file`, as a part of a message."""
    return "a folder" if Path(path).is_dir() else "no such file"


def no_folder(path: str | Path) -> str:
    """Why a path is not a folder: `a file` or `no such folder`, as a part of a message."""
    return "a file" if Path(path).is_file() else "no such folder"


def is_path(name: str) -> bool:
    """Whether a name can only be a path, since it has not the form of a name at the hub, such as
    `gpt2` or `organisation/name`.

    Which files and folders exist does not matter.
    """
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is None


def check_utf8(text: str, flag: str) -> None:
    """Refuse a name of a file whose bytes are not UTF-8: it could not be written into a record."""
    if text != text.encode("utf-8", "replace").decode():
        raise UserError(f"{flag} {text!r}: is not UTF-8; give another name")


@contextmanager
def file_held(path: Path) -> Iterator[None]:
    """Hold a lock of an existing file while the block runs.

    Raises:
        BlockingIOError: another process, also on another machine, has locked it.
    """
    # Open for writing: on NFS, Linux asks the file server for the lock, which requires it.
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def new_file_held(path: Path) -> Iterator[None]:
    """Make an empty file that is locked, as by `file_held`, from the moment at which it appears;
    the block runs with the lock."""
    new = path.with_name(f"{path.name}.new")
    new.touch()
    with file_held(new):
        os.rename(new, path)
        yield


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a lock of a folder of this machine, such as one in /tmp, while the block runs.

    File servers know no locks of folders, so that processes of other machines do not see the lock.

    Raises:
        BlockingIOError: another process has locked it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


# JSON: files of one object, and files of one object per line, whose errors have the line's number.


def sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        remedy: what to do if there is none; the end of the message.

    Raises:
        UserError: the file cannot be read or holds no JSON object, or a key occurs twice.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from None
    document = validated(dict[str, Any], path, content, remedy)
    # Pydantic has taken the last value of each key. The file is read again for keys that repeat.
    pairs = json.loads(content, object_pairs_hook=_Pairs)
    twice = list(_keys_twice(pairs, ""))
    if twice:
        raise UserError(f"{path}: {', '.join(twice)}: there twice; keep one of each")
    return document


class _Pairs(dict[str, Any]):
    """An object of a JSON document, with its keys that occur more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice: list[str] = []
        if len(self) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            self.twice = [key for key, count in counts.items() if count > 1]


def _keys_twice(value: object, prefix: str) -> Iterator[str]:
    """Keys that occur more than once in an object within this value, with the keys that lead to
    them: `optimizer.params.lr`.

    Args:
        prefix: the keys that lead to the value, each with a dot behind it.
    """
    if isinstance(value, list):
        for number, item in enumerate(value, 1):
            yield from _keys_twice(item, f"{prefix}{number}.")
    if isinstance(value, _Pairs):
        for key in value.twice:
            yield f"{prefix}{key}"
        for key, item in value.items():
            yield from _keys_twice(item, f"{prefix}{key}.")


MEND = "correct it, or fetch the file again"
"""What to do about a fault in a file of data."""


def validated_lines(
    kind: type[Validated], path: Path, remedy: str = MEND
) -> Iterator[tuple[str, Validated]]:
    """Yield the place of every line, `FILE:NUMBER`, and its value, as `validated` reads it.

    Blank lines may stand at the end of the file only.

    Raises:
        UserError: a fault in a line, or an empty file; lines before the fault have been yielded.
    """
    is_empty = True
    first_blank = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                first_blank = first_blank or number
                continue
            is_empty = False
            if first_blank:
                raise UserError(f"{path}:{first_blank}: the line is empty; remove it")
            place = f"{path}:{number}"
            yield place, validated(kind, place, line, remedy)
    if is_empty:
        raise UserError(f"{path}: the file is empty; expected one JSON object per line")


def validated(
    kind: type[Validated], place: Path | str, content: bytes, remedy: str = MEND
) -> Validated:
    """Read JSON in UTF-8, with or without a byte order mark, into a dataclass or a dictionary.

    In a dataclass NaN and Infinity, which Python writes but JSON does not have, are a fault.

    Args:
        kind: the dataclass, or `dict[...]`.
        place: where the JSON is from, for the message.
        remedy: what to do about a fault, for the message.

    Raises:
        UserError: pydantic finds a fault; the first one is named, with its key and value.
    """
    # A pod's agent imports this module, and may have no such package.
    from pydantic import ValidationError

    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        # As JSON, since a strict dataclass accepts no Python dictionary.
        value: Validated = _adapter(kind).validate_json(content)  # type: ignore[arg-type]
    except ValidationError as error:
        fault = _first_fault(error)
        raise UserError(f"{place}: {fault}; {remedy}") from None
    # A dataclass's fields of numbers have refused NaN and Infinity by now, and named the key; this
    # is for its fields that take any value. An object of any keys may have them: configurations of
    # models hold Infinity.
    if get_origin(kind) is not dict:
        _refuse_constants(place, content)
    return value


def _first_fault(error: ValidationError) -> str:
    """The first of the faults that pydantic has found, with its key and value."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"broken JSON: {first['ctx']['error']}"
    key = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "missing":
        return f"{key}: {first['msg']}"
    return f"{key} is {first['input']!r:.60}: {first['msg']}"


def _refuse_constants(place: Path | str, content: bytes) -> None:
    """Refuse JSON with the bare words NaN, Infinity or -Infinity; inside a text they are
    welcome."""
    if b"NaN" not in content and b"Infinity" not in content:
        return
    constants: list[str] = []
    try:
        json.loads(content, parse_constant=constants.append)
    except (ValueError, RecursionError):
        return  # Pydantic has accepted the JSON, and its reader reports what else is wrong.
    if constants:
        remedy = 'write null where there is no value, a number, or a text in "quotes"'
        raise UserError(f"{place}: {constants[0]} is not a number of JSON; {remedy}")


@cache
def _adapter(kind: type[object]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# A folder that one process at a time writes into, and that holds what it should.


@contextmanager
def folder_locked(
    folder: Path, lock: str, *, signs: Sequence[str], kind: str, flag: str
) -> Iterator[None]:
    """Hold a lock of a folder, which is created if it is missing, while the block runs.

    If the block has left nothing but lock files in the folder, the folder is removed if it was
    created here, and only the lock if the folder was empty before.

    Args:
        lock: name of the lock file in the folder; it holds who has locked the folder.
        signs: file names, any of which shows that a folder that is not empty is of this kind.
        kind: what the folder is, for messages, such as `run`.
        flag: the flag by which the user named it, for the remedy.

    Raises:
        UserError: the folder is a file or of another kind, or another process has locked it.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; choose another {flag}")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    was_empty = not any(folder.iterdir())
    is_of_kind = any((folder / name).exists() for name in signs)
    if not was_empty and not is_of_kind:
        raise UserError(f"{folder}: is not empty and is not a {kind} folder; choose another {flag}")
    with open(folder / lock, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_deleted = os.fstat(file.fileno()).st_nlink == 0
            if is_deleted:
                # The holder has removed the folder between `open` and `flock`.
                raise BlockingIOError
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            fault = f"in use by {holder}"
            raise UserError(f"{folder}: {fault}; wait for it, or choose another {flag}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            if was_empty and all(path.suffix == ".lock" for path in folder.iterdir()):
                if is_new:
                    shutil.rmtree(folder)
                else:
                    (folder / lock).unlink()


# Weights are read from safetensors files only: any other format may run a program when it is read.

SUFFIX = ".safetensors"
SUMS = "SHA256SUMS"
"""File in a model folder: what `sha256sum` prints for its weights and its tokenizer, and `sha256sum
-c` checks."""
TOKENIZER = "tokenizer.json"


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weights in safetensors files."""
    return bool(list(folder.glob(f"*{SUFFIX}")))


def check_weights(folder: Path) -> None:
    """Refuse a model folder without weights in safetensors files.

    One whose index or configuration names weights of another format is refused too: transformers
    loads such a file even where it was asked for safetensors. A name that is no folder is not
    checked.
    """
    if folder.is_dir() and not has_weights(folder):
        remedy = "a model folder has them beside config.json"
        raise UserError(f"{folder}: no weights (*.safetensors) in this folder; {remedy}")
    for path in [*sorted(folder.glob("*.index.json")), folder / "config.json"]:
        for name in _names_of_weights(path):
            if name is not None and not str(name).endswith(SUFFIX):
                fault = f"names {name!r} as weights"
                raise UserError(f"{path}: {fault}; expected *{SUFFIX}: convert the model first")


def _names_of_weights(path: Path) -> list[object]:
    """What an index or a configuration names as files of weights; values that are no text, too."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # A file that cannot be read is refused when it is loaded.
        return []
    if not isinstance(document, dict):
        return []
    names: list[object] = []
    weight_map = document.get("weight_map")
    if isinstance(weight_map, dict):
        names += weight_map.values()
    names.append(document.get("transformers_weights"))
    return names


def seal_model(folder: Path) -> None:
    """Write the digests of a model's weights and tokenizer beside them.

    From then on `check_digests` compares them.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    tokenizer = folder / TOKENIZER
    if tokenizer.is_file():
        paths.append(tokenizer)
    lines = [f"{sha256(path)}  {path.name}\n" for path in paths]
    write_text(folder / SUMS, "".join(lines))


def check_digests(folder: Path, *, weights: bool = True) -> None:
    """Refuse a model whose files have changed since they were saved.

    A model without digests is accepted as it is.

    Args:
        weights: False to check the tokenizer alone; weights may take minutes.
    """
    if not (folder / SUMS).is_file():
        return
    digests_and_names = (folder / SUMS).read_text(encoding="utf-8", errors="replace").split()
    paths = []
    # A tokenizer in files of another form has no digest.
    if TOKENIZER in digests_and_names:
        paths.append(folder / TOKENIZER)
    if weights:
        paths += folder.glob(f"*{SUFFIX}")
    for path in paths:
        if path.is_file() and sha256(path) in digests_and_names:
            continue
        change = "its bytes have changed" if path.is_file() else "it has been removed"
        raise UserError(
            f"{path}: {change} since it was saved; copy it again or export a checkpoint; if you "
            f"changed it on purpose, remove {SUMS}"
        )


def open_to_readers(folder: Path) -> None:
    """Let everyone who may read a model's folder read its weights.

    The safetensors library saves them so that only their owner can read them.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        path.chmod(folder.stat().st_mode & 0o666)


# Files of torch that hold tensors and plain values, and nothing that runs when it is loaded.


@contextmanager
def plain_values_only() -> Iterator[None]:
    """Let every `torch.load` in this block, DeepSpeed's included, create tensors, plain values and
    a few classes of DeepSpeed's, and nothing else."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # Python 3.11.2 (Debian 12's) pickles a stage as a call of `getattr` with its class and name.
    # This function is called in the place of `getattr`, and can return nothing but a stage.
    stage = (lambda _, name: ZeroStageEnum[name], "builtins.getattr")
    allowed: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, stage]
    only_weights = variable_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with only_weights, torch.serialization.safe_globals(allowed):
        yield


def foreign_object(error: pickle.UnpicklingError) -> str:
    """What a file holds that torch has refused to load: the name of the object's class, else the
    first line of torch's message."""
    match = re.search(r"GLOBAL (\S+)", str(error))
    return match[1] if match else first_line(error)


def first_line(error: Exception) -> str:
    """First line of the message of a library's error, at most 200 characters."""
    return str(error).strip().split("\n")[0][:200]


# A disk that is full or not writable, reported in one line whichever library ran into it.

TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "Parent directory")
"""Words in error messages of torch's file writer, which has no exception class of its own."""


@contextmanager
def said_in_one_line(folder: Path, what: str, remedy: str) -> Iterator[None]:
    """Turn an error of writing within the block into a `UserError` that names the folder.

    Other errors pass through.

    Args:
        what: what is being written.
        remedy: what to do about the error.
    """
    # A pod's agent imports this module, and has no such package.
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) else first_line(error)
        # An `OSError` without a text of the system's, such as that of a damaged archive, has
        # nothing to do with the disk.
        if cause is None:
            raise
        if isinstance(error, RuntimeError) and not any(word in cause for word in TORCH_WRITER):
            raise
        if not isinstance(error, OSError):
            # These libraries hide the system's reason, or word it as Rust does: a test write asks
            # the system again.
            cause = _why_not_writable(folder) or cause
        raise UserError(f"{folder}: {what} cannot be written ({cause}); {remedy}") from error


def _why_not_writable(folder: Path) -> str | None:
    """The system's reason why a file of 1 MiB cannot be written; None where it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 2**20)
    except OSError as error:
        return error.strerror
    return None


# The folder of data that outlive a command: clusters, and what was learned about machines and runs.

HOME = "ZEROPODS_HOME"
"""Environment variable that names the folder."""
ROOT = Path(__file__).resolve().parents[1]
"""The project's folder."""
PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)
"""Pattern of the paths that every program to which they are passed, such as pdsh, takes as they
are."""


def home() -> Path:
    """The folder of data that outlive a command: `$ZEROPODS_HOME`, else `.zeropods` in the project.

    Where the project's path has characters that pdsh does not take as they are, it is a folder in
    `/tmp` that this user alone can read; it is created here.

    Raises:
        UserError: a file is in the way, or the folder in `/tmp` is not private.
    """
    is_chosen = bool(os.environ.get(HOME))
    usual = Path(os.environ.get(HOME) or ROOT / ".zeropods").absolute()
    existing = next(path for path in (usual, *usual.parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{HOME} {usual}: {existing} is a file; name a folder")
    if is_chosen or PLAIN.fullmatch(str(usual)):
        return usual
    # A digest of the path, so that each copy of the project has a folder of its own.
    digest = hashlib.sha256(os.fsencode(usual)).hexdigest()[:12]
    folder = Path("/tmp", f"zeropods-{os.geteuid()}-{digest}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    is_open_to_others = bool(status.st_mode & 0o077)
    if not is_mine or is_open_to_others:
        raise UserError(f"{folder}: is not private to this user; remove it, or set {HOME}")
    return folder
