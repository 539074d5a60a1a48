"""Tokenizers: from a hub, from a folder, from a bare spiece.model, or trained on the spot."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zeropods.errors import UserError
from zeropods.files import first_line, read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


# The model hub.

ANSWER_SECONDS = 10.0


def hub_options(name: str) -> dict[str, bool]:
    """Options for `from_pretrained(name)`: the local copy alone where the hub cannot be reached.

    transformers asks five times for each file, with growing pauses, before it gives up; that is most of
    a minute without a word.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        HfApi().model_info(name, timeout=ANSWER_SECONDS)
    except (httpx2.TransportError, OfflineModeIsEnabled):
        return {"local_files_only": True}
    except (HfHubHTTPError, HFValidationError):
        pass  # It answered: what it has against the name, from_pretrained says better.
    return {}


# Tokenizers for T5.

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
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        raise UserError(f"{path}: not a SentencePiece model; expected a spiece.model or a folder") from None
    # `T5Tokenizer(vocab_file=...)` silently makes a tokenizer of 104 tokens; a folder is read right.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, f"{folder}/spiece.model")
        return _from_folder(Path(folder))


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, T5Tokenizer

    bare = (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file()
    try:
        found = (T5Tokenizer if bare else AutoTokenizer).from_pretrained(folder)
        # Where there is only a model's config.json, transformers makes a tokenizer of special tokens.
        if not found.get_vocab().keys() - {*found.all_special_tokens, *found.get_added_vocab()}:
            raise OSError("there are no files of one")
        return found
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{folder}: no tokenizer can be read there ({first_line(error)}); "
            "expected a spiece.model or a folder with tokenizer.json"
        ) from None


def _from_hub(name: str, instead: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **hub_options(name))
    except (ValueError, OSError) as error:
        raise UserError(
            f"tokenizer {name!r} is neither a file nor a folder, and the hub did not give it "
            f"({first_line(error)}); name a local folder or {instead}"
        ) from None


# A byte-level BPE tokenizer of GPT-2's kind.

GPT_TINY = "gpt-tiny"
VOCABULARY = 1_024
"""With the 256 bytes and the two special tokens."""
END, PAD = "<|endoftext|>", "<|pad|>"
MOST_CHARACTERS = 10_000_000
"""What is read to learn the merges: more text changes little in so small a vocabulary."""


def train_byte_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerBase:
    """Train on the first ten million characters; the same texts give the same tokenizer.

    It has no unknown token, since every byte is a token, and decoding gives the text back exactly.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first(texts, MOST_CHARACTERS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


# Tokenizers for causal models.

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

    vocabulary, merges = folder / BARE[0], folder / BARE[1]
    pieces = read_object(vocabulary, "fetch it again")
    if END not in pieces:
        raise UserError(f"{vocabulary}: no vocabulary of GPT-2's kind, with {END}; name a folder with tokenizer.json")
    for number, line in enumerate(merges.read_text(encoding="utf-8").splitlines(), start=1):
        if line and not line.startswith("#version") and line.replace(" ", "", 1) not in pieces:
            raise UserError(f"{merges}:{number}: {line!r} makes no piece of {BARE[0]}; fetch both files again")
    return GPT2TokenizerFast.from_pretrained(folder)


# Token ids of many texts.

Ids = NDArray[np.int32]
NO_LOSS = -100
"""Stands in labels where there is no loss."""


@dataclass
class TokenRows:
    """The rows of a split, without padding, and what was left out of them."""

    input_ids: list[Ids] = field(default_factory=list)
    labels: list[Ids] = field(default_factory=list)
    """Of a causal model as long as `input_ids`."""
    inputs_cut: int = 0
    """Number of rows that were cut at the limit; `labels_cut` likewise."""
    labels_cut: int = 0
    targets_lost: int | None = None
    """Targets whose text does not come back when their tokens are decoded (NFKC, spaces folded)."""
    documents: int | None = None
    leftover_tokens: int | None = None
    """Tokens of an incomplete last block that is left out."""


def folded(text: str) -> str:
    """The text with compatible characters and runs of spaces made one, as it is compared after decoding."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


class Encoder:
    """Encodes texts as their tokenizer does, and each different word only once.

    A tokenizer of T5's kind cuts at spaces before its model looks, so a word has the same ids wherever it
    stands. WikiSQL's 64,776 prompts with column names have 1.6 million words and 90,000 different ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._end = [tokenizer.eos_token_id]
        self._by_words = _cuts_at_spaces(self._backend)
        self._words: dict[str, list[int]] = {"": []}

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, the end token last."""
        if not self._by_words:
            return [np.array(e.ids, dtype=np.int32) for e in self._backend.encode_batch_fast(texts)]
        split, known = [text.split(" ") for text in texts], self._words
        new = list({word for words in split for word in words} - known.keys())
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        known.update(zip(new, (encoding.ids for encoding in encodings), strict=True))
        return [np.array([*chain.from_iterable(known[w] for w in words), *self._end], np.int32) for words in split]


def _cuts_at_spaces(backend: Tokenizer) -> bool:
    document = json.loads(backend.to_str())["pre_tokenizer"] or {}
    parts = document.get("pretokenizers", [])
    return [part["type"] for part in parts] == ["WhitespaceSplit", "Metaspace"] and parts[1][
        "prepend_scheme"
    ] == "always"
