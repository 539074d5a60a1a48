"""The manifest, in which a prepared data set describes itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zeropods.errors import UserError
from zeropods.files import validated

SCHEMA_VERSION: Literal[1] = 1
FILE = "manifest.json"
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Lengths of the rows of one side of a split, in tokens including the end token, after
    truncation."""

    total: int
    mean: float
    p50: int
    p99: int
    max: int
    truncated_rows: int
    """Number of rows that were cut at the limit."""
    unknown_tokens: int
    rows_with_unknown: int


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """One split of a prepared set.

    A row of text2sql has a source and a target. A row of a causal set is one text: `source` counts
    all of its tokens, `target` those of them that carry a loss.
    """

    rows: int
    source: TokenStatistics
    target: TokenStatistics
    targets_lost: int | None
    """Number of targets whose text is not restored by decoding their tokens (NFKC, spaces folded);
    None for `lm`."""
    targets_unreadable: int | None = None
    """text2sql: number of targets that are not read back as their query, so that no answer to them
    can be right."""
    first_unreadable: str | None = None
    """Place and text of the first target that is not read back."""
    documents: int | None = None
    """`lm`: number of documents that were read, not counting empty ones."""
    leftover_tokens: int | None = None
    """`lm`: number of tokens in the incomplete last block, which train omits; 0 where the last
    block may be short."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record beside a prepared set, from which everything else reads the prompt and the
    tokenizer."""

    schema_version: Literal[1]
    content_key: str
    """SHA-256 of the sources and settings: an equal key means an equal set."""
    task: str
    """`text2sql`, `squad` or `lm`."""
    prompt: str
    """`question` or `schema` for text2sql; otherwise the task's own name."""
    tokenizer: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    max_source_tokens: int | None
    """text2sql: the most tokens of a source; None for causal sets, as is the next field."""
    max_target_tokens: int | None
    limit: int | None
    copies: int | None
    """text2sql: number of rows of the split train for each question, of which all but the first
    are varied; None for causal sets."""
    source_sha256: dict[str, str]
    splits: dict[str, SplitStatistics]
    versions: dict[str, str]
    max_seq_length: int | None = None
    """The most tokens of a causal row; a block of `lm`'s train split has exactly this number."""
    loss_on: str | None = None
    """Which tokens of a causal row carry a loss: `answer` or `all`."""
    pad_token: str | None = None
    """The token that pads a causal batch: the end token if the tokenizer came without a pad
    token."""
    data: str
    """Location of the raw data, a folder or a hub id."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared set; `UserError` if there is none, or anything is wrong with
    it."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise UserError(
            f"{folder}: no prepared data set there; "
            "make one with zeropods prepare --data DATA --tokenizer MODEL --out SET"
        )
    return validated(Manifest, path, path.read_bytes(), "prepare the data set again")
