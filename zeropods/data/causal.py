"""Raw questions or raw text -> a tokenized set for a causal model, with its tokenizer and manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from zeropods.data.building import Progress, build_once, key_of, save_set, tokenizer_identity, versions
from zeropods.data.byte_tokenizer import GPT_TINY, train_byte_tokenizer
from zeropods.data.causal_lm import LmSource
from zeropods.data.causal_squad import SquadSource
from zeropods.data.causal_tokenizer import load_causal_tokenizer
from zeropods.data.corpus_hub import hub_name
from zeropods.data.manifest import SCHEMA_VERSION, Manifest, SplitStatistics
from zeropods.data.tokenizer import fingerprint
from zeropods.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TASKS = ("squad", "lm")
LOSSES = ("answer", "all")
FEWEST_TOKENS = 2
"""A row of one token has nothing to predict."""


@dataclass(frozen=True, kw_only=True)
class CausalPreparation:
    """What is asked of `prepare_causal`."""

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


def prepare_causal(
    wanted: CausalPreparation, out: Path, progress: Progress = lambda rows: None
) -> tuple[Manifest, bool]:
    """Make the tokenized set at `out`; returns its manifest, and False if it was there already.

    Every split is a folder of the columns `input_ids` and `labels`: lists of int32, in each row of the
    same length, -100 where there is no loss. The first label of a row is -100 always: nothing predicts it.
    `progress` is called with the number of questions, or documents, done since the last call.
    """
    source = _source(wanted)
    key = content_key(wanted, source.hashes)
    return build_once(Path(out), key, lambda folder: _build(wanted, source, key, folder, progress))


def key_of_preparation(wanted: CausalPreparation, made: Manifest) -> str:
    """The content key of the set that `prepare_causal` would make; `made` is one that it has made.

    Raw data that are gone, or at a hub, which may not answer and whose revision moves on, count as they were then.
    """
    data = Path(wanted.data)
    gone = not data.exists() and (isinstance(wanted.data, Path) or data.is_absolute())
    of_hub = hub_name(str(wanted.data), wanted.dataset_config) in made.source_sha256
    hashes = made.source_sha256 if gone or of_hub else _source(wanted).hashes
    return content_key(wanted, hashes)


def content_key(wanted: CausalPreparation, hashes: dict[str, str]) -> str:
    """SHA-256 over what decides the result: sources, settings, tokenizer, versions of what tokenizes."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "sources": hashes,
        "tokenizer": tokenizer_identity(wanted.tokenizer),
        "task": wanted.task,
        "max_seq_length": wanted.max_seq_length,
        "loss_on": wanted.loss,
        "limit": wanted.limit,
        "text_field": wanted.text_field,
        "versions": versions(),
    }
    return key_of(document)


class CausalSource(Protocol):
    """Raw data of a task, and how they become rows."""

    splits: list[str]
    hashes: dict[str, str]

    def texts(self) -> Iterator[str]:
        """What a tokenizer learns from."""

    def build(
        self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ) -> tuple[Dataset, SplitStatistics]:
        """The rows of a split and their statistics."""


def _source(wanted: CausalPreparation) -> CausalSource:
    return SquadSource(wanted) if wanted.task == "squad" else LmSource(wanted)


def _build(wanted: CausalPreparation, source: CausalSource, key: str, folder: Path, progress: Progress) -> Manifest:
    if wanted.tokenizer == GPT_TINY:
        tokenizer = train_byte_tokenizer(source.texts())
    else:
        tokenizer = load_causal_tokenizer(wanted.tokenizer)
    built = {split: source.build(split, tokenizer, progress) for split in source.splits}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        content_key=key,
        task=wanted.task,
        prompt=wanted.task,
        tokenizer=wanted.tokenizer,
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocabulary_size=len(tokenizer),
        max_source_tokens=None,
        max_target_tokens=None,
        limit=wanted.limit,
        source_sha256=source.hashes,
        splits={split: statistics for split, (_, statistics) in built.items()},
        versions=versions(),
        max_seq_length=wanted.max_seq_length,
        loss_on=wanted.loss,
        pad_token=str(tokenizer.pad_token),
    )
    save_set(folder, {split: rows for split, (rows, _) in built.items()}, tokenizer, manifest)
    return manifest
