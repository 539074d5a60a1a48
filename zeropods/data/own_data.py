"""A user's own data: CSV files and questions with plain SQL, converted to WikiSQL's layout."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
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
from zeropods.sql.query import (
    AGGREGATES,
    OPERATORS,
    Condition,
    Execution,
    Query,
    format_query,
    parse_query,
)
from zeropods.sql.query import number as number_in
from zeropods.sql.table import SQLTable
from zeropods.tables import counted

# Read a CSV file as a table; a fault in it is reported in one line.

DELIMITERS = ";\t|,"
"""Delimiters to try; if two divide the lines equally well, the first one counts, since commas also
occur in texts."""
SEPARATOR = re.compile(r'\s*"?sep=([;\t|,])"?[ \t]*\r?(?=\n|$)', re.IGNORECASE)
"""A line before the header in which spreadsheets name the delimiter."""
NUMBER_CELL = re.compile(
    r"[-+−]?(0|[1-9]\d{0,2}(,\d{3})+|[1-9]\d*|0?(?=\.\d))(\.\d+)?([eE][-+]?[12]?\d{1,2})?"
)
"""A number; with a leading zero, as in a postcode, a cell is a name instead."""
DECIMAL_COMMA_CELL = re.compile(
    r"[-+−]?(0|[1-9]\d{0,2}(\.\d{3})+|[1-9]\d*)(,\d+)?([eE][-+]?[12]?\d{1,2})?"
)
"""A number that may have a decimal comma, and points between its thousands."""
DECIMAL_COMMA_IN_TEXT = re.compile(r"(?<![\w.,])(\d{1,3}(\.\d{3})+|\d+),(\d+)(?![.,]?\w)")
"""A number with a decimal comma in a question."""
DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?")
"""A date of ISO 8601, with or without its time. As text such dates are in the order of time: `>`,
`<`, `MIN` and `MAX` are right."""
OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{2,4}|\d{4}([./])\d{1,2}\2\d{1,2}")
"""A date in another form, which as text has no order."""
WRITE_ISO = "write its dates as 2024-12-31, which have an order"
MOST_ODD = 0.1
"""Largest share of cells that are no numbers in a column of text that is reported as meant for
numbers. One such cell is not counted, so that a single one is reported in a short column too."""

NumberedLine = tuple[int, list[str]]
"""The number of a line in its file, and its cells."""
NumberedCell = tuple[int, str]
"""The number of a line in its file, and one of its cells."""


@dataclass(frozen=True)
class ReadTable(SQLTable):
    """A table read from a CSV file."""

    has_commas: bool = False
    """Whether its numbers had decimal commas."""
    odd_cells: tuple[str, ...] = ()
    """A remark for each column that is text only because of a few cells: what the first of these
    is, and where."""


def read_csv(path: Path, id_: str = "uploaded") -> ReadTable:
    """The table of a CSV file: its first line has the names; columns of numbers are `real`, others
    `text`.

    Empty cells are None. Numbers with decimal commas, which only a file with semicolons may have,
    get a point instead.

    Raises:
        UserError: the file is not text in UTF-8 (or UTF-16 with its byte order mark), has no header
            or no row, a name that is empty or occurs twice, or a row whose length is not that of
            the header.
    """
    file_name = f"the file {shown(path.name)}"
    lines, delimiter = _read_lines(file_name, path.read_bytes())
    if len(lines) < 2:
        raise UserError(f"{file_name}: has no rows; expected a line of column names, then rows")
    _, header = lines[0]
    rows = lines[1:]
    _check_header(file_name, header)
    _check_widths(file_name, len(header), rows, delimiter)

    may_have_commas = delimiter == ";"
    columns = [_Column(rows, index, may_have_commas) for index in range(len(header))]
    # One column with decimal commas shows how the whole file is written: `1.234` is 1234 then, in
    # any column.
    has_commas = any(column.has_decimal_commas for column in columns)
    types: list[Literal["text", "real"]] = []
    for index, column in enumerate(columns):
        gets_points = has_commas and not column.not_decimal_commas
        if gets_points:
            _replace_commas(rows, index)
        is_of_numbers = gets_points or not column.not_numbers
        types.append("real" if column.cells and is_of_numbers else "text")
    table_rows = []
    for _, cells in rows:
        table_rows.append(tuple(cell or None for cell in cells))
    return ReadTable(
        id_,
        tuple(header),
        tuple(types),
        tuple(table_rows),
        has_commas=has_commas,
        odd_cells=tuple(_remarks_on_odd_cells(path.name, header, columns)),
    )


def _replace_commas(rows: Sequence[NumberedLine], index: int) -> None:
    """Write the numbers in a column with a point, in place."""
    for _, cells in rows:
        cells[index] = _with_point(cells[index])


def _remarks_on_odd_cells(
    file_name: str, header: Sequence[str], columns: Sequence[_Column]
) -> Iterator[str]:
    """A remark on each column that is text only because of a few cells."""
    for name, column in zip(header, columns, strict=True):
        odd_cell = column.odd_cell()
        if odd_cell is not None:
            yield _remark_on(file_name, odd_cell, name)


def _remark_on(file_name: str, odd_cell: NumberedCell, column: str) -> str:
    """What is said of a cell that keeps its column from being one of numbers."""
    line, cell = odd_cell
    return (
        f"{file_name}:{line}: {shown(cell)!r} is not a number, so column {column} is treated as "
        "text; write a number, or leave the cell empty"
    )


def _check_header(file_name: str, header: Sequence[str]) -> None:
    """Refuse a column without a name, and two columns of one name."""
    # To the model, names that differ only in the case or form of their letters are the same.
    comparable_names = [_comparable(name) for name in header]
    for index, name in enumerate(comparable_names):
        has_letter_or_digit = any(character.isalnum() for character in name)
        if not has_letter_or_digit:
            raise UserError(
                f"{file_name}: column {index + 1} has no name; "
                "the first line must name every column"
            )
        if comparable_names.count(name) > 1:
            raise UserError(
                f"{file_name}: two columns are named {shown(header[index])!r}; rename one"
            )


def _check_widths(file_name: str, width: int, rows: Sequence[NumberedLine], delimiter: str) -> None:
    """Refuse a row that has not as many cells as the header."""
    for line, cells in rows:
        if len(cells) != width:
            raise UserError(
                f"{file_name}: line {line}: {counted(len(cells), 'cell')}, "
                f"but the first line has {width}; "
                f"correct one of them (a cell that contains {delimiter!r} must be in double quotes)"
            )


class _Column:
    """A column's cells that are not empty, and those among them that are not numbers."""

    def __init__(self, rows: Sequence[NumberedLine], index: int, may_have_commas: bool) -> None:
        self.may_have_commas = may_have_commas
        self.cells = [(line, cells[index]) for line, cells in rows if cells[index]]
        self.not_numbers = self._not_matching(NUMBER_CELL)
        """Cells that are not numbers with a decimal point."""
        self.not_decimal_commas: list[NumberedCell] = []
        """Cells that are not numbers with a decimal comma; empty where the file has none."""
        if may_have_commas:
            self.not_decimal_commas = self._not_matching(DECIMAL_COMMA_CELL)

    def _not_matching(self, number: re.Pattern[str]) -> list[NumberedCell]:
        return [(line, cell) for line, cell in self.cells if not number.fullmatch(cell)]

    @property
    def has_decimal_commas(self) -> bool:
        """Whether all cells are numbers if commas are decimal, and one of them has a comma."""
        if not self.may_have_commas or self.not_decimal_commas:
            return False
        return any("," in cell for _, cell in self.cells)

    def odd_cell(self) -> NumberedCell | None:
        """The first of the few cells that keep the column from being one of numbers.

        None where all cells are numbers, and where so many are not that the column is meant as
        text.
        """
        odd_cells = self.not_numbers
        if self.may_have_commas:
            # The column is meant in the way in which more of its cells are numbers.
            odd_cells = min(odd_cells, self.not_decimal_commas, key=len)
        if not odd_cells:
            return None
        are_few = len(odd_cells) - 1 <= MOST_ODD * (len(self.cells) - 1)
        are_fewer_than_half = 2 * len(odd_cells) < len(self.cells)
        return odd_cells[0] if are_few and are_fewer_than_half else None


