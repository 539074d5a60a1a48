"""One question to one model about one table: its query, what it finds, and whether that is right."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.data.manifest import read_manifest
from zeropods.data.prompts import MAX_SOURCE_TOKENS, PROMPTS, source_text
from zeropods.data.wikisql import Cell, Example, Table
from zeropods.errors import UserError
from zeropods.evaluate.models import model_folder, task_of
from zeropods.measure.record import RunConfig, read_json
from zeropods.report.entry import Entry, find_runs, read_entry
from zeropods.sql.execute import Execution, Rows, is_usable
from zeropods.sql.query import AGGREGATES, Query

if TYPE_CHECKING:
    from zeropods.evaluate.generate import QueryAnswerer


# A visitor's query: on one table in memory that it can only read, for a limited time.

SECONDS = 2.0
INSTRUCTIONS = 1_000
"""SQLite looks at the clock after so many steps of its machine."""
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


class BoundedExecution(Execution):
    """An `Execution` that only reads, and for `seconds` in all; what takes longer gives None, and `overdue` is set."""

    def __init__(self, table: Table, seconds: float = SECONDS) -> None:
        super().__init__(table)
        self.overdue = False
        self._deadline = time.monotonic() + seconds
        self._database.execute("PRAGMA query_only = ON")
        self._database.set_authorizer(_may)
        self._database.set_progress_handler(self._is_over, INSTRUCTIONS)

    def _is_over(self) -> bool:
        self.overdue = time.monotonic() > self._deadline
        return self.overdue


def _may(action: int, first: str | None, *_: object) -> int:
    """Reading the one table, and nothing else."""
    allowed = action in READING and (action != sqlite3.SQLITE_READ or first == "cells")
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


# The trained models below the folders that a user names, the best first.

TASK = "text2sql"
TASK_NAMES = {"squad": "squad", "lm": "text"}


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A text-to-SQL model that can be asked."""

    name: str
    folder: Path
    """Run folder or model folder."""
    model_id: str
    technique: str | None
    """None for a model folder, as the next two where nothing was scored."""
    split: str | None
    accuracy: float | None
    """Execution accuracy as a share of 1; logical-form accuracy where nothing could be executed."""
    eval_loss: float | None
    """The last one."""
    prepared: Path | None
    """The tokenized set that the run was trained on, where the run says it."""
    source_limit: int
    """Tokens of a question with its columns in training."""
    changed: float
    """When the weights were written, in seconds of the epoch."""

    @property
    def label(self) -> str:
        """One line for people."""
        technique = "no ZeRO" if self.technique == "none" else self.technique or ""
        parts = [self.model_id, technique, self.accuracy_text, self.name]
        return " · ".join(dict.fromkeys(filter(None, parts)))

    @property
    def accuracy_text(self) -> str:
        return "not scored" if self.accuracy is None else f"{self.accuracy:.0%} right on {self.split}"


def trained_models(folders: Sequence[Path]) -> list[TrainedModel]:
    """All models to ask, by accuracy, where there is none by validation loss, then the newest first.

    Raises:
        UserError: a folder that is not there; a run or model folder named itself that cannot be asked; no model at all.
    """
    found: dict[Path, TrainedModel] = {}
    for folder in map(Path, folders):
        for model in _below(folder):
            found.setdefault(model.folder, model)
    if not found:
        named = ", ".join(map(str, folders)) or "no folder"
        raise UserError(f"{named}: no trained text-to-SQL model there; textsql_train.py --outputdir makes one")
    return _named_apart(sorted(found.values(), key=_place))


def _place(model: TrainedModel) -> tuple[float, float, float]:
    loss = math.inf if model.eval_loss is None else model.eval_loss
    return -(model.accuracy or 0.0), loss, -model.changed


def _below(folder: Path) -> Iterator[TrainedModel]:
    whole = folder.resolve()
    if not whole.is_dir():
        raise UserError(f"{folder}: no such folder; name run folders, or a folder that holds some")
    runs = {} if _is_model(whole) else find_runs([folder])
    if not runs or whole in runs.values():
        yield _asked(whole, folder)
        return
    for name, run in runs.items():
        try:
            if task_of(run) == TASK:
                yield _model(run, name)
        except (UserError, OSError):
            # Among many, a run that failed or still trains has no model, and is no fault.
            continue


def _asked(folder: Path, said: Path) -> TrainedModel:
    """The model in a folder that was named itself."""
    task = task_of(folder)
    if task != TASK:
        raise UserError(f"{said}: is a {TASK_NAMES[task]} run; the demo asks text-to-SQL models")
    return _model(folder, folder.name)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _model(folder: Path, name: str) -> TrainedModel:
    within = model_folder(folder)
    config = read_json(within / "config.json")
    if config.get("prompt") not in PROMPTS:
        raise UserError(f"{folder}: does not say its prompt ({config.get('prompt')!r}); train it with textsql_train.py")
    entry = read_entry(folder, name) if within != folder else None
    of_run = entry.config if entry else None
    losses = entry.record.eval_losses if entry and entry.record else []
    prepared = _prepared(of_run)
    return TrainedModel(
        name=name,
        folder=folder,
        model_id=of_run.model_id if of_run else "model",
        technique=of_run.technique if of_run else None,
        split=entry.split if entry else None,
        accuracy=_accuracy(entry),
        eval_loss=losses[-1].loss if losses else None,
        prepared=prepared,
        source_limit=_source_limit(prepared, config["prompt"]),
        changed=(within / "config.json").stat().st_mtime,
    )


