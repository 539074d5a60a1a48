"""Runs in a notebook: a run by its folder, and tables and plots of several, such as what ZeRO divides, or a restart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.calibration import planned
from zeropods.measure.record import Record, read_json, read_record
from zeropods.plan.cpu import STATES
from zeropods.report.columns import COUNT, FOUR, ONE, TWO, mib, run_table, shown
from zeropods.report.entry import read_entry
from zeropods.report.formulas import LIVE_STATES, Values, figures, ratio
from zeropods.report.plots import WIDE, Plot, legend_below, loss_plot, new_axes, stacked_bars
from zeropods.report.profile import ProfileReport
from zeropods.report.settings import unlike_precision
from zeropods.tables import MIB, Table

TIMES, SIX = "{:.2f} x".format, "{:.6f}".format
OTHER_PRECISION = "other precision"
"""What stands in place of a comparison with a run of another precision."""


@dataclass(frozen=True)
class Run:
    """A run, by its folder."""

    folder: Path

    @property
    def record(self) -> Record:
        """The record in `record.json`; `UserError` where there is none."""
        return read_record(self.folder)

    @property
    def profile(self) -> ProfileReport:
        """The report of DeepSpeed's flops profiler, read and checked; `UserError` where the profiler was off."""
        return ProfileReport.read(self.folder)

    def summary(self, *, whole: bool = False) -> Table:
        """The dozen figures of this run that matter first, one per line; if `whole`, all that a summary has."""
        return run_table(read_entry(self.folder, self.folder.name), whole=whole)

    def losses(self) -> Plot:
        """Training and validation loss by step."""
        return loss_plot([(self.folder.name, read_entry(self.folder, self.folder.name).record)])

    def tensorboard(self) -> Any:
        """Serve the run's scalars with TensorBoard at 127.0.0.1 while this process lives, and return a link to it."""
        from IPython.display import HTML
        from tensorboard import program

        server = program.TensorBoard()
        # TensorBoard's fast loader is a separate process, which may outlive this one.
        server.configure(
            (None, "--logdir", str(self.folder), "--host", "127.0.0.1", "--port", "0", "--load_fast=false")
        )
        address = server.launch()
        return HTML(f'<a href="{address}" target="_blank">{address}</a>')


# Tables of several runs: techniques against a baseline, in memory, speed, and whether the losses are the same.


def technique_table(runs: Sequence[Run]) -> Table:
    """A line for each run; the others are compared with the first.

    `states` are parameters, gradients and optimizer states in memory before an optimizer step, measured where there
    is no GPU. `loss difference` is the largest at any training step, as a share of the baseline's loss at that step.
    A run that computed in another precision than the first is not compared with it.
    """
    first, lines = runs[0].record, []
    for record in (run.record for run in runs):
        values = figures(record)
        states = values["measured_bytes"] if values["planned_kind"] == LIVE_STATES else None
        is_alike = not unlike_precision(first, record)
        speed_up = shown(ratio(record.samples_per_second, first.samples_per_second), TIMES)
        difference = largest_difference(record, first)
        lines.append(
            {
                "technique": record.technique_text,
                "precision": precision_text(record),
                "training (samples/s)": shown(record.samples_per_second, ONE),
                "against the first": speed_up if is_alike else OTHER_PRECISION,
                "peak memory (MiB)": shown(values["peak_memory_bytes"], mib),
                "kind of memory": shown(values["memory_kind"]),
                "states (MiB)": shown(states, mib),
                "final train loss": shown(values["train_loss"], FOUR),
                "final eval loss": shown(values["eval_loss"], FOUR),
                "loss difference": _difference_text(difference) if is_alike else OTHER_PRECISION,
                "status": record.status,
            }
        )
    return Table.of(lines)


def _difference_text(difference: float | None) -> str:
    return "0" if difference == 0 else shown(difference, "{:.1e}".format)


def precision_text(record: Record) -> str:
    """The precision that a run computed in; where it was not measured, the one that was asked for."""
    measured = record.measured_precision
    return record.precision if measured is None else measured.text


def largest_difference(record: Record, baseline: Record) -> float | None:
    """The largest |loss - loss of the baseline| / loss of the baseline, over the steps that both have; None if none."""
    before = {point.step: point.loss for point in baseline.losses}
    pairs = [(point.loss, before[point.step]) for point in record.losses if point.step in before]
    return max((abs(loss - base) / abs(base) for loss, base in pairs), default=None)


