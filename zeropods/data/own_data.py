"""A user's own data: tables as CSV files and questions with plain SQL, converted to WikiSQL's layout."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import sqlglot
from sqlglot import exp

from zeropods.data.encoding import folded
from zeropods.data.wikisql import split_files
from zeropods.errors import UserError
from zeropods.files import no_folder
from zeropods.outputs import new_folder
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Execution, Query, format_query, parse_query
from zeropods.sql.query import number as number_in
from zeropods.sql.table import SQLTable
from zeropods.tables import counted

# Read a CSV file as a table; a fault in it is reported in one line.

DELIMITERS = ";\t|,"
"""Delimiters to try; if two divide the lines equally well, the first one counts, since commas also occur in texts."""
SEPARATOR = re.compile(r'\s*"?sep=([;\t|,])"?[ \t]*\r?(?=\n|$)', re.IGNORECASE)
"""A line before the header in which spreadsheets name the delimiter."""
NUMBER = re.compile(r"[-+−]?(0|[1-9]\d{0,2}(,\d{3})+|[1-9]\d*|0?(?=\.\d))(\.\d+)?([eE][-+]?[12]?\d{1,2})?")
"""A number; with a leading zero, as in a postcode, a cell is a name instead."""
DECIMAL_COMMA = re.compile(r"[-+−]?(0|[1-9]\d{0,2}(\.\d{3})+|[1-9]\d*)(,\d+)?([eE][-+]?[12]?\d{1,2})?")
KINDS = (NUMBER, DECIMAL_COMMA)
COMMA = re.compile(r"(?<![\w.,])(\d{1,3}(\.\d{3})+|\d+),(\d+)(?![.,]?\w)")
"""A number with a decimal comma in a question."""
DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?")
"""A date of ISO 8601, with or without its time. As text such dates are in the order of time: `>`, `<`, `MIN` and `MAX`
are right."""
OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{2,4}|\d{4}([./])\d{1,2}\2\d{1,2}")
"""A date in another form, which as text has no order."""
WRITE_ISO = "write its dates as 2024-12-31, which have an order"
MOST_ODD = 0.1
"""Largest share of non-numbers, one of them not counted, in a text column that is reported as meant for numbers."""


@dataclass(frozen=True)
class ReadTable(SQLTable):
    """A table read from a CSV file."""

    has_commas: bool = False
    """Whether its numbers had decimal commas."""
    odd_cells: tuple[str, ...] = ()
    """A remark for each column that is text only because of a few cells: what the first of these is, and where."""


def read_csv(path: Path, id_: str = "uploaded") -> ReadTable:
    """The table of a CSV file: its first line has the names; columns of numbers are `real`, others `text`.

    Empty cells are None. Numbers with decimal commas, which only a file with semicolons may have, get a point instead.

    Raises:
        UserError: the file is not text in UTF-8 (or UTF-16 with its byte order mark), has no header or no row, a name
            that is empty or occurs twice, or a row whose length is not that of the header.
    """
    name = f"the file {shown(path.name)}"
    lines, delimiter = _lines(name, path.read_bytes())
    if len(lines) < 2:
        raise UserError(f"{name}: has no rows; expected a line of column names, then rows")
    (_, header), *rows = lines
    # To the model, names that differ only in the form of their letters are the same.
    forms = [folded(column).casefold() for column in header]
    for number, form in enumerate(forms):
        if not any(letter.isalnum() for letter in form):
            raise UserError(f"{name}: column {number + 1} has no name; the first line must name every column")
        if forms.count(form) > 1:
            raise UserError(f"{name}: two columns are named {shown(header[number])!r}; rename one")
    for number, cells in rows:
        if len(cells) != len(header):
            remedy = f"correct one of them (a cell that contains {delimiter!r} must be in double quotes)"
            said = f"{counted(len(cells), 'cell')}, but the first line has {len(header)}"
            raise UserError(f"{name}: line {number}: {said}; {remedy}")

    columns = [[(line, cells[number]) for line, cells in rows if cells[number]] for number in range(len(header))]
    odd = [{kind: [each for each in column if not kind.fullmatch(each[1])] for kind in KINDS} for column in columns]
    has_commas = delimiter == ";" and any(
        not odd[number][DECIMAL_COMMA] and any("," in cell for _, cell in column)
        for number, column in enumerate(columns)
    )
    types: list[Literal["text", "real"]] = []
    remarks = []
    for number, column in enumerate(columns):
        kind = DECIMAL_COMMA if has_commas and not odd[number][DECIMAL_COMMA] else NUMBER
        if kind is DECIMAL_COMMA:
            for _, cells in rows:
                cells[number] = _with_point(cells[number])
        types.append("real" if column and not odd[number][kind] else "text")
        fewest = min((odd[number][kind] for kind in KINDS[: 2 if delimiter == ";" else 1]), key=len)
        if fewest and len(fewest) - 1 <= MOST_ODD * (len(column) - 1) and 2 * len(fewest) < len(column):
            line, cell = fewest[0]
            said = f"{shown(cell)!r} is not a number, so column {header[number]} is treated as text"
            remarks.append(f"{path.name}:{line}: {said}; write a number, or leave the cell empty")
    body = tuple(tuple(cell or None for cell in cells) for _, cells in rows)
    return ReadTable(id_, tuple(header), tuple(types), body, has_commas, tuple(remarks))


def shown(text: str, most: int = 60) -> str:
    """A text from outside, made fit for a message: one line of printable characters, at most `most` of them."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return line if len(line) <= most else line[: most - 1] + "…"