def shown(text: str, most: int = 60) -> str:
    """A text from outside, made fit for a message: one line of printable characters, at most `most`
    of them."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    line = printable.strip()
    if len(line) <= most:
        return line
    return line[: most - 1] + "…"


@dataclass(frozen=True)
class _DividedLines:
    """The lines of a CSV file, divided by one delimiter."""

    delimiter: str
    lines: list[NumberedLine]
    """The lines that are not blank, up to the fault if there is one."""
    fault: str | None
    """What is wrong with the quotes, and in which line; None if nothing is."""

    def fitness(self, header: str) -> tuple[bool, float, int]:
        """How well the delimiter fits: the larger, the better.

        There are three criteria, in this order: the delimiter divides the header; most lines have
        as many cells as the header; it occurs most often in the header.
        """
        width = len(self.lines[0][1]) if self.lines else 0
        lines_alike = sum(len(cells) == width for _, cells in self.lines)
        share_alike = lines_alike / max(1, len(self.lines))
        return width > 1, share_alike, header.count(self.delimiter)


def _read_lines(name: str, content: bytes) -> tuple[list[NumberedLine], str]:
    """Number and cells of each line of a CSV file that is not blank, and the delimiter.

    The delimiter is the one that the file names in its first line, else the one that fits best.

    Args:
        name: the file's name, for messages.

    Raises:
        UserError: the file is not text in UTF-8 or UTF-16, or its quotes are wrong.
    """
    text = _decoded(name, content)
    header = text.lstrip().split("\n", 1)[0]
    separator = SEPARATOR.match(text)
    if separator:
        text = text[separator.end() :]
        delimiters = [separator[1]]
    else:
        delimiters = [delimiter for delimiter in DELIMITERS if delimiter in header] or [","]
    divided = [_divided_by(delimiter, text) for delimiter in delimiters]
    best = max(divided, key=lambda division: division.fitness(header))
    if best.fault is not None:
        raise UserError(f"{name}: {best.fault}; correct the quotes there")
    return best.lines, best.delimiter


def _decoded(name: str, content: bytes) -> str:
    """The text of a file in UTF-8, or in UTF-16 with its byte order mark; `UserError` if it is in
    neither."""
    is_utf_16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        return content.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{name}: line {line} is not valid UTF-8; save the table as CSV in UTF-8"
        ) from None


def _divided_by(delimiter: str, text: str) -> _DividedLines:
    """The lines of a text, divided by a delimiter; each run of spaces in a cell becomes one."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines: list[NumberedLine] = []
    fault = None
    try:
        for cells in reader:
            is_blank = not any(cell.strip() for cell in cells)
            if not is_blank:
                lines.append((reader.line_num, [" ".join(cell.split()) for cell in cells]))
    except csv.Error as error:
        fault = f"line {reader.line_num}: {error}"
    return _DividedLines(delimiter, lines, fault)


