"""Raw WikiSQL -> a tokenized set with its tokenizer and manifest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.data import manifest as manifests
from zeropods.data.building import Progress, build_once, key_of, save_set, tokenizer_identity, versions
from zeropods.data.checksum import sha256
from zeropods.data.manifest import Manifest
from zeropods.data.prompts import MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS, PROMPTS
from zeropods.data.tokenized import source_of, target_of, tokenize
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

    def rows(self) -> int:
        """How many examples are asked for, of all splits."""
        counts = []
        for split in _splits(self.data):
            with open(split_file(self.data, split, "jsonl"), "rb") as lines:
                counts.append(sum(1 for _ in itertools.islice(lines, self.limit)))
        return sum(counts)


def prepare(wanted: Preparation, out: Path, progress: Progress = lambda rows: None) -> tuple[Manifest, bool]:
    """Make the tokenized set at `out`; returns its manifest, and False if it was there already.

    `progress` is called with the number of rows done since the last call.
    """
    sources = source_hashes(wanted.data)
    key = content_key(wanted, sources)
    return build_once(Path(out), key, lambda folder: _build(wanted, sources, key, folder, progress))


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
        "tokenizer": tokenizer_identity(wanted.tokenizer),
        "prompt": wanted.prompt,
        "limit": wanted.limit,
        "complete_vocabulary": wanted.complete_vocabulary,
        "max_tokens": [wanted.source_limit, wanted.max_target_tokens],
        "versions": versions(),
    }
    return key_of(document)


def _build(wanted: Preparation, sources: dict[str, str], key: str, folder: Path, progress: Progress) -> Manifest:
    tokenizer = _tokenizer(wanted)
    limits = (wanted.source_limit, wanted.max_target_tokens)
    built = {
        split: tokenize(_examples(wanted, split), wanted.prompt, tokenizer, limits, progress)
        for split in _splits(wanted.data)
    }
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
        versions=versions(),
    )
    save_set(folder, {split: rows for split, (rows, _) in built.items()}, tokenizer, manifest)
    return manifest


def _tokenizer(wanted: Preparation) -> PreTrainedTokenizerBase:
    if wanted.tokenizer != TINY:
        return load_tokenizer(wanted.tokenizer, complete=wanted.complete_vocabulary)
    examples = _examples(wanted, "train")
    return train_tokenizer(text for e in examples for text in (source_of(e, wanted.prompt), target_of(e)))


def _examples(wanted: Preparation, split: str) -> Iterator[Example]:
    return itertools.islice(read_split(wanted.data, split), wanted.limit)


def _splits(data: Path) -> list[str]:
    return [split for split in SPLITS if (Path(data) / f"{split}.jsonl").is_file()]
