"""What is wrong with a profiler report, and the figures that would be right."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.profile import Module, Report, read_report, rounding
from zeropods.measure.record import Record, read_record

Figures = dict[str, Any]
"""Figures of a summary by the names of `ReportSummary`; None where there is none."""
TOLERANCE = 0.02
"""What rounding to two decimals may do to a quotient of such figures, and some more."""
CLOCK_SECONDS = 1e8
"""Three years: no latency, but `time.time() - 0`."""
TWICE, ONCE = (1.8, 2.2), (0.9, 1.1)
"""Between these a factor is taken for 2, or for 1."""
CLEAR = 5
"""How many times the rounding of the figures attention's products must be: below it they drown in it."""
AGREEMENT = 0.03
"""How far a profiler's count may be from the closed form."""
NEAR = 0.05
"""A profiled step this near to the run's others says nothing wrong."""


@dataclass(frozen=True)
class Fault:
    """What a report says, and what would be right."""

    name: str
    """One of docs/profiler.md."""
    line: int
    """Line of the report's file, the first being 1."""
    where: str
    said: float | None
    corrected: float | None
    """None where nothing is to be corrected, or the right figure cannot be known."""
    unit: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What a report should have said."""

    figures: Figures
    """Figures of the summary; None where one cannot be known."""
    root: Module | None
    """The tree with shares computed anew; sums where DeepSpeed prints no figures."""
    times_counted: float | None
    """How often linear layers were counted; None where nothing tells."""
    missing_parameters: int
    """Parameters that lie on other ranks, each matrix once."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A report that was read, mended and checked: what the command line and the notebooks show."""

    report: Report
    mended: Mended
    faults: tuple[Fault, ...]
    run: str
    """Whether it was compared with its run, in words."""

    def to_json(self, depth: int | None = None) -> dict[str, Any]:
        """Everything as plain numbers; the tree down to a depth, all of it if None."""
        root, rows = self.mended.root, self.report.summary.batch_size_per_gpu
        form = closed_form(root, rows) if root is not None and rows else None
        return {
            "file": str(self.report.path),
            "line": self.report.number,
            "reports": self.report.reports,
            "run": self.run,
            "summary": asdict(self.report.summary),
            "corrected": self.mended.figures,
            "shares": shares(self.mended.figures),
            "closed_form_macs": None if form is None else form.macs,
            "faults": [asdict(fault) for fault in self.faults],
            "aggregated": [asdict(each) for each in self.report.depths],
            "classes": [asdict(each) for each in by_class(root)] if root is not None else [],
            "tree": None if self.report.root is None else self.report.root.to_json(depth),
            "corrected_tree": None if root is None else root.to_json(depth),
        }


def check(path: Path) -> Checked:
    """Read a report and check it; against its run too, where the run's record lies beside it.

    Args:
        path: the report, or a run folder.

    Raises:
        UserError: there is no report, or not a whole one.
    """
    report = read_report(path)
    folder, record, run = report.path.parent, None, "compared with record.json beside it"
    if not (folder / "record.json").is_file():
        run = "not compared with its run: no record.json beside the report"
    else:
        try:
            record = read_record(folder)
        except UserError as error:
            run = f"not compared with its run: {error}"
    right = mended(report)
    return Checked(report=report, mended=right, faults=tuple(faults(report, right, record)), run=run)


# Figures of a summary that follow from others of it.


def contradictions(figures: Mapping[str, Any]) -> Figures:
    """What follows by DeepSpeed's own formulas, of those figures that say something else than that."""
    flops, factor, rows = figures["forward_flops"], figures["backward_factor"], figures["batch_size_per_gpu"]
    forward, backward = figures["forward_seconds"], figures["backward_seconds"]
    both, iteration = _sum(forward, backward), _sum(forward, backward, figures["step_seconds"])
    whole = None if factor is None else (1 + factor) * flops
    world = figures["world_size"]
    follows = {
        "forward_flops_per_second": _rate(flops, forward),
        "backward_flops_per_second": _rate(None if factor is None else factor * flops, backward),
        "forward_backward_flops_per_second": _rate(whole, both),
        "iteration_seconds": iteration,
        "flops_per_second": _rate(whole, iteration),
        "samples_per_second": _rate(None if rows is None or world is None else rows * world, iteration),
    }
    return {
        name: computed
        for name, computed in follows.items()
        if figures[name] is not None and (computed is None or abs(figures[name] - computed) > TOLERANCE * computed)
    }