def decimal_points(text: str, values: Collection[str] | None = None) -> str:
    """The text, in which numbers with a decimal comma (`72,5`, `1.234,50`) are written with a
    point.

    Args:
        values: the numbers to change, written with a point; by default all but those with three
            digits after a comma, which may be thousands.
    """

    def point(match: re.Match[str]) -> str:
        number = _with_point(match[0])
        may_be_thousands = len(match[3]) == 3
        if values is None:
            return match[0] if may_be_thousands else number
        return number if number in values else match[0]

    return DECIMAL_COMMA_IN_TEXT.sub(point, text)


def _with_point(cell: str) -> str:
    """A number with a decimal comma, written with a point and without points between thousands."""
    return cell.replace(".", "").replace(",", ".")


# A plain SQL statement as a query: one table, one column, at most one aggregate, conditions joined
# by AND.

REACH = (
    "expected one column, or MAX, MIN, COUNT, SUM or AVG of it, FROM one table "
    "WHERE COLUMN =, > or < VALUE, joined by AND"
)
QUOTES = "put text in 'single quotes', a name with spaces in \"double quotes\" or [brackets]"
SUPPORTED_PARTS = {"expressions", "from", "where", "kind"}
"""Parts of sqlglot's SELECT that a query may have."""
AGGREGATE_FUNCTIONS = (exp.Max, exp.Min, exp.Count, exp.Sum, exp.Avg)
"""The functions of `AGGREGATES`, which begins with none."""
COMPARISON_NODES = (exp.EQ, exp.GT, exp.LT)
"""The comparisons of `OPERATORS`, which ends with one that nobody writes."""


