"""A plan for people: its table, what to choose, every term, plots, plans at several lengths."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zeropods.plan.estimate import Estimate, Plan, Request, plan, request_for
from zeropods.plan.machines import GIGA
from zeropods.plan.published import beside, claims
from zeropods.plan.workload import PARTS
from zeropods.report.plots import Plot, drawn, new_axes
from zeropods.tables import GIB, Table

Document = dict[str, Any]
"""The document of `zeropods plan --json`: all tables are made from it, so that what is printed is what is stored."""
TIMES = {
    "compute_seconds": "arithmetic",
    "exposed_communication_seconds": "network",
    "offload_seconds": "GPU to host and back",
    "processor_seconds": "Adam on the processor",
}


@dataclass(frozen=True)
class PlanReport:
    """A plan in a notebook; itself shown as its table and what to choose."""

    plan: Plan

    @cached_property
    def document(self) -> Document:
        """What `zeropods plan --json` prints."""
        return document(self.plan)

    @property
    def reference(self) -> Table:
        """Published runs beside the plan; without lines where there are none."""
        return reference(self.document)

    def formulas(self, technique: str | None = None) -> Table:
        """Every term with its formula."""
        return terms(self.document, technique)

    @property
    def memory(self) -> Plot:
        """Memory of one GPU by part and technique, in GiB; a line where the GPU ends."""
        made, size = self.document["techniques"], self.document["request"]["gpu_memory_bytes"] / GIB
        axes = self._bars({part: [each["bytes"][part] / GIB for each in made] for part in PARTS})
        axes.axvline(size, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"the GPU: {size:g} GiB", (size, 1.0), (-4, 2), ha="right", xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize="small")  # fmt: skip
        return self._finished(axes, "memory", "GiB of one GPU", "planned memory of one GPU")

    @property
    def time(self) -> Plot:
        """A step's time by technique and what it waits for."""
        axes = self._bars({label: [each[key] for each in self.document["techniques"]] for key, label in TIMES.items()})
        return self._finished(axes, "step", "seconds a step", "planned seconds of one step")

    def _bars(self, values: dict[str, list[float]]) -> Any:
        """A bar for each technique, stacked."""
        names = [name(each) for each in self.document["techniques"]]
        _, (axes,) = new_axes(8, 1.6 + 0.36 * len(names))
        begin = [0.0] * len(names)
        for number, (label, widths) in enumerate(values.items()):
            axes.barh(names, widths, left=begin, height=0.65, label=label, color=f"C{number}")
            begin = [start + width for start, width in zip(begin, widths, strict=True)]
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        return axes

    def _finished(self, axes: Any, what: str, unit: str, text: str) -> Plot:
        axes.set_xlabel(unit)
        names = ", ".join(name(each) for each in self.document["techniques"])
        return _finished(axes, f"{self.plan.request.model}: planned {what}", f"{text} by part, {names}")

    def _repr_html_(self) -> str:
        return f"{techniques(self.document).to_html()}<p>{html.escape(choice(self.document))}</p>"

    def __repr__(self) -> str:
        return f"{techniques(self.document)}\n{choice(self.document)}"


def plan_report(model: str, **asked: Any) -> PlanReport:
    """The plan of a `Request` with these fields; `UserError` where one is wrong."""
    return PlanReport(plan(request_for(model, **asked)))


def document(made: Plan) -> Document:
    """A plan and the published runs beside it, as plain values."""
    return {**made.to_json(), "reference": [row.to_json() for row in beside(made)]}


# Tables.


def techniques(plan: Document) -> Table:
    """A line for each technique: memory of a GPU in GiB, of a pod's host, largest batch, time."""
    request = plan["request"]
    tokens = request.get("seq_length") or f"{request['source_length']} + {request['target_length']}"
    title = (
        f"{request['model']}: {request['batch_size']} rows of {tokens} tokens a process, "
        f"{request['precision']}, on GPUs of {gib(request['gpu_memory_bytes'])} GiB"
    )
    return Table.of(map(_technique, plan["techniques"]), title)