def pod_table(runs: Sequence[Run]) -> Table:
    """A line for each rank: when its process began, how long it took, its last loss and its memory.

    `states` are as in `technique_table`; the loss is the mean over all ranks, so it is the same for each of them.
    """
    return Table.of(
        {
            "run": name,
            "pod": rank.host,
            "rank": rank.rank,
            "began (UTC)": shown(rank.began_unix_seconds, lambda began: f"{datetime.fromtimestamp(began, UTC):%T}"),
            "start (s)": shown(rank.start_seconds, ONE),
            "training (s)": shown(rank.train_seconds or None, ONE),
            "whole (s)": shown(rank.wall_seconds, ONE),
            "last loss": shown(record.losses[-1].loss if record.losses else None, FOUR),
            "states (MiB)": shown(rank.live_bytes and rank.live_bytes.total, mib),
            "peak (MiB)": shown(rank.peak_allocated_bytes or rank.peak_resident_bytes, mib),
        }
        for name, record in ((run.folder.name, run.record) for run in runs)
        for rank in record.ranks
    )


# What ZeRO divides: the measured bytes of a model's states in each process, beside the calculated ones.


def state_table(runs: Sequence[Run]) -> Table:
    """A line for each run: the states of its fullest rank, their calculated size, and the resident peak.

    States are tensors in memory between a backward pass and the optimizer's step, counted one by one. The resident
    peak is that of the whole process: Python and its libraries, activations and buffers as well.
    """
    records = [run.record for run in runs]
    held = [_states(record) for record in records]
    return Table.of(
        {
            "technique": record.technique,
            "processes": record.world_size,
            **{f"{part} (MiB)": shown(states.get(part), mib) for part in (*STATES, "states")},
            "by arithmetic (MiB)": shown(states["planned"], mib),
            "against the first": _states_text(record, records[0], states, held[0]),
            "resident peak (MiB)": shown(figures(record)["peak_resident_bytes"], mib),
            "status": record.status,
        }
        for record, states in zip(records, held, strict=True)
    )


def _states_text(record: Record, first: Record, states: Values, of_first: Values) -> str:
    """States as a multiple of those of the first run, unless their numbers have another size."""
    if unlike_precision(first, record):
        return OTHER_PRECISION
    return shown(ratio(states.get("states"), of_first.get("states")), TIMES)


def state_plot(runs: Sequence[Run]) -> Plot:
    """The states of `state_table` as stacked bars, one colour per part; a black line marks the calculated sum."""
    figure, (axes,) = new_axes(WIDE, 0.5 * len(runs) + 1.6)
    labels = [f"{run.record.technique}, {run.record.world_size} x" for run in runs]
    states = [_states(run.record) for run in runs]
    stacked_bars(axes, labels, {part: [(each.get(part) or 0) / MIB for each in states] for part in STATES})
    expected = [(each["planned"] or math.nan) / MIB for each in states]
    tops, bottoms = ([place + half for place in range(len(runs))] for half in (-0.4, 0.4))
    axes.vlines(expected, tops, bottoms, color="black", label="by arithmetic")
    axes.set(xlabel="MiB in each process", title="What ZeRO divides: the states of one model")
    legend_below(figure, 4)
    return Plot(figure, "bars of parameters, gradients and optimizer states per process, by technique")


def _states(record: Record) -> Values:
    """Bytes by part of the rank that holds the most, their sum `states`, and the calculated sum `planned`."""
    held = [rank.live_bytes for rank in record.ranks if rank.live_bytes is not None]
    fullest, plan = max(held, key=lambda live: live.total, default=None), planned(record)
    parts = {} if fullest is None else {**vars(fullest), "states": fullest.total}
    return {**parts, "planned": None if plan is None else plan.state_bytes}


# A run that lost a pod and continued, beside an undisturbed one, as notebook 07 shows them.

FAULT, JOURNAL = "fault.json", "restarts.json"


