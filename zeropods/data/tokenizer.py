"""Tokenizers for T5: from a hub, a folder, a bare spiece.model, or trained on the spot."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.data.hub import hub_options
from zeropods.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TINY = "t5-tiny"
TINY_VOCABULARY = 1_000
TINY_ALPHABET = 300
"""The commonest characters; others are unknown to a trained tokenizer."""
PARTS = r"▁?\p{L}+|▁?\p{N}|▁?[^\p{L}\p{N}▁]"
"""What no piece of a trained tokenizer crosses: letters, single digits, single signs, each with its space."""
MISSING_CHARACTERS = "<{}~^"
"""Characters of WikiSQL queries that T5's vocabulary lacks: encoded as `<unk>`, decoded as nothing."""


def load_tokenizer(
    source: str, *, complete: bool = True, instead: str = f"a spiece.model or {TINY}"
) -> PreTrainedTokenizerBase:
    """The tokenizer that `source` names.

    Args:
        source: a hub id, a folder with a tokenizer, or a SentencePiece model file.
        complete: add the characters that T5's vocabulary lacks as pieces of their own.
        instead: what an error names besides a local folder.
    """
    path = Path(source)
    if path.is_file():
        tokenizer = _from_sentencepiece(path)
    elif path.is_dir():
        tokenizer = _from_folder(path)
    else:
        tokenizer = _from_hub(source, instead)
    return complete_vocabulary(tokenizer) if complete else tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int = TINY_VOCABULARY) -> PreTrainedTokenizerBase:
    """Train a unigram tokenizer of T5's kind; the same texts give the same tokenizer.

    The pieces are byte-pair merges, so that a frequent word is one piece; their scores are the logarithms
    of their shares. SentencePiece's own unigram trainer takes its candidates from repeated parts of
    *different* words: in texts as narrow as ours `SELECT` becomes five pieces.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import T5Tokenizer

    merges = Tokenizer(models.BPE())
    merges.normalizer = normalizers.NFKC()
    merges.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Split(Regex(PARTS), "isolated"),
        ]
    )
    texts = list(texts)
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, limit_alphabet=TINY_ALPHABET, show_progress=False)
    merges.train_from_iterator(texts, trainer)
    counts = Counter(piece for encoding in merges.encode_batch(texts) for piece in encoding.tokens)
    total = sum(counts.values())
    pieces = [(p, math.log((counts[p] + 0.5) / total)) for p in sorted(merges.get_vocab())]
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = T5Tokenizer(vocab=specials + pieces, extra_ids=0)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    return complete_vocabulary(tokenizer)


def complete_vocabulary(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Append the missing characters, each alone and after a space, as pieces of the unigram model.

    Pieces, not `add_tokens`: an added token cuts the text before the model sees it, and the space
    before it is lost. T5's embedding has 32,128 rows for 32,100 ids, so no resize is needed.
    """
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    missing = [c for c in MISSING_CHARACTERS if tokenizer.unk_token_id in tokenizer(c).input_ids]
    if not missing:
        return tokenizer
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    for character in missing:
        vocabulary += [["▁" + character, -4.0], [character, -6.0]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(json.dumps(document)),
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        clean_up_tokenization_spaces=False,
    )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides the ids: the backend's whole definition."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document.update(padding=None, truncation=None)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _from_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    _check_sentencepiece(path)
    # `T5Tokenizer(vocab_file=...)` silently makes a tokenizer of 104 tokens; a folder is read right.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, f"{folder}/spiece.model")
        return _from_folder(Path(folder))


def _check_sentencepiece(path: Path) -> None:
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        raise UserError(f"{path}: not a SentencePiece model; expected a spiece.model or a folder") from None


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, T5Tokenizer

    bare = (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file()
    try:
        if bare:
            return T5Tokenizer.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{folder}: no tokenizer can be read there ({_first_line(error)}); "
            "expected a spiece.model or a folder with tokenizer.json"
        ) from None


def _from_hub(name: str, instead: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **hub_options(name))
    except (ValueError, OSError) as error:
        raise UserError(
            f"tokenizer {name!r} is neither a file nor a folder, and the hub did not give it "
            f"({_first_line(error)}); name a local folder or {instead}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
