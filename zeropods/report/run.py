"""Runs in a notebook: one by its folder; tables and plots of several, such as what ZeRO divides, or a restart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

from zeropods.errors import UserError
from zeropods.measure.calibration import planned
from zeropods.measure.record import Record, read_json, read_record
from zeropods.plan.cpu import STATES
from zeropods.report.entry import read_entry
from zeropods.report.formulas import DEVICE_USED, LIVE_STATES, RESIDENT, Values, column_of, figures, ratio, samples_of
from zeropods.report.plots import WIDE, Plot, legend_below, loss_plot, new_axes, stacked_bars
from zeropods.report.profile import ProfileReport
from zeropods.report.rows import COUNT, FOUR, NOT_MEASURED, ONE, TWO, Column, mib, run_table, table
from zeropods.tables import MIB, Table


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


# Tables of several runs.

RUN, STATUS = Column("run", "run"), Column("status", "status")
TECHNIQUE = Column("technique_text", "technique")
LOSSES = (Column("train_loss", "final train loss", "", FOUR), Column("eval_loss", "final eval loss", "", FOUR))
AGAINST = Column("against_first", "against the first", "", "{:.2f} x".format)


def _values(run: Run) -> Values:
    """The figures of a run, and what tables call it."""
    record = run.record
    facts = {"run": run.folder.name, "technique_text": record.technique_text, "status": record.status}
    return {**facts, "technique": record.technique, "world_size": record.world_size, **figures(record)}


# Techniques against a baseline: memory, speed, and whether the losses are the same.


def technique_table(runs: Sequence[Run]) -> Table:
    """A line for each run; the first is what the others are compared with.

    `states` are parameters, gradients and optimizer states in memory before an optimizer step, measured where there
    is no GPU. `loss difference` is the largest of a training step, as a share of the baseline's loss at that step.
    """
    columns = (
        Column("samples_per_second", "training", "samples/s", ONE),
        AGAINST,
        Column("peak_memory_bytes", "peak memory", "MiB", mib),
        Column("memory_kind", "kind of memory"),
        Column("states", "states", "MiB", mib),
        *LOSSES,
        Column("loss_difference", "loss difference", "", lambda share: f"{share:.1e}" if share else "0"),
        STATUS,
    )
    lines, first = [_values(run) for run in runs], runs[0].record
    for line, run in zip(lines, runs, strict=True):
        line["against_first"] = ratio(line["samples_per_second"], first.samples_per_second)
        line["states"] = line["measured_bytes"] if line["planned_kind"] == LIVE_STATES else None
        line["loss_difference"] = largest_difference(run.record, first)
    return table("", columns, lines, whole=True, label=TECHNIQUE)


def largest_difference(record: Record, baseline: Record) -> float | None:
    """The largest |loss - loss of the baseline| / loss of the baseline, over the steps that both have; None if none."""
    before = {point.step: point.loss for point in baseline.losses}
    pairs = [(point.loss, before[point.step]) for point in record.losses if point.step in before]
    return max((abs(loss - base) / abs(base) for loss, base in pairs), default=None)


def pod_table(runs: Sequence[Run]) -> Table:
    """A line for each rank: when its process began, how long it took, its last loss and its memory.

    `states` are as in `technique_table`; the loss is the mean over all ranks, which each of them has.
    """
    columns = (
        Column("host", "pod"),
        Column("rank", "rank"),
        Column("began", "began", "UTC", lambda began: f"{datetime.fromtimestamp(began, UTC):%H:%M:%S}"),
        Column("start_seconds", "start", "s", ONE),
        Column("training", "training", "s", ONE),
        Column("wall_seconds", "whole", "s", ONE),
        Column("last_loss", "last loss", "", FOUR),
        Column("states", "states", "MiB", mib),
        Column("peak", "peak", "MiB", mib),
    )
    lines = (
        {
            **vars(rank),
            "run": run.folder.name,
            "began": rank.began_unix_seconds,
            "training": rank.train_seconds or None,
            "last_loss": record.losses[-1].loss if record.losses else None,
            "states": rank.live_bytes and rank.live_bytes.total,
            "peak": rank.peak_allocated_bytes or rank.peak_resident_bytes,
        }
        for run, record in ((run, run.record) for run in runs)
        for rank in record.ranks
    )
    return table("", columns, lines, whole=True, label=RUN)


# What ZeRO divides: the bytes of a model's states in each process, beside arithmetic.


def state_table(runs: Sequence[Run]) -> Table:
    """A line for each run: the states of its fullest rank, what they come to by arithmetic, and the resident peak.

    States are tensors in memory between a backward pass and the optimizer's step, counted one by one. The resident
    peak is the whole process's: Python and its libraries, activations and buffers too.
    """
    columns = (
        Column("world_size", "processes"),
        *(Column(part, part, "MiB", mib) for part in (*STATES, "states")),
        Column("planned", "by arithmetic", "MiB", mib),
        AGAINST,
        Column("peak_resident_bytes", "resident peak", "MiB", mib),
        STATUS,
    )
    lines = [{**_values(run), **_states(run.record)} for run in runs]
    for line in lines:
        line["against_first"] = ratio(line.get("states"), lines[0].get("states"))
    return table("", columns, lines, whole=True, label=Column("technique", "technique"))


def state_plot(runs: Sequence[Run]) -> Plot:
    """The same as bars, a part of each colour; a black line is where arithmetic puts the sum."""
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
    """Bytes of the rank that holds most by part, their sum `states`, and what arithmetic says of that, `planned`."""
    held = [rank.live_bytes for rank in record.ranks if rank.live_bytes is not None]
    fullest, plan = max(held, key=lambda live: live.total, default=None), planned(record)
    parts = {} if fullest is None else {**vars(fullest), "states": fullest.total}
    return {**parts, "planned": None if plan is None else plan.state_bytes}


# A run that lost a pod and went on, beside one that nothing has disturbed: what 07 shows.

FAULT, JOURNAL = "fault.json", "restarts.json"


def disturbed_table(disturbed: Run, undisturbed: Run) -> Table:
    """What was lost, how soon it was found, what the run went on with, and the losses of both.

    `UserError` where the first one did not go on by itself.
    """
    if not (disturbed.folder / JOURNAL).is_file():
        raise UserError(f"{disturbed.folder}: did not go on by itself; nothing was lost")
    record, other = disturbed.record, undisturbed.record
    entry = read_json(disturbed.folder / JOURNAL)["restarts"][-1]
    found, fault = entry["found_unix_seconds"], disturbed.folder / FAULT
    # From the fault to the moment when the supervisor saw that the run had ended.
    until_found = found - read_json(fault)["killed_unix_seconds"] if fault.is_file() else None
    first, rank = read_record(disturbed.folder, record.attempt - 1), record.ranks[0]
    began, start = rank.began_unix_seconds, rank.start_seconds
    # To the first step of the last attempt, start of all processes included.
    until_step = None if began is None or start is None else began + start - found
    flags = " ".join(f"--{name} {value}" for name, value in entry["flags"].items())
    ours, theirs = figures(record), figures(other)
    facts = {
        "ended by": (f"{entry['status']}: {entry['pod']}", "nothing"),
        "found after": (_shown(until_found, "{:.1f} s"), "-"),
        "trained again after": (_shown(until_step, "{:.1f} s"), "-"),
        "steps done twice": (str(first.steps - rank.first_step), "0"),
        "pods": (f"{first.pods}, then {record.pods}: {', '.join(entry['pods'])}", str(other.pods)),
        "told otherwise": (flags or "nothing", "-"),
        "effective batch": (str(record.effective_batch_size), str(other.effective_batch_size)),
        "steps": (str(record.steps), str(other.steps)),
        "last training loss": tuple(_shown(one["train_loss"], "{:.6f}") for one in (ours, theirs)),
        "last validation loss": tuple(_shown(one["eval_loss"], "{:.6f}") for one in (ours, theirs)),
        "largest difference of a step's loss": (_shown(largest_difference(record, other), "{:.1e}"), "-"),
    }
    return Table.of({"": name, "went on": ours, "undisturbed": theirs} for name, (ours, theirs) in facts.items())


def _shown(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else form.format(value)


# The tables of the causal workshop: losses and speed, memory.


def training_table(runs: Sequence[Run]) -> Table:
    """Losses and speed: a line for each run, with its evaluation loss after each epoch.

    Losses are nats per label token; samples/s are of all processes. `before` is the evaluation before the first step,
    where there was one.
    """
    lines = []
    for run in runs:
        record = run.record
        steps = math.ceil(record.train_rows / record.effective_batch_size)
        # The last loss within each epoch, from 1; under 0 that before the first step.
        by_epoch = {math.ceil(point.step / steps): point.loss for point in record.eval_losses}
        named = {f"epoch {epoch}": loss for epoch, loss in by_epoch.items()}
        lines.append({**_values(run), **named, "steps_per_epoch": steps, "epochs": set(by_epoch)})
    epochs = sorted(set[int]().union(*(line["epochs"] for line in lines)))
    columns = (
        TECHNIQUE,
        LOSSES[0],
        *(Column(f"epoch {n}", f"eval loss, {f'epoch {n}' if n else 'before'}", "", FOUR) for n in epochs),
        Column("samples_per_second", "training", "samples/s", TWO),
        Column("evaluation_samples_per_second", "evaluation", "samples/s", TWO),
        Column("steps_per_epoch", "steps per epoch", "", COUNT),
        STATUS,
    )
    return table("", columns, lines, whole=True, label=RUN)


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory over a whole run as a log of `nvidia-smi` would give it: peak, mean and minimum of its samples, in MiB.

    Of GPUs device-used memory, context and other processes included; elsewhere the process's resident memory. The peak
    is of the rank that needed most, the minimum of the one that needed least, the mean of all.
    """
    rules: dict[str, Callable[[Iterable[float]], float]] = {"peak": max, "mean": mean, "minimum": min}
    columns = (TECHNIQUE, Column("kind", "kind of memory"), *(Column(name, name, "MiB", mib) for name in rules))
    lines = []
    for run in runs:
        sampled = {kind: samples_of(run.record, column_of(kind)) for kind in (DEVICE_USED, RESIDENT)}
        kind = next((kind for kind, found in sampled.items() if found), None)
        statistics = {name: rule(getattr(one, name) for one in sampled[kind]) for name, rule in rules.items() if kind}
        lines.append({**_values(run), "kind": kind, **statistics})
    return table("", columns, lines, whole=True, label=RUN)