def parsed(sql: str) -> tuple[exp.Select, str]:
    """A statement as parsed by sqlglot, and its table's name; `ValueError` unless it is one SELECT
    from one table."""
    # sqlglot logs warnings about what it does not know, besides the error that it raises.
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        parsed_statements = sqlglot.parse(sql, read="sqlite")
    except (sqlglot.errors.SqlglotError, RecursionError) as error:
        raise ValueError(_syntax_fault(sql, error)) from None
    statements = [statement for statement in parsed_statements if statement is not None]
    if len(statements) != 1 or not isinstance(statements[0], exp.Select):
        raise ValueError(f"not a single SELECT; {REACH}")
    select = statements[0]
    # sqlglot has an underscore behind names that are Python's keywords too, such as `from_`.
    parts = {name.rstrip("_"): part for name, part in select.args.items() if part}
    unsupported = parts.keys() - SUPPORTED_PARTS
    if unsupported:
        keyword = min(unsupported).upper().removesuffix("S")
        raise ValueError(f"{keyword}: not supported; {REACH}")
    source = parts["from"].this if "from" in parts else None
    if not isinstance(source, exp.Table):
        raise ValueError(f"no plain table after FROM; {REACH}")
    return select, source.name


def _syntax_fault(sql: str, error: Exception) -> str:
    """What is wrong with a statement that sqlglot cannot parse, and the way out."""
    places = error.errors if isinstance(error, sqlglot.errors.ParseError) else []
    place = places[0] if places else {}
    near = place.get("highlight", sql)
    before_comma = re.search(r"[\d.]+,$", place.get("start_context", ""))
    if before_comma and near.isdigit():
        # A comma for a point divides a number in two, and the second one is the fault.
        number = f"{before_comma[0]}{near}"
        return f"not valid SQL near {number!r}; write {_with_point(number)}"
    return f"not valid SQL near {shown(near)!r}; {QUOTES}"


def query_of(statement: exp.Select, table: ReadTable) -> Query:
    """The query that a statement stands for on its table; `ValueError` if a `Query` cannot say what
    the statement says."""
    if len(statement.expressions) != 1:
        raise ValueError(f"{len(statement.expressions)} columns are selected; {REACH}")
    agg, selected = _aggregate(statement.expressions[0].unalias())
    sel = _selected_column(agg, selected, table)
    conditions = []
    for node in _joined_by_and(statement.args.get("where")):
        conditions.append(_condition(node, table))
    query = Query(sel, agg, tuple(conditions))
    text = format_query(query, table.header)
    if parse_query(text, table.header) != query:
        raise ValueError(f"{text!r} can be read as another query; rename a column")
    return query


def _aggregate(selected: exp.Expr) -> tuple[int, exp.Expr]:
    """The index in `AGGREGATES` of what is selected, and what stands within the aggregate.

    A COUNT of several columns is returned whole, and so is any other function, so that
    `_selected_column` refuses it.
    """
    for agg, function in enumerate(AGGREGATE_FUNCTIONS, 1):
        if isinstance(selected, function):
            is_of_several = selected.args.get("expressions")
            return agg, selected if is_of_several else selected.this
    return 0, selected


def _selected_column(agg: int, selected: exp.Expr, table: SQLTable) -> int:
    """Index of the column that is selected; `ValueError` if none is.

    For `COUNT(*)` it is the first column without empty cells, which has as many cells as the table
    has rows.
    """
    if isinstance(selected, exp.Star) and AGGREGATES[agg] == "COUNT":
        for column, cells in enumerate(zip(*table.rows, strict=True)):
            if None not in cells:
                return column
        raise ValueError(f"COUNT(*): every column of {table.id} has empty cells; count one of them")
    if isinstance(selected, exp.Column):
        return _column(selected, table)
    raise ValueError(f"{shown(selected.sql('sqlite'))} is selected; {REACH}")


def _joined_by_and(where: exp.Where | None) -> Iterator[exp.Expr]:
    """The conditions that AND joins after WHERE, from left to right."""
    # As a stack, since a statement may have more conditions than Python has levels of recursion.
    nodes = [where.this] if where else []
    while nodes:
        node = nodes.pop().unnest()
        if isinstance(node, exp.And):
            nodes += [node.right, node.left]
        else:
            yield node


