"""A plan as people see it: its table, what to choose, every term, plots, plans at several
lengths."""

from __future__ import annotations

import csv
import html
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.plan.estimate import Estimate, Plan, Request, plan, request_for
from zeropods.plan.machines import GIGA, Machines
from zeropods.plan.terms import PARTS, STATES
from zeropods.plan.workload import ZeroSettings
from zeropods.tables import GIB, SECONDS_PER_HOUR, Table, counted, digits, wrapped
from zeropods.techniques import not_planned_yet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from zeropods.report.plots import Plot

TIMES = {
    "compute_seconds": "arithmetic",
    "launch_seconds": "waiting for the host's launches",
    "exposed_communication_seconds": "network",
    "offload_seconds": "GPU to host and back",
    "processor_seconds": "Adam on the processor",
    "optimizer_seconds": "the optimizer on the GPU",
}
"""What a step waits for, in words, by the field of the planned time."""
FAR = 5
"""Multiple of the longest bar; a GPU's memory beyond it is not marked."""
LIMIT: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
"""Style of the line that marks the memory available."""
LEGEND = (
    "Memory is that of one GPU: context is what CUDA itself uses; "
    "host is a pod's main memory, for all processes."
)


@dataclass(frozen=True)
class PlanReport:
    """A plan in a notebook, which shows it as its table and what to choose."""

    plan: Plan
    source: str = ""
    """Where rates and intervals come from, in words."""

    @cached_property
    def published(self) -> list[Published]:
        """The rows of `published()` with the plan's model, techniques and pods; none for a model of
        which no run was published."""
        model = self.plan.request.model.rsplit("/", 1)[-1]
        planned = {(estimate.technique.name, estimate.pods) for estimate in self.plan.estimates}
        rows = []
        for row in published():
            if row.model == model and (row.technique, row.pods) in planned:
                rows.append(row)
        return rows

    def to_json(self) -> dict[str, Any]:
        """What `zeropods plan --json` prints."""
        return {
            **self.plan.to_json(),
            "source": self.source,
            "reference": [row.to_json() for row in self.published],
        }

    def to_text(self, formulas: bool) -> str:
        """The table, what to choose, how to read them, and the published runs beside the plan,
        wrapped for the terminal.

        Args:
            formulas: whether to add every term of the memory with its formula.
        """
        request = self.plan.request
        legend = f"{LEGEND} {self.source}".strip()
        if request.steps:
            steps = "Each technique trains on the same number of samples, in steps of its own size."
            legend = f"{steps} {legend}"
        parts = [str(self.table()), self.choice(), f"{wrapped(legend)}\n"]
        if request.remark:
            parts.append(f"Note: {request.remark}.\n")
        line_of_unplanned = not_planned_yet()
        if line_of_unplanned and not request.techniques:
            parts.append(line_of_unplanned)
        if self.published:
            parts.append(str(self.reference))
            parts.append("".join(f"{wrapped(row.note())}\n" for row in self.published))
        if formulas:
            parts.append(str(self.formulas()))
        return "\n".join(parts).rstrip()

    def table(self) -> Table:
        """A table with a line for each technique: memory of a GPU in GiB, of a pod's host, largest
        batch, time."""
        request = self.plan.request
        # A causal model has one length, an encoder-decoder those of source and target.
        tokens = request.seq_length or f"{request.source_length} + {request.target_length}"
        rows = f"{counted(request.batch_size, 'row')} of {tokens} tokens per process"
        gpus = f"on GPUs of {gib(request.gpu_memory_bytes)} GiB"
        title = f"{request.model}: {rows}, {request.precision}, {gpus}"
        return Table.of([_line_of(estimate) for estimate in self.plan.estimates], title)

    def choice(self) -> str:
        """A recommendation in a line or two; where no technique fits, what to change."""
        best = self.plan.best
        estimates = self.plan.estimates
        if best is None:
            largest_batches = [estimate.largest_batch_size or 0 for estimate in estimates]
            rows = max(largest_batches, default=0)
            if rows:
                return f"No technique fits; a batch of {rows:,} would."
            remedy = "try bf16, more pods, gradient checkpointing"
            return f"No technique fits at any batch size: {remedy}."
        where = f"{counted(best.pods, 'pod')} of {counted(best.slots, 'process')}"
        if best.technique.is_alone:
            where = "one process on one pod"
        speed = f"{digits(best.samples_per_second)} samples/s on {where}"
        sentence = f"Recommended: technique {name(best)}, the fastest of those that fit: {speed}."
        text = wrapped(sentence)
        has_one_process = any(estimate.technique.is_alone for estimate in estimates)
        if self.plan.request.machines.pods > 1 and has_one_process:
            text += "\nThe row none is always one process on one pod, regardless of --pods."
        return f"{text}\n"

    @property
    def reference(self) -> Table:
        """A table of the published runs of this model beside the plan."""
        title = "Published on A100-40GB pods, and planned with the settings published"
        return Table.of([row.line() for row in self.published], title)

    def formulas(self, technique: str | None = None) -> Table:
        """A table of every term with its formula, for one process, of all techniques or of one."""
        lines = []
        for estimate in self.plan.estimates:
            if technique is not None and technique != estimate.technique.name:
                continue
            memory = estimate.memory
            places = {"GPU": memory.terms, "host": memory.host_terms, "NVMe": memory.nvme_terms}
            for where, terms in places.items():
                for term in terms:
                    line = {
                        "technique": name(estimate),
                        "where": where,
                        "part": term.part,
                        "what": term.name,
                        "GiB": gib(term.bytes),
                        "formula": term.formula,
                    }
                    lines.append(line)
        return Table.of(lines, "Every term, of one process")

    @property
    def memory(self) -> Plot:
        """Plot of one GPU's memory in GiB by part and technique; a line marks the GPU's size unless
        it is more than `FAR` times the longest bar."""
        gpu_gib = self.plan.request.gpu_memory_bytes / GIB
        parts_of_estimates = [estimate.memory.parts() for estimate in self.plan.estimates]
        values = {part: [parts[part] / GIB for parts in parts_of_estimates] for part in PARTS}
        unit = f"GiB of one GPU, which has {gpu_gib:g}"
        plot, axes = self._bars(values, "memory", unit, "planned memory of one GPU")
        _, right_end = axes.get_xlim()
        # With a line that is far away, the bars could not be told apart.
        if gpu_gib <= FAR * right_end:
            axes.set_xlim(right=max(right_end, 1.05 * gpu_gib))
            axes.axvline(gpu_gib, **LIMIT)
            axes.annotate(
                f"the GPU: {gpu_gib:g} GiB",
                (gpu_gib, 1.0),
                (-4, 2),
                ha="right",
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize="small",
            )
        return plot

    @property
    def time(self) -> Plot:
        """Plot of a step's time by technique and by what it waits for."""
        values = {}
        for key, label in TIMES.items():
            values[label] = [getattr(estimate.time, key) for estimate in self.plan.estimates]
        plot, _ = self._bars(values, "step", "seconds per step", "planned seconds of one step")
        return plot

    def _bars(
        self, values: dict[str, list[float]], what: str, unit: str, text: str
    ) -> tuple[Plot, Axes]:
        """Draw a stacked bar for each technique; return the plot, and its axes to draw more on.

        Args:
            values: lengths of the parts, one for each technique, by the label of the part.
            what: what is planned, for the title.
            unit: label of the axis.
            text: what the plot shows, for those who cannot see it.
        """
        from zeropods.report.plots import WIDE, new_axes, stacked_bars

        names = [name(estimate) for estimate in self.plan.estimates]
        _, (axes,) = new_axes(WIDE, 2.2 + 0.32 * len(names))
        stacked_bars(axes, names, values)
        axes.set_xlabel(unit)
        title = f"{self.plan.request.model}: planned {what}"
        return _finished(axes, title, f"{text} by part, {', '.join(names)}"), axes

    def _repr_html_(self) -> str:
        return f"{self.table().to_html()}<p>{html.escape(self.choice())}</p>"

    def __repr__(self) -> str:
        return f"{self.table()}\n{self.choice()}"


