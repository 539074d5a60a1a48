"""A plan for people: its table, what to choose, every term, plots, plans at several lengths."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zeropods.plan.estimate import Estimate, Plan, plan
from zeropods.plan.published import GIGA, Claim, beside, claims
from zeropods.plan.request import CausalRequest, request_for
from zeropods.plan.workload import PARTS
from zeropods.report.plots import Plot, drawn, new_axes
from zeropods.tables import Table

# A plan as people read it: techniques, what to choose, every term, published runs beside it.
#
# All from the document of `zeropods plan --json`, so that what is printed is what is stored.

GIB = 1 << 30
Document = dict[str, Any]


def techniques(plan: Document) -> Table:
    """A line for each technique: memory of a GPU in GiB, of a pod's host, largest batch, time."""
    request = plan["request"]
    title = (
        f"{request['model']}: {request['batch_size']} rows of {_tokens(request)} tokens a process, "
        f"{request['precision']}, on GPUs of {gib(request['gpu_memory_bytes'])} GiB"
    )
    return Table.of([_technique(estimate, plan) for estimate in plan["techniques"]], title)


def name(estimate: Document) -> str:
    """A technique, with the way of training where a plan compares some: `zero3, sdpa, checkpointing`."""
    return ", ".join((estimate["technique"], *_way(estimate)))


def choice(plan: Document) -> str:
    """What to choose, in a line or two."""
    wanted = {"technique": plan["best"], **plan["best_labels"]}
    best = next((each for each in plan["techniques"] if wanted.items() <= each.items()), None)
    if best is None:
        rows = max((estimate["largest_batch_size"] or 0 for estimate in plan["techniques"]), default=0)
        remedy = f"a batch of {rows} would" if rows else "no batch does: try bf16, more pods, gradient checkpointing"
        return f"None fits; {remedy}."
    where = "one process on one pod" if best["technique"] == "none" else f"{best['pods']} pods of {best['slots']}"
    speed = f"{rate(best['samples_per_second'])} samples/s"
    alone = "\nThe row none is one process on one pod, whatever --pods says." if _has_none(plan) else ""
    return f"Choose {name(best)}: of those that fit the fastest, {speed} on {where}.{alone}\n"


def reference(plan: Document) -> Table:
    """Published runs of this model beside the plan, each with how they differ."""
    return Table.of(
        [_reference(row) for row in plan["reference"]],
        "Published on A100-40GB pods, and planned with the settings published",
    )


def terms(plan: Document, technique: str | None = None) -> Table:
    """Every term with its formula, of all techniques or of one; of one process."""
    chosen = [each for each in plan["techniques"] if technique in (None, each["technique"])]
    lines = [
        {
            "technique": name(each),
            "where": where,
            "part": term["part"],
            "what": term["name"],
            "GiB": gib(term["bytes"]),
            "formula": term["formula"],
        }
        for each in chosen
        for where, key in (("GPU", "terms"), ("host", "host_terms"))
        for term in each[key]
    ]
    return Table.of(lines, "Every term, of one process")


def gib(size: float) -> str:
    """Bytes in GiB, as people read them."""
    shown = size / GIB
    return f"{shown:.2f}" if shown >= 1 else f"{shown:.3g}"


def rate(value: float) -> str:
    """A rate in digits that count, without an exponent."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _technique(estimate: Document, plan: Document) -> dict[str, str]:
    line = {"technique": estimate["technique"], **_labels(estimate), "fits": "yes" if estimate["fits"] else "no"}
    line |= {part: gib(estimate["bytes"][part]) for part in (*PARTS, "total")}
    line |= {
        "host": gib(estimate["host_bytes"]),
        "largest batch": str(estimate["largest_batch_size"] or "none"),
        "step (s)": f"{estimate['step_seconds']:.3g}",
        "samples/s": rate(estimate["samples_per_second"]),
    }
    if "attention" in estimate:
        line["tokens/s"] = rate(estimate["tokens_per_second"])
    if estimate["total_seconds"] is not None:
        line["hours"] = f"{estimate['total_seconds'] / 3600:.2f}"
    if estimate["cost_per_million_samples"] is not None:
        line["cost of 1 M samples"] = f"{estimate['cost_per_million_samples']:.2f}"
    if estimate["cost"] is not None:
        line["cost"] = f"{estimate['cost']:.2f}"
    return line


def _labels(estimate: Document) -> dict[str, str]:
    if "attention" not in estimate:
        return {}
    return {
        "attention": estimate["attention"],
        "checkpointing": "yes" if estimate["gradient_checkpointing"] else "no",
    }


def _way(estimate: Document) -> list[str]:
    if "attention" not in estimate:
        return []
    return [estimate["attention"], *(["checkpointing"] if estimate["gradient_checkpointing"] else [])]


def _tokens(request: Document) -> str:
    if "seq_length" in request:
        return f"{request['seq_length']}"
    return f"{request['source_length']} + {request['target_length']}"


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


def _has_none(plan: Document) -> bool:
    return plan["request"]["machines"]["pods"] > 1 and any(e["technique"] == "none" for e in plan["techniques"])


# A plan as a notebook shows it: its table, what to choose, every term, plots.


@dataclass(frozen=True)
class PlanReport:
    """A plan, shown."""

    plan: Plan

    @cached_property
    def document(self) -> dict[str, Any]:
        """What `zeropods plan --json` prints."""
        return {**self.plan.to_json(), "reference": [row.to_json() for row in beside(self.plan)]}

    @property
    def table(self) -> Table:
        """A line for each technique."""
        return techniques(self.document)

    @property
    def reference(self) -> Table:
        """Published runs beside the plan; without lines where there are none."""
        return reference(self.document)

    def formulas(self, technique: str | None = None) -> Table:
        """Every term with its formula."""
        return terms(self.document, technique)

    @property
    def memory(self) -> Plot:
        """Memory by part and technique against the GPU's size."""

        return memory_plot(self.document)

    @property
    def time(self) -> Plot:
        """A step's time by part and technique."""

        return time_plot(self.document)

    def _repr_html_(self) -> str:
        return f"{self.table.to_html()}<p>{html.escape(choice(self.document))}</p>"

    def __repr__(self) -> str:
        return f"{self.table}\n{choice(self.document)}"


