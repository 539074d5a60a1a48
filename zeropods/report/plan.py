"""A plan for people: its table, what to choose, every term, plots, plans at several lengths."""

from __future__ import annotations

import csv
import html
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.plan.cpu import STATES
from zeropods.plan.estimate import Estimate, Plan, Request, plan, request_for
from zeropods.plan.machines import GIGA, Machines
from zeropods.plan.memory import PARTS
from zeropods.plan.workload import ZeroSettings
from zeropods.tables import GIB, Table, counted, digits, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from zeropods.report.plots import Plot

TIMES = {
    "compute_seconds": "arithmetic",
    "exposed_communication_seconds": "network",
    "offload_seconds": "GPU to host and back",
    "processor_seconds": "Adam on the processor",
}

CPU_LEGEND = (
    "Memory is resident, of one process: context is what it has before its model. Of runs of the kind, "
    "80% lie within [ ]; what fits has room for 95% of them."
)
FAR = 5
"""Times the longest bar."""
LEGEND = "Memory is of one GPU: context is what CUDA itself takes; host is main memory of a pod, for all its processes."


@dataclass(frozen=True)
class PlanReport:
    """A plan in a notebook; itself shown as its table and what to choose."""

    plan: Plan
    source: str = ""
    """Where rates and intervals are from, in words."""

    @cached_property
    def published(self) -> list[Published]:
        """Published runs that the plan is of too."""
        return [] if self.on_cpu else beside(self.plan)

    @property
    def on_cpu(self) -> bool:
        """Whether no GPU trains."""
        return self.plan.request.machines.device == "cpu"

    def to_json(self) -> dict[str, Any]:
        """What `zeropods plan --json` prints."""
        return {**self.plan.to_json(), "source": self.source, "reference": [row.to_json() for row in self.published]}

    def to_text(self, formulas: bool) -> str:
        """One table, what to choose, and the published runs beside it; every term if asked."""
        remark = self.plan.request.remark
        equal = (
            "Each technique trains on as many samples, in steps of its own size. " if self.plan.request.steps else ""
        )
        legend = f"{equal}{CPU_LEGEND if self.on_cpu else LEGEND} {self.source}".strip()
        parts = [str(self.table()), self.choice(), f"{wrapped(legend)}\n", f"Note: {remark}.\n" if remark else ""]
        notes = (
            f"Memory of {row.technique} on {counted(row.pods, 'pod')}: {row.to_json()['remark']}."
            for row in self.published
        )
        parts += [str(self.reference), "".join(f"{wrapped(note)}\n" for note in notes)] if self.published else []
        parts += [str(self.formulas())] if formulas else []
        return "\n".join(filter(None, parts)).rstrip()

    def table(self) -> Table:
        """A line for each technique: memory of a GPU in GiB, of a pod's host, largest batch, time."""
        request = self.plan.request
        tokens = request.seq_length or f"{request.source_length} + {request.target_length}"
        title = (
            f"{request.model}: {counted(request.batch_size, 'row')} of {tokens} tokens per process, "
            f"{request.precision}, {'with' if self.on_cpu else 'on GPUs of'} {gib(request.gpu_memory_bytes)} GiB"
        )
        return Table.of(map(_line, self.plan.estimates), title)

    def choice(self) -> str:
        """What to choose, in a line or two."""
        best, made = self.plan.best, self.plan.estimates
        if best is None:
            rows = max((estimate.largest_batch_size or 0 for estimate in made), default=0)
            remedy = "no batch does: try bf16, more pods, gradient checkpointing"
            return f"None fits; {f'a batch of {rows:,} would' if rows else remedy}."
        pods = f"{counted(best.pods, 'pod')} of {counted(best.slots, 'process')}"
        where = "one process on one pod" if best.technique.is_alone else pods
        several = self.plan.request.machines.pods > 1 and any(each.technique.is_alone for each in made)
        alone = "\nThe row none is one process on one pod, whatever --pods says." if several else ""
        speed = f"{digits(best.samples_per_second)} samples/s"
        said = f"Recommended: technique {name(best)}, the fastest of those that fit: {speed} on {where}."
        return f"{wrapped(said)}{alone}\n"

    @property
    def reference(self) -> Table:
        """Published runs of this model beside the plan."""
        title = "Published on A100-40GB pods, and planned with the settings published"
        return Table.of(map(_published, self.published), title)

    def formulas(self, technique: str | None = None) -> Table:
        """Every term with its formula, of all techniques or of one; of one process."""
        lines = [
            {
                "technique": name(each),
                "where": where,
                "part": term.part,
                "what": term.name,
                "GiB": gib(term.bytes),
                "formula": term.formula,
            }
            for each in self.plan.estimates
            if technique in (None, each.technique.name)
            for where, terms in (
                ("process" if self.on_cpu else "GPU", each.memory.terms),
                ("host", each.memory.host_terms),
            )
            for term in terms
        ]
        return Table.of(lines, "Every term, of one process")

    @property
    def memory(self) -> Plot:
        """Memory of one GPU by part and technique, in GiB; a line where the GPU ends, unless that is far away."""
        size = self.plan.request.gpu_memory_bytes / GIB
        parts = [each.memory.parts() for each in self.plan.estimates]
        values = {part: [each[part] / GIB for each in parts] for part in PARTS}
        unit = f"GiB of one GPU, which has {size:g}"
        plot, axes = self._bars(values, "memory", unit, "planned memory of one GPU")
        longest = axes.get_xlim()[1]
        if size > FAR * longest:
            # With the line in it the bars could not be told apart.
            return plot
        axes.set_xlim(right=max(longest, 1.05 * size))
        axes.axvline(size, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"the GPU: {size:g} GiB", (size, 1.0), (-4, 2), ha="right", xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize="small")  # fmt: skip
        return plot

    @property
    def time(self) -> Plot:
        """A step's time by technique and what it waits for."""
        values = {label: [getattr(each.time, key) for each in self.plan.estimates] for key, label in TIMES.items()}
        return self._bars(values, "step", "seconds per step", "planned seconds of one step")[0]

    def _bars(self, values: dict[str, list[float]], what: str, unit: str, text: str) -> tuple[Plot, Axes]:
        """A bar for each technique, stacked."""
        from zeropods.report.plots import WIDE, new_axes, stacked_bars

        names = list(map(name, self.plan.estimates))
        _, (axes,) = new_axes(WIDE, 2.2 + 0.32 * len(names))
        stacked_bars(axes, names, values)
        axes.set_xlabel(unit)
        title = f"{self.plan.request.model}: planned {what}"
        return _finished(axes, title, f"{text} by part, {', '.join(names)}"), axes

    def _repr_html_(self) -> str:
        return f"{self.table().to_html()}<p>{html.escape(self.choice())}</p>"

    def __repr__(self) -> str:
        return f"{self.table()}\n{self.choice()}"


