"""A table that questions are asked about, as WikiSQL describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import Field

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
