"""A table that questions are asked about, as WikiSQL describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import Field

from zeropods.errors import UserError
from zeropods.files import MEND

Cell = str | int | float | None
Text = Annotated[str, Field(pattern=r"\S")]
"""A text of more than spaces."""


@dataclass(frozen=True)
class SQLTable:
    """A table: its columns with their types, and its rows."""

    id: Text
    header: Annotated[tuple[str, ...], MinLen(1)]
    types: tuple[Literal["text", "real"], ...]
    """The type of each column."""
    rows: tuple[tuple[Cell, ...], ...]


def check_width(place: str, table: SQLTable) -> None:
    """Refuse a table in which a row, or its types, have not one cell for each column."""
    width = len(table.header)
    other_widths = {len(table.types), *map(len, table.rows)} - {width}
    if other_widths:
        raise UserError(
            f"{place}: {width} columns, but a row or its types have {other_widths.pop()}; {MEND}"
        )
