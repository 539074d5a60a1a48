"""A plan as people see it: its table, what to choose, every term, plots, plans at several lengths."""

from __future__ import annotations

import csv
import html
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.plan.cpu import CPU, STATES
from zeropods.plan.estimate import Estimate, Plan, Request, plan, request_for
from zeropods.plan.machines import GIGA, Machines
from zeropods.plan.terms import PARTS
from zeropods.plan.workload import ZeroSettings
from zeropods.tables import GIB, Table, counted, digits, wrapped
from zeropods.techniques import TECHNIQUES

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
    "Memory is the resident memory of one process; context is what it uses before the model is loaded. "
    "80% of such runs lie within [ ]; a plan fits if 95% of them would."
)
FAR = 5
"""Multiple of the longest bar; a GPU's memory beyond it is not marked."""
LIMIT: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
"""Style of the line that marks the memory available."""
LEGEND = "Memory is that of one GPU: context is what CUDA itself uses; host is a pod's main memory, for all processes."


@dataclass(frozen=True)
class PlanReport:
    """A plan in a notebook, which shows it as its table and what to choose."""

    plan: Plan
    source: str = ""
    """Where rates and intervals come from, in words."""

    @cached_property
    def published(self) -> list[Published]:
        """Published runs of the plan's model, techniques and pods; none for a model of which no run was published."""
        model = self.plan.request.model.rsplit("/", 1)[-1]
        keys = {(model, each.technique.name, each.pods) for each in self.plan.estimates if not self.on_cpu}
        return [row for row in published() if (row.model, row.technique, row.pods) in keys]

    @property
    def on_cpu(self) -> bool:
        """Whether the plan is for training without a GPU."""
        return self.plan.request.machines.device == CPU

    def to_json(self) -> dict[str, Any]:
        """What `zeropods plan --json` prints."""
        return {**self.plan.to_json(), "source": self.source, "reference": [row.to_json() for row in self.published]}

    def to_text(self, formulas: bool) -> str:
        """One table, what to choose, and the published runs beside it; every term if asked."""
        remark, legend = self.plan.request.remark, f"{CPU_LEGEND if self.on_cpu else LEGEND} {self.source}".strip()
        if self.plan.request.steps:
            legend = f"Each technique trains on the same number of samples, in steps of its own size. {legend}"
        parts = [str(self.table()), self.choice(), f"{wrapped(legend)}\n", f"Note: {remark}.\n" if remark else ""]
        unplanned = [technique.name for technique in TECHNIQUES if not technique.is_planned]
        if unplanned and not self.plan.request.techniques:
            parts.append(f"{', '.join(unplanned)}: not planned yet.\n")
        if self.published:
            notes = (
                f"Memory of {row.technique} on {counted(row.pods, 'pod')}: {row.to_json()['remark']}."
                for row in self.published
            )
            parts += [str(self.reference), "".join(f"{wrapped(note)}\n" for note in notes)]
        if formulas:
            parts.append(str(self.formulas()))
        return "\n".join(filter(None, parts)).rstrip()

    def table(self) -> Table:
        """A table with a line for each technique: memory of a GPU in GiB, of a pod's host, largest batch, time."""
        request, lines = self.plan.request, list[dict[str, object]]()
        for each in self.plan.estimates:
            labels, parts, seconds = each.labels, each.memory.parts(), each.total_seconds
            line: dict[str, object] = {
                "technique": each.technique.name,
                "attention": labels.get("attention"),
                "checkpointing": labels and ("yes" if labels["gradient_checkpointing"] else "no"),
                "fits": "yes" if each.fits else "no",
                "total (GiB)": _with_interval(parts["total"], each.intervals["memory"], gib),
                "host (GiB)": each.memory.host_terms and gib(each.host_bytes),
                "largest batch (rows)": f"{each.largest_batch_size:,}" if each.largest_batch_size else "none",
                "step (s)": _with_interval(each.time.seconds, each.intervals["time"], digits),
                "samples/s": digits(each.samples_per_second),
                "tokens/s": labels and digits(each.tokens_per_second),
                "training (h)": None if seconds is None else digits(seconds / 3600),
            }
            for heading, cost in (("cost of 1 M samples", each.cost_per_million_samples), ("cost", each.cost)):
                line[heading] = None if cost is None else f"{cost:.2f}"
            # The parts of the total come last, where a narrow terminal breaks the table.
            line |= {f"{part} (GiB)": gib(parts[part]) for part in PARTS}
            lines.append({heading: text for heading, text in line.items() if text})
        tokens = request.seq_length or f"{request.source_length} + {request.target_length}"
        title = (
            f"{request.model}: {counted(request.batch_size, 'row')} of {tokens} tokens per process, "
            f"{request.precision}, {'with' if self.on_cpu else 'on GPUs of'} {gib(request.gpu_memory_bytes)} GiB"
        )
        return Table.of(lines, title)

    def choice(self) -> str:
        """A recommendation in a line or two."""
        best, made = self.plan.best, self.plan.estimates
        if best is None:
            rows = max((estimate.largest_batch_size or 0 for estimate in made), default=0)
            remedy = " at any batch size: try bf16, more pods, gradient checkpointing"
            return f"No technique fits{f'; a batch of {rows:,} would' if rows else remedy}."
        pods = f"{counted(best.pods, 'pod')} of {counted(best.slots, 'process')}"
        where = "one process on one pod" if best.technique.is_alone else pods
        several = self.plan.request.machines.pods > 1 and any(each.technique.is_alone for each in made)
        alone = "\nThe row none is always one process on one pod, regardless of --pods." if several else ""
        speed = f"{digits(best.samples_per_second)} samples/s"
        said = f"Recommended: technique {name(best)}, the fastest of those that fit: {speed} on {where}."
        return f"{wrapped(said)}{alone}\n"

    @property
    def reference(self) -> Table:
        """A table of the published runs of this model beside the plan."""
        lines = []
        for row in self.published:
            (size, seconds), step = row.planned(), row.step_seconds
            low, high = (f"{GIGA * each / GIB:.1f}" for each in (row.gigabytes_a_pod_low, row.gigabytes_a_pod_high))
            line = {"technique": row.technique, "pods": row.pods}
            line |= {"published (GiB)": low if low == high else f"{low}-{high}", "planned (GiB)": f"{size / GIB:.1f}"}
            line |= {"published step (s)": "" if step is None else digits(step), "planned step (s)": digits(seconds)}
            lines.append(line)
        return Table.of(lines, "Published on A100-40GB pods, and planned with the settings published")

    def formulas(self, technique: str | None = None) -> Table:
        """A table of every term with its formula, for one process, of all techniques or of one."""
        lines = []
        for each in self.plan.estimates:
            if technique not in (None, each.technique.name):
                continue
            places = {"process" if self.on_cpu else "GPU": each.memory.terms, "host": each.memory.host_terms}
            for where, term in ((where, term) for where, terms in places.items() for term in terms):
                line = {"technique": name(each), "where": where, "part": term.part, "what": term.name}
                lines.append(line | {"GiB": gib(term.bytes), "formula": term.formula})
        return Table.of(lines, "Every term, of one process")

    @property
    def memory(self) -> Plot:
        """Plot of one GPU's memory in GiB by part and technique; a line marks the GPU's size unless it is far off."""
        size = self.plan.request.gpu_memory_bytes / GIB
        parts = [each.memory.parts() for each in self.plan.estimates]
        values = {part: [each[part] / GIB for each in parts] for part in PARTS}
        unit = f"GiB of one GPU, which has {size:g}"
        plot, axes = self._bars(values, "memory", unit, "planned memory of one GPU")
        longest = axes.get_xlim()[1]
        # With a line that is far away, the bars could not be told apart.
        if size <= FAR * longest:
            axes.set_xlim(right=max(longest, 1.05 * size))
            axes.axvline(size, **LIMIT)
            axes.annotate(f"the GPU: {size:g} GiB", (size, 1.0), (-4, 2), ha="right",
                          xycoords=("data", "axes fraction"), textcoords="offset points", fontsize="small")  # fmt: skip
        return plot

    @property
    def time(self) -> Plot:
        """Plot of a step's time by technique and by what it waits for."""
        values = {label: [getattr(each.time, key) for each in self.plan.estimates] for key, label in TIMES.items()}
        return self._bars(values, "step", "seconds per step", "planned seconds of one step")[0]

    def _bars(self, values: dict[str, list[float]], what: str, unit: str, text: str) -> tuple[Plot, Axes]:
        """Draw a stacked bar for each technique."""
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
    """The report of a plan for a `Request` with these fields; `UserError` where one is wrong."""
    return PlanReport(plan(request_for(model, **asked)))


