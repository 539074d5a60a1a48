"""A report against the record of its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from zeropods.measure.profile.fault import Fault
from zeropods.measure.profile.report import Report

NEAR = 0.05
"""A profiled step this near to the run's others says nothing wrong."""


def run_faults(report: Report, record: Mapping[str, Any]) -> Iterator[Fault]:
    """Where the report and its run's record say different things.

    Args:
        record: a run's `record.json`, schema version 2.
    """
    yield from _another_run(report, record)
    yield from _speed(report, record)
    yield from _recomputation(report, record)


def step_seconds(record: Mapping[str, Any]) -> float | None:
    """Median of rank 0's timed steps, those of warm-up and of the profiler left out; None where there are none."""
    first = next((rank for rank in record["ranks"] if rank["rank"] == 0), None)
    timed = first["step_seconds"][first["warmup_steps"] :] if first is not None else []
    return median(timed) if timed else None


def _another_run(report: Report, record: Mapping[str, Any]) -> Iterator[Fault]:
    profiler = (record["deepspeed"] or {}).get("flops_profiler", {})
    for key, said, expected in (
        ("world_size", report.summary.world_size, record["world_size"]),
        ("batch_size_per_gpu", report.summary.batch_size_per_gpu, record["per_device_train_batch_size"]),
        ("step", report.summary.step, profiler.get("profile_step", report.summary.step - 1) + 1),
    ):
        if said is not None and said != expected:
            yield Fault(
                name="another_run",
                line=report.line_of(key),
                where=key,
                said=said,
                corrected=expected,
                unit="",
                reason="the record beside the report has another figure: the report is of another run",
            )


def _speed(report: Report, record: Mapping[str, Any]) -> Iterator[Fault]:
    seconds, summary = step_seconds(record), report.summary
    if seconds is None or summary.iteration_seconds is None:
        return
    passes = record["gradient_accumulation_steps"]
    accumulated = f"; it is of one pass of {passes}, with a whole step of the optimizer" if passes > 1 else ""
    reason = (
        "one step, with a profiler that stops at every module and without what lies between two steps; right is the "
        f"median of the run's own timed steps{accumulated}"
    )
    for key, said, right, unit in (
        ("iteration_seconds", summary.iteration_seconds, seconds, "s"),
        ("samples_per_second", summary.samples_per_second, record["effective_batch_size"] / seconds, "samples/s"),
    ):
        if said is not None and abs(said / right - 1) > NEAR:
            yield Fault(
                name="profiler_overhead",
                line=report.line_of(key),
                where=next(line.label for line in report.lines if key in line.keys).split(" = ")[0],
                said=said,
                corrected=right,
                unit=unit,
                reason=reason,
            )


def _recomputation(report: Report, record: Mapping[str, Any]) -> Iterator[Fault]:
    """Gradient checkpointing runs the forward pass a second time inside the backward pass."""
    summary = report.summary
    if not record["gradient_checkpointing"] or summary.backward_factor != 2 or not summary.backward_seconds:
        return
    yield Fault(
        name="recomputation_left_out",
        line=report.line_of("backward_flops_per_second"),
        where="bwd FLOPS per GPU",
        said=summary.backward_flops_per_second,
        corrected=3 * summary.forward_flops / summary.backward_seconds,
        unit="FLOP/s",
        reason="gradient checkpointing was on: the backward pass also runs the forward pass again, so that it "
        "computes 3 forward passes and not 2 ('recompute_fwd_factor': 1.0 would have said so)",
    )
