"""Raw WikiSQL -> a tokenized set with its tokenizer and manifest."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods import atomic
from zeropods.data import manifest as manifests
from zeropods.data.checksum import sha256
from zeropods.data.manifest import Manifest
from zeropods.data.prompts import MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS, PROMPTS
from zeropods.data.tokenized import Progress, source_of, target_of, tokenize
from zeropods.data.tokenizer import TINY, fingerprint, load_tokenizer, train_tokenizer
from zeropods.data.wikisql import SPLITS, Example, read_split, split_file
from zeropods.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is asked of `prepare`."""

    data: Path
    tokenizer: str
    prompt: str = "schema"
    limit: int | None = None
    """Only the first N examples of each split."""
    complete_vocabulary: bool = True
    """Add the characters that T5's vocabulary lacks; False is the original recipe."""
    max_source_tokens: int | None = None
    max_target_tokens: int = MAX_TARGET_TOKENS

    def __post_init__(self) -> None:
        if self.prompt not in PROMPTS:
            raise UserError(f"prompt {self.prompt!r}; expected {' or '.join(PROMPTS)}")
        for name in ("limit", "max_source_tokens", "max_target_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value}; expected at least 1")

    @property
    def source_limit(self) -> int:
        """The most tokens of a source, the end token included."""
        return self.max_source_tokens or MAX_SOURCE_TOKENS[self.prompt]


def prepare(wanted: Preparation, out: Path, progress: Progress = lambda rows: None) -> tuple[Manifest, bool]:
    """Make the tokenized set at `out`; returns its manifest, and False if it was there already.

    `progress` is called with the number of rows done since the last call.
    """
    out = Path(out)
    sources = source_hashes(wanted.data)
    key = content_key(wanted, sources)
    if (out / manifests.FILE).is_file():
        current = manifests.read_manifest(out)
        if current.content_key == key:
            return current, False
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: holds something that is no prepared data set; choose another --out")
    with _without_collector(), atomic.new_folder(out) as folder:
        return _build(wanted, sources, key, folder, progress), True


def source_hashes(data: Path) -> dict[str, str]:
    """SHA-256 of every file of the raw set; the train split must be there, the others may be."""
    split_file(data, "train", "jsonl")
    files = [split_file(data, split, suffix) for split in _splits(data) for suffix in ("jsonl", "tables.jsonl")]
    return {path.name: sha256(path) for path in files}


def content_key(wanted: Preparation, sources: dict[str, str]) -> str:
    """SHA-256 over what decides the result: sources, settings, tokenizer, versions of what tokenizes."""
    document = {
        "schema_version": manifests.SCHEMA_VERSION,
        "sources": sources,
        "tokenizer": _tokenizer_identity(wanted.tokenizer),
        "prompt": wanted.prompt,
        "limit": wanted.limit,
        "complete_vocabulary": wanted.complete_vocabulary,
        "max_tokens": [wanted.source_limit, wanted.max_target_tokens],
        "versions": _versions(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _build(wanted: Preparation, sources: dict[str, str], key: str, folder: Path, progress: Progress) -> Manifest:
    from datasets import DatasetDict

    tokenizer = _tokenizer(wanted)
    limits = (wanted.source_limit, wanted.max_target_tokens)
    built = {
        split: tokenize(_examples(wanted, split), wanted.prompt, tokenizer, limits, progress)
        for split in _splits(wanted.data)
    }
    with _without_bars():
        DatasetDict({split: rows for split, (rows, _) in built.items()}).save_to_disk(folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = Manifest(
        schema_version=manifests.SCHEMA_VERSION,
        content_key=key,
        task="text2sql",
        prompt=wanted.prompt,
        tokenizer=wanted.tokenizer,
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocabulary_size=len(tokenizer),
        max_source_tokens=wanted.source_limit,
        max_target_tokens=wanted.max_target_tokens,
        limit=wanted.limit,
        source_sha256=sources,
        splits={split: statistics for split, (_, statistics) in built.items()},
        versions=_versions(),
    )
    atomic.write_json(folder / manifests.FILE, manifest.to_json())
    return manifest


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of rows and none in a cycle: looking for cycles takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Our own progress is shown; a second bar for each split is none."""
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()


def _tokenizer(wanted: Preparation) -> PreTrainedTokenizerBase:
    if wanted.tokenizer != TINY:
        return load_tokenizer(wanted.tokenizer, complete=wanted.complete_vocabulary)
    examples = _examples(wanted, "train")
    return train_tokenizer(text for e in examples for text in (source_of(e, wanted.prompt), target_of(e)))


def _examples(wanted: Preparation, split: str) -> Iterator[Example]:
    return itertools.islice(read_split(wanted.data, split), wanted.limit)


def _splits(data: Path) -> list[str]:
    return [split for split in SPLITS if (Path(data) / f"{split}.jsonl").is_file()]


def _tokenizer_identity(source: str) -> str:
    """What tells two tokenizers apart without loading them: their files' content, or a name."""
    path = Path(source)
    if path.is_file():
        return sha256(path)
    files = sorted(f for f in path.glob("*") if f.name in ("tokenizer.json", "spiece.model"))
    return " ".join(sha256(file) for file in files) or source


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("zeropods", "tokenizers", "sentencepiece", "datasets")}