def _with_interval(value: float, interval: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    return form(value) + (f" [{form(interval[0])}, {form(interval[1])}]" if interval else "")


def name(estimate: Estimate) -> str:
    """Name of an estimate: its technique, with the way of training for a causal model: `zero3, sdpa, checkpointing`."""
    labels = estimate.labels
    way = [labels["attention"], *["checkpointing"] * labels["gradient_checkpointing"]] if labels else []
    return ", ".join([estimate.technique.name, *way])


def gib(size: float) -> str:
    """A number of bytes in GiB, as text."""
    shown = size / GIB
    return f"{shown:,.2f}" if shown >= 1 else digits(shown)


# Plans of a causal model at several lengths: what grows with the length, and what with its square.


@dataclass(frozen=True)
class LengthPlans:
    """The estimates of one request at each length, in the same order; a notebook shows them as their table."""

    request: Request
    estimates: dict[int, tuple[Estimate, ...]]
    """Estimates by tokens per row."""

    @property
    def table(self) -> Table:
        """A table with a line for each technique, way of training and length."""
        request, lines = self.request, []
        for way in zip(*self.estimates.values(), strict=True):
            for length, each in zip(self.estimates, way, strict=True):
                parts = {part: gib(size) for part, size in each.memory.parts().items()}
                states = gib(sum(each.memory.parts()[part] for part in STATES))
                line = {"way": name(each), "tokens": f"{length:,}", "states (GiB)": states}
                line |= {f"{part} (GiB)": parts[part] for part in ("buffers", "activations", "total")}
                lines.append(line | {"fits": "yes" if each.fits else "no", "tokens/s": digits(each.tokens_per_second)})
        title = f"{request.model}: {counted(request.batch_size, 'row')} per process, {request.precision}"
        return Table.of(lines, title)

    @property
    def plot(self) -> Plot:
        """Plot of one GPU's memory by length: a line for each technique and way of training; equal ones share a
        line."""
        from zeropods.report.plots import WIDE, new_axes

        _, (axes,) = new_axes(WIDE, 5.0)
        lengths, curves = list(self.estimates), dict[tuple[float, ...], list[str]]()
        for way in zip(*self.estimates.values(), strict=True):
            curves.setdefault(tuple(each.memory.device_bytes / GIB for each in way), []).append(name(way[0]))
        for sizes, names in curves.items():
            axes.plot(lengths, sizes, marker="o", label="\nor ".join(names))
        size = self.request.gpu_memory_bytes / GIB
        axes.axhline(size, **LIMIT)
        said, place = f"the GPU: {size:g} GiB", (lengths[0], size)
        axes.annotate(said, place, (0, 3), textcoords="offset points", fontsize="small")
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
    """Plan a causal model at each of these lengths; `UserError` where a field is wrong, or the model is not causal.

    Args:
        asked: fields of `Request`.
    """
    request = request_for(model, seq_length=lengths[0], **asked)
    plans = {length: plan(replace(request, seq_length=length)).estimates for length in lengths}
    return LengthPlans(request, plans)


def _finished(axes: Axes, title: str, text: str) -> Plot:
    from zeropods.report.plots import Plot, legend_below

    figure: Any = axes.get_figure()
    legend_below(figure)
    figure.suptitle(title)
    return Plot(figure, text)


# The published runs that this project's original reports: A100-40GB pods, batch 32, FP32, 3 epochs of WikiSQL.

PUBLISHED = Path(__file__).with_name("published.csv")
WIKISQL_STEPS = {1: 5_286, 2: 2_643, 3: 1_764}
"""Number of optimizer steps by pods: 3 x ceil(56,355 / (32 x pods))."""
TOLERANCE = 0.10
"""Relative tolerance of the published memory, which is read off a screenshot."""
ROWS, TOKENS = 32, 96
"""Rows per process; tokens of the source and of the target."""
STAGE_1 = ZeroSettings(reduce_elements=500_000_000, overlap=False, contiguous=False, multi_rank_all_reduce=False)
STAGE_3 = ZeroSettings(live_elements=1_000_000_000, overlap=False)
"""Settings of the published configurations, and DeepSpeed's defaults of that time, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the published table; a field is None where the table says nothing."""

    model: str
    technique: str
    pods: int
    train_seconds: float | None
    samples_per_second: float | None
    gigabytes_a_pod_low: float
    """GB of a pod, as `nvidia-smi` showed them: CUDA's own memory and the allocator's cache included."""
    gigabytes_a_pod_high: float
    gradient_checkpointing: bool
    effective_batch_size: int
    confounders: str
    """What makes the row hard to compare, in words."""

    @property
    def step_seconds(self) -> float | None:
        """Duration divided by optimizer steps, evaluation and saving included."""
        return None if self.train_seconds is None else self.train_seconds / WIKISQL_STEPS[self.pods]

    def planned(self) -> tuple[int, float]:
        """Planned bytes of a GPU and seconds of a step for its settings: 32 rows of 96 + 96 tokens in FP32."""
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
        """The row with what is planned for it, how the memory differs, and why."""
        size, seconds = self.planned()
        low, high = GIGA * self.gigabytes_a_pod_low, GIGA * self.gigabytes_a_pod_high
        remark = f"within {TOLERANCE:.0%}"
        if size < (1 - TOLERANCE) * low:
            more = f"the published figure is {(low - size) / GIB:.1f} GiB higher"
            remark = f"{more}: it includes the allocator's cache, which nvidia-smi counts as used"
        elif size > (1 + TOLERANCE) * high:
            remark = f"the published figure is {(size - high) / GIB:.1f} GiB lower: the plan is too high here"
        return asdict(self) | {
            "planned_gigabytes": size / GIGA,
            "published_step_seconds": self.step_seconds,
            "planned_step_seconds": seconds,
            "remark": remark,
        }


def published() -> list[Published]:
    """All rows of the published table."""
    from pydantic import TypeAdapter

    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        values = [{name: text or None for name, text in line.items()} for line in csv.DictReader(file)]
    return TypeAdapter(list[Published]).validate_python(values)
