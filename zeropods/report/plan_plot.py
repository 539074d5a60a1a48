"""A plan as pictures: memory by part against the GPU's size, a step's time by part."""

from __future__ import annotations

from typing import Any

from zeropods.plan.term import PARTS
from zeropods.report.plan_tables import GIB, name
from zeropods.report.plot import Plot, drawn, new_axes

TIMES = {
    "compute_seconds": "arithmetic",
    "exposed_communication_seconds": "network",
    "offload_seconds": "GPU to host and back",
    "processor_seconds": "Adam on the processor",
}


def memory_plot(plan: dict[str, Any]) -> Plot:
    """A bar for each technique, stacked by part, in GiB of one GPU; a line where the GPU ends."""
    techniques, size = plan["techniques"], plan["request"]["gpu_memory_bytes"] / GIB
    bars = {part: [each["bytes"][part] / GIB for each in techniques] for part in PARTS}
    figure, axes = _stacked(bars, [name(each) for each in techniques])
    axes.axvline(size, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"the GPU: {size:g} GiB", (size, 1.0), (-4, 2), ha="right", xycoords=("data", "axes fraction"),
                  textcoords="offset points", fontsize="small")  # fmt: skip
    axes.set_xlabel("GiB of one GPU")
    figure.suptitle(f"{plan['request']['model']}: planned memory")
    return drawn(figure, f"planned memory of one GPU by part, {_names(techniques)}")


def time_plot(plan: dict[str, Any]) -> Plot:
    """A bar for each technique, stacked by what a step waits for."""
    techniques = plan["techniques"]
    bars = {name: [each[key] for each in techniques] for key, name in TIMES.items()}
    figure, axes = _stacked(bars, [name(each) for each in techniques])
    axes.set_xlabel("seconds a step")
    figure.suptitle(f"{plan['request']['model']}: planned step")
    return drawn(figure, f"planned seconds of one step by part, {_names(techniques)}")


def _stacked(bars: dict[str, list[float]], names: list[str]) -> tuple[Any, Any]:
    figure, (axes,) = new_axes(8, 1.6 + 0.36 * len(names))
    begin = [0.0] * len(names)
    for number, (label, values) in enumerate(bars.items()):
        axes.barh(names, values, left=begin, height=0.65, label=label, color=f"C{number}")
        begin = [start + value for start, value in zip(begin, values, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    return figure, axes


def _names(techniques: list[dict[str, Any]]) -> str:
    return ", ".join(name(each) for each in techniques)