def plan_report(model: str, **fields: Any) -> PlanReport:
    """The report of a plan for a `Request` with these fields; `UserError` where one is wrong."""
    return PlanReport(plan(request_for(model, **fields)))


def _line_of(estimate: Estimate) -> dict[str, object]:
    """The line of an estimate in the table, by heading; headings for which the estimate has nothing
    are left out."""
    # A causal model can be trained in several ways, which the labels tell apart; others have none.
    labels = estimate.labels
    parts = estimate.memory.parts()
    line: dict[str, object] = {"technique": estimate.technique.name}
    if labels:
        line["attention"] = labels["attention"]
        line["checkpointing"] = _yes_or_no(labels["gradient_checkpointing"])
    line["fits"] = _yes_or_no(estimate.fits)
    line["total (GiB)"] = _with_interval(parts["total"], estimate.intervals["memory"], gib)
    if estimate.memory.host_terms:
        line["host (GiB)"] = gib(estimate.host_bytes)
    line["largest batch (rows)"] = "none"
    if estimate.largest_batch_size:
        line["largest batch (rows)"] = f"{estimate.largest_batch_size:,}"
    line["step (s)"] = _with_interval(estimate.time.seconds, estimate.intervals["time"], digits)
    line["samples/s"] = digits(estimate.samples_per_second)
    if labels:
        line["tokens/s"] = digits(estimate.tokens_per_second)
    if estimate.total_seconds is not None:
        line["training (h)"] = digits(estimate.total_seconds / SECONDS_PER_HOUR)
    if estimate.cost_per_million_samples is not None:
        line["cost of 1 M samples"] = f"{estimate.cost_per_million_samples:.2f}"
    if estimate.cost is not None:
        line["cost"] = f"{estimate.cost:.2f}"
    # The parts of the total come last, where a narrow terminal breaks the table.
    for part in PARTS:
        line[f"{part} (GiB)"] = gib(parts[part])
    return line


