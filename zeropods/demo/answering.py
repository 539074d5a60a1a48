"""The models and tables that the page offers, and the answer to a question.

An answer is a query and its result, and whether it is right.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.own_data import read_csv, shown
from zeropods.data.sample import write_sample
from zeropods.data.wikisql import (
    MAX_SOURCE_TOKENS,
    PROMPTS,
    Example,
    has_split,
    read_split,
    source_of,
    table_titles,
)
from zeropods.errors import UserError
from zeropods.measure.record import CONFIG
from zeropods.measure.score_json import QueryScore
from zeropods.report.entry import Entry, find_runs, read_entry
from zeropods.sql.query import AGGREGATES, Execution, Query, is_usable
from zeropods.sql.table import Cell, SQLTable
from zeropods.tasks import TEXT2SQL
from zeropods.train.saved_models import (
    model_config,
    model_folder,
    prepared_of,
    raw_data_of,
    task_of,
)

if TYPE_CHECKING:
    from zeropods.evaluate.generate import QueryAnswerer


LOADED = 2
"""Number of models kept in memory: as many as the page shows side by side."""


# The trained models below the folders that a user names, the best first.


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A text-to-SQL model that can be asked."""

    name: str
    folder: Path
    """Run folder or model folder."""
    about: tuple[str, ...]
    """Model, technique and the share of its answers that is right, as text for people."""
    order: tuple[float, float, float]
    """Sort key, least for the best: negated accuracy, loss, and the negated time when the weights
    were written."""
    prepared: Path | None
    """The tokenized set that the run was trained on, if it still exists."""
    trained_on: str | None
    """Where the tokenized set was, whether it still exists or not; None for a model folder, which
    does not record it."""
    source_limit: int
    """Maximum number of tokens of a question with its columns in training."""

    @property
    def label(self) -> str:
        """One line for people."""
        return " · ".join(dict.fromkeys((*self.about, self.name)))


def trained_models(folders: Sequence[Path]) -> list[TrainedModel]:
    """All models that can be asked, the best first.

    The higher accuracy comes first; where it is equal or missing, the lower validation loss, then
    the newer weights.

    Args:
        folders: run folders, model folders, or folders with runs below them.

    Raises:
        UserError: a folder does not exist, a run or model folder that was named cannot be asked, or
            there is no model.
    """
    models: dict[Path, TrainedModel] = {}
    for folder in map(Path, folders):
        resolved = folder.resolve()
        is_model = (resolved / "config.json").is_file() and any(resolved.glob("*.safetensors"))
        runs = {resolved.name: resolved} if is_model else find_runs([folder])
        for name, run in runs.items():
            try:
                model = _model(run, name)
            except (UserError, OSError):
                was_named = run == resolved
                if was_named:
                    raise
                # Among many runs, one of another task, or one that failed or still trains and has
                # no model, is no error.
                continue
            models.setdefault(run, model)
    if not models:
        named = ", ".join(map(str, folders)) or "no folder"
        fault = "no trained text-to-SQL model there"
        raise UserError(f"{named}: {fault}; create one with textsql_train.py --outputdir")
    with_names = _with_different_names(list(models.values()))
    return sorted(with_names, key=lambda model: model.order)


def _with_different_names(models: Sequence[TrainedModel]) -> list[TrainedModel]:
    """The models, of which those that share a name are named by their folders."""
    count_by_name = Counter(model.name for model in models)
    with_names = []
    for model in models:
        if count_by_name[model.name] > 1:
            with_names.append(replace(model, name=str(model.folder)))
        else:
            with_names.append(model)
    return with_names


def _model(folder: Path, name: str) -> TrainedModel:
    """The model in a run or model folder, with what its run says about it.

    Raises:
        UserError: the folder holds no model, or one that is not for text-to-SQL or does not record
            its prompt.
    """
    task = task_of(folder)
    with_weights = model_folder(folder)
    if task != TEXT2SQL:
        raise UserError(f"{folder}: is a {task} run; the demo needs text-to-SQL models")
    prompt = model_config(folder).get("prompt")
    if prompt not in PROMPTS:
        raise UserError(f"{folder}: does not record its prompt; train it with textsql_train.py")
    # A model folder has no record, so its entry is empty.
    entry = read_entry(folder, name)
    accuracy = _accuracy(entry) or 0.0
    losses = entry.record.eval_losses if entry.record else []
    last_loss = losses[-1].loss if losses else math.inf
    prepared = _prepared(entry)
    source_limit = read_manifest(prepared).max_source_tokens if prepared else None
    written = (with_weights / CONFIG).stat().st_mtime
    return TrainedModel(
        name=name,
        folder=folder,
        about=_about(entry),
        order=(-accuracy, last_loss, -written),
        prepared=prepared,
        trained_on=entry.config.dataset.get("path") if entry.config else None,
        source_limit=source_limit or MAX_SOURCE_TOKENS[prompt],
    )


