"""Raw questions or raw text to a tokenized set for a causal model: the tasks `squad` and `lm`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeropods.data.manifest import Manifest, SplitStatistics
from zeropods.data.prepare import (
    MOST_TOKENS,
    Progress,
    content_key,
    count_by_row,
    dataset_of,
    folded,
    token_statistics,
)
from zeropods.data.prompts import squad_prompt
from zeropods.data.squad import SquadEncoder, SquadExample, SquadRow, read_squad, squad_file, squad_splits
from zeropods.data.text import hub_name, join, open_corpus, overlap, pack
from zeropods.data.tokenizers import (
    GPT_TINY,
    Ids,
    first_tokens,
    load_causal_tokenizer,
    train_byte_tokenizer,
    unknown_id,
)
from zeropods.errors import UserError
from zeropods.files import sha256

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TASKS = ("squad", "lm")
LOSSES = ("answer", "all")
FEWEST_TOKENS = 2
"""A row of one token has nothing to predict."""
NO_LOSS = -100
CHUNK_QUESTIONS, CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 2_048, 1_024, 2_000_000


@dataclass(frozen=True, kw_only=True)
class CausalPreparation:
    """What is asked of `prepare` for a causal model."""

    task: str
    """`squad` or `lm`."""
    data: Path | str
    """A folder; for `lm` also the id of a data set at the hub, which is streamed."""
    tokenizer: str
    """A hub id, a folder, or `gpt-tiny`: trained on the data."""
    max_seq_length: int = 512
    """squad: the most tokens of a row. lm: the tokens of a block."""
    loss_on: str | None = None
    """squad: `answer`, which is also meant by None, or `all`. lm: always `all`."""
    limit: int | None = None
    """Only the first N questions, or documents, of each split."""
    dataset_config: str | None = None
    """A configuration of a data set at the hub, as `en` of `allenai/c4`."""
    text_field: str = "text"
    """lm: the field of JSON lines, Parquet and data sets at the hub that holds the text."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(f"task {self.task!r}; expected {' or '.join(TASKS)}")
        if self.loss_on not in (None, *LOSSES):
            raise UserError(f"loss_on {self.loss_on!r}; expected {' or '.join(LOSSES)}")
        if self.task == "lm" and self.loss_on == "answer":
            raise UserError("loss_on 'answer': text of the task lm has no answers; leave it out, or say all")
        if self.max_seq_length < FEWEST_TOKENS:
            raise UserError(f"max_seq_length {self.max_seq_length}; expected at least {FEWEST_TOKENS}")
        if self.task == "squad" and self.dataset_config is not None:
            raise UserError(f"dataset_config {self.dataset_config!r}: SQuAD is read from a folder; leave it out")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit {self.limit}; expected at least 1")

    @property
    def loss(self) -> str:
        """Which tokens carry a loss: `answer` or `all`."""
        return self.loss_on or ("answer" if self.task == "squad" else "all")

    def settings(self) -> dict[str, Any]:
        """Task, lengths and what carries a loss."""
        return {
            "task": self.task,
            "max_seq_length": self.max_seq_length,
            "loss_on": self.loss,
            "limit": self.limit,
            "text_field": self.text_field,
        }

    def open(self) -> SquadData | TextData:
        """The raw data of the task."""
        return SquadData(self) if self.task == "squad" else TextData(self)


def key_of_preparation(wanted: CausalPreparation, made: Manifest) -> str:
    """The content key of the set that `prepare` would make; `made` is one that it has made.

    Raw data that are gone, or at a hub, which may not answer and whose revision moves on, count as they were then.
    """
    data = Path(wanted.data)
    gone = not data.exists() and (isinstance(wanted.data, Path) or data.is_absolute())
    of_hub = hub_name(str(wanted.data), wanted.dataset_config) in made.source_sha256
    return content_key(wanted, made.source_sha256 if gone or of_hub else wanted.open().hashes)


class _CausalData:
    """What the sources of both tasks share. The first label of a row is -100 always: nothing predicts it."""

    splits: list[str]
    hashes: dict[str, str]

    def __init__(self, wanted: CausalPreparation) -> None:
        self._wanted = wanted

    def texts(self) -> Iterator[str]:
        """What a tokenizer learns from."""
        raise NotImplementedError

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that was asked for, or a byte-level one that is trained on the train split."""
        if self._wanted.tokenizer == GPT_TINY:
            return train_byte_tokenizer(self.texts())
        return load_causal_tokenizer(self._wanted.tokenizer)

    def described(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The task, its lengths and what carries a loss."""
        return {
            "task": self._wanted.task,
            "prompt": self._wanted.task,
            "max_source_tokens": None,
            "max_target_tokens": None,
            "max_seq_length": self._wanted.max_seq_length,
            "loss_on": self._wanted.loss,
            "pad_token": str(tokenizer.pad_token),
        }


class TextData(_CausalData):
    """The documents of a folder of text, or of a data set at the hub."""

    def __init__(self, wanted: CausalPreparation) -> None:
        super().__init__(wanted)
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
        return np.full(len(blocks), length), blocks.reshape(-1), leftover

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


class SquadData(_CausalData):
    """The questions of a folder in SQuAD's layout."""

    def __init__(self, wanted: CausalPreparation) -> None:
        super().__init__(wanted)
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
        while chunk := list(itertools.islice(examples, CHUNK_QUESTIONS)):
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


def _labels(ids: np.ndarray, lengths: np.ndarray, labelled: np.ndarray) -> np.ndarray:
    """(tokens,) the ids of the last `labelled` tokens of each row, -100 before them."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    with_loss = np.arange(len(ids)) >= ends - np.repeat(labelled, lengths)
    return np.where(with_loss, ids, np.int32(NO_LOSS))


def _lost(examples: list[SquadExample], rows: list[SquadRow], tokenizer: PreTrainedTokenizerBase) -> int:
    """Answers whose text does not come back from their tokens."""
    tokens = [row.ids[len(row.ids) - row.answer : -1].tolist() for row in rows]
    texts = tokenizer.backend_tokenizer.decode_batch(tokens, skip_special_tokens=True)
    return sum(folded(text) != folded(e.answers[0]) for text, e in zip(texts, examples, strict=True))
