"""WikiSQL: a strict, streaming reader of its official layout, its prompts, and its questions as tokens for T5."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import MinLen
from pydantic import Field

from zeropods.data.encoding import Encoder, Ids, TokenRows, folded
from zeropods.data.manifest import SPLITS
from zeropods.errors import UserError
from zeropods.files import MEND, sha256, validated_lines
from zeropods.sql.query import Query, format_query, is_restored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zeropods.data.prepare import Preparation

PROMPTS = ("question", "schema")
MAX_SOURCE_TOKENS = {"question": 96, "schema": 256}
"""Token limit by prompt: `question` is cut where the original recipe cuts; `schema` above WikiSQL's longest (226)."""
MAX_TARGET_TOKENS = 96
CHUNK = 8_192
SHOWN_CHARACTERS = 200
"""Length at which the text of a query is cut in a message."""

Cell = str | int | float | None
Text = Annotated[str, Field(pattern=r"\S")]
"""A text of more than spaces."""


@dataclass(frozen=True)
class SQLTable:
    """A table that questions are asked about."""

    id: Text
    header: Annotated[tuple[str, ...], MinLen(1)]
    types: tuple[Literal["text", "real"], ...]
    """The type of each column."""
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Example:
    """A question about a table, and the query that answers it."""

    index: int
    """Line number in SPLIT.jsonl, from 0."""
    question: str
    table: SQLTable
    query: Query


@dataclass(frozen=True)
class _Line:
    """A line of SPLIT.jsonl."""

    question: Text
    table_id: str
    sql: Query


def read_split(folder: Path, split: str) -> Iterator[Example]:
    """Stream the examples of a split in file order; `UserError` at the first fault, with its line."""
    tables = read_tables(split_file(folder, split, "tables.jsonl"))
    path = split_file(folder, split, "jsonl")
    for index, (place, line) in enumerate(validated_lines(_Line, path)):
        table = tables.get(line.table_id)
        if table is None:
            raise UserError(f"{place}: table_id {line.table_id!r} is missing from the tables file beside it")
        if not line.sql.fits(len(table.header)):
            raise UserError(f"{place}: {line.sql}; its table {table.id} has {len(table.header)} columns; correct it")
        yield Example(index, line.question, table, line.sql)


def read_tables(path: Path) -> dict[str, SQLTable]:
    """All tables of a file, by id."""
    tables: dict[str, SQLTable] = {}
    for place, table in validated_lines(SQLTable, path):
        if table.id in tables:
            raise UserError(f"{place}: table id {table.id!r} occurs twice; keep one of them")
        lengths = {len(table.types), *map(len, table.rows)} - {len(table.header)}
        if lengths:
            raise UserError(
                f"{place}: {len(table.header)} columns, but a row or its types have {lengths.pop()}; {MEND}"
            )
        tables[table.id] = table
    return tables


def split_file(folder: Path, split: str, suffix: str) -> Path:
    """The path of a split's file, which must exist."""
    path = Path(folder) / f"{split}.{suffix}"
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; give a folder that has it, or fetch it: zeropods data get wikisql --out wikisql"
        )
    return path


def split_files(split: str, tables: Iterable[SQLTable], questions: Iterable[object]) -> dict[str, bytes]:
    """Name and content of the two files of a split, in WikiSQL's layout."""
    described = [{"id": t.id, "header": t.header, "types": t.types, "rows": t.rows} for t in tables]
    documents = {f"{split}.jsonl": questions, f"{split}.tables.jsonl": described}
    return {
        name: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        for name, lines in documents.items()
    }


# The two prompts, and questions as tokens.


def source_of(example: Example, prompt: str) -> str:
    """The text that the model reads for an example.

    `question` is the original recipe. `schema` appends the column names, so that the model need not
    guess them, and marks the numeric ones; an unmarked column is text.
    """
    source, table = f"translate to SQL: {example.question.strip()}", example.table
    if prompt == "question":
        return source
    columns = (f"{n} ({kind})" if kind == "real" else n for n, kind in zip(table.header, table.types, strict=True))
    return f"{source} columns: {'; '.join(columns)}"


def target_of(example: Example) -> str:
    """The text that the model is to write for an example."""
    return format_query(example.query, example.table.header)


def wikisql_splits(folder: Path) -> list[str]:
    """The splits that a folder has."""
    return [split for split in SPLITS if (Path(folder) / f"{split}.jsonl").is_file()]


class WikiSQLData:
    """The questions of a folder as rows, each with its query as the target; it must have the split train."""

    def __init__(self, wanted: Preparation) -> None:
        self._wanted, self._folder = wanted, Path(wanted.data)
        split_file(self._folder, "train", "jsonl")
        self.splits = wikisql_splits(self._folder)
        files = [split_file(self._folder, split, kind) for split in self.splits for kind in ("jsonl", "tables.jsonl")]
        self.hashes = {path.name: sha256(path) for path in files}
        """SHA-256 of each file, by its name."""

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: sources and targets of train."""
        for example in self._examples("train"):
            yield source_of(example, self._wanted.prompt)
            yield target_of(example)

    def rows(self, split: str, tokenizer: PreTrainedTokenizerBase, progress: Callable[[int], object]) -> TokenRows:
        """Sources and targets of a split; those that are too long are cut, but keep their end token."""
        encode, backend, most = Encoder(tokenizer), tokenizer.backend_tokenizer, self._wanted.source_limit
        rows, examples, lost = TokenRows(), self._examples(split), 0
        unreadable = 0
        while chunk := list(itertools.islice(examples, CHUNK)):
            texts = [target_of(example) for example in chunk]
            targets = encode(texts)
            sources = encode([source_of(example, self._wanted.prompt) for example in chunk])
            decoded = backend.decode_batch(targets, skip_special_tokens=True)
            lost += sum(folded(a) != folded(b) for a, b in zip(texts, decoded, strict=True))
            for example, text in zip(chunk, texts, strict=True):
                if is_restored(example.query, example.table.header):
                    continue
                unreadable += 1
                if rows.first_unreadable is None:
                    rows.first_unreadable = f"{split}.jsonl:{example.index + 1}: {text[:SHOWN_CHARACTERS]!r}"
            rows.inputs_cut += sum(len(row) > most for row in sources)
            rows.labels_cut += sum(len(row) > MAX_TARGET_TOKENS for row in targets)
            rows.input_ids += [_cut(row, most, tokenizer.eos_token_id) for row in sources]
            rows.labels += [_cut(row, MAX_TARGET_TOKENS, tokenizer.eos_token_id) for row in targets]
            progress(len(chunk))
        rows.targets_lost = lost
        rows.targets_unreadable = unreadable
        return rows

    def _examples(self, split: str) -> Iterator[Example]:
        return itertools.islice(read_split(self._folder, split), self._wanted.limit)


def _cut(row: Ids, limit: int, end: int) -> Ids:
    """The row, cut to at most `limit` tokens with the end token last."""
    return row if len(row) <= limit else np.append(row[: limit - 1], np.int32(end))
