"""Runs in a notebook: a run by its folder, and tables and plots of several, such as what ZeRO
divides, or a restart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from zeropods.errors import UserError
from zeropods.measure.planned_runs import planned_memory
from zeropods.measure.record import LiveBytes, Record, read_json, read_record
from zeropods.plan.terms import STATES
from zeropods.report.columns import COUNT, FOUR, ONE, TWO, mib, run_table, shown
from zeropods.report.entry import read_entry
from zeropods.report.formulas import LIVE_STATES, figures, ratio
from zeropods.report.plots import WIDE, Plot, legend_below, loss_plot, new_axes, stacked_bars
from zeropods.report.profile import ProfileReport
from zeropods.report.settings import unlike_precision
from zeropods.tables import MIB, Table

SIX_DECIMALS = "{:.6f}".format
AS_MULTIPLE = "{:.2f} x".format
AS_DIFFERENCE = "{:.1e}".format
WITH_SECONDS = "{:.1f} s".format
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
        """The report of DeepSpeed's flops profiler, read and checked; `UserError` where the
        profiler was off."""
        return ProfileReport.read(self.folder)

    def summary(self, *, whole: bool = False) -> Table:
        """The dozen figures of this run that matter first, one per line; if `whole`, all that were
        measured."""
        return run_table(read_entry(self.folder, self.folder.name), whole=whole)

    def losses(self) -> Plot:
        """Training and validation loss by step."""
        entry = read_entry(self.folder, self.folder.name)
        return loss_plot([(entry.name, entry.record)])

    def tensorboard(self) -> Any:
        """Serve the run's scalars with TensorBoard at 127.0.0.1 while this process lives, and
        return a link to it."""
        from IPython.display import HTML
        from tensorboard import program

        server = program.TensorBoard()
        # Port 0 lets the system choose a free one.
        flags = ("--logdir", str(self.folder), "--host", "127.0.0.1", "--port", "0")
        # The first item stands for the name of a program. TensorBoard's fast loader is a separate
        # process, which may outlive this one.
        server.configure((None, *flags, "--load_fast=false"))
        address = server.launch()
        return HTML(f'<a href="{address}" target="_blank">{address}</a>')


# Tables of several runs: techniques against a baseline, in memory, speed, and whether the losses
# are the same.


def technique_table(runs: Sequence[Run]) -> Table:
    """A line for each run, one or more; the others are compared with the first.

    `states` are parameters, gradients and optimizer states in memory before an optimizer step,
    measured where there is no GPU. `loss difference` is the largest at any training step, as a
    share of the baseline's loss at that step. A run that computed in another precision than the
    first is not compared with it.
    """
    first = runs[0].record
    lines = []
    for run in runs:
        record = run.record
        values = figures(record)
        states = values.measured_bytes if values.planned_kind == LIVE_STATES else None
        if unlike_precision(first, record):
            speed_up_text = OTHER_PRECISION
            difference_text = OTHER_PRECISION
        else:
            speed_up = ratio(record.samples_per_second, first.samples_per_second)
            speed_up_text = shown(speed_up, AS_MULTIPLE)
            difference_text = _difference_text(largest_difference(record, first))
        lines.append(
            {
                "technique": record.technique_text,
                "precision": precision_text(record),
                "training (samples/s)": shown(record.samples_per_second, ONE),
                "against the first": speed_up_text,
                "peak memory (MiB)": shown(values.peak_memory_bytes, mib),
                "kind of memory": shown(values.memory_kind),
                "states (MiB)": shown(states, mib),
                "final train loss": shown(values.train_loss, FOUR),
                "final eval loss": shown(values.eval_loss, FOUR),
                "loss difference": difference_text,
                "status": record.status,
            }
        )
    return Table.of(lines)


def _difference_text(difference: float | None) -> str:
    """A difference of losses as text; a plain `0` where they are equal."""
    return "0" if difference == 0 else shown(difference, AS_DIFFERENCE)


def precision_text(record: Record) -> str:
    """The precision that a run computed in; where it was not measured, the one that was asked
    for."""
    measured = record.measured_precision
    return record.precision if measured is None else measured.text


def largest_difference(record: Record, baseline: Record) -> float | None:
    """The largest |loss - loss of the baseline| / loss of the baseline, over the steps for which
    both runs have a training loss; None where there is no such step."""
    baseline_losses = {point.step: point.loss for point in baseline.losses}
    differences = []
    for point in record.losses:
        if point.step in baseline_losses:
            expected = baseline_losses[point.step]
            differences.append(abs(point.loss - expected) / abs(expected))
    return max(differences, default=None)


def pod_table(runs: Sequence[Run]) -> Table:
    """A line for each rank: when its process began, how long it took, its last loss and its memory.

    `states` are as in `technique_table`, but measured on GPUs as well. The loss is the mean over
    all ranks, so it is the same for each of them.
    """
    lines = []
    for run in runs:
        record = run.record
        last_loss = record.losses[-1].loss if record.losses else None
        for rank in record.ranks:
            states = rank.live_bytes.total if rank.live_bytes else None
            # Of the GPU, or without one of the process.
            peak = rank.peak_allocated_bytes or rank.peak_resident_bytes
            lines.append(
                {
                    "run": run.folder.name,
                    "pod": rank.host,
                    "rank": rank.rank,
                    "began (UTC)": shown(rank.began_unix_seconds, _clock_text),
                    "start (s)": shown(rank.start_seconds, ONE),
                    "training (s)": shown(rank.train_seconds or None, ONE),
                    "whole (s)": shown(rank.wall_seconds, ONE),
                    "last loss": shown(last_loss, FOUR),
                    "states (MiB)": shown(states, mib),
                    "peak (MiB)": shown(peak, mib),
                }
            )
    return Table.of(lines)


def _clock_text(unix_seconds: float) -> str:
    """The time of day in UTC, `14:05:09`."""
    return f"{datetime.fromtimestamp(unix_seconds, UTC):%T}"


# What ZeRO divides: the measured bytes of a model's states in each process, beside the calculated
# ones.


class ProcessStates(NamedTuple):
    """The states in one process of a run, as measured and as calculated."""

    measured: LiveBytes | None
    """The states of the rank that holds the most; None where they were not measured."""
    planned_bytes: int | None
    """The calculated bytes of all states in one process; None where they cannot be planned."""

    @property
    def measured_bytes(self) -> int | None:
        """The measured bytes of parameters, gradients and optimizer states together; None where
        they were not measured."""
        return None if self.measured is None else self.measured.total

    def part_bytes(self, part: str) -> int | None:
        """The measured bytes of one of `STATES`, such as `gradients`; None where they were not
        measured."""
        return None if self.measured is None else getattr(self.measured, part)


def state_table(runs: Sequence[Run]) -> Table:
    """A line for each run: the states of its fullest rank, their calculated size, and the resident
    peak.

    States are tensors in memory between a backward pass and the optimizer's step, counted one by
    one. The resident peak is that of the whole process: Python and its libraries, activations and
    buffers as well.
    """
    records = [run.record for run in runs]
    all_states = [_states(record) for record in records]
    lines = []
    for record, states in zip(records, all_states, strict=True):
        line = {"technique": record.technique, "processes": record.world_size}
        for part in STATES:
            line[f"{part} (MiB)"] = shown(states.part_bytes(part), mib)
        lines.append(
            {
                **line,
                "states (MiB)": shown(states.measured_bytes, mib),
                "by arithmetic (MiB)": shown(states.planned_bytes, mib),
                "against the first": _states_text(record, records[0], states, all_states[0]),
                "resident peak (MiB)": shown(figures(record).peak_resident_bytes, mib),
                "status": record.status,
            }
        )
    return Table.of(lines)


def _states_text(
    record: Record, first: Record, states: ProcessStates, states_of_first: ProcessStates
) -> str:
    """States as a multiple of those of the first run; where the two computed in different
    precisions, and so with numbers of different sizes, `OTHER_PRECISION`."""
    if unlike_precision(first, record):
        return OTHER_PRECISION
    return shown(ratio(states.measured_bytes, states_of_first.measured_bytes), AS_MULTIPLE)


def state_plot(runs: Sequence[Run]) -> Plot:
    """The states of `state_table` as stacked bars, one colour per part; a black line marks their
    calculated sum, where it can be planned."""
    records = [run.record for run in runs]
    labels = [f"{record.technique}, {record.world_size} x" for record in records]
    all_states = [_states(record) for record in records]
    sizes = {}
    for part in STATES:
        sizes[part] = [(states.part_bytes(part) or 0) / MIB for states in all_states]
    # No line is drawn at NaN.
    planned_sizes = [(states.planned_bytes or math.nan) / MIB for states in all_states]

    figure, (axes,) = new_axes(WIDE, 0.5 * len(runs) + 1.6)
    stacked_bars(axes, labels, sizes)
    # The axis points down; bar 0 is at 0. A line is a little longer than its bar is high.
    tops = [bar - 0.4 for bar in range(len(runs))]
    bottoms = [bar + 0.4 for bar in range(len(runs))]
    axes.vlines(planned_sizes, tops, bottoms, color="black", label="by arithmetic")
    title = "What ZeRO divides: the states of one model"
    axes.set(xlabel="MiB in each process", title=title)
    legend_below(figure, columns=4)
    text = "bars of parameters, gradients and optimizer states per process, by technique"
    return Plot(figure, text)


def _states(record: Record) -> ProcessStates:
    """The states of the fullest rank, and what a plan says of them."""
    measured = [rank.live_bytes for rank in record.ranks if rank.live_bytes is not None]
    fullest = max(measured, key=lambda live_bytes: live_bytes.total, default=None)
    plan = planned_memory(record)
    return ProcessStates(fullest, None if plan is None else plan.state_bytes)


# A run that lost a pod and continued, beside an undisturbed one, as notebook 07 shows them.

FAULT_FILE = "fault.json"
"""File of a run folder in which a notebook notes what it has done to a pod of the run, and when."""
RESTARTS_FILE = "restarts.json"
"""File of a run folder with the restarts of the run, as its supervisor has written them."""


def disturbed_table(disturbed: Run, undisturbed: Run) -> Table:
    """What was lost in the last failure, how soon it was detected, what the run continued with, and
    the losses of both runs.

    `UserError` where the disturbed run did not restart by itself.
    """
    restarts_path = disturbed.folder / RESTARTS_FILE
    if not restarts_path.is_file():
        raise UserError(
            f"{disturbed.folder}: was not restarted automatically, so there is nothing to compare"
        )
    record = disturbed.record
    other = undisturbed.record
    restart = read_json(restarts_path)["restarts"][-1]
    detected_at = restart["found_unix_seconds"]
    seconds_to_detect = _seconds_to_detect(disturbed.folder / FAULT_FILE, detected_at)
    before = read_record(disturbed.folder, record.attempt - 1)
    seconds_to_train = _seconds_to_train(record, detected_at)
    flags = [f"--{name} {value}" for name, value in restart["flags"].items()]
    values = figures(record)
    other_values = figures(other)
    difference = largest_difference(record, other)
    # What is told, of the disturbed run and of the other one.
    facts = {
        "ended by": (f"{restart['status']}: {restart['pod']}", "nothing"),
        "found after": (shown(seconds_to_detect, WITH_SECONDS), "-"),
        "trained again after": (shown(seconds_to_train, WITH_SECONDS), "-"),
        "steps done twice": (str(before.steps - record.ranks[0].first_step), "0"),
        "pods": (
            f"{before.pods}, then {record.pods}: {', '.join(restart['pods'])}",
            str(other.pods),
        ),
        "changed flags": (" ".join(flags) or "nothing", "-"),
        "effective batch": (str(record.effective_batch_size), str(other.effective_batch_size)),
        "steps": (str(record.steps), str(other.steps)),
        "last training loss": (
            shown(values.train_loss, SIX_DECIMALS),
            shown(other_values.train_loss, SIX_DECIMALS),
        ),
        "last validation loss": (
            shown(values.eval_loss, SIX_DECIMALS),
            shown(other_values.eval_loss, SIX_DECIMALS),
        ),
        "largest difference of a step's loss": (shown(difference, AS_DIFFERENCE), "-"),
    }
    return Table.of(
        {"": name, "went on": text_of_disturbed, "undisturbed": text_of_other}
        for name, (text_of_disturbed, text_of_other) in facts.items()
    )


def _seconds_to_detect(fault: Path, detected_at: float) -> float | None:
    """Seconds from the fault to the moment when the supervisor saw that the run had ended; None
    where no file says when the fault was.

    Args:
        fault: the `FAULT_FILE` of the run.
        detected_at: this moment in Unix seconds.
    """
    if not fault.is_file():
        return None
    return detected_at - read_json(fault)["killed_unix_seconds"]


def _seconds_to_train(record: Record, detected_at: float) -> float | None:
    """Seconds from the moment when the supervisor saw that the run had ended to the first step of
    the last attempt, including the start of all processes; None where that was not measured."""
    rank = record.ranks[0]
    if rank.began_unix_seconds is None or rank.start_seconds is None:
        return None
    return rank.began_unix_seconds + rank.start_seconds - detected_at


# The tables of the causal workshop: losses and speed, memory.


def training_table(runs: Sequence[Run]) -> Table:
    """Losses and speed: a line for each run, with its evaluation loss after each epoch.

    Losses are nats per label token; samples/s count all processes. `before` is the evaluation
    before the first step, where there was one.
    """
    records = [run.record for run in runs]
    losses_of_runs = [_eval_loss_by_epoch(record) for record in records]
    # Every epoch after which some run was evaluated.
    epochs = sorted(set[int]().union(*losses_of_runs))
    lines = []
    for run, record, loss_by_epoch in zip(runs, records, losses_of_runs, strict=True):
        values = figures(record)
        line = {
            "run": run.folder.name,
            "technique": record.technique_text,
            "final train loss": shown(values.train_loss, FOUR),
        }
        for epoch in epochs:
            when = f"epoch {epoch}" if epoch else "before"
            line[f"eval loss, {when}"] = shown(loss_by_epoch.get(epoch), FOUR)
        lines.append(
            {
                **line,
                "training (samples/s)": shown(record.samples_per_second, TWO),
                "evaluation (samples/s)": shown(values.evaluation_samples_per_second, TWO),
                "steps per epoch": COUNT(_steps_per_epoch(record)),
                "status": record.status,
            }
        )
    return Table.of(lines)


def _eval_loss_by_epoch(record: Record) -> dict[int, float]:
    """The last loss within each epoch, counted from 1; key 0 has the loss before the first step."""
    steps = _steps_per_epoch(record)
    # Of several losses within an epoch the last one stays.
    return {math.ceil(point.step / steps): point.loss for point in record.eval_losses}


def _steps_per_epoch(record: Record) -> int:
    """Number of optimizer steps of an epoch."""
    return math.ceil(record.train_rows / record.effective_batch_size)


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory over a whole run as a log of `nvidia-smi` would give it: peak, mean and minimum, in
    MiB.

    On GPUs it is device-used memory, with context and other processes; elsewhere it is the
    process's resident memory. The peak is that of the rank that needed most, the minimum that of
    the one that needed least, the mean that of all. `zeropods summary` shows the same in its table
    of memory.
    """
    lines = []
    for run in runs:
        record = run.record
        values = figures(record)
        lines.append(
            {
                "run": run.folder.name,
                "technique": record.technique_text,
                "kind of memory": shown(values.memory_kind),
                "peak (MiB)": shown(values.process_peak_bytes, mib),
                "mean (MiB)": shown(values.process_mean_bytes, mib),
                "minimum (MiB)": shown(values.process_minimum_bytes, mib),
            }
        )
    return Table.of(lines)
