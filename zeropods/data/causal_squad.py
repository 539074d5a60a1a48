"""SQuAD as rows of a causal model: a question a row."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zeropods.data.building import Progress, count_by_row, dataset_of, token_statistics
from zeropods.data.causal_tokenizer import unknown_id
from zeropods.data.checksum import sha256
from zeropods.data.manifest import SplitStatistics
from zeropods.data.squad import SquadExample, read_squad, squad_file, squad_splits
from zeropods.data.squad_prompt import squad_prompt
from zeropods.data.squad_tokens import SquadEncoder, SquadRow
from zeropods.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from zeropods.data.causal import CausalPreparation

CHUNK = 2_048
NO_LOSS = -100


class SquadSource:
    """The questions of a folder in SQuAD's layout."""

    def __init__(self, wanted: CausalPreparation) -> None:
        self._wanted = wanted
        self._folder = Path(wanted.data)
        if not self._folder.is_dir():
            raise UserError(f"{wanted.data}: no such folder; fetch SQuAD: zeropods data get squad --out DIR")
        self.splits = squad_splits(self._folder)
        files = [squad_file(self._folder, split) for split in self.splits]
        self.hashes = {path.name: sha256(path) for path in files}

    def texts(self) -> Iterator[str]:
        """What a tokenizer learns from: the rows of train."""
        for example in self._examples("train"):
            yield f"{squad_prompt(example.question, example.context)} {example.answers[0]}"

    def build(
        self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ) -> tuple[Dataset, SplitStatistics]:
        """The rows of a split and their statistics.

        A context of train that is too long keeps the part around its answer. One of dev or test keeps its
        beginning, as it will when the question is asked: where the answer lies is not known then.
        """
        encoder = SquadEncoder(tokenizer, self._wanted.max_seq_length)
        examples, rows, lost = self._examples(split), list[SquadRow](), 0
        while chunk := list(itertools.islice(examples, CHUNK)):
            new = encoder.rows(chunk, keep_answer=split == "train")
            lost += _lost(chunk, new, tokenizer)
            rows += new
            progress(len(chunk))
        return self._built(rows, lost, unknown_id(tokenizer))

    def _built(self, rows: list[SquadRow], lost: int, unknown: int | None) -> tuple[Dataset, SplitStatistics]:
        lengths = np.array([len(row.ids) for row in rows])
        ids = np.concatenate([row.ids for row in rows])
        answers = np.array([row.answer for row in rows])
        labels = _labels(ids, lengths, answers if self._wanted.loss == "answer" else lengths - 1)
        unknowns, with_loss = ids == unknown, labels != NO_LOSS
        statistics = SplitStatistics(
            rows=len(rows),
            source=token_statistics(lengths, sum(row.cut for row in rows), count_by_row(unknowns, lengths)),
            target=token_statistics(count_by_row(with_loss, lengths), 0, count_by_row(unknowns & with_loss, lengths)),
            targets_lost=lost,
        )
        return dataset_of(input_ids=(lengths, ids), labels=(lengths, labels)), statistics

    def _examples(self, split: str) -> Iterator[SquadExample]:
        return itertools.islice(read_squad(self._folder, split), self._wanted.limit)


def _labels(ids: np.ndarray, lengths: np.ndarray, labelled: np.ndarray) -> np.ndarray:
    """(tokens,) the ids of the last `labelled` tokens of each row, -100 before them."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    with_loss = np.arange(len(ids)) >= ends - np.repeat(labelled, lengths)
    return np.where(with_loss, ids, np.int32(NO_LOSS))


def _lost(examples: list[SquadExample], rows: list[SquadRow], tokenizer: PreTrainedTokenizerBase) -> int:
    """Answers whose text does not come back from their tokens."""
    tokens = [row.ids[len(row.ids) - row.answer : -1].tolist() for row in rows]
    texts = tokenizer.backend_tokenizer.decode_batch(tokens, skip_special_tokens=True)
    return sum(_folded(text) != _folded(e.answers[0]) for text, e in zip(texts, examples, strict=True))


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())
