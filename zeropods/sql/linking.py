"""Links between the words of a question and the cells of its table.

Most questions quote the cells that they compare with: in `the field of Stethoscope` the column is
the one that has the cell Stethoscope, whatever that column is called. Systems for text-to-SQL that
may read the database do this as value linking (IRNet: Guo et al. 2019, arXiv 1905.08205) or as
content enhancement (Guo and Gao 2019, arXiv 1910.07179). What they answer is not to be compared
with answers of systems that read the names of the columns only.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from zeropods.sql.table import SQLTable

Links = Mapping[int, tuple[str, ...]]
"""The columns that a question's conditions can compare, by number, each with its cells that the
question quotes, in lower case; a column without cells is compared with any span of the question."""

INSIDE_A_NUMBER = r"(?<=\d[.,])(?=\d)|(?<=\d)(?=[.,]\d)"
"""A place beside the point or comma of a number (`7.14`, `5,000`)."""

_LETTER_OR_DIGIT = r"[^\W_]"
_DIGIT = re.compile(r"\d")


def links(question: str, table: SQLTable) -> Links | None:
    """What a question quotes from the rows of its table; None where no column is linked.

    A column of texts is linked if one of its cells stands in the question, in whole words and
    numbers and any letter case. A column of numbers is linked if there is any number in the
    question, which may ask for what lies above or below all cells.

    Of 1,925 dev questions of WikiSQL that quote something, 19 have a condition on a column that is
    not linked, and 7 have a value that is not one of the cells, mostly more than the cell at hand.
    """
    folded_question = _folded(question)
    has_number = _DIGIT.search(folded_question) is not None
    linked: dict[int, tuple[str, ...]] = {}
    for column, kind in enumerate(table.types):
        if kind == "real":
            if has_number:
                linked[column] = ()
        else:
            cells = _quoted_cells(folded_question, table, column)
            if cells:
                linked[column] = cells
    return linked or None


def _quoted_cells(folded_question: str, table: SQLTable, column: int) -> tuple[str, ...]:
    """The cells of a column that stand in a question, each once, in the order of the rows."""
    # A dictionary, unlike a set, keeps the order of the rows.
    folded_cells: dict[str, None] = {}
    for row in table.rows:
        cell = row[column]
        if cell is not None:
            folded_cells[_folded(str(cell))] = None
    return tuple(cell for cell in folded_cells if _stands_in(cell, folded_question))


def _stands_in(cell: str, question: str) -> bool:
    """Whether a cell stands in a question as whole words and numbers; both are folded.

    A cell without a letter or a digit, such as a dash for what is unknown, stands in none.
    """
    if cell not in question or re.search(_LETTER_OR_DIGIT, cell) is None:
        return False
    start = rf"(?<!{_LETTER_OR_DIGIT})(?!{INSIDE_A_NUMBER})"
    end = rf"(?!{_LETTER_OR_DIGIT})(?!{INSIDE_A_NUMBER})"
    return re.search(f"{start}{re.escape(cell)}{end}", question) is not None


def _folded(text: str) -> str:
    """A text in its normal form, in lower case and with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())
