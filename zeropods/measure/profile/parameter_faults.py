"""Parameters that were left out, or counted in several places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeropods.measure.profile.counts import matrix_of, parameters_by_size, shared_size
from zeropods.measure.profile.fault import Fault
from zeropods.measure.profile.mend import Mended
from zeropods.measure.profile.report import Depth, Module, Report, total
from zeropods.measure.profile.units import rounding


def sharded_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """Layers with fewer parameters than their size has."""
    if mended.missing_parameters:
        yield Fault(
            name="sharded_parameters",
            line=report.line_of("parameters_per_gpu"),
            where="params per GPU, params of layers",
            said=report.summary.parameters_per_gpu,
            corrected=mended.figures["parameters_per_gpu"],
            unit="parameters",
            reason="ZeRO-3 shards parameters, and those on other ranks are counted as 0; right is what the printed "
            "sizes give, embeddings and output layer of one size once; layers without a size are taken as printed",
        )


def shared_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """Depths where modules of one class have more parameters than the model."""
    if report.root is None or mended.missing_parameters:
        return
    model = report.summary.parameters_per_gpu
    for depth in report.depths:
        for name, said in depth.parameters.items():
            if said > model + rounding(said) + rounding(model):
                yield Fault(
                    name="shared_parameters",
                    line=depth.number,
                    where=f"depth {depth.depth}, {name}",
                    said=said,
                    corrected=_once(report.root, _modules(report.root, depth, name)),
                    unit="parameters",
                    reason=f"more than the model has: one matrix is in several {name}, and counted in each",
                )


def _modules(root: Module, depth: Depth, class_name: str) -> list[tuple[str, Module]]:
    """Modules of a class at a depth, with their paths."""
    return [
        (path, module)
        for path, module in root.walk()
        if module.class_name == class_name and len(path.split(".")) * bool(path) == depth.depth
    ]


def _once(root: Module, modules: Sequence[tuple[str, Module]]) -> float:
    """Parameters of several modules together, the token embedding in them once."""
    shared = shared_size(root)
    holders = [
        below
        for path, module in modules
        for place, below in module.walk(path)
        if shared is not None and matrix_of(place, below, shared) == shared
    ]
    size = parameters_by_size(holders[0]) or 0 if holders else 0
    return sum(total(module, "parameters") for _, module in modules) - size * max(0, len(holders) - 1)
