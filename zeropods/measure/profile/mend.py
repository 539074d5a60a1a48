"""A report with its known faults taken out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace

from zeropods.measure.profile.attention import times_counted
from zeropods.measure.profile.counts import linear_size, matrix_of, missing_parameters, shared_size
from zeropods.measure.profile.derived import Figures, followed
from zeropods.measure.profile.report import Module, Report, total
from zeropods.measure.profile.units import rounding

CLOCK_SECONDS = 1e8
"""Three years: no latency, but `time.time() - 0`."""
TWICE = (1.8, 2.2)
"""Between these a factor is taken for 2."""


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What a report should have said."""

    figures: Figures
    """Of the summary; None where it cannot be known."""
    root: Module | None
    """The tree with shares computed anew; sums where DeepSpeed prints no figures."""
    times_counted: float | None
    """How often linear layers were counted; None where nothing tells."""
    missing_parameters: int
    """Those that lie on other ranks, each matrix once."""


def mended(report: Report) -> Mended:
    """Take out: a clock in place of the root's latency, linear layers counted twice, parameters left out."""
    root, rows = report.root, report.summary.batch_size_per_gpu
    figures = asdict(report.summary)
    if is_clock(report.summary.forward_seconds):
        figures["forward_seconds"] = None
    # Without an engine DeepSpeed prints 0 here.
    figures["model_parameters"] = figures["model_parameters"] or None
    if root is None:
        return Mended(figures=followed(figures), root=None, times_counted=None, missing_parameters=0)
    times = times_counted(root, rows) if rows else None
    mender = _Mender(root, halve=is_twice(times))
    new, missing = mender.mend("", root)
    new, left_out = _with_own_macs(root, new), sum(missing.values())
    if figures["forward_seconds"] is None:
        figures["forward_seconds"] = sum(total(child, "latency_seconds") for child in new.children) or None
    _correct(figures, left_out, (root.macs or 0.0) - (new.macs or 0.0))
    new = replace(new, latency_seconds=_root_seconds(root, figures), parameters=figures["parameters_per_gpu"])
    new = replace(new, flops_per_second=figures["forward_flops"] / new.latency_seconds if new.latency_seconds else None)
    return Mended(figures=figures, root=_with_shares(new, new), times_counted=times, missing_parameters=left_out)


def is_clock(seconds: float | None) -> bool:
    """Whether a latency is the time of day: the root's timer was never started."""
    return seconds is not None and seconds > CLOCK_SECONDS


def is_twice(times: float | None) -> bool:
    """Whether linear layers were counted twice."""
    return times is not None and TWICE[0] < times < TWICE[1]


def _correct(figures: Figures, missing: int, macs: float) -> None:
    """Put missing parameters and superfluous MACs right, and all that follows from them."""
    flops = 2 * macs
    figures["parameters_per_gpu"] += missing
    figures["forward_macs"] -= macs
    figures["forward_flops"] -= flops
    if figures["model_forward_flops"] is not None:
        figures["model_forward_flops"] -= flops * (figures["model_parallel_size"] or 1)
    if figures["model_parameters"]:
        figures["model_parameters"] += missing * (figures["model_parallel_size"] or 1)
    figures |= followed(figures)


def _root_seconds(root: Module, figures: Figures) -> float | None:
    return figures["forward_seconds"] if is_clock(root.latency_seconds) else root.latency_seconds


def _with_own_macs(said: Module, new: Module) -> Module:
    """The root as the sum of its children where it was nothing else: they are printed with more digits."""
    parts = [total(child, "macs") for child in said.children]
    if not said.macs or abs(said.macs - sum(parts)) > rounding(said.macs) + sum(map(rounding, parts)):
        return new
    return replace(new, macs=sum(total(child, "macs") for child in new.children))


class _Mender:
    """Mends a tree from its leaves up."""

    def __init__(self, root: Module, halve: bool) -> None:
        self._halve, self._shared = halve, shared_size(root)

    def mend(self, path: str, module: Module) -> tuple[Module, dict[Hashable, int]]:
        """The module, and the parameters missing in it by the matrix that they belong to."""
        pairs = [self.mend(f"{path}.{child.name}" if path else child.name, child) for child in module.children]
        missing = {matrix: size for _, below in pairs for matrix, size in below.items()}
        if missing_parameters(module):
            missing[matrix_of(path, module, self._shared)] = missing_parameters(module)
        children = tuple(child for child, _ in pairs)
        macs = self._macs(module, children)
        superfluous = total(module, "macs") - macs
        seconds = total(module, "latency_seconds")
        changed = replace(
            module,
            parameters=total(module, "parameters") + sum(missing.values()),
            macs=macs,
            latency_seconds=seconds,
            flops_per_second=_mended_rate(module, 2 * superfluous, seconds),
            children=children,
        )
        return changed, missing

    def _macs(self, module: Module, children: tuple[Module, ...]) -> float:
        said = total(module, "macs")
        if linear_size(module) is not None:
            return said / 2 if self._halve else said
        return said - sum(total(old, "macs") for old in module.children) + sum(total(new, "macs") for new in children)


def _mended_rate(module: Module, superfluous_flops: float, seconds: float) -> float | None:
    if module.flops_per_second is None or not seconds:
        return module.flops_per_second
    return max(0.0, module.flops_per_second - superfluous_flops / seconds)


def _with_shares(module: Module, root: Module) -> Module:
    """Percentages of the root's figures, all through the tree."""
    return replace(
        module,
        parameters_percent=_percent(module.parameters, root.parameters),
        macs_percent=_percent(module.macs, root.macs),
        latency_percent=_percent(module.latency_seconds, root.latency_seconds),
        children=tuple(_with_shares(child, root) for child in module.children),
    )


def _percent(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None
