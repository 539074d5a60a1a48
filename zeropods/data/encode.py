"""Token ids of many texts, word by word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]


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
        split = [text.split(" ") for text in texts]
        self._learn({word for words in split for word in words})
        known = self._words
        return [np.array([*chain.from_iterable(known[w] for w in words), *self._end], np.int32) for words in split]

    def _learn(self, words: set[str]) -> None:
        new = list(words - self._words.keys())
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        self._words.update(zip(new, (encoding.ids for encoding in encodings), strict=True))


def _cuts_at_spaces(backend: Tokenizer) -> bool:
    document = json.loads(backend.to_str())["pre_tokenizer"] or {}
    parts = document.get("pretokenizers", [])
    return [part["type"] for part in parts] == ["WhitespaceSplit", "Metaspace"] and parts[1][
        "prepend_scheme"
    ] == "always"
