"""Memory over time as a rank's sampler wrote it: `memory/N.csv` of a run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zeropods.errors import UserError

BYTES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "device-used": "device_used_bytes",
    "resident": "resident_bytes",
}
"""Columns by kind of memory."""


@dataclass
class Series:
    """Samples of one rank, in the order of the file."""

    unix_seconds: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    bytes_by_kind: dict[str, list[float | None]] = field(default_factory=lambda: {kind: [] for kind in BYTES})
    """None where a sample has nothing of that kind."""
    fault: str | None = None
    """The first line that is none: it is left out. The last line of a run that was killed may be cut short."""

    def since(self, unix_seconds: float) -> Series:
        """The samples from a moment on."""
        kept = [i for i, seconds in enumerate(self.unix_seconds) if seconds >= unix_seconds]
        return Series(
            [self.unix_seconds[i] for i in kept],
            [self.phases[i] for i in kept],
            {kind: [values[i] for i in kept] for kind, values in self.bytes_by_kind.items()},
            self.fault,
        )


def read_series(path: Path) -> Series:
    """Read a file of samples.

    Raises:
        UserError: it has no header, or one without the columns that are needed.
    """
    try:
        header, *lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged: {error}; run it again") from None
    names = header.split(",")
    missing = [name for name in ("unix_seconds", "phase", *BYTES.values()) if name not in names]
    if missing:
        raise UserError(f"{path}: header {header!r:.60}; expected a column {missing[0]}: run it again")
    series = Series()
    for number, line in enumerate(lines, 2):
        # The text behind the last line end is empty, or a line that was cut short.
        if number - 2 < len(lines) - 1 and not _add(series, names, line) and series.fault is None:
            series.fault = f"{path}:{number}: {line!r:.60} is no sample, left out"
    return series


def _add(series: Series, names: list[str], line: str) -> bool:
    """Add a line's sample; False, and nothing added, where it is none."""
    cells = line.split(",")
    if len(cells) != len(names):
        return False
    by_name = dict(zip(names, cells, strict=True))
    try:
        seconds = float(by_name["unix_seconds"])
        values = {kind: float(by_name[name]) if by_name[name] else None for kind, name in BYTES.items()}
    except ValueError:
        return False
    series.unix_seconds.append(seconds)
    series.phases.append(by_name["phase"])
    for kind, value in values.items():
        series.bytes_by_kind[kind].append(value)
    return True
