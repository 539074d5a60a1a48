"""WikiSQL: a strict, streaming reader of its layouts, its prompts, and its questions as tokens for
T5.

The official layout is `SPLIT.jsonl` with a question a line, and `SPLIT.tables.jsonl` beside it. In
the layout of the Hugging Face hub each row carries its table, and the conditions of its query are
three lists. LLMSQL's is in a module of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zeropods.data.encoding import Encoder, Ids, TokenRows, count_lost
from zeropods.data.llmsql import (
    QUESTION_FILES,
    SQLQuestion,
    question_file,
    read_questions,
    tables_file,
)
from zeropods.data.manifest import FILE as MANIFEST
from zeropods.data.manifest import SPLITS
from zeropods.data.varied import NamesByType, names_of_columns, varied
from zeropods.errors import UserError
from zeropods.files import MEND, first_line, no_folder, sha256, validated, validated_lines
from zeropods.sql.example import Example as Example
from zeropods.sql.example import lower_cased
from zeropods.sql.query import Query, is_restored
from zeropods.sql.table import SQLTable, Text, check_width

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS = ("question", "schema")
MAX_SOURCE_TOKENS = {"question": 96, "schema": 256}
"""Token limit by prompt: `question` is cut where the original recipe cuts; `schema` above WikiSQL's
longest (226)."""
MAX_TARGET_TOKENS = 96
CHUNK_EXAMPLES = 8_192
"""Number of examples that are encoded at a time."""
ROWS_AT_ONCE = 1_024
"""Number of rows of a Parquet file that are in memory at a time, each with its table."""
SHOWN_CHARACTERS = 200
"""Length at which the text of a query is cut in a message."""


RowType = TypeVar("RowType")
"""The dataclass, or the dictionary, as which a row is read."""


@dataclass(frozen=True)
class _Line:
    """A line of SPLIT.jsonl."""

    question: Text
    table_id: str
    sql: Query


def read_split(folder: Path, split: str) -> Iterator[Example]:
    """Stream the examples of a split in file order; `UserError` at the first fault, with its line.

    Questions of LLMSQL whose statement is not of WikiSQL's form are passed over.
    """
    questions = question_file(folder, split)
    if questions is not None:
        yield from _read_llmsql(questions)
        return
    files = hub_files(folder, split)
    rows = _read_hub(files) if files else _read_official(folder, split)
    for index, (place, question, table, query) in enumerate(rows):
        if not query.fits(len(table.header)):
            raise UserError(
                f"{place}: {query}; "
                f"its table {table.id} has {len(table.header)} columns; correct it"
            )
        yield Example(index, question, table, query)


Row = tuple[str, str, SQLTable, Query]
"""Place in a file, question, table and query."""


def _read_llmsql(questions: Path) -> Iterator[Example]:
    """The questions of a file in LLMSQL's layout whose statement is of WikiSQL's form; `UserError`
    after the last one if there was none."""
    has_example = False
    for question in read_questions(questions):
        if question.query is not None:
            has_example = True
            yield Example(question.index, question.question, question.table, question.query)
    if not has_example:
        raise UserError(
            f"{questions}: none of its statements is of WikiSQL's form: one column, or an "
            "aggregate of it, and comparisons joined by AND; choose other questions"
        )


def _read_official(folder: Path, split: str) -> Iterator[Row]:
    """The questions of a split in the official layout, in file order."""
    tables = read_tables(split_file(folder, split, "tables.jsonl"))
    for place, line in validated_lines(_Line, split_file(folder, split, "jsonl")):
        table = tables.get(line.table_id)
        if table is None:
            raise UserError(
                f"{place}: table_id {line.table_id!r} is missing from the tables file beside it"
            )
        yield place, line.question, table, line.sql


def read_tables(path: Path) -> dict[str, SQLTable]:
    """All tables of a file in the official layout, by id."""
    tables: dict[str, SQLTable] = {}
    for place, table in validated_lines(SQLTable, path):
        if table.id in tables:
            raise UserError(f"{place}: table id {table.id!r} occurs twice; keep one of them")
        check_width(place, table)
        tables[table.id] = table
    return tables


def split_file(folder: Path, split: str, suffix: str) -> Path:
    """The path of a split's file in the official layout, which must exist."""
    path = Path(folder) / f"{split}.{suffix}"
    check_folder(folder, "wikisql")
    if path.is_file():
        return path
    examples = path.with_name(f"{split}.jsonl")
    if examples.is_file():
        raise UserError(
            f"{path}: no such file, and {examples.name} does not have its table in each row, as "
            "the hub's layout has; add one or the other"
        )
    raise UserError(
        f"{examples}: no such file; give a folder that has it, or {split}.parquet (the hub's "
        f"layout), or {QUESTION_FILES[split][0]} (LLMSQL's), "
        "or fetch it: zeropods data get wikisql --out wikisql"
    )