def _condition(node: exp.Expr, table: ReadTable) -> Condition:
    """The condition that a comparison stands for; `ValueError` if a `Condition` cannot say it."""
    if type(node) not in COMPARISON_NODES:
        raise ValueError(f"{shown(node.sql('sqlite'))}: not supported; {REACH}")
    value = node.args.get("expression")
    literal = value.this if isinstance(value, exp.Neg) else value
    is_negative = literal is not value
    if not isinstance(node.this, exp.Column) or not isinstance(literal, exp.Literal):
        comparison = shown(node.sql("sqlite"))
        operators = ", ".join(OPERATORS[:3])
        raise ValueError(
            f"{comparison}: expected a column, one of {operators}, and a value; {QUOTES}"
        )
    text = " ".join(literal.name.split())
    if not text:
        raise ValueError(f"{shown(node.sql('sqlite'))}: the value is empty; give one")
    column = _column(node.this, table)
    may_have_comma = table.has_commas and table.types[column] == "real"
    if may_have_comma and DECIMAL_COMMA_CELL.fullmatch(text):
        text = _with_point(text)
    if is_negative:
        text = f"-{text}"
    return Condition(column, COMPARISON_NODES.index(type(node)), text)


def _column(node: exp.Column, table: SQLTable) -> int:
    """Index of a column, by its name without regard to letter case; `ValueError` if there is
    none."""
    names = [_comparable(name) for name in table.header]
    name = _comparable(node.name)
    if name not in names:
        columns = shown(", ".join(table.header), 200)
        raise ValueError(
            f"{node.name!r} is not a column of {table.id}, whose columns are {columns}; {QUOTES}"
        )
    return names.index(name)


def _comparable(text: str) -> str:
    """A name or a text in the form in which two are compared without regard to letter case."""
    return folded(text).casefold()


# Tables and questions as a data set.

QUESTION_COLUMNS = ("question", "sql")
FEWEST_TABLES = 3
"""Least number of tables to divide: fewer are not enough for train, dev and test, so questions are
divided instead."""
QUESTIONS_FOR_EACH_HELD_OUT = 10
"""One question in this many is for dev, and one for test."""


@dataclass(frozen=True)
class TakenQuestion:
    """A question that was taken into the data set."""

    place: str
    """File and line of the question."""
    question: str
    table: ReadTable
    query: Query


def from_csv(tables: Path, questions: Path, out: Path) -> dict[str, Any]:
    """Write a data set in WikiSQL's layout.

    Args:
        tables: a folder of CSV files, each named after its table.
        questions: a CSV file of two columns, a question and its SQL statement.

    Returns:
        What `zeropods data from-csv --json` prints: `out`, the number of `questions` by split, and
        lines that each name a place: `left_out` has one for each question that was not taken, with
        the reason; the others are `remarks`.

    Raises:
        UserError: `out` is not empty; `tables`, `questions` or a table asked about cannot be read;
            or no question can be taken.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists; remove it, or choose a new folder")
    files = _csv_files(tables)
    taken, left_out = _read_questions(files, questions)
    if not taken:
        first_reason = f" ({left_out[0]})" if left_out else ""
        raise UserError(
            f"{questions}: no question can be used{first_reason}; docs/own_data.md has examples"
        )
    groups = _grouped(taken, lambda question: question.table.id)
    remarks = _remarks_on_all(tables, files, groups)
    # No group is divided: all questions about a table are in one split, or, where there are too few
    # tables, all statements for the same question.
    if len(groups) < FEWEST_TABLES:
        groups = _grouped(taken, lambda question: question.question)
    splits = _into_splits(groups)
    with new_folder(out) as folder:
        for split, questions_of_split in splits.items():
            _write_split(folder, split, questions_of_split)
    counts = {split: len(questions_of_split) for split, questions_of_split in splits.items()}
    return {"out": str(out), "questions": counts, "left_out": left_out, "remarks": remarks}


def _csv_files(folder: Path) -> dict[str, Path]:
    """The CSV files of a folder by their names in lower case, without `.csv`."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: {no_folder(folder)}; expected one with a CSV file for each table"
        )
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() != ".csv":
            continue
        first = files.setdefault(path.stem.casefold(), path)
        if first != path:
            raise UserError(
                f"{folder}: {first.name} and {path.name} differ only in letter case; rename one"
            )
    if not files:
        raise UserError(f"{folder}: no .csv file there; expected one for each table")
    return files


