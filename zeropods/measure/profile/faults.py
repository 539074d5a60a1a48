"""What is wrong with a report, each fault with the figure that would be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zeropods.measure.profile.against_run import run_faults
from zeropods.measure.profile.count_faults import closed_form_faults, token_faults
from zeropods.measure.profile.derived import contradictions
from zeropods.measure.profile.fault import Fault
from zeropods.measure.profile.latency_faults import latency_faults
from zeropods.measure.profile.mend import Mended, is_clock
from zeropods.measure.profile.parameter_faults import sharded_faults, shared_faults
from zeropods.measure.profile.report import Report


def faults(report: Report, mended: Mended, record: Mapping[str, Any] | None = None) -> list[Fault]:
    """All that is wrong with a report, or easily misread.

    Args:
        mended: the same report, mended.
        record: of the run that was profiled, where there is one.
    """
    return [
        *latency_faults(report, mended),
        *token_faults(report, mended),
        *closed_form_faults(report, mended),
        *sharded_faults(report, mended),
        *shared_faults(report, mended),
        *_contradictions(report),
        *_step(report),
        *_several(report),
        *(run_faults(report, record) if record is not None else ()),
    ]


def _contradictions(report: Report) -> Iterator[Fault]:
    """Figures of the summary that do not follow from the others, by their own formulas."""
    said = vars(report.summary)
    if is_clock(report.summary.forward_seconds):
        return
    for name, computed in contradictions(said).items():
        yield Fault(
            name="contradicts_itself",
            line=report.line_of(name),
            where=next(line.label for line in report.lines if name in line.keys),
            said=said[name],
            corrected=computed,
            unit="s" if name.endswith("_seconds") else "1/s",
            reason="the other lines of the summary give another figure: the report was changed, or a line is missing",
        )


def _step(report: Report) -> Iterator[Fault]:
    step = report.summary.step
    if report.summary.world_size is not None and step > 0:
        yield Fault(
            name="profiled_step",
            line=report.number + 1,
            where="Profile Summary at step",
            said=step,
            corrected=None,
            unit="",
            reason=f"this is step {step} counted from 1, and 'profile_step: {step - 1}' asked for it: "
            "DeepSpeed profiles the step after that many",
        )


def _several(report: Report) -> Iterator[Fault]:
    if report.reports > 1:
        yield Fault(
            name="several_reports",
            line=report.number,
            where="the file",
            said=report.reports,
            corrected=None,
            unit="",
            reason="this is the last; where gradients are accumulated, that of the pass before the optimizer's step",
        )