def _lines(name: str, content: bytes) -> tuple[list[tuple[int, list[str]]], str]:
    """Number and cells of each line of a CSV file that is not blank, and the delimiter.

    The delimiter is the best by three criteria, in this order: it divides the header; most lines have as many cells as
    the header; it occurs most often in the header.
    """
    try:
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}: line {line} is not valid UTF-8; save the table as CSV in UTF-8") from None
    told = SEPARATOR.match(text)
    first, text = text.lstrip().split("\n", 1)[0], text[told.end() :] if told else text
    found = []
    for delimiter in told[1] if told else [each for each in DELIMITERS if each in first] or [","]:
        reader, lines, fault = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), [], None
        try:
            for cells in reader:
                if any(map(str.strip, cells)):
                    lines.append((reader.line_num, [" ".join(cell.split()) for cell in cells]))
        except csv.Error as error:
            fault = f"line {reader.line_num}: {error}"
        width = len(lines[0][1]) if lines else 0
        alike = sum(len(cells) == width for _, cells in lines) / max(1, len(lines))
        found.append(((width > 1, alike, first.count(delimiter)), lines, fault, delimiter))
    _, lines, fault, delimiter = max(found, key=lambda each: each[0])
    if fault:
        raise UserError(f"{name}: {fault}; correct the quotes there")
    return lines, delimiter


def decimal_points(text: str, values: Collection[str] | None = None) -> str:
    """The text, in which numbers with a decimal comma (`72,5`, `1.234,50`) are written with a point.

    Args:
        values: the numbers to change, written with a point; by default all but those with three digits after a comma,
            which may be thousands.
    """

    def point(found: re.Match[str]) -> str:
        written = _with_point(found[0])
        return written if (len(found[3]) != 3 if values is None else written in values) else found[0]

    return COMMA.sub(point, text)


def _with_point(cell: str) -> str:
    return cell.replace(".", "").replace(",", ".")


# A plain SQL statement as a query: one table, one column, at most one aggregate, conditions joined by AND.

REACH = (
    "expected one column, or MAX, MIN, COUNT, SUM or AVG of it, FROM one table "
    "WHERE COLUMN =, > or < VALUE, joined by AND"
)
QUOTES = "put text in 'single quotes', a name with spaces in \"double quotes\" or [brackets]"