def _yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _with_interval(
    value: float, interval: tuple[float, float] | None, form: Callable[[float], str]
) -> str:
    """A value as text, with its interval where there is one: `13.2 [12.9, 13.6]`."""
    if interval is None:
        return form(value)
    low, high = interval
    return f"{form(value)} [{form(low)}, {form(high)}]"


def name(estimate: Estimate) -> str:
    """Name of an estimate: its technique, with the way of training for a causal model: `zero3,
    sdpa, checkpointing`."""
    labels = estimate.labels
    words = [estimate.technique.name]
    if labels:
        words.append(labels["attention"])
        if labels["gradient_checkpointing"]:
            words.append("checkpointing")
    return ", ".join(words)


def gib(size: float) -> str:
    """A number of bytes in GiB, as text."""
    gibibytes = size / GIB
    return f"{gibibytes:,.2f}" if gibibytes >= 1 else digits(gibibytes)


# Plans of a causal model at several lengths: what grows with the length, and what with its square.


@dataclass(frozen=True)
class LengthPlans:
    """The estimates of one request at each length; a notebook shows them as their table."""

    request: Request
    """The request with one of the lengths."""
    estimates: dict[int, tuple[Estimate, ...]]
    """Estimates by tokens per row; at each length the same techniques and ways of training, in the
    same order."""

    @property
    def table(self) -> Table:
        """A table with a line for each technique, way of training and length."""
        request = self.request
        lines = []
        for estimates_of_way in self._by_way():
            for length, estimate in zip(self.estimates, estimates_of_way, strict=True):
                parts = estimate.memory.parts()
                line = {
                    "way": name(estimate),
                    "tokens": f"{length:,}",
                    "states (GiB)": gib(sum(parts[part] for part in STATES)),
                }
                for part in ("buffers", "activations", "total"):
                    line[f"{part} (GiB)"] = gib(parts[part])
                line["fits"] = _yes_or_no(estimate.fits)
                line["tokens/s"] = digits(estimate.tokens_per_second)
                lines.append(line)
        rows = f"{counted(request.batch_size, 'row')} per process"
        return Table.of(lines, f"{request.model}: {rows}, {request.precision}")

    @property
    def plot(self) -> Plot:
        """Plot of one GPU's memory by length: a line for each technique and way of training; equal
        ones share a line."""
        from zeropods.report.plots import WIDE, new_axes

        _, (axes,) = new_axes(WIDE, 5.0)
        lengths = list(self.estimates)
        # Names of the ways by their sizes in GiB, one for each length.
        names_by_sizes: dict[tuple[float, ...], list[str]] = {}
        for estimates_of_way in self._by_way():
            sizes = tuple(estimate.memory.device_bytes / GIB for estimate in estimates_of_way)
            # The name does not depend on the length.
            names_by_sizes.setdefault(sizes, []).append(name(estimates_of_way[0]))
        for sizes, names in names_by_sizes.items():
            axes.plot(lengths, sizes, marker="o", label="\nor ".join(names))
        gpu_gib = self.request.gpu_memory_bytes / GIB
        axes.axhline(gpu_gib, **LIMIT)
        axes.annotate(
            f"the GPU: {gpu_gib:g} GiB",
            (lengths[0], gpu_gib),
            (0, 3),
            textcoords="offset points",
            fontsize="small",
        )
        axes.set(xlabel="tokens per row", ylabel="GiB of one GPU", yscale="log", xticks=lengths)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        text = f"planned memory of one GPU at {', '.join(map(str, lengths))} tokens"
        return _finished(axes, f"{self.request.model}: planned memory by length", text)

    def _by_way(self) -> list[tuple[Estimate, ...]]:
        """The estimates of each technique and way of training: one for each length, in the order
        of `estimates`."""
        return list(zip(*self.estimates.values(), strict=True))

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def __repr__(self) -> str:
        return str(self.table)


