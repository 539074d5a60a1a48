"""What came of a sweep: `sweep.json`, written after each run, and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean

from zeropods import files
from zeropods.errors import UserError
from zeropods.evaluate.score_file import main_measure, score_of
from zeropods.measure.record import Record
from zeropods.sweep.matrix import LeftOut, Matrix, matrix_of
from zeropods.tables import Table

FILE = "sweep.json"
SCHEMA_VERSION = 1
RESULTS = ("ok", "oom", "timeout", "failed", "pod_lost")
"""Statuses of a run that has been measured, whatever came of it; `interrupted` is none."""
LONGEST_REASON = 120
"""Most letters of a reason in a table; `sweep.json` has all of it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of a sweep, measured or not yet."""

    cell: str
    repeat: int
    model: str
    technique: str
    pods: int
    prompt: str
    folder: str
    """The run folder, below the sweep's."""
    status: str | None = None
    """Status as in a record; None where it has not run yet."""
    reason: str | None = None
    samples_per_second: float | None = None
    seconds: float | None = None
    """Wall time from the launch to the record, of the attempt that gave it."""

    def ended(self, status: str, reason: str | None, rate: float | None = None, seconds: float | None = None) -> Row:
        """The row of a run that has ended; `rate` in samples per second."""
        return replace(self, status=status, reason=reason, samples_per_second=rate, seconds=seconds)

    def recorded(self, record: Record, seconds: float | None) -> Row:
        """The row with what a record says."""
        place = f"{record.pod}: " if record.pod else ""
        reason = None if record.reason is None else f"{place}{record.reason}"
        return self.ended(record.status, reason, record.samples_per_second, seconds)

    @property
    def is_measured(self) -> bool:
        """Whether it needs no further run."""
        return self.status in RESULTS


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A matrix and its runs, in the order in which they are run."""

    out: Path
    matrix: Matrix
    rows: tuple[Row, ...]

    @property
    def is_measured(self) -> bool:
        """Whether every run has a result, of whatever kind."""
        return all(row.is_measured for row in self.rows)

    def with_row(self, row: Row) -> Sweep:
        """The sweep with a newer row in the place of an older one."""
        key = (row.cell, row.repeat)
        return replace(self, rows=tuple(row if (old.cell, old.repeat) == key else old for old in self.rows))

    def to_json(self) -> dict[str, object]:
        """The document of `sweep.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "matrix": self.matrix.to_json(),
            "cells": [asdict(row) for row in self.rows],
            "left_out": [{"cell": left.cell.name, "reason": left.reason} for left in self.matrix.left_out],
        }

    def write(self) -> None:
        """Write `sweep.json`."""
        files.write_json(self.out / FILE, self.to_json())

    def table(self) -> Table:
        """A line for each cell; samples per second are the mean of its repeats that ended well."""
        lines = [self._line(cell.name) for cell in self.matrix.cells]
        return Table.of([*lines, *map(self._left_out, self.matrix.left_out)])

    def _line(self, name: str) -> dict[str, str]:
        rows = [row for row in self.rows if row.cell == name]
        well = [row for row in rows if row.status == "ok"]
        rates = [row.samples_per_second for row in well if row.samples_per_second is not None]
        scores = [score for row in well if self.matrix.questions and (score := score_of(self.out / row.folder))]
        return {
            "cell": name,
            "repeats ok": f"{len(well)} of {len(rows)}",
            "samples/s": f"{fmean(rates):.4g}" if rates else "n/a",
            **self._right(f"{fmean(main_measure(score) for _, score in scores):.3f}" if scores else "n/a"),
            "result": "; ".join(dict.fromkeys(map(_result, rows))),
        }

    def _left_out(self, left: LeftOut) -> dict[str, str]:
        said = {"result": f"left out: {left.reason}"}
        return {"cell": left.cell.name, "repeats ok": "", "samples/s": "", **self._right(""), **said}

    def _right(self, share: str) -> dict[str, str]:
        """The column of what is right, where questions are asked."""
        return {"right, of 1": share} if self.matrix.questions else {}

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __repr__(self) -> str:
        return str(self.table())


def read_sweep(out: Path) -> Sweep:
    """What `sweep.json` of a folder says, read strictly: `read_sweep(sweep.out)` equals the sweep that was written."""
    path = out / FILE
    document = files.read_object(path, "move the file away")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version {version!r}, not {SCHEMA_VERSION}; choose another --out")
    names = {field.name for field in fields(Row)}
    rows, matrix = document.get("cells"), document.get("matrix")
    if not isinstance(rows, list) or any(not isinstance(row, dict) or set(row) != names for row in rows):
        raise UserError(f"{path}: cells: not as this version writes them; move the file away")
    if not isinstance(matrix, dict):
        raise UserError(f"{path}: matrix: {matrix!r:.60}; move the file away")
    return Sweep(out=out, matrix=matrix_of(matrix, f"{path}: matrix"), rows=tuple(Row(**row) for row in rows))


def earlier_rows(out: Path, matrix: Matrix) -> dict[tuple[str, int], Row]:
    """Rows of an earlier call of the same matrix, by cell and repeat; none where it was another matrix."""
    if not (out / FILE).is_file():
        return {}
    earlier = read_sweep(out)
    return {(row.cell, row.repeat): row for row in earlier.rows} if earlier.matrix == matrix else {}


def _result(row: Row) -> str:
    if row.status is None:
        return "not run yet"
    reason = (row.reason or "").split("\n")[0]
    shown = reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 1]}…"
    return f"{row.status}: {shown}" if shown else row.status