def parsed(sql: str) -> tuple[exp.Select, str]:
    """A statement as parsed by sqlglot, and its table's name; `ValueError` unless it is one SELECT from one table."""
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        statements = [each for each in sqlglot.parse(sql, read="sqlite") if each is not None]
    except (sqlglot.errors.SqlglotError, RecursionError) as error:
        found = error.errors[0] if isinstance(error, sqlglot.errors.ParseError) and error.errors else {}
        near, decimal = found.get("highlight", sql), re.search(r"[\d.]+,$", found.get("start_context", ""))
        if decimal and near.isdigit():
            number = f"{decimal[0]}{near}"
            raise ValueError(f"not valid SQL near {number!r}; write {_with_point(number)}") from None
        raise ValueError(f"not valid SQL near {shown(near)!r}; {QUOTES}") from None
    if len(statements) != 1 or not isinstance(statements[0], exp.Select):
        raise ValueError(f"not a single SELECT; {REACH}")
    parts = {name.rstrip("_"): part for name, part in statements[0].args.items() if part}
    if beyond := parts.keys() - {"expressions", "from", "where", "kind"}:
        raise ValueError(f"{min(beyond).upper().removesuffix('S')}: not supported; {REACH}")
    if "from" not in parts or not isinstance(parts["from"].this, exp.Table):
        raise ValueError(f"no plain table after FROM; {REACH}")
    return statements[0], parts["from"].this.name


def query_of(statement: exp.Select, table: ReadTable) -> Query:
    """The query that a statement stands for on its table; `ValueError` says what is out of reach."""
    if len(statement.expressions) != 1:
        raise ValueError(f"{len(statement.expressions)} columns are selected; {REACH}")
    selected = statement.expressions[0].unalias()
    kinds = (exp.Max, exp.Min, exp.Count, exp.Sum, exp.Avg)
    agg = next((number for number, kind in enumerate(kinds, 1) if isinstance(selected, kind)), 0)
    if agg and not selected.args.get("expressions"):
        selected = selected.this
    if isinstance(selected, exp.Star) and AGGREGATES[agg] == "COUNT":
        whole = [n for n, cells in enumerate(zip(*table.rows, strict=True)) if None not in cells]
        if not whole:
            raise ValueError(f"COUNT(*): every column of {table.id} has empty cells; count one of them")
        sel = whole[0]
    elif isinstance(selected, exp.Column):
        sel = _column(selected, table)
    else:
        raise ValueError(f"{shown(selected.sql('sqlite'))} is selected; {REACH}")

    conds, where = [], statement.args.get("where")
    left = [where.this] if where else []
    while left:
        node = left.pop().unnest()
        if isinstance(node, exp.And):
            left += [node.right, node.left]
        else:
            conds.append(_condition(node, table))
    query = Query(sel, agg, tuple(conds))
    text = format_query(query, table.header)
    if parse_query(text, table.header) != query:
        raise ValueError(f"{text!r} can be read as another query; rename a column")
    return query


def _condition(node: exp.Expr, table: ReadTable) -> Condition:
    operators = (exp.EQ, exp.GT, exp.LT)
    if type(node) not in operators:
        raise ValueError(f"{shown(node.sql('sqlite'))}: not supported; {REACH}")
    value = node.args.get("expression")
    literal = value.this if isinstance(value, exp.Neg) else value
    if not isinstance(node.this, exp.Column) or not isinstance(literal, exp.Literal):
        said = shown(node.sql("sqlite"))
        raise ValueError(f"{said}: expected a column, one of {', '.join(OPERATORS[:3])}, and a value; {QUOTES}")
    text = " ".join(literal.name.split())
    if not text:
        raise ValueError(f"{shown(node.sql('sqlite'))}: the value is empty; give one")
    column = _column(node.this, table)
    if table.has_commas and table.types[column] == "real" and DECIMAL_COMMA.fullmatch(text):
        text = _with_point(text)
    return Condition(column, operators.index(type(node)), text if literal is value else f"-{text}")


