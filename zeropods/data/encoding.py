"""Texts encoded as rows of token ids for a prepared set, and tokenizers that are trained on its
texts."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zeropods.data.tokenizers import END, complete_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A tokenizer for T5 that is trained on texts.

TINY_VOCABULARY = 1_000
"""Number of pieces of a trained tokenizer, before characters are added to it."""
TINY_ALPHABET = 300
"""Number of characters that a trained tokenizer knows, the most common ones; all others are unknown
to it."""
PIECE_BORDERS = r"▁?\p{L}+|▁?\p{N}|▁?[^\p{L}\p{N}▁]"
"""Parts whose borders no piece of a trained tokenizer crosses: letters, single digits or signs,
each with its space."""


def train_tokenizer(
    texts: Iterable[str], vocabulary: int = TINY_VOCABULARY
) -> PreTrainedTokenizerBase:
    """Train a unigram tokenizer of T5's kind; the same texts give the same tokenizer.

    The pieces are byte-pair merges, so a frequent word is one piece; their scores are the
    logarithms of their shares. SentencePiece's own unigram trainer takes its candidates from
    repeated parts of *different* words: in texts as narrow as ours, `SELECT` becomes five pieces.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import T5Tokenizer

    merges = Tokenizer(models.BPE())
    merges.normalizer = normalizers.NFKC()
    merges.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Split(Regex(PIECE_BORDERS), "isolated"),
        ]
    )
    texts = list(texts)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, limit_alphabet=TINY_ALPHABET, show_progress=False
    )
    merges.train_from_iterator(texts, trainer)
    counts = Counter[str]()
    for encoding in merges.encode_batch(texts):
        counts.update(encoding.tokens)
    total = counts.total()
    pieces = []
    for piece in sorted(merges.get_vocab()):
        # Half a count more: a piece that occurs only within longer ones has the count 0, of which
        # there is no logarithm.
        share = (counts[piece] + 0.5) / total
        pieces.append((piece, math.log(share)))
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = T5Tokenizer(vocab=specials + pieces, extra_ids=0)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    return complete_vocabulary(tokenizer)


# A byte-level BPE tokenizer of GPT-2's kind.

BYTE_VOCABULARY = 1_024
"""Vocabulary size of a trained tokenizer, including the 256 bytes and the two special tokens."""
PAD = "<|pad|>"
MOST_CHARACTERS = 10_000_000
"""Number of characters read to learn the merges: more text would change little in such a small
vocabulary."""


def train_byte_tokenizer(
    texts: Iterable[str], vocabulary: int = BYTE_VOCABULARY
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the first ten million characters; the same texts give the same
    tokenizer.

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
    backend.train_from_iterator(_first_characters(texts, MOST_CHARACTERS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _first_characters(texts: Iterable[str], most: int) -> Iterator[str]:
    """The texts up to this number of characters, the last one cut."""
    remaining = most
    for text in texts:
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return


# Properties of a tokenizer.


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that determines the ids: the backend's definition without padding and
    truncation."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document.update(padding=None, truncation=None)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that this tokenizer puts before every text, such as Llama's `<s>`; often none."""
    encoding = tokenizer.backend_tokenizer.encode("a")
    return encoding.ids[: encoding.special_tokens_mask.index(0)]


def unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the unknown token; None if the tokenizer can read everything, as GPT-2's can.

    GPT-2's tokenizer names its end token as its unknown token.
    """
    others = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    unknown = tokenizer.unk_token_id
    return None if unknown in others else unknown


# Token ids of many texts.

Ids = NDArray[np.int32]
NO_LOSS = -100
"""Label of a token that carries no loss."""


@dataclass
class TokenRows:
    """The rows of a split, without padding, and what was left out of them."""

    input_ids: list[Ids] = field(default_factory=list)
    labels: list[Ids] = field(default_factory=list)
    """Labels of each row; a causal model's are as many as the row's `input_ids`."""
    inputs_cut: int = 0
    """Number of rows whose inputs were cut at the limit; `labels_cut` is the same for the
    labels."""
    labels_cut: int = 0
    targets_lost: int | None = None
    """Number of targets whose text does not come back when their tokens are decoded (NFKC, spaces
    folded)."""
    targets_unreadable: int | None = None
    """text2sql: number of targets that are not read back as their query, so that no answer to them
    can be right."""
    first_unreadable: str | None = None
    """Place and text of the first target that is not read back."""
    documents: int | None = None
    """lm: number of documents that were read."""
    leftover_tokens: int | None = None
    """Number of tokens in an incomplete last block, which is left out."""


def folded(text: str) -> str:
    """The text in NFKC and with single spaces, the form in which texts are compared after
    decoding."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def count_lost(texts: Sequence[str], decoded: Sequence[str]) -> int:
    """The number of texts that do not come back when their tokens are decoded."""
    pairs = zip(texts, decoded, strict=True)
    return sum(folded(text) != folded(after) for text, after in pairs)


class Encoder:
    """Encodes texts as their tokenizer does, but encodes each distinct word only once.

    A tokenizer of T5's kind splits at spaces before its model runs, so a word has the same ids
    wherever it occurs. WikiSQL's 64,776 prompts with column names have 1.6 million words, of which
    90,000 are distinct.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._end = [tokenizer.eos_token_id]
        self._ids: dict[str, list[int]] = {"": []}
        """The ids of each word that has occurred."""
        pre_tokenizer = json.loads(self._backend.to_str())["pre_tokenizer"] or {}
        steps = []
        for step in pre_tokenizer.get("pretokenizers", ()):
            steps.append((step["type"], step.get("prepend_scheme")))
        self._splits_at_spaces = steps == [("WhitespaceSplit", None), ("Metaspace", "always")]
        """Whether the tokenizer is of T5's kind; the texts of any other are encoded whole."""

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, the end token last."""
        if not self._splits_at_spaces:
            encodings = self._backend.encode_batch_fast(texts)
            return [np.array(encoding.ids, np.int32) for encoding in encodings]
        words_of_texts = [text.split(" ") for text in texts]
        self._encode_words(set(chain.from_iterable(words_of_texts)))
        rows = []
        for words in words_of_texts:
            ids = chain.from_iterable(self._ids[word] for word in words)
            rows.append(np.array([*ids, *self._end], np.int32))
        return rows

    def _encode_words(self, words: set[str]) -> None:
        """Encode those of the words that have not occurred before, and remember their ids."""
        new = list(words - self._ids.keys())
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._ids[word] = encoding.ids
