"""`zeropods prepare`: turn raw data into a tokenized set with its tokenizer and manifest.

A task's raw data are read and tokenized as `TASK_DATA` says, for example by `WikiSQLData`; this
module serves all tasks.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from zeropods import __version__
from zeropods.data.encoding import (
    NO_LOSS,
    Ids,
    TokenRows,
    fingerprint,
    train_byte_tokenizer,
    train_tokenizer,
    unknown_id,
)
from zeropods.data.manifest import (
    FILE,
    SCHEMA_VERSION,
    Manifest,
    SplitStatistics,
    TokenStatistics,
    read_manifest,
)
from zeropods.data.squad import SquadData, read_squad, squad_file
from zeropods.data.text import TextData, hub_name
from zeropods.data.tokenizers import GPT_TINY, load_causal_tokenizer, load_tokenizer
from zeropods.data.wikisql import (
    MAX_SOURCE_TOKENS,
    MAX_TARGET_TOKENS,
    PROMPTS,
    WikiSQLData,
    count_examples,
    read_split,
    source_files,
    wikisql_splits,
)
from zeropods.errors import UserError, told_differences
from zeropods.files import sha256, write_json
from zeropods.outputs import new_folder
from zeropods.plan.known_models import T5_TINY
from zeropods.shipped_models import SHIPPED, model_source
from zeropods.tasks import LM, SQUAD, TASKS, TEXT2SQL, LearningTask

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import ListArray
    from transformers import PreTrainedTokenizerBase

LOSSES = ("answer", "all")
FEWEST_TOKENS = 2
"""Lowest token limit: a row of one token has nothing to predict, a source of one nothing to read
but its end token."""
TRAINED = "trained"
TRAINED_TOKENIZERS = {TRAINED, *T5_TINY}.difference(SHIPPED)
"""text2sql: names of tokenizers that are trained on the data."""
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt")
NOT_IN_MANIFEST = "versions, --plain-vocabulary or --text-field"
"""What may differ between two sets of the same data whose manifests show the same settings."""


class RawData(Protocol):
    """A task's raw data, opened."""

    splits: list[str]
    """`train`, and whichever of `dev` and `test` exist."""
    hashes: dict[str, str]
    """What identifies the data: the SHA-256 of each file, or the revision of a data set on the
    hub."""

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on."""

    def rows(
        self,
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        progress: Callable[[int], object],
    ) -> TokenRows:
        """The rows of a split; `progress` is called with the number done since its last call."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The request to `prepare`; fields that belong to other tasks have no effect.

    A value that is not allowed raises `UserError`.
    """

    task: str = TEXT2SQL
    """Name of a task: `text2sql`, `squad` or `lm`."""
    data: Path | str
    """A folder; for `lm` also the id of a data set on the hub, which is streamed."""
    tokenizer: str
    """A hub id, a folder, a spiece.model, or `t5-tiny`, whose tokenizer comes with the package.
    `trained` is one that is made of the data, and so is that of `gpt-tiny`."""
    limit: int | None = None
    """Number of examples to take from the start of each split; None for all."""
    prompt: str = "schema"
    """text2sql: `schema` or `question`."""
    complete_vocabulary: bool = True
    """text2sql: add the characters that T5's vocabulary lacks; False is the original recipe."""
    max_source_tokens: int | None = None
    """text2sql: the most tokens of a source; None for the prompt's own limit."""
    copies: int = 1
    """text2sql: number of rows of the split train for each question, all but the first `varied`."""
    max_seq_length: int = 512
    """squad: the most tokens of a row. lm: the number of tokens in a block."""
    loss_on: str | None = None
    """squad: `answer`, which is the same as None, or `all`. lm: always `all`."""
    dataset_config: str | None = None
    """Configuration of a data set on the hub, such as `en` of `allenai/c4`."""
    text_field: str = "text"
    """lm: the field of JSON lines, Parquet and data sets on the hub that holds the text."""

    def __post_init__(self) -> None:
        if self.prompt not in PROMPTS:
            raise UserError(f"prompt {self.prompt!r}; expected {' or '.join(PROMPTS)}")
        if self.loss_on not in (None, *LOSSES):
            raise UserError(f"loss_on {self.loss_on!r}; expected {' or '.join(LOSSES)}")
        if self.loss_on == "answer" and not self.kind.has_answers:
            raise UserError(
                f"loss_on 'answer': text of the task {self.task} has no answers; "
                "leave it out, or use all"
            )
        _check_least("--limit", self.limit, 1)
        _check_least("--max-source-tokens", self.max_source_tokens, FEWEST_TOKENS)
        _check_least("--copies", self.copies, 1)
        _check_least("--max-seq-length", self.max_seq_length, FEWEST_TOKENS)

    @property
    def kind(self) -> LearningTask:
        """The task; `KeyError` where there is none of that name."""
        return TASKS[self.task]

    @property
    def is_causal(self) -> bool:
        """Whether each row is a single text, as causal models read it."""
        return self.kind.is_one_text

    @property
    def prompt_of_task(self) -> str:
        """The prompt, if the task has a choice of them; otherwise its only one."""
        prompts = self.kind.prompts
        return self.prompt if self.prompt in prompts else prompts[0]

    @property
    def source_limit(self) -> int:
        """text2sql: the most tokens of a source, the end token included."""
        return self.max_source_tokens or MAX_SOURCE_TOKENS[self.prompt]

    @property
    def loss(self) -> str:
        """Which tokens of a causal row carry a loss: `answer` or `all`."""
        return self.loss_on or self.kind.loss_on

    def open(self) -> RawData:
        """Open the raw data; `UserError` if they do not exist."""
        return TASK_DATA[self.task].open(self)

    def rows(self) -> int:
        """text2sql: number of rows requested, in all splits together; reads the splits to count."""
        folder = Path(self.data)
        rows = 0
        for split in wikisql_splits(folder):
            copies = self.copies if split == "train" else 1
            rows += copies * count_examples(folder, split, self.limit)
        return rows


