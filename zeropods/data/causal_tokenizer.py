"""Tokenizers for causal models: from a hub, from a folder, or trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.data.byte_tokenizer import END, GPT_TINY
from zeropods.data.tokenizer import load_tokenizer
from zeropods.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BARE = ("vocab.json", "merges.txt")
"""GPT-2's files as they were published; a folder may hold no others."""
DESCRIBED = ("tokenizer.json", "tokenizer_config.json", "config.json")


def load_causal_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer that `source` names: it has an end token, and pads with that if it has no pad token.

    Args:
        source: a hub id, or a folder with tokenizer.json or with GPT-2's vocab.json and merges.txt.
    """
    folder = Path(source)
    if folder.is_file():
        raise UserError(f"{source}: a file; name the folder with tokenizer.json, or with {' and '.join(BARE)}")
    if all((folder / name).is_file() for name in BARE) and not any((folder / name).is_file() for name in DESCRIBED):
        tokenizer = _from_merges(folder)
    else:
        tokenizer = load_tokenizer(source, complete=False, instead=GPT_TINY)
    return with_ends(source, tokenizer)


def with_ends(source: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer with a pad token, and without a limit of its own; refused where it cannot be used.

    Padding with the end token is harmless: padded places are masked and carry no loss.
    """
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {source!r} has no fast implementation; convert it to a tokenizer.json")
    if tokenizer.eos_token_id is None:
        remedy = f"name another tokenizer, or {GPT_TINY}"
        pad = "nor a pad token" if tokenizer.pad_token_id is None else "to mark where a text ends"
        raise UserError(f"tokenizer {source!r} has no end token {pad}; {remedy}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that this tokenizer puts before every text, as Llama's `<s>`; often none."""
    bare = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.backend_tokenizer.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of what the tokenizer cannot read; None where it reads everything, as GPT-2's does.

    GPT-2's names its end token as the unknown one.
    """
    unknown = tokenizer.unk_token_id
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    return None if unknown in ends else unknown


def _from_merges(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import GPT2TokenizerFast

    size = _check_merges(*(folder / name for name in BARE))
    tokenizer = GPT2TokenizerFast.from_pretrained(folder)
    # Given other names for these files, the class silently makes a tokenizer of one token.
    if len(tokenizer) < size:
        raise UserError(f"{folder}: {BARE[0]} has {size} entries, but {len(tokenizer)} were read; name another folder")
    return tokenizer


def _check_merges(vocabulary: Path, merges: Path) -> int:
    """The entries of the vocabulary, of which each merge joins two and makes a third."""
    try:
        pieces = json.loads(vocabulary.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise UserError(f"{vocabulary.parent}: no tokenizer can be read there ({error}); fetch it again") from None
    if not isinstance(pieces, dict) or END not in pieces:
        raise UserError(f"{vocabulary}: no vocabulary of GPT-2's kind, with {END}; name a folder with tokenizer.json")
    for number, line in enumerate(lines, 1):
        parts = line.split(" ")
        if line and not line.startswith("#version") and not _is_merge(parts, pieces):
            raise UserError(f"{merges}:{number}: {line[:60]!r} merges no two entries of {vocabulary.name} into a third")
    return len(pieces)


def _is_merge(parts: list[str], pieces: dict[str, int]) -> bool:
    return len(parts) == 2 and all(piece in pieces for piece in (*parts, "".join(parts)))
