"""Tables, queries and answers as HTML; every text of others is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from zeropods.data.wikisql import Cell, Table
from zeropods.demo.answering import Answer, Found
from zeropods.report.answers import cells_text
from zeropods.sql.query import AGGREGATES, OPERATORS, Query

PREVIEW_ROWS = 6
SHOWN_ROWS = 20
SHOWN_CELLS = 12
"""Of a long list of answers."""
KINDS = {"column": "selected column", "aggregate": "aggregate", "condition": "condition"}
VERDICTS = {True: ("right", "✓ right"), False: ("wrong", "✗ wrong"), None: ("open", "? cannot be checked")}

Span = tuple[str, str | None]
"""A text and its kind, None for the words between."""


def message_html(text: str) -> str:
    """A line that says what is wrong."""
    return f'<p class="zp-message" role="alert">{escape(text[:1].upper() + text[1:])}</p>'


def spans(query: Query, header: Sequence[str]) -> list[Span]:
    """A query's readable text by parts; joined with spaces they are `format_query`."""
    aggregate = AGGREGATES[query.agg]
    parts: list[Span] = [
        ("SELECT", None),
        (aggregate, "aggregate"),
        (header[query.sel], "column"),
        ("FROM table", None),
    ]
    for number, (column, operator, value) in enumerate(query.conds):
        parts.append(("AND" if number else "WHERE", None))
        parts.append((f"{header[column]} {OPERATORS[operator]} {value}", "condition"))
    return [part for part in parts if part[0]]


def query_html(query: Query, header: Sequence[str]) -> str:
    """The query with its parts marked."""
    return f'<code class="zp-sql">{" ".join(_span(*part) for part in spans(query, header))}</code>'


def legend_html() -> str:
    """What the marks mean."""
    return f'<p class="zp-legend">{" ".join(_span(words, kind) for kind, words in KINDS.items())}</p>'


def table_html(header: Sequence[str], rows: Sequence[Sequence[Cell]], most: int, query: Query | None = None) -> str:
    """The first rows of a table that scrolls sideways; the query's columns are marked."""
    kinds: dict[int, str] = {condition.column: "condition" for condition in query.conds} if query else {}
    if query:
        kinds[query.sel] = "column"
    head = "".join(f'<th scope="col"{_class(kinds.get(n))}>{escape(name)}</th>' for n, name in enumerate(header))
    body = "".join(_row_html(row, kinds) for row in rows[:most])
    return (
        f'<div class="zp-scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def preview_html(table: Table, name: str) -> str:
    """A table before anything is asked: its columns with their types, its first rows."""
    header = [
        f"{column} (number)" if kind == "real" else column
        for column, kind in zip(table.header, table.types, strict=True)
    ]
    count = first_of(len(table.rows), PREVIEW_ROWS)
    return f"<p>{escape(name)}: {count}</p>{table_html(header, table.rows, PREVIEW_ROWS)}"


def answers_html(question: str, answers: Iterable[tuple[str, Answer | str]], header: Sequence[str]) -> str:
    """Cards side by side, one for each model: its answer, or why there is none."""
    cards = "".join(_card(label, answer, header) for label, answer in answers)
    return f'<p class="zp-question">{escape(question)}</p>{legend_html()}<div class="zp-cards">{cards}</div>'


def answer_text(found: Found) -> str:
    """What the query gives, in one line."""
    cells = found.cells
    if cells is None or len(cells) <= SHOWN_CELLS:
        return cells_text(cells)
    return f"{cells_text(cells[:SHOWN_CELLS])} and {len(cells) - SHOWN_CELLS:,} more"


def first_of(count: int, most: int) -> str:
    """How many rows there are, and how many of them are shown."""
    rows = "1 row" if count == 1 else f"{count:,} rows"
    return rows if count <= most else f"first {most} of {rows}"


def _card(label: str, answer: Answer | str, header: Sequence[str]) -> str:
    title = f"<h3>{escape(label)}</h3>"
    if isinstance(answer, str):
        return f'<section class="zp-card">{title}{message_html(answer)}</section>'
    found = answer.found
    return (
        f'<section class="zp-card">{title}{query_html(found.query, header)}'
        f'<p class="zp-answer">{escape(answer_text(found))}</p>{_expected_html(answer, header)}{_rows_html(found)}'
        f'<p class="zp-time">{answer.generated_seconds * 1e3:,.0f} ms to write the query, '
        f"{found.seconds * 1e3:,.2f} ms to execute it</p></section>"
    )


def _expected_html(answer: Answer, header: Sequence[str]) -> str:
    if answer.expected is None:
        return ""
    kind, words = VERDICTS[answer.right]
    return (
        f'<div class="zp-expected"><p><strong class="zp-{kind}">{words}</strong> '
        f"Expected: {escape(answer_text(answer.expected))}</p>{query_html(answer.expected.query, header)}</div>"
    )


def _rows_html(found: Found) -> str:
    if found.rows is None:
        return "<p>SQLite cannot run this query on this table.</p>"
    if not found.rows.rows:
        return "<p>No row meets the conditions.</p>"
    count = first_of(len(found.rows.rows), SHOWN_ROWS)
    return f"<p>Rows that meet the conditions: {count}</p>" + table_html(*found.rows, SHOWN_ROWS, found.query)


def _row_html(row: Sequence[Cell], kinds: dict[int, str]) -> str:
    cells = (f"<td{_class(kinds.get(n))}>{'' if c is None else escape(str(c))}</td>" for n, c in enumerate(row))
    return f"<tr>{''.join(cells)}</tr>"


def _span(text: str, kind: str | None) -> str:
    return escape(text) if kind is None else f"<mark{_class(kind)}>{escape(text)}</mark>"


def _class(kind: str | None) -> str:
    return "" if kind is None else f' class="zp-{kind}"'
