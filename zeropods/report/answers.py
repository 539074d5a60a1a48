"""A model's answers beside what was expected: what 05 shows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from zeropods.data.wikisql import Cell, Example
from zeropods.report.accuracy import score_lines
from zeropods.report.columns import accuracy_columns
from zeropods.report.table import Table
from zeropods.sql.execute import Execution, Rows
from zeropods.sql.query import Query
from zeropods.sql.text import format_query

if TYPE_CHECKING:
    from zeropods.evaluate.perplexity import TextScore
    from zeropods.evaluate.predictions import Prediction
    from zeropods.evaluate.score import Score
    from zeropods.evaluate.squad_score import SquadScore

SHOWN_ROWS = 2
"""Of the rows that a query finds."""
NO_QUERY = "(no query)"


def answer_table(predictions: Sequence[Prediction], examples: Sequence[Example], count: int = 8) -> Table:
    """Question, prediction, expected query, and the rows that both find, side by side.

    Args:
        predictions: their `index` names the example that they answer.
        count: how many are shown, taken at even distances.
    """
    by_index = {example.index: example for example in examples}
    step = max(1, len(predictions) // count)
    chosen = predictions[::step][:count]
    return Table.of(_line(prediction, by_index[prediction.index]) for prediction in chosen)


def accuracy_table(score: Score | SquadScore | TextScore, split: str) -> Table:
    """The measures of a score of any task, with their 95 % intervals where they have one.

    Of text-to-SQL a line for all tables, and one each for known and unseen ones.
    """
    document = score.to_json()
    lines = list(score_lines(split, [document]))
    columns = accuracy_columns([document["task"]], lines)
    return Table(tuple(c.heading for c in columns), tuple(tuple(c.show(one) for c in columns) for one in lines))


def cells_text(cells: Sequence[Cell] | None) -> str:
    """What a query gives, as people read it; None stands for a query that cannot be run."""
    if cells is None:
        return "cannot be run"
    return ", ".join(_cell_text(cell) for cell in cells if cell is not None) or "nothing"


def _cell_text(cell: Cell) -> str:
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell)


def _line(prediction: Prediction, example: Example) -> dict[str, str]:
    header = example.table.header
    with closing(Execution(example.table)) as execution:
        return {
            "question": example.question,
            "prediction": prediction.text or NO_QUERY,
            "expected": format_query(example.query, header),
            "answer": _answer(execution, prediction.query),
            "expected answer": _answer(execution, example.query),
            "rows found": _rows(execution, prediction.query),
            "rows expected": _rows(execution, example.query),
        }


def _answer(execution: Execution, query: Query | None) -> str:
    return cells_text(None if query is None else execution.execute(query))


def _rows(execution: Execution, query: Query | None) -> str:
    found = None if query is None else execution.matching_rows(query)
    return "" if found is None else _shown(found)


def _shown(found: Rows) -> str:
    rows = [" | ".join(map(str, row)) for row in found.rows[:SHOWN_ROWS]]
    more = len(found.rows) - len(rows)
    return "\n".join([*rows, *([f"and {more} more"] if more else [])])
