"""Plain text as rows of a causal model: blocks of tokens without padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from zeropods.data.building import MOST_TOKENS, Progress, count_by_row, dataset_of, token_statistics
from zeropods.data.causal_tokenizer import first_tokens, unknown_id
from zeropods.data.corpus import open_corpus
from zeropods.data.manifest import SplitStatistics
from zeropods.data.packing import Ids, join, overlap, pack, unpack
from zeropods.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from zeropods.data.causal import CausalPreparation

CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 1_024, 2_000_000
NO_LOSS = -100


class LmSource:
    """The documents of a folder of text, or of a data set at the hub."""

    def __init__(self, wanted: CausalPreparation) -> None:
        self._wanted = wanted
        self._corpus = open_corpus(wanted.data, wanted.dataset_config, wanted.text_field)
        self.splits = self._corpus.splits
        self.hashes = self._corpus.hashes

    def texts(self) -> Iterator[str]:
        """What a tokenizer learns from: the documents of train."""
        return self._documents("train")

    def build(
        self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ) -> tuple[Dataset, SplitStatistics]:
        """The blocks of a split and their statistics.

        Blocks of train have exactly `max_seq_length` tokens; what is left of the last is counted. Those of
        dev and test overlap by a token and the last may be short, so that every token is predicted but the first.
        """
        documents = self._tokens(split, tokenizer, progress)
        tokens = join(documents, tokenizer.eos_token_id)
        lengths, ids, leftover = self._blocks(split, tokens)
        labels = ids.copy()
        labels[np.cumsum(lengths) - lengths] = NO_LOSS
        unknowns = ids == unknown_id(tokenizer)
        statistics = SplitStatistics(
            rows=len(lengths),
            source=token_statistics(lengths, 0, count_by_row(unknowns, lengths)),
            target=token_statistics(lengths - 1, 0, count_by_row(unknowns & (labels != NO_LOSS), lengths)),
            targets_lost=None,
            documents=len(documents),
            leftover_tokens=leftover,
        )
        return dataset_of(input_ids=(lengths, ids), labels=(lengths, labels)), statistics

    def _blocks(self, split: str, tokens: Ids) -> tuple[np.ndarray, Ids, int]:
        """Tokens of each block, the blocks one behind the other, and how many tokens are left over."""
        length, place = self._wanted.max_seq_length, f"{self._wanted.data}, {split}"
        if split == "train" and len(tokens) < length:
            raise UserError(
                f"{place}: {len(tokens)} tokens, fewer than one block of {length}; "
                "give more text or a smaller --max-seq-length"
            )
        if len(tokens) < 2:
            raise UserError(f"{place}: {len(tokens)} tokens; expected 2 at least, the second to be predicted")
        if split != "train":
            return *overlap(tokens, length), 0
        blocks, leftover = pack(tokens, length)
        return np.full(len(blocks), length), unpack(blocks), leftover

    def _tokens(self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> list[Ids]:
        encode, first = tokenizer.backend_tokenizer.encode_batch_fast, first_tokens(tokenizer)
        tokens: list[Ids] = []
        total = 0
        for chunk in _chunks(self._documents(split)):
            new = [np.array([*first, *encoding.ids], np.int32) for encoding in encode(chunk, add_special_tokens=False)]
            tokens += new
            total += sum(map(len, new))
            if total > MOST_TOKENS:
                raise UserError(
                    f"{self._wanted.data}, {split}: more than {MOST_TOKENS:,} tokens; say --limit DOCUMENTS"
                )
            progress(len(chunk))
        return tokens

    def _documents(self, split: str) -> Iterator[str]:
        return itertools.islice(self._corpus.documents(split), self._wanted.limit)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of a thousand texts, or of fewer that are long: what is encoded at once stays in memory."""
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