def length_plans(model: str, lengths: Sequence[int], **fields: Any) -> LengthPlans:
    """Plan a causal model at each of these lengths; `UserError` where a field is wrong, or the
    model is not causal.

    Args:
        model: its known name, hub id or folder.
        lengths: tokens per row, one length or more.
        fields: other fields of `Request`.
    """
    request = request_for(model, seq_length=lengths[0], **fields)
    plans = {length: plan(replace(request, seq_length=length)).estimates for length in lengths}
    return LengthPlans(request, plans)


def _finished(axes: Axes, title: str, text: str) -> Plot:
    """The plot of these axes, with a legend below them, a title, and a text for those who cannot
    see it."""
    from zeropods.report.plots import Plot, legend_below

    # `Any`, since matplotlib's types allow for axes without a figure; `new_axes` makes none.
    figure: Any = axes.get_figure()
    legend_below(figure)
    figure.suptitle(title)
    return Plot(figure, text)


# The published runs that this project's original reports: A100-40GB pods, batch 32, FP32, 3 epochs
# of WikiSQL.

PUBLISHED = Path(__file__).with_name("published.csv")
WIKISQL_STEPS = {1: 5_286, 2: 2_643, 3: 1_764}
"""Number of optimizer steps by pods: 3 x ceil(56,355 / (32 x pods))."""
TOLERANCE = 0.10
"""Relative tolerance of the published memory, which is read off a screenshot."""
PUBLISHED_ROWS = 32
"""Rows per process."""
PUBLISHED_TOKENS = 96
"""Tokens of the source, and of the target."""
STAGE_1 = ZeroSettings(
    reduce_elements=500_000_000, overlap=False, contiguous=False, multi_rank_all_reduce=False
)
STAGE_3 = ZeroSettings(live_elements=1_000_000_000, overlap=False)
"""Settings of the published configurations by their stage, with DeepSpeed's defaults of that time,
as far as these are known."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the published table; a field is None where the table says nothing."""

    model: str
    technique: str
    pods: int
    train_seconds: float | None
    samples_per_second: float | None
    gigabytes_a_pod_low: float
    """GB of a pod, as `nvidia-smi` showed them: CUDA's own memory and the allocator's cache
    included."""
    gigabytes_a_pod_high: float
    gradient_checkpointing: bool
    effective_batch_size: int
    confounders: str
    """What makes the row hard to compare, in words."""

    @property
    def step_seconds(self) -> float | None:
        """Duration divided by optimizer steps, evaluation and saving included."""
        if self.train_seconds is None:
            return None
        return self.train_seconds / WIKISQL_STEPS[self.pods]

    def planned(self) -> tuple[int, float]:
        """Planned bytes of a GPU and seconds of a step, with the published settings: 32 rows of
        96 + 96 tokens in FP32."""
        request = request_for(
            self.model,
            machines=Machines(pods=self.pods),
            techniques=(self.technique,),
            zero=STAGE_3 if self.technique.startswith("zero3") else STAGE_1,
            gradient_checkpointing=self.gradient_checkpointing,
            batch_size=PUBLISHED_ROWS,
            source_length=PUBLISHED_TOKENS,
            target_length=PUBLISHED_TOKENS,
        )
        (estimate,) = plan(request).estimates
        return estimate.memory.device_bytes, estimate.time.seconds

    def line(self) -> dict[str, object]:
        """The row's line in the table of what was published and planned."""
        planned_bytes, planned_seconds = self.planned()
        low = f"{GIGA * self.gigabytes_a_pod_low / GIB:.1f}"
        high = f"{GIGA * self.gigabytes_a_pod_high / GIB:.1f}"
        step = self.step_seconds
        return {
            "technique": self.technique,
            "pods": self.pods,
            "published (GiB)": low if low == high else f"{low}-{high}",
            "planned (GiB)": f"{planned_bytes / GIB:.1f}",
            "published step (s)": "" if step is None else digits(step),
            "planned step (s)": digits(planned_seconds),
        }

    def remark(self, planned_bytes: int) -> str:
        """How the planned memory differs from the published one, and why, in words; `within 10%`
        where it does not by more than `TOLERANCE`."""
        low = GIGA * self.gigabytes_a_pod_low
        high = GIGA * self.gigabytes_a_pod_high
        if planned_bytes < (1 - TOLERANCE) * low:
            more = f"the published figure is {(low - planned_bytes) / GIB:.1f} GiB higher"
            return f"{more}: it includes the allocator's cache, which nvidia-smi counts as used"
        if planned_bytes > (1 + TOLERANCE) * high:
            less = f"the published figure is {(planned_bytes - high) / GIB:.1f} GiB lower"
            return f"{less}: the plan is too high here"
        return f"within {TOLERANCE:.0%}"

    def note(self) -> str:
        """The remark on the planned memory in a sentence."""
        planned_bytes, _ = self.planned()
        where = f"{self.technique} on {counted(self.pods, 'pod')}"
        return f"Memory of {where}: {self.remark(planned_bytes)}."

    def to_json(self) -> dict[str, object]:
        """The row with what is planned for it, how the memory differs, and why."""
        planned_bytes, planned_seconds = self.planned()
        return asdict(self) | {
            "planned_gigabytes": planned_bytes / GIGA,
            "published_step_seconds": self.step_seconds,
            "planned_step_seconds": planned_seconds,
            "remark": self.remark(planned_bytes),
        }


def published() -> list[Published]:
    """All rows of the published table."""
    from pydantic import TypeAdapter

    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        values = []
        for line in csv.DictReader(file):
            # An empty text stands for what the table does not say.
            values.append({key: text or None for key, text in line.items()})
    return TypeAdapter(list[Published]).validate_python(values)