def plan_report(model: str, **asked: Any) -> PlanReport:
    """The plan of a `Request`, or of a `CausalRequest`, with these fields; `UserError` where one is wrong."""
    return PlanReport(plan(request_for(model, **asked)))


# A plan as pictures: memory by part against the GPU's size, a step's time by part.

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


# Plans of a causal model at several lengths: what grows with the length, and what with its square.


@dataclass(frozen=True)
class LengthPlans:
    """The estimates of one request at each length, in the same order."""

    request: CausalRequest
    estimates: dict[int, tuple[Estimate, ...]]
    """By tokens a row."""

    @property
    def table(self) -> Table:
        """A line for each technique, way of training and length."""
        request = self.request
        title = f"{request.model}: {request.batch_size} rows a process, {request.precision}"
        return Table.of([self._line(*each) for each in self._each()], title)

    @property
    def plot(self) -> Plot:
        """Memory of one GPU over the length: a line for each technique and way of training, alike ones together."""
        figure, (axes,) = new_axes(8, 4.2)
        lengths = list(self.estimates)
        for sizes, names in self._curves().items():
            axes.plot(lengths, sizes, marker="o", label="\nor ".join(names))
        size = self.request.gpu_memory_bytes / GIB
        axes.axhline(size, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"the GPU: {size:g} GiB", (lengths[0], size), (0, 3), textcoords="offset points", fontsize="small"
        )
        axes.set(xlabel="tokens a row", ylabel="GiB of one GPU", yscale="log", xticks=lengths)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
        figure.suptitle(f"{self.request.model}: planned memory by length")
        return drawn(figure, f"planned memory of one GPU at {', '.join(map(str, lengths))} tokens")

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def __repr__(self) -> str:
        return str(self.table)

    def _curves(self) -> dict[tuple[float, ...], list[str]]:
        """Names by sizes in GiB, of each length."""
        found: dict[tuple[float, ...], list[str]] = {}
        for of_all in zip(*self.estimates.values(), strict=True):
            sizes = tuple(each.memory.device_bytes / GIB for each in of_all)
            found.setdefault(sizes, []).append(name(of_all[0].to_json()))
        return found

    def _each(self) -> Iterator[tuple[int, Estimate]]:
        for number in range(len(next(iter(self.estimates.values())))):
            yield from ((length, of_length[number]) for length, of_length in self.estimates.items())

    def _line(self, length: int, estimate: Estimate) -> dict[str, Any]:
        parts = estimate.memory.parts()
        states = sum(parts[part] for part in ("parameters", "gradients", "optimizer"))
        return {
            "way": name(estimate.to_json()),
            "tokens": f"{length:,}",
            "states": gib(states),
            "buffers": gib(parts["buffers"]),
            "activations": gib(parts["activations"]),
            "total (GiB)": gib(parts["total"]),
            "fits": "yes" if estimate.fits else "no",
            "tokens/s": rate(estimate.tokens_per_second),
        }


def length_plans(model: str, lengths: Sequence[int], **asked: Any) -> LengthPlans:
    """Plan a causal model at each of these lengths.

    Args:
        asked: fields of `CausalRequest`.

    Raises:
        UserError: a field is wrong, or the model is no causal one.
    """
    request = request_for(model, seq_length=lengths[0], **asked)
    assert isinstance(request, CausalRequest)
    plans = {length: plan(replace(request, seq_length=length)).estimates for length in lengths}
    return LengthPlans(request, plans)


# Published claims about large models, and what is right, as a table.


def claims_table(model: str = "llama-8b", tokens: int = 16_384, rows: int = 1) -> Table:
    """A line for each figure; `UserError` for a model without FlashAttention."""
    return Table.of([_line(claim) for claim in claims(model, tokens, rows)], f"{model}: {tokens} tokens, {rows} rows")


def _line(claim: Claim) -> dict[str, Any]:
    return {
        "what": claim.what,
        "GB": f"{claim.bytes / GIGA:,.1f}",
        "from": claim.formula,
        "verdict": claim.verdict,
    }