def _check_least(flag: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"{flag} {value}; expected at least {least}")


# The raw data of each task.


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """How the raw data of a task are read."""

    open: Callable[[Preparation], RawData]
    """Opens them to be turned into rows of tokens; `UserError` if they do not exist."""
    read: Callable[[Path, str], Iterable[Any]] | None = None
    """Yields the examples of a split of a folder, each with an `index` and a `question`; None for
    text, which has none."""
    check: Callable[[Path, str], object] | None = None
    """Raises `UserError` where the files of a split are missing, without reading them; None for
    text."""


def _open_wikisql(wanted: Preparation) -> RawData:
    return WikiSQLData(
        Path(wanted.data),
        limit=wanted.limit,
        prompt=wanted.prompt,
        max_source_tokens=wanted.source_limit,
        copies=wanted.copies,
    )


def _open_squad(wanted: Preparation) -> RawData:
    return SquadData(
        Path(wanted.data),
        limit=wanted.limit,
        max_seq_length=wanted.max_seq_length,
        loss_on=wanted.loss,
    )


def _open_text(wanted: Preparation) -> RawData:
    return TextData(
        wanted.data,
        dataset_config=wanted.dataset_config,
        text_field=wanted.text_field,
        limit=wanted.limit,
        max_seq_length=wanted.max_seq_length,
    )


TASK_DATA = {
    TEXT2SQL: TaskData(open=_open_wikisql, read=read_split, check=source_files),
    SQUAD: TaskData(open=_open_squad, read=read_squad, check=squad_file),
    LM: TaskData(open=_open_text),
}
"""How the raw data of each task are read, by its name."""


# The set that is made of the raw data.


def prepare(
    wanted: Preparation,
    out: Path,
    progress: Callable[[int], object] = lambda done: None,
    *,
    replaces: bool = True,
) -> tuple[Manifest, bool]:
    """Make the tokenized set at `out`, unless it is there already.

    Every split is a folder with the columns `input_ids` and `labels`: lists of int32, without
    padding.

    Args:
        progress: called with the number of rows, or of documents, done since the last call.
        replaces: whether a set of other data, settings or versions may be replaced.

    Returns:
        The set's manifest, and whether the set has been made now.

    Raises:
        UserError: the raw data do not exist or are at fault, or `out` holds something else than a
            set, or another set that may not be replaced.
    """
    raw = wanted.open()
    out = Path(out)
    key = _content_key(wanted, raw.hashes)
    settings = _settings(wanted)
    current = _set_at(out)
    if current is not None:
        if current.content_key == key:
            return current, False
        if not replaces:
            raise UserError(_difference(out, current, settings, raw.hashes))
    with _without_gc_and_bars(), new_folder(out) as folder:
        tokenizer = _tokenizer(wanted, raw)
        splits = {split: raw.rows(split, tokenizer, progress) for split in raw.splits}
        _save(splits, tokenizer, folder)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            content_key=key,
            tokenizer_fingerprint=fingerprint(tokenizer),
            vocabulary_size=len(tokenizer),
            source_sha256=raw.hashes,
            splits=_split_statistics(splits, unknown_id(tokenizer)),
            versions=_versions(),
            pad_token=str(tokenizer.pad_token) if wanted.is_causal else None,
            **settings,
        )
        write_json(folder / FILE, asdict(manifest))
    return manifest, True


