"""What a prepared data set says about itself, and how files are proven and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zeropods.errors import UserError

# What a prepared data set says about itself.

SCHEMA_VERSION = 1
FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Lengths of one side of a split, in tokens with the end token, after truncation."""

    total: int
    mean: float
    p50: int
    p99: int
    max: int
    truncated_rows: int
    """Rows that were cut at the limit."""
    unknown_tokens: int
    rows_with_unknown: int


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """One split of a prepared set.

    text2sql has a source and a target in a row. A row of a causal set is one text: `source` is all of
    its tokens, `target` those of them that carry a loss.
    """

    rows: int
    source: TokenStatistics
    target: TokenStatistics
    targets_lost: int | None
    """Targets whose text does not come back when their tokens are decoded (NFKC, spaces folded); None for `lm`."""
    documents: int | None = None
    """`lm`: documents that were read, the empty ones not counted."""
    leftover_tokens: int | None = None
    """`lm`: tokens of the incomplete last block, which train leaves out; 0 where the last block may be short."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record beside a prepared set: everything else reads prompt and tokenizer from here."""

    schema_version: int
    content_key: str
    """SHA-256 of the sources and settings: an equal key means an equal set."""
    task: str
    """`text2sql`, `squad` or `lm`."""
    prompt: str
    """`question` or `schema` for text2sql; else the task's own name."""
    tokenizer: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    max_source_tokens: int | None
    """text2sql: the most tokens of a source; None for causal sets, as the next."""
    max_target_tokens: int | None
    limit: int | None
    source_sha256: dict[str, str]
    splits: dict[str, SplitStatistics]
    versions: dict[str, str]
    max_seq_length: int | None = None
    """The most tokens of a causal row; exactly so many in a block of `lm`'s train split."""
    loss_on: str | None = None
    """Which tokens of a causal row carry a loss: `answer` or `all`."""
    pad_token: str | None = None
    """What a causal batch is padded with: the end token where the tokenizer came without a pad token."""

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain JSON values."""
        return asdict(self)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared set, strictly."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise UserError(f"{folder}: no prepared data set there; make one: zeropods prepare --out {folder}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema_version"] != SCHEMA_VERSION:
            raise UserError(
                f"{path}: schema_version {document['schema_version']!r}, not {SCHEMA_VERSION}; prepare again"
            )
        document["splits"] = {name: _split(split) for name, split in document["splits"].items()}
        return Manifest(**document)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a manifest of ours ({error}); prepare the data set again") from None


def _split(document: dict[str, Any]) -> SplitStatistics:
    sides = {side: TokenStatistics(**document[side]) for side in ("source", "target")}
    return SplitStatistics(**{**document, **sides})


# What proves that a downloaded file is the one that was meant.


@dataclass(frozen=True)
class Checksum:
    """A digest over the whole content of a file."""

    algorithm: Literal["git-blob", "sha256"]
    value: str
    """Lower-case hexadecimal."""

    def of(self, path: Path) -> str:
        """This algorithm's digest of a file, computed while streaming it."""
        return git_blob_hash(path) if self.algorithm == "git-blob" else sha256(path)


def git_blob_hash(path: Path) -> str:
    """The name that git gives a file's content: SHA-1 of `blob SIZE`, a zero byte, and the content."""
    header = b"blob %d\0" % path.stat().st_size
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha1(header, usedforsecurity=False)).hexdigest()


def sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# JSON objects, one a line; what is wrong with a line is said with its number.


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and object of every line; an empty file raises `UserError` too."""
    number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield number, json_object(f"{path}:{number}", line)
    if number == 0:
        raise UserError(f"{path}: the file is empty; expected one JSON object a line")


def json_object(place: str, line: bytes) -> dict[str, Any]:
    """The object that a text in UTF-8 holds."""
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: byte {line[error.start]:#04x} is not UTF-8; convert the file") from None
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{place}: broken JSON at {at}: {error.msg}; fetch the file again") from None
    except RecursionError:
        raise UserError(f"{place}: nested too deeply to be an example or a table; fetch the file again") from None
    except ValueError as error:  # An integer of thousands of digits.
        raise UserError(f"{place}: {error}; fetch the file again") from None
    if not isinstance(document, dict):
        raise UserError(f"{place}: {type(document).__name__}; expected a JSON object")
    return document


def text_of(place: str, document: dict[str, Any], key: str) -> str:
    """A text that is there, is more than spaces, and can be encoded."""
    value = document.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: {key} is {value!r}; expected text")
    return encodable(place, key, value)


def encodable(place: str, key: str, value: str) -> str:
    r"""`value`, unless it holds half of a surrogate pair, as `"\ud800"` in JSON, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise UserError(f"{place}: {key} holds {half!r}, half a character; correct it") from None
    return value


# An error while a file is written names the file.


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Give an `OSError` without a name, as of a full disk, the name of the file that was being written."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