def plan_report(model: str, **asked: Any) -> PlanReport:
    """The plan of a `Request` with these fields; `UserError` where one is wrong."""
    return PlanReport(plan(request_for(model, **asked)))


def _line(estimate: Estimate) -> dict[str, str]:
    labels, parts = estimate.labels, estimate.memory.parts()
    line = {"technique": estimate.technique.name}
    if labels:
        checkpointing = "yes" if labels["gradient_checkpointing"] else "no"
        line |= {"attention": labels["attention"], "checkpointing": checkpointing}
    line["fits"] = "yes" if estimate.fits else "no"
    line |= {"total (GiB)": _with_interval(parts["total"], estimate.intervals.get("memory"), gib)}
    line |= {"host (GiB)": gib(estimate.host_bytes)} if estimate.memory.host_terms else {}
    line |= {
        "largest batch (rows)": f"{estimate.largest_batch_size:,}" if estimate.largest_batch_size else "none",
        "step (s)": _with_interval(estimate.time.seconds, estimate.intervals.get("time"), digits),
        "samples/s": digits(estimate.samples_per_second),
    }
    line |= {"tokens/s": digits(estimate.tokens_per_second)} if labels else {}
    line |= {} if estimate.total_seconds is None else {"training (h)": digits(estimate.total_seconds / 3600)}
    for heading, value in (("cost of 1 M samples", estimate.cost_per_million_samples), ("cost", estimate.cost)):
        line |= {} if value is None else {heading: f"{value:.2f}"}
    # Last, where a narrow terminal breaks: what the total is made of.
    return line | {f"{part} (GiB)": gib(parts[part]) for part in PARTS}


def _with_interval(value: float, interval: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    return form(value) + (f" [{form(interval[0])}, {form(interval[1])}]" if interval else "")


def _published(row: Published) -> dict[str, str]:
    low, high = (f"{GIGA * size / GIB:.1f}" for size in (row.gigabytes_a_pod_low, row.gigabytes_a_pod_high))
    return {
        "technique": row.technique,
        "pods": str(row.pods),
        "published (GiB)": low if low == high else f"{low}-{high}",
        "planned (GiB)": f"{row.planned()[0] / GIB:.1f}",
        "published step (s)": "" if row.step_seconds is None else digits(row.step_seconds),
        "planned step (s)": digits(row.planned()[1]),
    }


def name(estimate: Estimate) -> str:
    """A technique, with the way of training where a plan compares some: `zero3, sdpa, checkpointing`."""
    labels = estimate.labels
    way = [labels["attention"], *["checkpointing"] * labels["gradient_checkpointing"]] if labels else []
    return ", ".join([estimate.technique.name, *way])


def gib(size: float) -> str:
    """Bytes in GiB, as people read them."""
    shown = size / GIB
    return f"{shown:,.2f}" if shown >= 1 else digits(shown)


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
        title = f"{request.model}: {counted(request.batch_size, 'row')} per process, {request.precision}"
        ways = zip(*self.estimates.values(), strict=True)
        return Table.of([_at_length(*each) for way in ways for each in zip(self.estimates, way, strict=True)], title)

    @property
    def plot(self) -> Plot:
        """Memory of one GPU over the length: a line for each technique and way of training, alike ones together."""
        from zeropods.report.plots import WIDE, new_axes

        _, (axes,) = new_axes(WIDE, 5.0)
        lengths = list(self.estimates)
        curves: dict[tuple[float, ...], list[str]] = {}
        for way in zip(*self.estimates.values(), strict=True):
            sizes = tuple(each.memory.device_bytes / GIB for each in way)
            curves.setdefault(sizes, []).append(name(way[0]))
        for sizes, names in curves.items():
            axes.plot(lengths, sizes, marker="o", label="\nor ".join(names))
        size = self.request.gpu_memory_bytes / GIB
        axes.axhline(size, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"the GPU: {size:g} GiB", (lengths[0], size), (0, 3), textcoords="offset points", fontsize="small"
        )
        axes.set(xlabel="tokens per row", ylabel="GiB of one GPU", yscale="log", xticks=lengths)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
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
        "way": name(estimate),
        "tokens": f"{length:,}",
        "states (GiB)": gib(sum(parts[part] for part in STATES)),
        "buffers (GiB)": gib(parts["buffers"]),
        "activations (GiB)": gib(parts["activations"]),
        "total (GiB)": gib(parts["total"]),
        "fits": "yes" if estimate.fits else "no",
        "tokens/s": digits(estimate.tokens_per_second),
    }