def _settings(wanted: Preparation) -> dict[str, Any]:
    """The fields of the manifest that tell what was requested; None in those of other tasks."""
    is_causal = wanted.is_causal
    data = wanted.data
    if Path(data).is_dir():
        data = Path(data).resolve()
    return {
        "task": wanted.task,
        "data": str(data),
        "tokenizer": wanted.tokenizer,
        "prompt": wanted.prompt_of_task,
        "limit": wanted.limit,
        "max_source_tokens": None if is_causal else wanted.source_limit,
        "max_target_tokens": None if is_causal else MAX_TARGET_TOKENS,
        "copies": None if is_causal else wanted.copies,
        "max_seq_length": wanted.max_seq_length if is_causal else None,
        "loss_on": wanted.loss if is_causal else None,
    }


def _set_at(out: Path) -> Manifest | None:
    """The manifest of the set at `out`; None where there is nothing, or an empty folder.

    Raises:
        UserError: there is anything else.
    """
    if (out / FILE).is_file():
        return read_manifest(out)
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty_folder:
        raise UserError(
            f"{out}: holds something that is not a prepared data set; choose another --out"
        )
    return None


def _difference(
    out: Path, current: Manifest, settings: dict[str, object], hashes: dict[str, str]
) -> str:
    """How the set at `out` differs from the one that is requested, and what to do."""
    current_settings = asdict(current)
    differing = [name for name in settings if current_settings[name] != settings[name]]
    has_same_data = current.source_sha256 == hashes
    # The same data in another place make no other set.
    if has_same_data and "data" in differing:
        differing.remove("data")
    differences = told_differences(current_settings, settings, differing)
    if not differences:
        differences = NOT_IN_MANIFEST if has_same_data else "the data have changed"
    return (
        f"{out}: holds a set with other data, settings or versions ({differences}); "
        "choose another --out, or remove this one first"
    )


def _tokenizer(wanted: Preparation, raw: RawData) -> PreTrainedTokenizerBase:
    """The tokenizer that is requested, loaded or trained on the raw data.

    `gpt-tiny`, `trained` and T5's tiny models that do not come with the package are trained.
    """
    if wanted.is_causal:
        if wanted.tokenizer == GPT_TINY:
            return train_byte_tokenizer(raw.texts())
        return load_causal_tokenizer(wanted.tokenizer)
    if wanted.tokenizer in TRAINED_TOKENIZERS:
        return train_tokenizer(raw.texts())
    return load_tokenizer(wanted.tokenizer, complete=wanted.complete_vocabulary)