def shares(figures: Mapping[str, Any]) -> dict[str, float] | None:
    """Shares of forward, backward and the optimizer's step in an iteration; None where they were not timed."""
    parts = {name: figures[f"{name}_seconds"] for name in ("forward", "backward", "step")}
    if any(seconds is None for seconds in parts.values()) or not sum(parts.values()):
        return None
    return {name: seconds / sum(parts.values()) for name, seconds in parts.items()}


def _rate(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount is not None and seconds else None


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


# A report with its known faults taken out.


def mended(report: Report) -> Mended:
    """Take out: a clock in place of the root's latency, linear layers counted twice, parameters left out."""
    root, rows = report.root, report.summary.batch_size_per_gpu
    figures = asdict(report.summary)
    if _is_clock(report.summary.forward_seconds):
        figures["forward_seconds"] = None
    # Without an engine DeepSpeed prints 0 here.
    figures["model_parameters"] = figures["model_parameters"] or None
    if root is None:
        figures |= contradictions(figures)
        return Mended(figures=figures, root=None, times_counted=None, missing_parameters=0)
    times = times_counted(root, rows) if rows else None
    new, missing = _mend("", root, halve=_is_twice(times), shared=_shared_size(root))
    # The root's MACs are the sum of its children where they were nothing else: these are printed with more digits.
    parts = [child.total("macs") for child in root.children]
    if root.macs and abs(root.macs - sum(parts)) <= rounding(root.macs) + sum(map(rounding, parts)):
        new = replace(new, macs=sum(child.total("macs") for child in new.children))
    if figures["forward_seconds"] is None:
        figures["forward_seconds"] = sum(child.total("latency_seconds") for child in new.children) or None
    left_out = sum(missing.values())
    _correct(figures, left_out, (root.macs or 0.0) - (new.macs or 0.0))
    seconds = figures["forward_seconds"] if _is_clock(root.latency_seconds) else root.latency_seconds
    rate = figures["forward_flops"] / seconds if seconds else None
    new = replace(new, latency_seconds=seconds, parameters=figures["parameters_per_gpu"], flops_per_second=rate)
    return Mended(figures=figures, root=_with_shares(new, new), times_counted=times, missing_parameters=left_out)


def _is_clock(seconds: float | None) -> bool:
    """Whether a latency is the time of day: the root's timer was never started."""
    return seconds is not None and seconds > CLOCK_SECONDS


def _is_twice(times: float | None) -> bool:
    return times is not None and TWICE[0] < times < TWICE[1]


def _correct(figures: Figures, missing: int, macs: float) -> None:
    """Put missing parameters and superfluous MACs right, and all that follows from them."""
    copies = figures["model_parallel_size"] or 1
    for name, change in (
        ("parameters_per_gpu", missing),
        ("model_parameters", missing * copies),
        ("forward_macs", -macs),
        ("forward_flops", -2 * macs),
        ("model_forward_flops", -2 * macs * copies),
    ):
        if figures[name] is not None:
            figures[name] += change
    figures |= contradictions(figures)


def _mend(path: str, module: Module, halve: bool, shared: Hashable) -> tuple[Module, dict[Hashable, int]]:
    """A module mended from its leaves up, and the parameters missing in it by the matrix that they belong to."""
    pairs = [_mend(f"{path}.{each.name}" if path else each.name, each, halve, shared) for each in module.children]
    missing = {matrix: size for _, below in pairs for matrix, size in below.items()}
    if left_out := _left_out(module):
        missing[_matrix_of(path, module, shared)] = left_out
    children = tuple(child for child, _ in pairs)
    said, seconds = module.total("macs"), module.total("latency_seconds")
    if module.linear is not None:
        macs = said / 2 if halve else said
    else:
        macs = said - sum(old.total("macs") for old in module.children) + sum(new.total("macs") for new in children)
    rate = module.flops_per_second
    changed = replace(
        module,
        parameters=module.total("parameters") + sum(missing.values()),
        macs=macs,
        latency_seconds=seconds,
        flops_per_second=rate if rate is None or not seconds else max(0.0, rate - 2 * (said - macs) / seconds),
        children=children,
    )
    return changed, missing


def _left_out(module: Module) -> int:
    """How many of its parameters by size the report left out: those that lie on other ranks."""
    expected, said = module.parameters_by_size, module.parameters
    if expected is None or said is None or said >= expected - 2 * rounding(expected):
        return 0
    return expected - round(said)


def _shared_size(root: Module) -> tuple[int, int] | None:
    """(rows, dimension) of the token embedding: the largest one. Others of that size are the same matrix."""
    sizes = [module.embedding for _, module in root.walk() if module.embedding]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def _matrix_of(path: str, module: Module, shared: Hashable) -> Hashable:
    """The same for modules that hold one matrix, the token embedding; a module's own path for all others.

    The report does not say what is shared. T5 and most language models give one matrix to the encoder's and the
    decoder's embedding and, without a bias, to the output layer.
    """
    linear = module.linear
    is_head = linear is not None and shared == linear[::-1] and not module.details.get("bias")
    return shared if shared is not None and (module.embedding == shared or is_head) else path


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


# Attention's products of queries with keys: a second witness of how many tokens a layer saw.


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A module whose own MACs are those of its products."""

    inner: int
    """Width of the queries, all heads together."""
    query_tokens: float
    """Tokens of the whole batch, by the first linear layer's MACs."""
    key_tokens: float
    """Tokens by the second one's."""
    macs: float
    """MACs of the products alone: what the linear layers leave."""

    def products(self, rows: int) -> float:
        """MACs of queries x keys and weights x values over so many rows, 2 x rows x T x S x inner."""
        return 2 * self.query_tokens * self.key_tokens * self.inner / rows


def _attentions(root: Module) -> list[Attention]:
    """Attention modules: linear layers (queries first, the output last), and more MACs than theirs."""
    found = []
    for _, module in root.walk():
        layers = [child for child in module.children if child.linear is not None]
        if len(layers) < 2 or module.macs is None:
            continue
        own = module.macs - sum(child.macs or 0.0 for child in module.children)
        unsure = rounding(module.macs) + sum(rounding(child.macs) for child in module.children)
        queries, keys, output = layers[0].tokens, layers[1 if len(layers) > 2 else 0].tokens, layers[-1].linear
        if queries and keys and output is not None and own >= CLEAR * unsure:
            found.append(Attention(inner=output[0], query_tokens=queries, key_tokens=keys, macs=own))
    return found


def times_counted(root: Module, rows: int) -> float | None:
    """How often linear layers were counted, as attention's products have it: 1.0 as it should be, 2.0 under ZeRO-3.

    The products grow with the square of the tokens; the linear layers' MACs claim a number of tokens, and with it
    products. Their ratio to those reported is the square of the answer. The median over all attention modules;
    None where the model has none.
    """
    ratios = [sqrt(each.products(rows) / each.macs) for each in _attentions(root)]
    return median(ratios) if ratios else None


# Forward MACs by arithmetic: sizes of layers x tokens, without what the profiler has summed.


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """Multiply-adds of a forward pass on one GPU."""

    linear_macs: float
    """Sum over linear layers of in x out x tokens."""
    attention_macs: float
    """Sum over attention modules of 2 x rows x T x S x inner."""
    planned_macs: float | None
    """The linear part for this T5 by `zeropods.plan`, where its shape is known there."""
    model: str | None
    """That shape's name."""

    @property
    def macs(self) -> float:
        """Both parts."""
        return (self.linear_macs if self.planned_macs is None else self.planned_macs) + self.attention_macs


def closed_form(root: Module, rows: int) -> ClosedForm | None:
    """The count for a tree whose linear layers are counted once; None where other layers compute too (`Conv2d`).

    Tokens are whole numbers: a layer's MACs / (in x out), rounded.
    """
    leaves = [module for _, module in root.walk() if not module.children]
    if any(module.macs and module.linear is None for module in leaves):
        return None
    linear = sum(round(leaf.tokens or 0) * leaf.linear[0] * leaf.linear[1] for leaf in leaves if leaf.linear)
    model, planned = _planned(root)
    attention = sum(each.products(rows) for each in _attentions(root))
    return ClosedForm(linear_macs=linear, attention_macs=attention, planned_macs=planned, model=model)


def _planned(root: Module) -> tuple[str | None, float | None]:
    """The T5 of `zeropods.plan` with this tree's sizes, and the MACs of its linear layers; None where there is none.

    A third of a training step's FLOPs are forward, and two make a MAC. The plan lets every target token through the
    output layer. Here only those with a label go through it, so the others are taken off again.
    """
    from zeropods.plan.shapes import T5_SHAPES

    modules, block = dict(root.walk()), "encoder.block.0.layer"
    paths = (f"{block}.0.SelfAttention.q", f"{block}.1.DenseReluDense.wi")
    layers = len([path for path in modules if path.startswith("encoder.block.") and path.count(".") == 2])
    seen = (*(modules[path].linear for path in paths if path in modules), _shared_size(root), layers)
    for name, shape in T5_SHAPES.items():
        inner, width = shape.heads * shape.d_kv, shape.d_model
        if seen != ((width, inner), (width, shape.d_ff), (shape.vocabulary, width), shape.layers):
            continue
        of = (paths[0], "decoder.block.0.layer.0.SelfAttention.q", "lm_head")
        tokens = [round(modules[path].tokens or 0) if path in modules else 0 for path in of]
        if not all(tokens):
            return name, None
        source, target, labels = tokens
        return name, shape.training_flops(source, target) / 6 - shape.embedding * (target - labels)
    return None, None


# Where MACs and time go: all modules of the tree by their class, each figure counted once.


@dataclass(frozen=True, kw_only=True)
class ClassShare:
    """What the modules of one class do themselves, without the modules inside them. Sums to the root's figures."""

    class_name: str
    modules: int
    macs: float
    macs_percent: float | None
    latency_seconds: float
    latency_percent: float | None


def by_class(root: Module) -> list[ClassShare]:
    """The classes of a tree, most MACs first, then most time."""
    classes: dict[str, list[Module]] = {}
    for _, module in root.walk():
        classes.setdefault(module.class_name, []).append(module)
    found = []
    for name in sorted(classes):
        macs, seconds = (sum(_own(m, figure) for m in classes[name]) for figure in ("macs", "latency_seconds"))
        found.append(
            ClassShare(
                class_name=name,
                modules=len(classes[name]),
                macs=macs,
                macs_percent=_percent(macs, root.macs),
                latency_seconds=seconds,
                latency_percent=_percent(seconds, root.latency_seconds),
            )
        )
    return sorted(found, key=lambda share: (share.macs, share.latency_seconds), reverse=True)


def _own(module: Module, figure: str) -> float:
    """What a module has beyond its children; nothing where that is what rounding has left."""
    parts = [child.total(figure) for child in module.children]
    rest = module.total(figure) - sum(parts)
    return rest if rest > rounding(module.total(figure)) + sum(map(rounding, parts)) else 0.0


# All that is wrong with a report, or easily misread.

CLOCK = "the root's forward pass has begun when the profiler hooks it, its timer never starts: this is the time of day"
TWICE_BY = (
    "ZeRO-3 runs a linear layer as a function of its own, and the profiler counts that and the product inside it: "
    "its MACs claim {times:.2f} times the tokens that attention's products fit"
)
UNCLEAR = (
    "linear layers claim {times:.2f} times the tokens that attention's products fit: the batch is not that of "
    "the summary, or part of the model is counted in another way"
)
SHARDED = (
    "ZeRO-3 shards parameters, and those on other ranks are counted as 0; right is what the printed sizes give, "
    "embeddings and output layer of one size once; layers without a size are taken as printed"
)
RECOMPUTED = (
    "gradient checkpointing was on: the backward pass also runs the forward pass again, so that it computes 3 forward "
    "passes and not 2 ('recompute_fwd_factor': 1.0 would have said so)"
)
OVERHEAD = (
    "one step, with a profiler that stops at every module and without what lies between two steps; right is the "
    "median of the run's own timed steps"
)


def faults(report: Report, mended: Mended, record: Record | None = None) -> Iterator[Fault]:
    """Each fault with the figure that would be right.

    Args:
        mended: the same report, mended.
        record: of the run that was profiled, where there is one.
    """
    yield from _latency_faults(report, mended)
    yield from _count_faults(report, mended)
    yield from _parameter_faults(report, mended)
    yield from _reading_faults(report)
    if record is not None:
        yield from _run_faults(report, record)


def _latency_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """`1.8 Gs` at the root, its FLOP/s, and the summary's latency where DeepSpeed has not timed it itself."""
    said, root, right = report.summary.forward_seconds, report.root, mended.root
    if _is_clock(said):
        line, seconds = report.line_of("forward_seconds"), mended.figures["forward_seconds"]
        reason = f"{CLOCK}; right is at least the sum of what is inside the model"
        yield Fault("forward_latency", line, "fwd latency", said, seconds, "s", reason)
    if root is None or right is None or not _is_clock(root.latency_seconds):
        return
    reason = f"{CLOCK}; every '% latency' of the tree is a share of it; right is the summary's forward latency"
    yield Fault("root_latency", root.number, root.class_name, root.latency_seconds, right.latency_seconds, "s", reason)
    rates, reason = (root.flops_per_second, right.flops_per_second), "FLOPs / the time of day"
    yield Fault("root_flops_per_second", root.number, root.class_name, *rates, "FLOP/s", reason)


def _count_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """Linear layers and attention that do not mean the same number of tokens; a count that arithmetic does not find."""
    times, rows, macs = mended.times_counted, report.summary.batch_size_per_gpu, mended.figures["forward_macs"]
    line = report.line_of("forward_macs")
    if times is not None and not ONCE[0] < times < ONCE[1]:
        where, said = "fwd MACs per GPU, all FLOPs and FLOP/s", report.summary.forward_macs
        if _is_twice(times):
            yield Fault("linear_counted_twice", line, where, said, macs, "MACs", TWICE_BY.format(times=times))
        else:
            yield Fault("tokens_contradict", line, where, said, None, "MACs", UNCLEAR.format(times=times))
    form = closed_form(mended.root, rows) if mended.root is not None and rows else None
    if form is not None and form.macs and abs(macs / form.macs - 1) > AGREEMENT:
        by = f"the plan's count for {form.model}" if form.planned_macs is not None else "sizes of layers x tokens"
        reason = f"differs from the closed form by {100 * (macs / form.macs - 1):+.1f} % ({by}, and attention)"
        yield Fault("differs_from_closed_form", line, "fwd MACs per GPU", macs, form.macs, "MACs", reason)


def _parameter_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """Layers with fewer parameters than their size has; depths where a class has more parameters than the model."""
    model = report.summary.parameters_per_gpu
    if mended.missing_parameters:
        line, where, right = report.line_of("parameters_per_gpu"), "params per GPU, params of layers", mended.figures
        yield Fault("sharded_parameters", line, where, model, right["parameters_per_gpu"], "parameters", SHARDED)
        return
    for depth in report.depths if report.root is not None else ():
        for name, said in depth.parameters.items():
            if report.root is not None and said > model + rounding(said) + rounding(model):
                where, once = f"depth {depth.depth}, {name}", _once(report.root, depth.depth, name)
                reason = f"more than the model has: one matrix is in several {name}, and counted in each"
                yield Fault("shared_parameters", depth.number, where, said, once, "parameters", reason)


def _once(root: Module, depth: int, class_name: str) -> float:
    """Parameters of the modules of a class at a depth together, the token embedding in them once."""
    shared = _shared_size(root)
    modules = [
        (path, module)
        for path, module in root.walk()
        if module.class_name == class_name and len(path.split(".")) * bool(path) == depth
    ]
    holders = [
        below
        for path, module in modules
        for place, below in module.walk(path)
        if shared is not None and _matrix_of(place, below, shared) == shared
    ]
    size = holders[0].parameters_by_size or 0 if holders else 0
    return sum(module.total("parameters") for _, module in modules) - size * max(0, len(holders) - 1)


def _reading_faults(report: Report) -> Iterator[Fault]:
    """Figures of the summary that do not follow from the others; what is easily misread."""
    summary, said = report.summary, vars(report.summary)
    for name, computed in {} if _is_clock(summary.forward_seconds) else contradictions(said).items():
        place, unit = (report.line_of(name), report.label_of(name)), "s" if name.endswith("_seconds") else "1/s"
        reason = "the other lines of the summary give another figure: the report was changed, or a line is missing"
        yield Fault("contradicts_itself", *place, said[name], computed, unit, reason)
    step = summary.step
    if summary.world_size is not None and step > 0:
        reason = (
            f"this is step {step} counted from 1, and 'profile_step: {step - 1}' asked for it: "
            "DeepSpeed profiles the step after that many"
        )
        yield Fault("profiled_step", report.number + 1, "Profile Summary at step", step, None, "", reason)
    if report.reports > 1:
        reason = "this is the last; where gradients are accumulated, that of the pass before the optimizer's step"
        yield Fault("several_reports", report.number, "the file", report.reports, None, "", reason)


def _run_faults(report: Report, record: Record) -> Iterator[Fault]:
    """Where the report and its run's record say different things."""
    summary, profiler = report.summary, (record.deepspeed or {}).get("flops_profiler", {})
    for key, expected in (
        ("world_size", record.world_size),
        ("batch_size_per_gpu", record.per_device_train_batch_size),
        ("step", profiler.get("profile_step", summary.step - 1) + 1),
    ):
        said = getattr(summary, key)
        if said is not None and said != expected:
            reason = "the record beside the report has another figure: the report is of another run"
            yield Fault("another_run", report.line_of(key), key, said, expected, "", reason)
    yield from _speed_faults(report, record)
    if record.gradient_checkpointing and summary.backward_factor == 2 and summary.backward_seconds:
        line, said = report.line_of("backward_flops_per_second"), summary.backward_flops_per_second
        right = 3 * summary.forward_flops / summary.backward_seconds
        yield Fault("recomputation_left_out", line, "bwd FLOPS per GPU", said, right, "FLOP/s", RECOMPUTED)


def _speed_faults(report: Report, record: Record) -> Iterator[Fault]:
    """A profiled step that took another time than rank 0's timed ones, those of warm-up and the profiler left out."""
    first = next((rank for rank in record.ranks if rank.rank == 0), None)
    timed = first.step_seconds[first.warmup_steps :] if first is not None else []
    if not timed or report.summary.iteration_seconds is None:
        return
    seconds, passes = median(timed), record.gradient_accumulation_steps
    accumulated = f"; it is of one pass of {passes}, with a whole step of the optimizer" if passes > 1 else ""
    for key, right, unit in (
        ("iteration_seconds", seconds, "s"),
        ("samples_per_second", record.effective_batch_size / seconds, "samples/s"),
    ):
        said = getattr(report.summary, key)
        if said is not None and abs(said / right - 1) > NEAR:
            where = report.label_of(key).split(" = ")[0]
            yield Fault("profiler_overhead", report.line_of(key), where, said, right, unit, OVERHEAD + accumulated)


# Two reports side by side, with ratios where they measured the same thing.

COMPARED = (
    "parameters_per_gpu", "forward_macs", "forward_flops", "forward_seconds", "forward_flops_per_second",
    "backward_seconds", "step_seconds", "iteration_seconds", "flops_per_second", "samples_per_second",
)  # fmt: skip
SETTING = ("world_size", "batch_size_per_gpu", "model_parallel_size")
"""What must be equal for a ratio to mean something."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure of two reports."""

    name: str
    first: float | None
    second: float | None
    ratio: float | None
    """second / first; None where one is missing, or the reports measured different things."""


def differences(first: Figures, second: Figures) -> list[str]:
    """What keeps two reports from being compared: `world_size 3, 2`; empty where nothing does."""
    return [f"{name} {first[name]}, {second[name]}" for name in SETTING if first[name] != second[name]]


def compare(first: Figures, second: Figures) -> list[Compared]:
    """The figures of two summaries; no ratios where `differences` finds any."""
    alike, found = not differences(first, second), []
    for name in COMPARED:
        one, two = first[name], second[name]
        ratio = two / one if alike and one and two is not None else None
        found.append(Compared(name=name, first=one, second=two, ratio=ratio))
    return found