def _read_questions(files: dict[str, Path], path: Path) -> tuple[list[TakenQuestion], list[str]]:
    """The questions of a file that can be taken, and a line with the reason for each that cannot.

    Args:
        files: the tables' files, by the names of the tables in lower case.
    """
    lines, _ = _read_lines(str(path), path.read_bytes())
    if not lines:
        columns = ",".join(QUESTION_COLUMNS)
        raise UserError(
            f"{path}: is empty; expected a line {columns}, then a row for each question"
        )
    header = [cell.casefold() for cell in lines[0][1]]
    if sorted(header) != sorted(QUESTION_COLUMNS):
        columns = shown(", ".join(header)) or "without names"
        raise UserError(f"{path}: columns {columns}; expected {', '.join(QUESTION_COLUMNS)}")
    taken = []
    left_out = []
    # A table is read when the first question about it comes, and once for all of them.
    read_table = cache(read_csv)
    for line, cells in lines[1:]:
        place = f"{path}:{line}"
        try:
            question, sql = _question_and_sql(header, cells)
            taken.append(_taken_question(place, question, sql, files, read_table))
        except ValueError as error:
            left_out.append(f"{place}: {error}")
    return taken, left_out


def _question_and_sql(header: Sequence[str], cells: Sequence[str]) -> tuple[str, str]:
    """The two cells of a row, whichever comes first; `ValueError` where one is missing."""
    if len(cells) != len(header):
        columns = " and ".join(QUESTION_COLUMNS)
        raise ValueError(
            f"{counted(len(cells), 'cell')}; expected {columns}, each in double quotes"
        )
    if "" in cells:
        column = header[cells.index("")]
        raise ValueError(f"its {column} is empty; write one, or remove the row")
    row = dict(zip(header, cells, strict=True))
    return row["question"], row["sql"]


def _taken_question(
    place: str,
    question: str,
    sql: str,
    files: dict[str, Path],
    read_table: Callable[[Path, str], ReadTable],
) -> TakenQuestion:
    """A question with its table and its query; `ValueError` says why it cannot be taken."""
    statement, table_name = parsed(sql)
    table_id = table_name.casefold()
    if table_id not in files:
        names = ", ".join(path.stem for path in files.values())
        raise ValueError(f"no table {table_name!r}; the tables are {shown(names, 200)}")
    table = read_table(files[table_id], table_id)
    query = query_of(statement, table)
    # A model copies its values from the question, where they must be written as in the query.
    if table.has_commas:
        numbers = set()
        for condition in query.conds:
            if table.types[condition.column] == "real":
                numbers.add(condition.value)
        question = decimal_points(question, numbers)
    return TakenQuestion(place, question, table, query)


def _write_split(folder: Path, split: str, questions: Sequence[TakenQuestion]) -> None:
    """Write a split's questions and the tables that they are about, in WikiSQL's layout."""
    lines = []
    tables = {}
    for taken in questions:
        lines.append(
            {
                "table_id": taken.table.id,
                "question": taken.question,
                "sql": taken.query.to_json(),
            }
        )
        tables[taken.table.id] = taken.table
    for name, content in split_files(split, tables.values(), lines).items():
        (folder / name).write_bytes(content)


def _grouped(
    questions: Sequence[TakenQuestion], key: Callable[[TakenQuestion], str]
) -> dict[str, list[TakenQuestion]]:
    """The questions by their keys."""
    groups: dict[str, list[TakenQuestion]] = {}
    for question in questions:
        groups.setdefault(key(question), []).append(question)
    return groups


def _into_splits(groups: dict[str, list[TakenQuestion]]) -> dict[str, list[TakenQuestion]]:
    """The questions by split; a split that would be empty is missing.

    Each group stays together, and train has the largest one. First test, then dev, get groups until
    they have at least a tenth of all questions; train gets the others.
    """
    fewest = sum(map(len, groups.values())) / QUESTIONS_FOR_EACH_HELD_OUT
    largest = max(groups, key=lambda name: len(groups[name]))
    splits: dict[str, list[TakenQuestion]] = {"train": list(groups[largest]), "dev": [], "test": []}
    # The order depends on the groups' names alone, and not on their order in the files. So most
    # groups stay in their splits when others are added.
    for name in sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if name == largest:
            continue
        if len(splits["test"]) < fewest:
            splits["test"] += groups[name]
        elif len(splits["dev"]) < fewest:
            splits["dev"] += groups[name]
        else:
            splits["train"] += groups[name]
    return {split: questions for split, questions in splits.items() if questions}