def check_folder(folder: Path, name: str) -> None:
    """Refuse raw data whose folder is missing or holds a prepared set, which has tokens and no
    questions.

    Args:
        folder: where the raw data should be.
        name: name of a published data set of their kind.
    """
    if (Path(folder) / MANIFEST).is_file():
        raise UserError(
            f"{folder}: a prepared set, which keeps no questions; "
            "give the raw data that it was made from"
        )
    if not Path(folder).is_dir():
        raise UserError(
            f"{folder}: {no_folder(folder)}; give the raw data, "
            f"or fetch some: zeropods data get {name} --out {name}"
        )


def split_files(
    split: str, tables: Iterable[SQLTable], questions: Iterable[object]
) -> dict[str, bytes]:
    """Name and content of the two files of a split, in WikiSQL's official layout."""
    described = []
    for table in tables:
        described.append(
            {
                "id": table.id,
                "header": table.header,
                "types": table.types,
                "rows": table.rows,
            }
        )
    return {
        f"{split}.jsonl": _json_lines(questions),
        f"{split}.tables.jsonl": _json_lines(described),
    }


def _json_lines(documents: Iterable[object]) -> bytes:
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
    return "".join(lines).encode()


# The hub's layout: `wikisql` or `Salesforce/wikisql`, as the package `datasets` leaves it on disk.

HUB_NAMES = {"train": ("train",), "dev": ("dev", "validation", "valid"), "test": ("test",)}
"""The names that each split has in the names of files and folders."""
HUB_FOLDERS = (".", "data", "default")
HUB_PATTERNS = (
    # `to_json`
    "{name}.jsonl",
    "{name}.json",
    # `to_parquet`, the hub's own files, and those that the hub converts
    "{name}.parquet",
    "{name}-*-of-*.parquet",
    "{name}/*.parquet",
    # `save_to_disk`
    "{name}/data-*-of-*.arrow",
)


@dataclass(frozen=True)
class _HubConditions:
    """The conditions of a query, as three lists of one length."""

    column_index: tuple[int, ...]
    operator_index: tuple[int, ...]
    condition: tuple[str | int | float, ...]


@dataclass(frozen=True)
class _HubQuery:
    sel: int
    agg: int
    conds: _HubConditions


@dataclass(frozen=True)
class _HubRow:
    """A row of the hub's layout; its `phase` and `sql.human_readable` are not read."""

    question: Text
    table: SQLTable
    sql: _HubQuery


