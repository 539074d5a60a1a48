"""The pieces of a SentencePiece tokenizer, indexed by what they spell."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "▁"
"""What SentencePiece writes for a space (U+2581)."""


class Vocabulary:
    """Which pieces begin a given text, with letter case or without.

    A piece that has a space anywhere but in front is left out: with T5's pre-tokenizer, which cuts before
    every space, no text is ever encoded with one (T5's own vocabulary has none).
    """

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        eos: int,
        unk: int,
        pad: int,
        special: Collection[int] = (),
        normalizer: Callable[[str], str] | None = None,
    ) -> None:
        """Index the pieces.

        Args:
            pieces: the spelling of each id, `▁` for a space.
            special: ids that spell nothing; `eos`, `unk` and `pad` are among them in any case.
            normalizer: what the tokenizer does to a text first; NFKC by default.
        """
        self.eos, self.unk, self.pad = eos, unk, pad
        self.pieces = [piece.replace(SPACE, " ") for piece in pieces]
        self._normalizer = normalizer or (lambda text: unicodedata.normalize("NFKC", text))
        self._index = self._indexed({eos, unk, pad, *special})
        self._known = {self.pieces[id_] for ids in self._index.values() for id_ in ids}
        self.longest = max(map(len, self._index), default=0)
        if " " not in self._known:
            raise ValueError("vocabulary: no piece '▁'; expected the pieces of a SentencePiece tokenizer")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """The vocabulary of a fast tokenizer of T5's kind. Takes about 0.2 s: build it once."""
        backend = tokenizer.backend_tokenizer
        return cls(
            tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))),
            eos=tokenizer.eos_token_id,
            unk=tokenizer.unk_token_id,
            pad=tokenizer.pad_token_id,
            special=backend.get_added_tokens_decoder().keys(),
            normalizer=backend.normalizer.normalize_str if backend.normalizer else None,
        )

    def normalize(self, text: str) -> str:
        """The text as the tokenizer sees it: normal form, single spaces, none at the ends."""
        return " ".join(self._normalizer(text).replace(SPACE, " ").split())

    def prefixes(self, folded: str, start: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The pieces that stand at `start` of a folded text, whatever their case: (ids, end) by length."""
        for end in range(start + 1, len(folded) + 1):
            ids = self._index.get(folded[start:end])
            if ids is None:
                return
            if ids:
                yield ids, end

    def unknown(self, character: str) -> str | None:
        """The character, or its other case, that is encoded as `<unk>`; None where each has a piece.

        T5 has pieces for `š` but none for `Š`: there `<unk>` can only mean the upper case.
        """
        for variant in (character, character.upper(), character.lower()):
            if len(variant) == 1 and variant not in self._known:
                return variant
        return None

    def _indexed(self, special: set[int]) -> dict[str, tuple[int, ...]]:
        """Folded piece -> ids; a text that only begins longer pieces -> no ids."""
        index: dict[str, tuple[int, ...]] = {}
        for id_, piece in enumerate(self.pieces):
            if id_ in special or not piece or " " in piece[1:]:
                continue
            folded = fold(piece)
            index[folded] = (*index.get(folded, ()), id_)
            for end in range(1, len(folded)):
                index.setdefault(folded[:end], ())
        return index


def fold(text: str) -> str:
    """Lower case of the same length: a character whose lower case is longer (`İ`) stays."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
