"""A run folder in a notebook: its record, a small table, its loss curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zeropods.measure.record import Record, read_record
from zeropods.report.entry import read_entry
from zeropods.report.plots import Plot, loss_plot
from zeropods.report.profile import ProfileReport
from zeropods.report.rows import run_table
from zeropods.tables import Table


@dataclass(frozen=True)
class Run:
    """A run, by its folder."""

    folder: Path

    @property
    def record(self) -> Record:
        """`record.json`; `UserError` where there is none."""
        return read_record(self.folder)

    @property
    def profile(self) -> ProfileReport:
        """The report of DeepSpeed's flops profiler, read and checked; `UserError` where the profiler was off."""
        return ProfileReport.read(self.folder)

    def summary(self) -> Table:
        """What the summary's columns say of this run, one per line."""
        return run_table(read_entry(self.folder, self.folder.name))

    def losses(self) -> Plot:
        """Training and validation loss by step."""
        return loss_plot([(self.folder.name, read_entry(self.folder, self.folder.name).record)])