def hub_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in the hub's layout, in their order; none where the folder does not have
    the split in this layout."""
    is_prepared = (Path(folder) / MANIFEST).is_file()
    if is_prepared:
        # The Arrow files of a prepared set hold tokens.
        return []
    for subfolder in HUB_FOLDERS:
        for name in HUB_NAMES[split]:
            for pattern in HUB_PATTERNS:
                files = sorted((Path(folder) / subfolder).glob(pattern.format(name=name)))
                if files and _holds_tables(files[0]):
                    return files
    return []


def _holds_tables(path: Path) -> bool:
    """Whether the rows of a file carry their tables, to judge by the first; those of the official
    layout do not."""
    if path.suffix in (".parquet", ".arrow"):
        return True
    with open(path, "rb") as file:
        first = file.readline()
    try:
        return "table" in json.loads(first)
    except (ValueError, TypeError, RecursionError):
        # Whoever reads the file says what is wrong with it.
        return False


def _read_hub(files: Sequence[Path]) -> Iterator[Row]:
    """The questions of files in the hub's layout, in file order."""
    tables: dict[str, SQLTable] = {}
    for place, row in _hub_rows(_HubRow, files):
        # Every question about a table brings a copy of it; the first is kept for all.
        table = tables.setdefault(row.table.id, row.table)
        is_new = table is row.table
        if is_new:
            check_width(place, table)
        elif table != row.table:
            raise UserError(
                f"{place}: table id {table.id!r} is another table in an earlier row; "
                "give each its own id"
            )
        yield place, row.question, table, _hub_query(place, row.sql)


def _hub_query(place: str, sql: _HubQuery) -> Query:
    """The query of a row in the hub's layout; `UserError` if it is none."""
    conds = sql.conds
    lengths = {len(conds.column_index), len(conds.operator_index), len(conds.condition)}
    if len(lengths) > 1:
        raise UserError(f"{place}: sql.conds: its lists differ in length; {MEND}")
    conditions = list(zip(conds.column_index, conds.operator_index, conds.condition, strict=True))
    document = {"sel": sql.sel, "agg": sql.agg, "conds": conditions}
    # It is checked as the query of the official layout is.
    return validated(Query, place, json.dumps(document).encode())


def _hub_rows(kind: type[RowType], files: Sequence[Path]) -> Iterator[tuple[str, RowType]]:
    """Yield place and value of every row of the files, each `validated`."""
    for path in files:
        if path.suffix in (".jsonl", ".json"):
            yield from validated_lines(kind, path)
            continue
        for number, row in enumerate(_arrow_rows(path), 1):
            place = f"{path}, row {number}"
            yield place, validated(kind, place, json.dumps(row).encode())


def _arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file in Parquet, or in Arrow's stream format, as `save_to_disk` writes it."""
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if path.suffix == ".parquet":
            batches = parquet.ParquetFile(path).iter_batches(ROWS_AT_ONCE)
        else:
            batches = iter(ipc.open_stream(pyarrow.memory_map(str(path))))
        for batch in batches:
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); fetch the file again"
        ) from None


# What all layouts tell without their questions.


def has_split(folder: Path, split: str) -> bool:
    """Whether a folder has a split, in any layout."""
    if (Path(folder) / f"{split}.jsonl").is_file() or question_file(folder, split) is not None:
        return True
    return bool(hub_files(folder, split))


def wikisql_splits(folder: Path) -> list[str]:
    """The splits that a folder has."""
    return [split for split in SPLITS if has_split(folder, split)]


def source_files(folder: Path, split: str) -> list[Path]:
    """All files that a split is read from, which must exist."""
    questions = question_file(folder, split)
    if questions is not None:
        return [questions, tables_file(questions)]
    files = hub_files(folder, split)
    if files:
        return files
    return [split_file(folder, split, suffix) for suffix in ("jsonl", "tables.jsonl")]


def split_of(source: str) -> str | None:
    """The split that a source file belongs to, to judge by its name; None if the name tells none.

    Args:
        source: the file's path in the folder of the data.
    """
    for split, files in QUESTION_FILES.items():
        if source in files:
            return split
    for part in Path(source).parts:
        for split, names in HUB_NAMES.items():
            if part.startswith(names):
                return split
    return None


@dataclass(frozen=True)
class _TableId:
    id: str


@dataclass(frozen=True)
class _RowsTable:
    table: _TableId


def table_ids(folder: Path, split: str) -> set[str]:
    """The ids of a split's tables; none where the folder does not have them.

    LLMSQL has one file of tables for all splits. The tables of a split are those that its questions
    are about.
    """
    questions = question_file(folder, split)
    if questions is not None:
        return {question.table.id for question in read_questions(questions)}
    files = hub_files(folder, split)
    if files:
        return {row.table.id for _, row in _hub_rows(_RowsTable, files)}
    path = Path(folder) / f"{split}.tables.jsonl"
    return set(read_tables(path)) if path.is_file() else set()