def _save(splits: dict[str, TokenRows], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the rows of each split to a folder of its name, and the tokenizer beside them."""
    from datasets import DatasetDict

    datasets = {split: _dataset(rows) for split, rows in splits.items()}
    DatasetDict(datasets).save_to_disk(folder)
    tokenizer.save_pretrained(folder / "tokenizer")


# What identifies a set.


def key_of_preparation(wanted: Preparation, made: Manifest) -> str:
    """The content key of the set that `prepare` would make now.

    Raw data that no longer exist count as unchanged since an earlier set was made; so do those on
    the hub, which may not answer and may have changed.

    Args:
        made: the manifest of the earlier set.
    """
    data = Path(wanted.data)
    is_path = isinstance(wanted.data, Path) or data.is_absolute()
    is_gone = is_path and not data.exists()
    is_on_hub = hub_name(str(wanted.data), wanted.dataset_config) in made.source_sha256
    if is_gone or is_on_hub:
        return _content_key(wanted, made.source_sha256)
    return _content_key(wanted, wanted.open().hashes)


def _content_key(wanted: Preparation, hashes: dict[str, str]) -> str:
    """SHA-256 of all that determines the rows: sources, settings, tokenizer, versions of packages
    that tokenize."""
    document = _settings(wanted)
    # What the raw data hold counts, and not where they lie.
    del document["data"]
    document["sources"] = hashes
    document["tokenizer"] = _tokenizer_key(wanted.tokenizer)
    document["schema_version"] = SCHEMA_VERSION
    document["versions"] = _versions()
    document["complete_vocabulary"] = None if wanted.is_causal else wanted.complete_vocabulary
    document["text_field"] = wanted.text_field if wanted.is_causal else None
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _tokenizer_key(tokenizer: str) -> str:
    """What tells two tokenizers apart without loading them: the content of their files, or the
    name."""
    source = Path(model_source(tokenizer))
    files = [source]
    if not source.is_file():
        files = [path for path in sorted(source.glob("*")) if path.name in TOKENIZER_FILES]
    return " ".join(map(sha256, files)) or tokenizer


def _versions() -> dict[str, str]:
    """Versions of the packages that tokenize and store; our own is the version of this code,
    installed or not."""
    versions = {"zeropods": __version__}
    for package in ("tokenizers", "sentencepiece", "datasets"):
        versions[package] = version(package)
    return versions


# Rows as they are stored and counted.


def _dataset(rows: TokenRows) -> Dataset:
    """The rows as a data set of two columns, each of lists of int32."""
    import pyarrow
    from datasets import Dataset

    columns = {"input_ids": _lists(rows.input_ids), "labels": _lists(rows.labels)}
    return Dataset(pyarrow.table(columns))


def _lists(column: list[Ids]) -> ListArray:
    """A column as Arrow stores it: the tokens of all lists one after another, and the offset at
    which each list begins."""
    import pyarrow

    offsets = np.cumsum([0, *map(len, column)]).astype(np.int32)
    return pyarrow.ListArray.from_arrays(offsets, np.concatenate(column))


def _split_statistics(
    splits: dict[str, TokenRows], unknown: int | None
) -> dict[str, SplitStatistics]:
    statistics = {}
    for split, rows in splits.items():
        statistics[split] = SplitStatistics(
            rows=len(rows.input_ids),
            source=_statistics(rows.input_ids, unknown, rows.inputs_cut),
            target=_statistics(rows.labels, unknown, rows.labels_cut),
            targets_lost=rows.targets_lost,
            targets_unreadable=rows.targets_unreadable,
            first_unreadable=rows.first_unreadable,
            documents=rows.documents,
            leftover_tokens=rows.leftover_tokens,
        )
    return statistics


def _statistics(column: list[Ids], unknown: int | None, cut: int) -> TokenStatistics:
    """Statistics of one of the columns `input_ids` and `labels`; labels without a loss, -100, are
    not counted.

    Args:
        unknown: id of the unknown token; None, which equals no id, if the tokenizer has none.
        cut: number of rows that have been cut.
    """
    tokens = np.concatenate(column)
    # `reduceat` sums from each row's first token to the next row's: rows are never empty.
    starts = np.cumsum([0, *map(len, column[:-1])])
    lengths = np.add.reduceat(tokens != NO_LOSS, starts, dtype=np.int64)
    unknowns = np.add.reduceat(tokens == unknown, starts, dtype=np.int64)
    return TokenStatistics(
        total=int(lengths.sum()),
        mean=round(float(lengths.mean()), 3),
        p50=int(np.percentile(lengths, 50)),
        p99=int(np.percentile(lengths, 99)),
        max=int(lengths.max()),
        truncated_rows=cut,
        unknown_tokens=int(unknowns.sum()),
        rows_with_unknown=int(np.count_nonzero(unknowns)),
    )


@contextmanager
def _without_gc_and_bars() -> Iterator[None]:
    """Switch off the search for cyclic garbage, which takes a quarter of the time and finds none,
    and the progress bars of `datasets`, which would be shown besides ours."""
    import datasets

    is_collecting = gc.isenabled()
    are_bars_hidden = datasets.are_progress_bars_disabled()
    gc.disable()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
        if not are_bars_hidden:
            datasets.enable_progress_bars()