def _column(node: exp.Column, table: SQLTable) -> int:
    """Index of a column, by its name without regard to letter case."""
    names = [folded(name).casefold() for name in table.header]
    wanted = folded(node.name).casefold()
    if wanted not in names:
        columns = shown(", ".join(table.header), 200)
        raise ValueError(f"{node.name!r} is not a column of {table.id}, whose columns are {columns}; {QUOTES}")
    return names.index(wanted)


# Tables and questions as a data set.

COLUMNS = ("question", "sql")
FEWEST_TABLES = 3
"""Least number of tables to divide: fewer are not enough for train, dev and test, so questions are divided instead."""
PART = 10
"""One question in this many is for dev, and one for test."""


@dataclass(frozen=True)
class Asked:
    """A question that was taken into the data set."""

    place: str
    question: str
    table: ReadTable
    query: Query


def from_csv(tables: Path, questions: Path, out: Path) -> dict[str, Any]:
    """Write a data set in WikiSQL's layout.

    Args:
        tables: a folder of CSV files, each named after its table.
        questions: a CSV file of two columns, a question and its SQL statement.

    Returns:
        What `zeropods data from-csv --json` prints: `out`, the number of `questions` by split, and lines that each name
        a place: `left_out` has one for each question that was not taken, with the reason; the others are `remarks`.

    Raises:
        UserError: `out` is not empty; `tables`, `questions` or a table asked about cannot be read; or no question can
            be taken.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists; remove it, or choose a new folder")
    files = _files(tables)
    taken, left_out = _taken(files, questions)
    if not taken:
        more = f" ({left_out[0]})" if left_out else ""
        raise UserError(f"{questions}: no question can be used{more}; docs/own_data.md has examples")
    about: dict[str, list[Asked]] = {}
    for asked in taken:
        about.setdefault(asked.table.id, []).append(asked)
    by_tables = len(about) >= FEWEST_TABLES
    remarks = [] if by_tables else [f"{tables}: too few tables to keep some for dev and test; questions are divided"]
    if unasked := [path.name for name, path in files.items() if name not in about]:
        remarks.append(f"{tables}: no question is about {shown(', '.join(unasked), 200)}")
    for those in about.values():
        with closing(Execution(those[0].table)) as execution:
            remarks += [f"{tables}/{said}" for said in those[0].table.odd_cells]
            remarks += [f"{asked.place}: {said}" for asked in those for said in _remarks(asked, execution)]
    splits = _divided_by(taken, lambda asked: asked.table.id if by_tables else asked.question)
    with new_folder(out) as folder:
        for split, those in splits.items():
            lines = [{"table_id": a.table.id, "question": a.question, "sql": a.query.to_json()} for a in those]
            of_split = {asked.table.id: asked.table for asked in those}
            for name, content in split_files(split, of_split.values(), lines).items():
                (folder / name).write_bytes(content)
    counts = {split: len(those) for split, those in splits.items()}
    return {"out": str(out), "questions": counts, "left_out": left_out, "remarks": remarks}


def _remarks(asked: Asked, execution: Execution) -> Iterator[str]:
    """Yield a line for each oddity of a question; `execution` is that of its table."""
    table, agg = asked.table, AGGREGATES[asked.query.agg]
    if agg not in ("", "COUNT") and table.types[asked.query.sel] == "text":
        has_order = agg in ("MAX", "MIN") and _all_match(table, asked.query.sel, DATE)
        if not has_order:
            name = table.header[asked.query.sel]
            remedy = f"; {WRITE_ISO}" if _all_match(table, asked.query.sel, OTHER_DATE) else ""
            yield f"{agg} of {name}, which is text: its cells are not numbers{remedy}"
    for condition in asked.query.conds:
        column, operator, value = condition
        name, number = table.header[column], number_in(value)
        if table.types[column] == "text":
            if operator and not _all_match(table, column, DATE):
                remedy = f", or {WRITE_ISO}" if _all_match(table, column, OTHER_DATE) else ""
                yield f"{name} is text, which has no order; compare it with ={remedy}"
            elif operator and DATE.fullmatch(value) is None:
                yield f"{name} holds dates, but {value!r} is none; compare it with a whole date, as in 2024-12-31"
        elif number is None:
            yield f"{value!r} is not a number, but {name} holds numbers"
        elif not NUMBER.fullmatch(value):
            yield f"{value!r} is compared as {number:g}"
        if not execution.execute(Query(0, 0, (condition,))):
            yield f"no row of {table.id} has {name} {OPERATORS[operator]} {value}"
        if folded(value).casefold() not in folded(asked.question).casefold():
            yield f"{value!r} is not in the question; a model copies its values from there"


def _all_match(table: SQLTable, column: int, form: re.Pattern[str]) -> bool:
    """Whether a column has cells that are not empty, and all of these have a form."""
    cells = [str(row[column]) for row in table.rows if row[column] is not None]
    return bool(cells) and all(form.fullmatch(cell) for cell in cells)


def _files(folder: Path) -> dict[str, Path]:
    """The CSV files of a folder by their names in lower case, without `.csv`."""
    if not folder.is_dir():
        raise UserError(f"{folder}: {no_folder(folder)}; expected one with a CSV file for each table")
    files: dict[str, Path] = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv"):
        other = files.setdefault(path.stem.casefold(), path)
        if other != path:
            raise UserError(f"{folder}: {other.name} and {path.name} differ only in letter case; rename one")
    if not files:
        raise UserError(f"{folder}: no .csv file there; expected one for each table")
    return files


def _taken(files: dict[str, Path], path: Path) -> tuple[list[Asked], list[str]]:
    """The questions that can be taken, and a line for each that cannot."""
    lines, _ = _lines(str(path), path.read_bytes())
    if not lines:
        raise UserError(f"{path}: is empty; expected a line {','.join(COLUMNS)}, then a row for each question")
    header = [cell.casefold() for cell in lines[0][1]]
    if sorted(header) != sorted(COLUMNS):
        raise UserError(f"{path}: columns {shown(', '.join(header)) or 'without names'}; expected {', '.join(COLUMNS)}")
    taken, left_out, read = [], [], cache(read_csv)
    for number, cells in lines[1:]:
        place = f"{path}:{number}"
        try:
            if len(cells) != len(header):
                remedy = f"expected {' and '.join(COLUMNS)}, each in double quotes"
                raise ValueError(f"{counted(len(cells), 'cell')}; {remedy}")
            row = dict(zip(header, cells, strict=True))
            if "" in cells:
                raise ValueError(f"its {header[cells.index('')]} is empty; write one, or remove the row")
            statement, name = parsed(row["sql"])
            if name.casefold() not in files:
                raise ValueError(
                    f"no table {name!r}; the tables are {shown(', '.join(path.stem for path in files.values()), 200)}"
                )
            table = read(files[name.casefold()], name.casefold())
            query = query_of(statement, table)
            question = row["question"]
            if table.has_commas:
                question = decimal_points(question, {c.value for c in query.conds if table.types[c.column] == "real"})
            taken.append(Asked(place, question, table, query))
        except ValueError as error:
            left_out.append(f"{place}: {error}")
    return taken, left_out


def _divided_by(taken: list[Asked], key: Callable[[Asked], str]) -> dict[str, list[Asked]]:
    """The splits: questions of one key stay together, dev and test get at least a tenth, train the largest group."""
    groups: dict[str, list[Asked]] = {}
    for asked in taken:
        groups.setdefault(key(asked), []).append(asked)
    largest = max(groups, key=lambda name: len(groups[name]))
    splits: dict[str, list[Asked]] = {"train": groups.pop(largest), "dev": [], "test": []}
    # A group stays in its split when others are added, since the order depends on the names alone.
    for name in sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest()):
        split = next((each for each in ("test", "dev") if len(splits[each]) * PART < len(taken)), "train")
        splits[split] += groups[name]
    return {split: those for split, those in splits.items() if those}