TITLE_FIELDS = ("page_title", "caption", "name")
"""Fields that may hold the title of one of WikiSQL's tables."""


def table_titles(folder: Path, split: str) -> dict[str, str | None]:
    """The title of each table of a split, by its id; None for a table without one."""
    documents: Iterator[dict[str, Any]]
    key = "id"
    questions = question_file(folder, split)
    files = hub_files(folder, split)
    if questions is not None:
        key = "table_id"
        documents = _documents(tables_file(questions))
    elif files:
        documents = (row["table"] for _, row in _hub_rows(dict[str, Any], files))
    else:
        documents = _documents(split_file(folder, split, "tables.jsonl"))
    titles = {}
    for document in documents:
        candidates = [document[name] for name in TITLE_FIELDS if document.get(name)]
        titles[str(document[key])] = candidates[0] if candidates else None
    return titles


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    return (document for _, document in validated_lines(dict[str, Any], path))


def count_examples(folder: Path, split: str, limit: int | None) -> int:
    """The number of examples of a split, or `limit` where there are more. Lines are counted, not
    checked, except in the hub's layout."""
    files = hub_files(folder, split)
    if files:
        rows: Iterator[object] = _hub_rows(dict[str, Any], files)
        return sum(1 for _ in itertools.islice(rows, limit))
    path = question_file(folder, split) or split_file(folder, split, "jsonl")
    with open(path, "rb") as lines:
        return sum(1 for _ in itertools.islice(lines, limit))


# The two prompts, and questions as tokens.


def source_of(example: Example, prompt: str) -> str:
    """The text that the model reads for an example.

    `question` is the original recipe. `schema` appends the column names, so that the model need not
    guess them, and marks the numeric ones; an unmarked column is text.
    """
    return _source_text(in_words_of(prompt, example), prompt)


def _source_text(worded: Example, prompt: str) -> str:
    """What `source_of` returns, for an example that is in the words of its prompt already."""
    source = f"translate to SQL: {worded.question.strip()}"
    if prompt == "question":
        return source
    columns = []
    for name, kind in zip(worded.table.header, worded.table.types, strict=True):
        columns.append(f"{name} ({kind})" if kind == "real" else name)
    return f"{source} columns: {'; '.join(columns)}"


def target_of(example: Example, prompt: str) -> str:
    """The text that the model is to write for an example."""
    return in_words_of(prompt, example).query_text


def in_words_of(prompt: str, example: Example) -> Example:
    """The example as a prompt writes it: `question` as it is, `schema` in lower case.

    A model need not learn then that `Island` and `islands` are one word, and nothing is lost:
    WikiSQL's evaluation compares in lower case.
    """
    if prompt == "question":
        return example
    return lower_cased(example)