def _technique(estimate: Document) -> dict[str, str]:
    is_compared, hours, cost = "attention" in estimate, estimate["total_seconds"], estimate["cost"]
    line = {"technique": estimate["technique"]}
    if is_compared:
        checkpointing = "yes" if estimate["gradient_checkpointing"] else "no"
        line |= {"attention": estimate["attention"], "checkpointing": checkpointing}
    line["fits"] = "yes" if estimate["fits"] else "no"
    line |= {part: gib(estimate["bytes"][part]) for part in (*PARTS, "total")}
    line |= {
        "host": gib(estimate["host_bytes"]),
        "largest batch": str(estimate["largest_batch_size"] or "none"),
        "step (s)": f"{estimate['step_seconds']:.3g}",
        "samples/s": rate(estimate["samples_per_second"]),
    }
    line |= {"tokens/s": rate(estimate["tokens_per_second"])} if is_compared else {}
    line |= {"hours": f"{hours / 3600:.2f}"} if hours is not None else {}
    if estimate["cost_per_million_samples"] is not None:
        line["cost of 1 M samples"] = f"{estimate['cost_per_million_samples']:.2f}"
    return line | ({"cost": f"{cost:.2f}"} if cost is not None else {})


def choice(plan: Document) -> str:
    """What to choose, in a line or two."""
    wanted, made = {"technique": plan["best"], **plan["best_labels"]}, plan["techniques"]
    best = next((each for each in made if wanted.items() <= each.items()), None)
    if best is None:
        rows = max((estimate["largest_batch_size"] or 0 for estimate in made), default=0)
        remedy = f"a batch of {rows} would" if rows else "no batch does: try bf16, more pods, gradient checkpointing"
        return f"None fits; {remedy}."
    where = "one process on one pod" if best["technique"] == "none" else f"{best['pods']} pods of {best['slots']}"
    several = plan["request"]["machines"]["pods"] > 1 and any(each["technique"] == "none" for each in made)
    alone = "\nThe row none is one process on one pod, whatever --pods says." if several else ""
    speed = f"{rate(best['samples_per_second'])} samples/s"
    return f"Choose {name(best)}: of those that fit the fastest, {speed} on {where}.{alone}\n"


def reference(plan: Document) -> Table:
    """Published runs of this model beside the plan, each with how they differ."""
    title = "Published on A100-40GB pods, and planned with the settings published"
    return Table.of(map(_reference, plan["reference"]), title)


def _reference(row: Document) -> dict[str, str]:
    low, high = row["gigabytes_a_pod_low"], row["gigabytes_a_pod_high"]
    seconds = row["published_step_seconds"]
    return {
        "technique": row["technique"],
        "pods": str(row["pods"]),
        "published GB": f"{low:g}" if low == high else f"{low:g}-{high:g}",
        "planned GB": f"{row['planned_gigabytes']:.1f}",
        "published step (s)": "" if seconds is None else f"{seconds:.3g}",
        "planned step (s)": f"{row['planned_step_seconds']:.3g}",
        "memory": row["remark"],
    }


def terms(plan: Document, technique: str | None = None) -> Table:
    """Every term with its formula, of all techniques or of one; of one process."""
    lines = [
        {
            "technique": name(each),
            "where": where,
            "part": term["part"],
            "what": term["name"],
            "GiB": gib(term["bytes"]),
            "formula": term["formula"],
        }
        for each in plan["techniques"]
        if technique in (None, each["technique"])
        for where, key in (("GPU", "terms"), ("host", "host_terms"))
        for term in each[key]
    ]
    return Table.of(lines, "Every term, of one process")


def name(estimate: Document) -> str:
    """A technique, with the way of training where a plan compares some: `zero3, sdpa, checkpointing`."""
    way = [estimate["attention"]] if "attention" in estimate else []
    return ", ".join([estimate["technique"], *way, *["checkpointing"] * estimate.get("gradient_checkpointing", False)])


