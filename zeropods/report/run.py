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

    def tensorboard(self) -> Link:
        """Serve the run's scalars at 127.0.0.1 by TensorBoard, as long as this process lives."""
        from tensorboard import program

        server = program.TensorBoard()
        # Its fast loader is a process of its own, which may outlive this one.
        server.configure(
            (None, "--logdir", str(self.folder), "--host", "127.0.0.1", "--port", "0", "--load_fast=false")
        )
        return Link(server.launch())


@dataclass(frozen=True)
class Link:
    """An address that a notebook shows as a link."""

    address: str

    def _repr_html_(self) -> str:
        return f'<a href="{self.address}" target="_blank">{self.address}</a>'