class WikiSQLData:
    """The questions of a folder as rows, each with its query as the target; it must have the split
    train."""

    def __init__(
        self,
        folder: Path,
        *,
        limit: int | None,
        prompt: str,
        max_source_tokens: int,
        copies: int = 1,
    ) -> None:
        """Open the raw data.

        Args:
            limit: number of questions to take from the start of each split; None for all.
            prompt: one of `PROMPTS`.
            max_source_tokens: the most tokens of a source, the end token included.
            copies: number of rows of the split train for each of its questions; all but the first
                are `varied`.
        """
        self._folder = folder
        self._limit = limit
        self._prompt = prompt
        self._max_source_tokens = max_source_tokens
        self._copies = copies
        source_files(self._folder, "train")
        self.splits = wikisql_splits(self._folder)
        self.hashes: dict[str, str] = {}
        """SHA-256 of each file, by its path in the folder."""
        for split in self.splits:
            for path in source_files(self._folder, split):
                self.hashes[str(path.relative_to(self._folder))] = sha256(path)

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: sources and targets of train."""
        for example in self._examples("train"):
            yield source_of(example, self._prompt)
            yield target_of(example, self._prompt)

    def rows(
        self,
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        progress: Callable[[int], object],
    ) -> TokenRows:
        """Sources and targets of a split; those that are too long are cut, but keep their end
        token."""
        encode = Encoder(tokenizer)
        end = tokenizer.eos_token_id
        rows = TokenRows()
        targets_lost = 0
        targets_unreadable = 0
        last_index = -1
        examples = self._examples(split)
        if split == "train":
            examples = itertools.chain(examples, self._varied_copies(split))
        while chunk := list(itertools.islice(examples, CHUNK_EXAMPLES)):
            # Wording an example takes as long as encoding it, so it is done once.
            worded = [in_words_of(self._prompt, example) for example in chunk]
            texts = [example.query_text for example in worded]
            targets = encode(texts)
            sources = encode([_source_text(example, self._prompt) for example in worded])

            decoded = tokenizer.backend_tokenizer.decode_batch(targets, skip_special_tokens=True)
            targets_lost += count_lost(texts, decoded)
            unreadable = []
            for example, in_words in zip(chunk, worded, strict=True):
                # A gold query that is not read back from its text cannot be answered right.
                if not is_restored(in_words.query, in_words.table.header):
                    unreadable.append(example)
            targets_unreadable += len(unreadable)
            if unreadable and rows.first_unreadable is None:
                rows.first_unreadable = _place_and_text(split, unreadable[0])

            rows.inputs_cut += _count_longer(sources, self._max_source_tokens)
            rows.labels_cut += _count_longer(targets, MAX_TARGET_TOKENS)
            rows.input_ids += [_cut(row, self._max_source_tokens, end) for row in sources]
            rows.labels += [_cut(row, MAX_TARGET_TOKENS, end) for row in targets]
            last_index = chunk[-1].index
            progress(len(chunk))
        # The varied copies end with the same example as the split does, so the index holds.
        passed_over = self._passed_over(split, last_index)
        if passed_over and rows.first_unreadable is None:
            rows.first_unreadable = _place_and_statement(split, passed_over[0])
        rows.targets_lost = targets_lost
        rows.targets_unreadable = targets_unreadable + len(passed_over)
        return rows

    def _passed_over(self, split: str, last_index: int) -> list[SQLQuestion]:
        """The questions of LLMSQL, up to the one of this index, that became no row because their
        statement is not of WikiSQL's form; none in other layouts."""
        path = question_file(self._folder, split)
        if path is None:
            return []
        questions = itertools.islice(read_questions(path), last_index + 1)
        return [question for question in questions if question.query is None]

    def _examples(self, split: str) -> Iterator[Example]:
        """The examples of a split, no more than the limit."""
        return itertools.islice(read_split(self._folder, split), self._limit)

    def _varied_copies(self, split: str) -> Iterator[Example]:
        """Varied copies of a split's examples, first one of each, then a second one of each, and so
        on; always the same."""
        names: NamesByType = {}
        # Without copies, the split need not be read once more for its names.
        if self._copies > 1:
            names = names_of_columns(self._examples(split))
        for copy in range(1, self._copies):
            rng = Random(copy)
            for example in self._examples(split):
                yield varied(example, rng, names)


def _place_and_text(split: str, example: Example) -> str:
    """Where an example is, and the beginning of its query."""
    text = example.query_text[:SHOWN_CHARACTERS]
    return f"row {example.index + 1} of {split}: {text!r}"


def _place_and_statement(split: str, question: SQLQuestion) -> str:
    """Where a question of LLMSQL is, and the beginning of its statement."""
    return f"row {question.index + 1} of {split}: {question.sql[:SHOWN_CHARACTERS]!r}"


def _count_longer(rows: Sequence[Ids], limit: int) -> int:
    return sum(len(row) > limit for row in rows)


def _cut(row: Ids, limit: int, end: int) -> Ids:
    """The row, cut to at most `limit` tokens with the end token last."""
    if len(row) <= limit:
        return row
    return np.append(row[: limit - 1], np.int32(end))
