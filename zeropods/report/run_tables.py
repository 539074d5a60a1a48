"""Tables and plots of runs that notebooks show: techniques, what ZeRO divides, restarts, the causal workshop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from zeropods.errors import UserError
from zeropods.measure.record import RankMeasurement, Record, read_json, read_record
from zeropods.plan.memory import planned
from zeropods.report import rows
from zeropods.report.figures import (
    DEVICE_USED,
    LIVE_STATES,
    RESIDENT,
    eval_loss,
    evaluation_samples_per_second,
    measured_bytes,
    peak_bytes,
    peak_memory_bytes,
    planned_kind,
    pod_memory_kind,
    samples_of,
    train_loss,
)
from zeropods.report.plots import Plot, new_axes
from zeropods.report.rows import NOT_MEASURED, Column
from zeropods.report.run import Run
from zeropods.report.summary import read_runs
from zeropods.tables import MIB, Table

# Techniques against a baseline: memory, speed, and whether the losses are the same.


def technique_table(runs: Sequence[Run]) -> Table:
    """A line for each run; the first is what the others are compared with.

    `states` are parameters, gradients and optimizer states in memory before an optimizer step, measured where there
    is no GPU. `loss difference` is the largest of a training step, as a share of the baseline's loss at that step.
    """
    records = [run.record for run in runs]
    return Table.of(_technique_line(record, records[0]) for record in records)


def pod_table(runs: Sequence[Run]) -> Table:
    """A line for each rank: when its process began, how long it took, its last loss and its memory.

    `states` are as in `technique_table`; the loss is the mean over all ranks, which each of them has.
    """
    return Table.of(_pod_line(run, rank) for run in runs for rank in run.record.ranks)


def _pod_line(run: Run, rank: RankMeasurement) -> dict[str, str]:
    began = None if rank.ended_unix_seconds is None else rank.ended_unix_seconds - (rank.wall_seconds or 0)
    live = rank.live_bytes
    return {
        "run": run.folder.name,
        "pod": rank.host,
        "rank": str(rank.rank),
        "began (UTC)": NOT_MEASURED if began is None else f"{datetime.fromtimestamp(began, UTC):%H:%M:%S}",
        "start (s)": _shown(rank.start_seconds, "{:.1f}"),
        "training (s)": _shown(sum(rank.step_seconds) or None, "{:.1f}"),
        "whole (s)": _shown(rank.wall_seconds, "{:.1f}"),
        "last loss": _shown(rank.losses[-1].loss if rank.losses else None, "{:.4f}"),
        "states (MiB)": _mib(None if live is None else live.parameters + live.gradients + live.optimizer),
        "peak (MiB)": _mib(rank.peak_allocated_bytes or rank.peak_resident_bytes),
    }


# What ZeRO divides: the bytes of a model's states in each process, beside arithmetic.

STATES = ("parameters", "gradients", "optimizer")


def state_table(runs: Sequence[Run]) -> Table:
    """A line for each run: the states of its fullest rank, what they come to by arithmetic, and the resident peak.

    States are tensors in memory between a backward pass and the optimizer's step, counted one by one. The resident
    peak is the whole process's: Python and its libraries, activations and buffers too.
    """
    records = [run.record for run in runs]
    base = state_bytes(records[0])
    return Table.of(_state_line(record, base) for record in records)


def state_plot(runs: Sequence[Run]) -> Plot:
    """The same as bars, a part of each colour; a black line is where arithmetic puts the sum."""
    figure, (axes,) = new_axes(8, 0.6 * len(runs) + 1.4)
    records = [run.record for run in runs]
    labels = [f"{record.technique}, {record.world_size} x" for record in records]
    lefts = np.zeros(len(records))
    for part in STATES:
        sizes = np.array([_states(record).get(part, 0) / MIB for record in records])
        axes.barh(labels, sizes, left=lefts, label=part)
        lefts += sizes
    expected = [(_planned_states(record) or math.nan) / MIB for record in records]
    axes.plot(expected, labels, linestyle="none", marker="|", markersize=24, color="black", label="by arithmetic")
    axes.invert_yaxis()
    axes.set(xlabel="MiB in each process", title="What ZeRO divides: the states of one model")
    axes.legend(loc="lower right")
    return Plot(figure, "bars of parameters, gradients and optimizer states per process, by technique")


def state_bytes(record: Record) -> int:
    """Parameters, gradients and optimizer states of the rank that holds most."""
    return sum(_states(record).values())


def _state_line(record: Record, base: int) -> dict[str, str]:
    parts, held = _states(record), state_bytes(record)
    return {
        "technique": record.technique,
        "processes": str(record.world_size),
        **{f"{part} (MiB)": _mib(parts.get(part)) for part in STATES},
        "states (MiB)": _mib(held or None),
        "by arithmetic (MiB)": _mib(_planned_states(record)),
        "against the first": _shown(held / base if held and base else None, "{:.2f} x"),
        "resident peak (MiB)": _mib(peak_bytes(record, RESIDENT)),
        "status": record.status,
    }


def _planned_states(record: Record) -> float | None:
    plan = planned(record)
    return None if plan is None else plan.state_bytes


def _states(record: Record) -> dict[str, int]:
    """Bytes by part, of the rank that holds most."""
    held = [asdict(rank.live_bytes) for rank in record.ranks if rank.live_bytes is not None]
    return max(held, key=lambda parts: sum(parts.values()), default={})


def largest_difference(record: Record, baseline: Record) -> float | None:
    """The largest |loss - loss of the baseline| / loss of the baseline, over the steps that both have; None if none."""
    before = {point.step: point.loss for point in baseline.losses}
    pairs = [(point.loss, before[point.step]) for point in record.losses if point.step in before]
    return max((abs(loss - base) / abs(base) for loss, base in pairs), default=None)


def _technique_line(record: Record, baseline: Record) -> dict[str, str]:
    rate, base = record.samples_per_second, baseline.samples_per_second
    states = measured_bytes(record) if planned_kind(record) == LIVE_STATES else None
    return {
        "technique": record.technique_text,
        "training (samples/s)": _shown(rate, "{:,.1f}"),
        "against the first": _shown(rate / base if rate and base else None, "{:.2f} x"),
        "peak memory (MiB)": _mib(peak_memory_bytes(record)),
        "kind of memory": pod_memory_kind(record) or NOT_MEASURED,
        "states (MiB)": _mib(states),
        "final train loss": _shown(train_loss(record), "{:.4f}"),
        "final eval loss": _shown(eval_loss(record), "{:.4f}"),
        "loss difference": _shown(largest_difference(record, baseline), "{:.1e}"),
        "status": record.status,
    }


def _mib(value: float | None) -> str:
    return _shown(None if value is None else value / MIB, "{:,.1f}")


def _shown(value: float | None, form: str, missing: str = NOT_MEASURED) -> str:
    return missing if value is None else form.format(value)


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
    first = read_record(disturbed.folder, record.attempt - 1)
    flags = " ".join(f"--{name} {value}" for name, value in entry["flags"].items())
    facts = {
        "ended by": (f"{entry['status']}: {entry['pod']}", "nothing"),
        "found after": (_seconds(_until_found(disturbed.folder, entry)), "-"),
        "trained again after": (_seconds(_until_first_step(record, entry)), "-"),
        "steps done twice": (str(first.steps - record.ranks[0].first_step), "0"),
        "pods": (f"{first.pods}, then {record.pods}: {', '.join(entry['pods'])}", str(other.pods)),
        "told otherwise": (flags or "nothing", "-"),
        "effective batch": (str(record.effective_batch_size), str(other.effective_batch_size)),
        "steps": (str(record.steps), str(other.steps)),
        "last training loss": tuple(_shown(train_loss(one), "{:.6f}", "none") for one in (record, other)),
        "last validation loss": tuple(_shown(eval_loss(one), "{:.6f}", "none") for one in (record, other)),
        "largest difference of a step's loss": (_shown(largest_difference(record, other), "{:.1e}"), "-"),
    }
    return Table.of({"": name, "went on": ours, "undisturbed": theirs} for name, (ours, theirs) in facts.items())


def _until_found(folder: Path, entry: Mapping[str, Any]) -> float | None:
    """Seconds from the fault to the moment when the supervisor saw that the run had ended."""
    if not (folder / FAULT).is_file():
        return None
    return float(entry["found_unix_seconds"] - read_json(folder / FAULT)["killed_unix_seconds"])


def _until_first_step(record: Record, entry: Mapping[str, Any]) -> float | None:
    """Seconds from that moment to the first step of the last attempt, start of all processes included."""
    first = record.ranks[0]
    if first.wall_seconds is None or first.start_seconds is None or first.ended_unix_seconds is None:
        return None
    return float(first.ended_unix_seconds - first.wall_seconds + first.start_seconds - entry["found_unix_seconds"])


def _seconds(value: float | None) -> str:
    return _shown(value, "{:.1f} s", "not measured")


# The tables of the causal workshop: losses and speed, memory, scaling over slots and pods.

SCALING = (
    Column("pods", "pods"),
    Column("slots", "slots of a pod"),
    Column("world_size", "processes"),
    *(one for one in (*rows.RESULTS, *rows.SPEED) if one.key in ("samples_per_second", "tokens_per_second")),
    *(column for column in rows.SCALING if column.key in ("speed_up", "scaling_efficiency", "base", "sharing")),
)


def training_table(runs: Sequence[Run]) -> Table:
    """Losses and speed: a line for each run, with its evaluation loss after each epoch.

    Losses are nats per label token; samples/s are of all processes. `before` is the evaluation before the first step,
    where there was one.
    """
    records = {run.folder.name: run.record for run in runs}
    # The last loss within each epoch, from 1; under 0 that before the first step.
    by_epoch = {
        name: {math.ceil(point.step / _steps_per_epoch(record)): point.loss for point in record.eval_losses}
        for name, record in records.items()
    }
    epochs = sorted({epoch for losses in by_epoch.values() for epoch in losses})
    return Table.of(
        {
            "run": name,
            "technique": record.technique_text,
            "final train loss": _shown(train_loss(record), "{:.4f}"),
            **{
                f"eval loss, epoch {epoch}" if epoch else "eval loss, before": _shown(
                    by_epoch[name].get(epoch), "{:.4f}"
                )
                for epoch in epochs
            },
            "training (samples/s)": _shown(record.samples_per_second, "{:,.2f}"),
            "evaluation (samples/s)": _shown(evaluation_samples_per_second(record), "{:,.2f}"),
            "steps per epoch": f"{_steps_per_epoch(record):,}",
            "status": record.status,
        }
        for name, record in records.items()
    )


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory over a whole run as a log of `nvidia-smi` would give it: peak, mean and minimum of its samples, in MiB.

    Of GPUs device-used memory, context and other processes included; elsewhere the process's resident memory. The peak
    is of the rank that needed most, the minimum of the one that needed least, the mean of all.
    """
    return Table.of(_memory_line(run) for run in runs)