def gib(size: float) -> str:
    """Bytes in GiB, as people read them."""
    shown = size / GIB
    return f"{shown:.2f}" if shown >= 1 else f"{shown:.3g}"


def rate(value: float) -> str:
    """A rate in digits that count, without an exponent."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


# Plans of a causal model at several lengths: what grows with the length, and what with its square.


@dataclass(frozen=True)
class LengthPlans:
    """The estimates of one request at each length, in the same order; itself shown as its table."""

    request: Request
    estimates: dict[int, tuple[Estimate, ...]]
    """By tokens per row."""

    @property
    def table(self) -> Table:
        """A line for each technique, way of training and length."""
        request = self.request
        title = f"{request.model}: {request.batch_size} rows a process, {request.precision}"
        ways = zip(*self.estimates.values(), strict=True)
        return Table.of([_at_length(*each) for way in ways for each in zip(self.estimates, way, strict=True)], title)

    @property
    def plot(self) -> Plot:
        """Memory of one GPU over the length: a line for each technique and way of training, alike ones together."""
        _, (axes,) = new_axes(8, 4.2)
        lengths = list(self.estimates)
        curves: dict[tuple[float, ...], list[str]] = {}
        for way in zip(*self.estimates.values(), strict=True):
            sizes = tuple(each.memory.device_bytes / GIB for each in way)
            curves.setdefault(sizes, []).append(name(way[0].to_json()))
        for sizes, names in curves.items():
            axes.plot(lengths, sizes, marker="o", label="\nor ".join(names))
        size = self.request.gpu_memory_bytes / GIB
        axes.axhline(size, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"the GPU: {size:g} GiB", (lengths[0], size), (0, 3), textcoords="offset points", fontsize="small"
        )
        axes.set(xlabel="tokens a row", ylabel="GiB of one GPU", yscale="log", xticks=lengths)
        axes.yaxis.set_major_formatter("{x:g}")
        text = f"planned memory of one GPU at {', '.join(map(str, lengths))} tokens"
        return _finished(axes, f"{self.request.model}: planned memory by length", text)

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def __repr__(self) -> str:
        return str(self.table)


def length_plans(model: str, lengths: Sequence[int], **asked: Any) -> LengthPlans:
    """Plan a causal model at each of these lengths; `UserError` where a field is wrong, or the model is no causal one.

    Args:
        asked: fields of `Request`.
    """
    request = request_for(model, seq_length=lengths[0], **asked)
    plans = {length: plan(replace(request, seq_length=length)).estimates for length in lengths}
    return LengthPlans(request, plans)


def _at_length(length: int, estimate: Estimate) -> dict[str, Any]:
    parts = estimate.memory.parts()
    return {
        "way": name(estimate.to_json()),
        "tokens": f"{length:,}",
        "states": gib(sum(parts[part] for part in ("parameters", "gradients", "optimizer"))),
        "buffers": gib(parts["buffers"]),
        "activations": gib(parts["activations"]),
        "total (GiB)": gib(parts["total"]),
        "fits": "yes" if estimate.fits else "no",
        "tokens/s": rate(estimate.tokens_per_second),
    }


def _finished(axes: Any, title: str, text: str) -> Plot:
    """The plot of these axes with a legend at their right."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    figure = axes.get_figure()
    figure.suptitle(title)
    return drawn(figure, text)


def claims_table(model: str = "llama-8b", tokens: int = 16_384, rows: int = 1) -> Table:
    """Published claims about large models, and what is right; `UserError` for a model without FlashAttention."""
    lines = (
        {"what": each.what, "GB": f"{each.bytes / GIGA:,.1f}", "from": each.formula, "verdict": each.verdict}
        for each in claims(model, tokens, rows)
    )
    return Table.of(lines, f"{model}: {tokens} tokens, {rows} rows")