def _accuracy(entry: Entry) -> float | None:
    """The share of a run's answers that is right, by their execution if that was measured, else by
    their logical form; None if they have not been scored."""
    if not isinstance(entry.score, QueryScore):
        return None
    if entry.score.execution_accuracy is None:
        return entry.score.logical_form_accuracy
    return entry.score.execution_accuracy


def _prepared(entry: Entry) -> Path | None:
    """The tokenized set that a run was trained on, if it still exists."""
    if entry.config is None:
        return None
    prepared = prepared_of(entry.folder, entry.config)
    return prepared if (prepared / FILE).is_file() else None


def _about(entry: Entry) -> tuple[str, ...]:
    """Model, technique and the share of its answers that is right, as text for people."""
    accuracy = _accuracy(entry)
    right = "not scored" if accuracy is None else f"{accuracy:.0%} right on {entry.split}"
    run = entry.config
    if run is None or not run.technique:
        return ("model", right)
    technique = "no ZeRO" if run.technique == "none" else run.technique
    return (run.model_id, technique, right)


# One question to one model.


@dataclass(frozen=True, kw_only=True)
class QueryResult:
    """The result of a query on its table."""

    query: Query
    cells: list[Cell] | None
    """The selected cells as the table spells them, or the aggregate; None if SQLite could not run
    the query."""
    executed: list[Cell] | None
    """The same cells as SQLite holds them, in lower case; these decide whether an answer is
    right."""
    rows: list[tuple[Cell, ...]] | None
    """The whole rows that meet the conditions; None as for `cells`."""
    seconds: float
    """Time that both took, without loading the table."""


