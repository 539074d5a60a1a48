"""Which split a text belongs to: by the name of its file, or by its hash."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from zeropods.errors import UserError

SPLITS = ("train", "dev", "test")
DEV_SHARE = 20
"""Where no name tells a split, one document in so many is dev."""
WORDS = {
    "train": "train",
    "training": "train",
    "valid": "dev",
    "validation": "dev",
    "val": "dev",
    "dev": "dev",
    "eval": "dev",
    "test": "test",
}
"""As it stands in `train.txt`, `wiki.valid.tokens`, `c4-train.00000-of-01024.jsonl` or `test/1.txt`."""


def by_split(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The files of each split; nothing where no name tells one."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    unnamed = splits.pop("", [])
    if not splits:
        return {}
    named = next(iter(splits.values()))[0]
    if unnamed:
        raise UserError(f"{unnamed[0]}: no split in its name, but one in {named.name}; expected train, valid or test")
    if "train" not in splits:
        raise UserError(f"{folder}: no file of train, but {named.name}; name one train, as train{named.suffix}")
    return splits


def split_by_hash(text: str) -> str:
    """`dev` for one document in twenty by the SHA-256 of its text, else `train`.

    The same text is always on the same side: a document that stands there twice is not in both.
    """
    return "train" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % DEV_SHARE else "dev"


def _split_of(name: Path) -> str:
    found = {WORDS[word] for word in re.findall(r"[a-z]+", str(name).lower()) if word in WORDS}
    if len(found) > 1:
        raise UserError(f"{name}: its name tells {' and '.join(sorted(found))}; give it the name of one split")
    return "".join(found)
