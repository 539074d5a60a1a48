"""Latencies that are the time of day."""

from __future__ import annotations

from collections.abc import Iterator

from zeropods.measure.profile.fault import Fault
from zeropods.measure.profile.mend import Mended, is_clock
from zeropods.measure.profile.report import Report

WHY = "the root's forward pass has begun when the profiler hooks it, its timer never starts: this is the time of day"


def latency_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """`1.8 Gs` at the root, its FLOP/s, and the summary's latency where DeepSpeed has not timed it itself."""
    root, summary = report.root, report.summary
    if is_clock(summary.forward_seconds):
        yield Fault(
            name="forward_latency",
            line=report.line_of("forward_seconds"),
            where="fwd latency",
            said=summary.forward_seconds,
            corrected=mended.figures["forward_seconds"],
            unit="s",
            reason=f"{WHY}; right is at least the sum of what is inside the model",
        )
    if root is None or mended.root is None or not is_clock(root.latency_seconds):
        return
    inside = "every '% latency' of the tree is a share of it; right is the summary's forward latency"
    for name, figure, unit, reason in (
        ("root_latency", "latency_seconds", "s", f"{WHY}; {inside}"),
        ("root_flops_per_second", "flops_per_second", "FLOP/s", "FLOPs / the time of day"),
    ):
        said, right = getattr(root, figure), getattr(mended.root, figure)
        yield Fault(
            name=name, line=root.number, where=root.class_name, said=said, corrected=right, unit=unit, reason=reason
        )