def _accuracy(entry: Entry | None) -> float | None:
    score: dict[str, Any] = (entry and entry.score) or {}
    executed = score.get("execution_accuracy")
    return score.get("logical_form_accuracy") if executed is None else executed


def _prepared(config: RunConfig | None) -> Path | None:
    path = config.dataset.get("path") if config else None
    return Path(path) if path is not None and (Path(path) / "manifest.json").is_file() else None


def _source_limit(prepared: Path | None, prompt: str) -> int:
    limit = read_manifest(prepared).max_source_tokens if prepared else None
    return limit or MAX_SOURCE_TOKENS[prompt]


def _named_apart(models: list[TrainedModel]) -> list[TrainedModel]:
    """Models of one name get their whole paths."""
    names = [model.name for model in models]
    return [replace(model, name=str(model.folder)) if names.count(model.name) > 1 else model for model in models]


# One question to one model about one table: its query, what the query finds, and whether that is right.

MAX_CHARACTERS = 1_000
"""Of a question; WikiSQL's longest has 300."""
LOADED = 2
"""Models in memory: as many as stand side by side."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a query gives on its table."""

    query: Query
    cells: list[Cell] | None
    """The selected cells as they are written, or the aggregate; None where SQLite could not run the query."""
    executed: list[Cell] | None
    """The same as SQLite holds them, in lower case: what is right is decided by these."""
    rows: Rows | None
    """The rows that meet the conditions, whole."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one model says."""

    found: Found
    generated_seconds: float
    expected: Found | None
    """Of the data set's own query, where the question is one of its."""
    right: bool | None
    """Whether both find the same; None where nothing is expected, or the expected query finds nothing."""


def ask(model: TrainedModel, table: Table, question: str, example: Example | None) -> Answer:
    """Let a model answer.

    Args:
        example: the data set's own query for this question, if it has one.

    Raises:
        UserError: a question that is empty or too long, a table whose columns the model cannot write.
    """
    question = checked(question)
    answerer = loaded(model)
    _check_length(answerer, model, table, question)
    began = time.perf_counter()
    query = _generated(answerer, table, question)
    generated = time.perf_counter() - began
    found = run_query(query, table)
    expected = run_query(example.query, table) if example else None
    return Answer(found=found, generated_seconds=generated, expected=expected, right=_is_right(found, expected))


def checked(question: str | None) -> str:
    """The question in one line, without control characters and halves of characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in question or "").split())
    if not any(letter.isalnum() for letter in line):
        raise UserError("there is no question yet; type one, or choose an example")
    if len(line) > MAX_CHARACTERS:
        raise UserError(f"the question has {len(line):,} characters; ask in at most {MAX_CHARACTERS:,}")
    return line


@lru_cache(maxsize=LOADED)
def loaded(model: TrainedModel) -> QueryAnswerer:
    """A model in memory, warmed up; the one that was not asked for longest makes room.

    Raises:
        UserError: it has gone, or its weights are damaged.
    """
    from safetensors import SafetensorError

    from zeropods.evaluate.generate import QueryAnswerer

    try:
        answerer = QueryAnswerer.load(model.folder)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        why = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{model.folder}: the model cannot be read ({why}); export or train it again") from None
    _generated(answerer, Table("warm", ("Name", "Age"), ("text", "real"), ()), "How many names are there?")
    return answerer


def run_query(query: Query, table: Table) -> Found:
    """Execute a query read-only and timed; `UserError` where it takes too long."""
    with closing(BoundedExecution(table)) as execution:
        began = time.perf_counter()
        executed = execution.execute(query)
        rows = execution.matching_rows(query)
        seconds = time.perf_counter() - began
        if execution.overdue:
            raise UserError("the query took too long on this table and was stopped; ask for less, or take fewer rows")
    cells = executed
    if rows is not None and not AGGREGATES[query.agg]:
        cells = [row[query.sel] for row in rows.rows]
    return Found(query=query, cells=cells, executed=executed, rows=rows, seconds=seconds)


def _generated(answerer: QueryAnswerer, table: Table, question: str) -> Query:
    from zeropods.evaluate.generate import Generation

    example = Example(0, question, table, Query(0, 0))
    try:
        (prediction,) = answerer.answer([example], Generation())
    except ValueError:  # The grammar's: no column of the table has a name that the tokenizer can write.
        raise UserError("the model cannot write any of this table's column names; give them others") from None
    if prediction.query is None:
        raise UserError("the model wrote no query; ask in other words")
    return prediction.query


def _check_length(answerer: QueryAnswerer, model: TrainedModel, table: Table, question: str) -> None:
    source = source_text(answerer.prompt, question, table.header, table.types)
    tokens = len(answerer.tokenizer.backend_tokenizer.encode(source).ids)
    if tokens > model.source_limit:
        raise UserError(
            f"question and column names make {tokens:,} tokens; {model.name} was trained on at most "
            f"{model.source_limit}: ask in fewer words, or take a table of fewer columns"
        )


def _is_right(found: Found, expected: Found | None) -> bool | None:
    if expected is None or not is_usable(expected.query, expected.executed):
        return None
    return found.executed == expected.executed