def run_query(query: Query, table: SQLTable) -> QueryResult:
    """Execute a query on its table alone, in memory, and time it.

    No words of a visitor become part of the SQL: values are passed as parameters.
    """
    with closing(Execution(table)) as execution:
        began = time.perf_counter()
        executed = execution.execute(query)
        rows = execution.matching_rows(query)
        seconds = time.perf_counter() - began
    cells = executed
    # An aggregate is in no row; selected cells are shown as their rows spell them.
    has_aggregate = AGGREGATES[query.agg] != ""
    if rows is not None and not has_aggregate:
        cells = [row[query.sel] for row in rows]
    return QueryResult(query=query, cells=cells, executed=executed, rows=rows, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class ModelAnswer:
    """The answer of one model."""

    result: QueryResult
    generated_seconds: float
    expected: QueryResult | None
    """Result of the data set's own query, if the question is from the data set."""
    right: bool | None
    """Whether the model's query and the expected one find the same; None if none is expected, or
    the expected one finds nothing."""


def ask(
    model: TrainedModel, table: SQLTable, question: str, example: Example | None
) -> ModelAnswer:
    """Let a model answer a question about a table.

    Args:
        example: the data set's own example of this question, with its query, if it has one.

    Raises:
        UserError: the question is empty or too long, the model cannot be loaded, or it cannot write
            any column name of the table.
    """
    # `Query(0, 0)` fills the place of the gold query, which nobody knows.
    request = Example(0, checked(question), table, Query(0, 0))
    answerer = loaded(model)
    source = source_of(request, answerer.prompt)
    tokens = len(answerer.tokenizer.backend_tokenizer.encode(source).ids)
    if tokens > model.source_limit:
        raise UserError(
            f"question and column names have {tokens:,} tokens, but {model.name} was trained on at "
            f"most {model.source_limit}; use fewer words, or a table with fewer columns"
        )
    began = time.perf_counter()
    query = _generated(answerer, request)
    generated_seconds = time.perf_counter() - began
    result = run_query(query, table)
    expected = None
    right = None
    if example:
        expected = run_query(example.query, table)
        if is_usable(expected.query, expected.executed):
            right = result.executed == expected.executed
    return ModelAnswer(
        result=result, generated_seconds=generated_seconds, expected=expected, right=right
    )


def checked(question: str | None) -> str:
    """The question in one line, without control characters or lone surrogates.

    Raises:
        UserError: no word is left.
    """
    letters = [letter if letter.isprintable() else " " for letter in question or ""]
    line = " ".join("".join(letters).split())
    if not any(letter.isalnum() for letter in line):
        raise UserError("there is no question yet; type one, or choose an example")
    return line


@lru_cache(maxsize=LOADED)
def loaded(model: TrainedModel) -> QueryAnswerer:
    """A model in memory, which is loaded and warmed up if it is not there yet.

    It takes the place of the model that has not been asked for the longest time.

    Raises:
        UserError: the model is gone, or its weights are damaged.
    """
    from zeropods.evaluate.generate import QueryAnswerer

    answerer = QueryAnswerer.load(model.folder)
    table = SQLTable("warm", ("Name", "Age"), ("text", "real"), ())
    _generated(answerer, Example(0, "How many names are there?", table, Query(0, 0)))
    return answerer


def _generated(answerer: QueryAnswerer, request: Example) -> Query:
    """The query that a model writes for a question; `UserError` if it cannot write any column name
    of the table."""
    from zeropods.evaluate.generate import Generation

    try:
        # The rows are at hand; what a question quotes from them tells which column it is about.
        (prediction,) = answerer.answer([request], Generation(linked=True))
    except ValueError:
        # From the grammar: no column of the table has a name that the tokenizer can write.
        fault = "the model cannot write any of this table's column names"
        raise UserError(f"{fault}; rename them") from None
    # Decoding is constrained, so that the grammar has made a query of every answer.
    assert prediction.query is not None
    return prediction.query


# The tables that the page offers: those of a data set's questions, or a visitor's CSV file.

SPLITS_BY_PREFERENCE = ("test", "dev", "train")
"""Training has not seen questions of test and dev."""
MOST_TABLES = 1_000
LONGEST_LABEL = 90
"""Maximum number of characters of a table's line in the list."""


@dataclass(frozen=True)
class Tables:
    """Tables by id, each with the questions about it."""

    description: str
    """Which data set and split, and how many of its tables, in a few words."""
    examples: dict[str, tuple[Example, ...]]
    """Examples by table id, at least one for each."""
    labels: dict[str, str]
    """A line for each table: its title, if it has one, and its columns."""

    def table(self, id_: str | None) -> SQLTable:
        """A table of the list; `UserError` for any other id."""
        if id_ is None or id_ not in self.examples:
            raise UserError("choose a table, or upload one")
        return self.examples[id_][0].table

    def expected(self, table: SQLTable, question: str) -> Example | None:
        """The data set's own example of this question about this table, if it has one."""
        words = question.casefold().split()
        for example in self.examples.get(table.id, ()):
            if example.question.casefold().split() == words:
                return example
        return None


@lru_cache(maxsize=4)
def tables_in(data: Path) -> Tables:
    """The tables of a folder in WikiSQL's layout, those of test first.

    A split is read only while there are fewer than `MOST_TABLES`. A table that splits share has the
    questions of them all.

    Raises:
        UserError: the first fault in the folder.
    """
    examples: dict[str, list[Example]] = {}
    labels: dict[str, str] = {}
    splits: list[str] = []
    existing_splits = [split for split in SPLITS_BY_PREFERENCE if has_split(data, split)]
    # Where there is none, reading the first one raises an error that says what is wrong with the
    # folder.
    for split in existing_splits or SPLITS_BY_PREFERENCE[:1]:
        if len(examples) >= MOST_TABLES:
            break
        splits.append(split)
        _add_examples(examples, data, split)
        _add_labels(labels, examples, table_titles(data, split))
    count = f"{len(examples):,}"
    if len(examples) > MOST_TABLES:
        count = f"first {MOST_TABLES:,} of {count}"
    where = f"the {splits[0]} split"
    if len(splits) > 1:
        where = f"the splits {', '.join(splits)}"
    offered = {id_: tuple(examples[id_]) for id_ in labels}
    return Tables(f"{count} in {where} of {data.name}", offered, labels)


def _add_examples(examples: dict[str, list[Example]], data: Path, split: str) -> None:
    """Add the examples of a split to `examples`, by the ids of their tables.

    Splits may use the same id for different tables. Then only the examples of the first are kept.
    """
    for example in read_split(data, split):
        examples_of_table = examples.get(example.table.id)
        if examples_of_table is None:
            examples[example.table.id] = [example]
        elif examples_of_table[0].table.header == example.table.header:
            examples_of_table.append(example)


def _add_labels(
    labels: dict[str, str], examples: dict[str, list[Example]], titles: dict[str, str | None]
) -> None:
    """Add to `labels` the lines of tables that have none yet, in alphabetical order, up to
    `MOST_TABLES` in all."""
    without_label = [id_ for id_ in examples if id_ not in labels]
    room = MOST_TABLES - len(labels)
    new = {id_: _label(examples[id_][0].table, titles.get(id_)) for id_ in without_label[:room]}
    for id_ in sorted(new, key=lambda id_: new[id_].casefold()):
        labels[id_] = new[id_]


def _label(table: SQLTable, title: str | None) -> str:
    """A table's line in the list: its title, if it has one, and its columns."""
    name = title
    has_letter = any(letter.isalpha() for letter in table.id)
    # WikiSQL's ids are numbers, which tell people nothing about a table.
    if not name and has_letter:
        name = table.id
    columns = ", ".join(table.header)
    line = f"{name}: {columns}" if name else columns
    if len(line) <= LONGEST_LABEL:
        return line
    return line[: LONGEST_LABEL - 1] + "…"


def tables_of(model: TrainedModel) -> Tables:
    """The tables that a model was trained on, if they lie near its tokenized set.

    Otherwise they are those of the embedded data set, whose description then says so.
    """
    if model.prepared is not None:
        data_and_split = raw_data_of(model.prepared, SPLITS_BY_PREFERENCE)
        if data_and_split is not None:
            data, _ = data_and_split
            return tables_in(data)
    embedded = sample_tables()
    if model.trained_on is None:
        return embedded
    description = f"{embedded.description}; the model's own data are gone"
    return replace(embedded, description=description)


def lost_data(model: TrainedModel) -> str | None:
    """A line for the user where a run's own data are gone; None where they still exist, or where it
    is not known what they were."""
    if model.trained_on is None:
        return None
    if model.prepared and raw_data_of(model.prepared, SPLITS_BY_PREFERENCE) is not None:
        return None
    return (
        f"{model.name}: the data that it was trained on are gone ({model.trained_on} and its "
        "tables); the page offers the tables of the embedded data set instead; name yours with "
        "--data DIR"
    )


@lru_cache(maxsize=1)
def sample_tables() -> Tables:
    """The tables of the embedded data set, which is generated into a temporary folder and read."""
    with tempfile.TemporaryDirectory(prefix="zeropods-sample-") as work:
        folder = Path(work) / "embedded sample"
        write_sample(folder)
        return tables_in(folder)


# A visitor's CSV file, read as a table; a fault in it is reported in one line.

MAX_BYTES = 2 * 2**20
MAX_ROWS = 10_000
MAX_COLUMNS = 40
UPLOADS_KEPT = 8
"""Number of uploaded tables kept in memory, for all visitors together: one of 2 MiB takes 30 MiB
there."""


@lru_cache(maxsize=UPLOADS_KEPT)
def uploaded(path: Path) -> SQLTable:
    """A visitor's table, read from its file unless it is among the last `UPLOADS_KEPT`.

    Raises:
        UserError: the file is too large or is no longer kept, or has a fault, as for `read_csv`.
    """
    name = f"the file {shown(path.name)}"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{name}: larger than {MAX_BYTES >> 20} MiB; upload fewer rows")
        table = read_csv(path)
    except FileNotFoundError:
        raise UserError(f"{name} is no longer kept; upload it again") from None
    if len(table.header) > MAX_COLUMNS:
        fault = f"{len(table.header)} columns"
        raise UserError(f"{name}: {fault}; expected at most {MAX_COLUMNS}: leave some out")
    if len(table.rows) > MAX_ROWS:
        raise UserError(f"{name}: more than {MAX_ROWS:,} rows; upload fewer")
    return table