def _finished(axes: Axes, title: str, text: str) -> Plot:
    from zeropods.report.plots import Plot, legend_below

    figure: Any = axes.get_figure()
    legend_below(figure)
    figure.suptitle(title)
    return Plot(figure, text)


# The published runs that this project's original reports: A100-40GB pods, batch 32, FP32, 3 epochs of WikiSQL.

PUBLISHED = Path(__file__).with_name("published.csv")
WIKISQL_STEPS = {1: 5_286, 2: 2_643, 3: 1_764}
"""Optimizer steps by pods: 3 x ceil(56,355 / (32 x pods))."""
TOLERANCE = 0.10
"""Share of the published memory, which is read off a screenshot."""
ROWS, TOKENS = 32, 96
"""Rows of a process; tokens of source and of target."""
STAGE_1 = ZeroSettings(reduce_elements=500_000_000, overlap=False, contiguous=False, multi_rank_all_reduce=False)
STAGE_3 = ZeroSettings(live_elements=1_000_000_000, overlap=False)
"""What the published configurations and DeepSpeed's defaults of then were, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the published table; None where it says nothing."""

    model: str
    technique: str
    pods: int
    train_seconds: float | None
    samples_per_second: float | None
    gigabytes_a_pod_low: float
    """As `nvidia-smi` showed it: CUDA's own memory and the allocator's cache included."""
    gigabytes_a_pod_high: float
    gradient_checkpointing: bool
    effective_batch_size: int
    confounders: str
    """What makes it hard to compare, in words."""

    @property
    def step_seconds(self) -> float | None:
        """Duration over optimizer steps, evaluation and saving included."""
        return None if self.train_seconds is None else self.train_seconds / WIKISQL_STEPS[self.pods]

    def planned(self) -> tuple[int, float]:
        """Bytes of a GPU and seconds of a step for its settings: 32 rows of 96 + 96 tokens in FP32."""
        request = request_for(
            self.model,
            machines=Machines(pods=self.pods),
            techniques=(self.technique,),
            zero=STAGE_3 if self.technique.startswith("zero3") else STAGE_1,
            gradient_checkpointing=self.gradient_checkpointing,
            batch_size=ROWS,
            source_length=TOKENS,
            target_length=TOKENS,
        )
        (found,) = plan(request).estimates
        return found.memory.device_bytes, found.time.seconds

    def to_json(self) -> dict[str, object]:
        """The row, what is planned, and how the memory differs, and why."""
        device_bytes, seconds = self.planned()
        return asdict(self) | {
            "planned_gigabytes": device_bytes / GIGA,
            "published_step_seconds": self.step_seconds,
            "planned_step_seconds": seconds,
            "remark": self._remark(device_bytes / GIGA),
        }

    def _remark(self, planned: float) -> str:
        low, high = self.gigabytes_a_pod_low, self.gigabytes_a_pod_high
        if planned < (1 - TOLERANCE) * low:
            more = f"{GIGA * (low - planned) / GIB:.1f} GiB more were published"
            return f"{more}: the allocator's cache, which nvidia-smi counts as used"
        if planned > (1 + TOLERANCE) * high:
            return f"{GIGA * (planned - high) / GIB:.1f} GiB fewer were published: this plan is too high there"
        return f"within {TOLERANCE:.0%}"


def published() -> list[Published]:
    """All rows."""
    from pydantic import TypeAdapter

    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        values = [{name: text or None for name, text in line.items()} for line in csv.DictReader(file)]
    return TypeAdapter(list[Published]).validate_python(values)


def beside(made: Plan) -> list[Published]:
    """Published runs of the model, technique and pods of a plan; none for a model that none was published of."""
    model = made.request.model.rsplit("/", 1)[-1]
    keys = {(model, estimate.technique.name, estimate.pods) for estimate in made.estimates}
    return [row for row in published() if (row.model, row.technique, row.pods) in keys]
