"""MACs that were counted twice, or that arithmetic does not find."""

from __future__ import annotations

from collections.abc import Iterator

from zeropods.measure.profile.closed_form import closed_form
from zeropods.measure.profile.fault import Fault
from zeropods.measure.profile.mend import Mended, is_twice
from zeropods.measure.profile.report import Report

AGREEMENT = 0.03
"""How far a profiler's count may be from the closed form."""
ONCE = (0.9, 1.1)
"""Between these a factor is taken for 1."""


def token_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """Linear layers and attention that do not mean the same number of tokens."""
    times = mended.times_counted
    if times is None or ONCE[0] < times < ONCE[1]:
        return
    doubled = (
        "ZeRO-3 runs a linear layer as a function of its own, and the profiler counts that and the product inside it: "
        f"its MACs claim {times:.2f} times the tokens that attention's products fit"
    )
    unclear = (
        f"linear layers claim {times:.2f} times the tokens that attention's products fit: the batch is not that of "
        "the summary, or part of the model is counted in another way"
    )
    yield Fault(
        name="linear_counted_twice" if is_twice(times) else "tokens_contradict",
        line=report.line_of("forward_macs"),
        where="fwd MACs per GPU, all FLOPs and FLOP/s",
        said=report.summary.forward_macs,
        corrected=mended.figures["forward_macs"] if is_twice(times) else None,
        unit="MACs",
        reason=doubled if is_twice(times) else unclear,
    )


def closed_form_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """A mended count that is more than 3 % from arithmetic."""
    rows, macs = report.summary.batch_size_per_gpu, mended.figures["forward_macs"]
    form = closed_form(mended.root, rows) if mended.root is not None and rows else None
    if form is None or not form.macs or abs(macs / form.macs - 1) <= AGREEMENT:
        return
    by = f"the plan's count for {form.model}" if form.planned_macs is not None else "sizes of layers x tokens"
    yield Fault(
        name="differs_from_closed_form",
        line=report.line_of("forward_macs"),
        where="fwd MACs per GPU",
        said=macs,
        corrected=form.macs,
        unit="MACs",
        reason=f"differs from the closed form by {100 * (macs / form.macs - 1):+.1f} % ({by}, and attention)",
    )