# What is odd about questions and tables that were taken.


def _remarks_on_all(
    tables: Path, files: dict[str, Path], by_table: dict[str, list[TakenQuestion]]
) -> list[str]:
    """A line for each oddity of a data set as a whole, then for those of each table."""
    remarks = []
    if len(by_table) < FEWEST_TABLES:
        remarks.append(
            f"{tables}: too few tables to keep some for dev and test; questions are divided"
        )
    unused = [path.name for name, path in files.items() if name not in by_table]
    if unused:
        remarks.append(f"{tables}: no question is about {shown(', '.join(unused), 200)}")
    for questions in by_table.values():
        remarks += _remarks_on_table(tables, questions)
    return remarks


def _remarks_on_table(folder: Path, questions: Sequence[TakenQuestion]) -> list[str]:
    """A line for each oddity of a table, then for each of the questions about it."""
    table = questions[0].table
    remarks = [f"{folder}/{remark}" for remark in table.odd_cells]
    with closing(Execution(table)) as execution:
        for taken in questions:
            remarks += [f"{taken.place}: {remark}" for remark in _remarks(taken, execution)]
    return remarks


def _remarks(taken: TakenQuestion, execution: Execution) -> Iterator[str]:
    """Yield a line for each oddity of a question; `execution` is that of its table."""
    table = taken.table
    yield from _aggregate_remarks(table, taken.query)
    for condition in taken.query.conds:
        column, operator, value = condition
        if table.types[column] == "real":
            yield from _number_remarks(table.header[column], value)
        elif OPERATORS[operator] != "=":
            yield from _order_remarks(table, column, value)
        has_row = execution.execute(Query(0, 0, (condition,)))
        if not has_row:
            comparison = f"{table.header[column]} {OPERATORS[operator]} {value}"
            yield f"no row of {table.id} has {comparison}"
        if _comparable(value) not in _comparable(taken.question):
            yield f"{value!r} is not in the question; a model copies its values from there"


def _aggregate_remarks(table: SQLTable, query: Query) -> Iterator[str]:
    """A line where an aggregate needs numbers or an order that its column does not have."""
    aggregate = AGGREGATES[query.agg]
    if aggregate in ("", "COUNT") or table.types[query.sel] == "real":
        return
    has_order = aggregate in ("MAX", "MIN") and _all_match(table, query.sel, DATE)
    if has_order:
        return
    remedy = f"; {WRITE_ISO}" if _all_match(table, query.sel, OTHER_DATE) else ""
    name = table.header[query.sel]
    yield f"{aggregate} of {name}, which is text: its cells are not numbers{remedy}"


def _number_remarks(name: str, value: str) -> Iterator[str]:
    """A line where a value that is compared with numbers is none itself, or is more than one."""
    number = number_in(value)
    if number is None:
        yield f"{value!r} is not a number, but {name} holds numbers"
    elif not NUMBER_CELL.fullmatch(value):
        yield f"{value!r} is compared as {number:g}"


def _order_remarks(table: SQLTable, column: int, value: str) -> Iterator[str]:
    """A line where texts that have no order are compared by `>` or `<`."""
    name = table.header[column]
    if not _all_match(table, column, DATE):
        remedy = f", or {WRITE_ISO}" if _all_match(table, column, OTHER_DATE) else ""
        yield f"{name} is text, which has no order; compare it with ={remedy}"
    elif not DATE.fullmatch(value):
        yield (
            f"{name} holds dates, but {value!r} is none; "
            "compare it with a whole date, as in 2024-12-31"
        )


def _all_match(table: SQLTable, column: int, form: re.Pattern[str]) -> bool:
    """Whether a column has cells that are not empty, and all of these have a form."""
    cells = [str(row[column]) for row in table.rows if row[column] is not None]
    return bool(cells) and all(form.fullmatch(cell) for cell in cells)
