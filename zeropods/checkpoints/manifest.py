"""The manifest of a checkpoint: written last, and proof of every file in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeropods import atomic
from zeropods.checkpoints.disk import sync_folder
from zeropods.checkpoints.origin import Origin, digest
from zeropods.checkpoints.shards import MANIFEST, Shard
from zeropods.measure.rank import STRICT

if TYPE_CHECKING:
    from pydantic import TypeAdapter


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