def scaling_table(runs: Sequence[Run]) -> Table:
    """Speed-up and efficiency over slots and pods, against the run with the fewest processes; repeats are one line."""
    lines = read_runs([run.folder for run in runs]).lines
    known = [{**line, "slots": line["pods"] and line["world_size"] // line["pods"]} for line in lines]
    return rows.table("", SCALING, known)


def _memory_line(run: Run) -> dict[str, str]:
    record = run.record
    kind = next((kind for kind in (DEVICE_USED, RESIDENT) if samples_of(record, kind)), None)
    sampled = samples_of(record, kind) or [] if kind else []

    def over_ranks(rule: Callable[[Iterable[float]], float], key: str) -> str:
        return _mib(rule([getattr(one, key) for one in sampled]) if sampled else None)

    return {
        "run": run.folder.name,
        "technique": record.technique_text,
        "kind of memory": kind or NOT_MEASURED,
        "peak (MiB)": over_ranks(max, "peak"),
        "mean (MiB)": over_ranks(mean, "mean"),
        "minimum (MiB)": over_ranks(min, "minimum"),
    }


def _steps_per_epoch(record: Record) -> int:
    """Optimizer steps of an epoch: rows of the train split / effective batch size, rounded up."""
    return math.ceil(record.train_rows / record.effective_batch_size)