def disturbed_table(disturbed: Run, undisturbed: Run) -> Table:
    """What was lost, how soon that was detected, what the run continued with, and the losses of both runs.

    `UserError` where the first run did not restart by itself.
    """
    if not (disturbed.folder / JOURNAL).is_file():
        raise UserError(f"{disturbed.folder}: was not restarted automatically, so there is nothing to compare")
    record, other = disturbed.record, undisturbed.record
    entry = read_json(disturbed.folder / JOURNAL)["restarts"][-1]
    found, fault = entry["found_unix_seconds"], disturbed.folder / FAULT
    # Seconds from the fault to the moment when the supervisor saw that the run had ended.
    until_found = found - read_json(fault)["killed_unix_seconds"] if fault.is_file() else None
    first, rank = read_record(disturbed.folder, record.attempt - 1), record.ranks[0]
    began, start = rank.began_unix_seconds, rank.start_seconds
    # Seconds from that moment to the first step of the last attempt, including the start of all processes.
    until_step = None if began is None or start is None else began + start - found
    flags = " ".join(f"--{name} {value}" for name, value in entry["flags"].items())
    ours, theirs = figures(record), figures(other)
    seconds = "{:.1f} s".format
    facts = {
        "ended by": (f"{entry['status']}: {entry['pod']}", "nothing"),
        "found after": (shown(until_found, seconds), "-"),
        "trained again after": (shown(until_step, seconds), "-"),
        "steps done twice": (str(first.steps - rank.first_step), "0"),
        "pods": (f"{first.pods}, then {record.pods}: {', '.join(entry['pods'])}", str(other.pods)),
        "changed flags": (flags or "nothing", "-"),
        "effective batch": (str(record.effective_batch_size), str(other.effective_batch_size)),
        "steps": (str(record.steps), str(other.steps)),
        "last training loss": (shown(ours["train_loss"], SIX), shown(theirs["train_loss"], SIX)),
        "last validation loss": (shown(ours["eval_loss"], SIX), shown(theirs["eval_loss"], SIX)),
        "largest difference of a step's loss": (shown(largest_difference(record, other), "{:.1e}".format), "-"),
    }
    return Table.of({"": name, "went on": ours, "undisturbed": theirs} for name, (ours, theirs) in facts.items())


# The tables of the causal workshop: losses and speed, memory.


def training_table(runs: Sequence[Run]) -> Table:
    """Losses and speed: a line for each run, with its evaluation loss after each epoch.

    Losses are nats per label token; samples/s count all processes. `before` is the evaluation before the first step,
    where there was one.
    """
    found = []
    for run in runs:
        record = run.record
        steps = math.ceil(record.train_rows / record.effective_batch_size)
        # The last loss within each epoch, counted from 1; key 0 has the loss before the first step.
        by_epoch = {math.ceil(point.step / steps): point.loss for point in record.eval_losses}
        found.append((run.folder.name, record, figures(record), steps, by_epoch))
    epochs = sorted({epoch for *_, by_epoch in found for epoch in by_epoch})
    return Table.of(
        {
            "run": name,
            "technique": record.technique_text,
            "final train loss": shown(values["train_loss"], FOUR),
            **{f"eval loss, {f'epoch {n}' if n else 'before'}": shown(by_epoch.get(n), FOUR) for n in epochs},
            "training (samples/s)": shown(record.samples_per_second, TWO),
            "evaluation (samples/s)": shown(values["evaluation_samples_per_second"], TWO),
            "steps per epoch": COUNT(steps),
            "status": record.status,
        }
        for name, record, values, steps, by_epoch in found
    )


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory over a whole run as a log of `nvidia-smi` would give it: peak, mean and minimum, in MiB.

    On GPUs it is device-used memory, with context and other processes; elsewhere it is the process's resident memory.
    The peak is that of the rank that needed most, the minimum that of the one that needed least, the mean that of all.
    `zeropods summary` shows the same in its table of memory.
    """
    lines = []
    for run in runs:
        record = run.record
        values = figures(record)
        lines.append(
            {
                "run": run.folder.name,
                "technique": record.technique_text,
                "kind of memory": shown(values["memory_kind"]),
                "peak (MiB)": shown(values["process_peak_bytes"], mib),
                "mean (MiB)": shown(values["process_mean_bytes"], mib),
                "minimum (MiB)": shown(values["process_minimum_bytes"], mib),
            }
        )
    return Table.of(lines)
