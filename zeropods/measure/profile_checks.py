"""What is wrong with a profiler report, and the figures that would be right."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.measure.profile import Depth, Module, Report, read_report, rounding, total
from zeropods.measure.record import Record, read_record

if TYPE_CHECKING:
    from zeropods.plan.shapes import T5Shape


# One thing that is wrong with a report.


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What a report says, and what would be right."""

    name: str
    """One of docs/profiler.md."""
    line: int
    """Of the report's file, the first being 1."""
    where: str
    said: float | None
    corrected: float | None
    """None where nothing is to be corrected, or the right figure cannot be known."""
    unit: str
    reason: str


# A report against the record of its run.

NEAR = 0.05
"""A profiled step this near to the run's others says nothing wrong."""


def run_faults(report: Report, record: Record) -> Iterator[Fault]:
    """Where the report and its run's record say different things.

    Args:
        record: of the run that the report is of.
    """
    yield from _another_run(report, record)
    yield from _speed(report, record)
    yield from _recomputation(report, record)


def step_seconds(record: Record) -> float | None:
    """Median of rank 0's timed steps, those of warm-up and of the profiler left out; None where there are none."""
    first = next((rank for rank in record.ranks if rank.rank == 0), None)
    timed = first.step_seconds[first.warmup_steps :] if first is not None else []
    return median(timed) if timed else None


def _another_run(report: Report, record: Record) -> Iterator[Fault]:
    profiler = (record.deepspeed or {}).get("flops_profiler", {})
    for key, said, expected in (
        ("world_size", report.summary.world_size, record.world_size),
        ("batch_size_per_gpu", report.summary.batch_size_per_gpu, record.per_device_train_batch_size),
        ("step", report.summary.step, profiler.get("profile_step", report.summary.step - 1) + 1),
    ):
        if said is not None and said != expected:
            yield Fault(
                name="another_run",
                line=report.line_of(key),
                where=key,
                said=said,
                corrected=expected,
                unit="",
                reason="the record beside the report has another figure: the report is of another run",
            )


def _speed(report: Report, record: Record) -> Iterator[Fault]:
    seconds, summary = step_seconds(record), report.summary
    if seconds is None or summary.iteration_seconds is None:
        return
    passes = record.gradient_accumulation_steps
    accumulated = f"; it is of one pass of {passes}, with a whole step of the optimizer" if passes > 1 else ""
    reason = (
        "one step, with a profiler that stops at every module and without what lies between two steps; right is the "
        f"median of the run's own timed steps{accumulated}"
    )
    for key, said, right, unit in (
        ("iteration_seconds", summary.iteration_seconds, seconds, "s"),
        ("samples_per_second", summary.samples_per_second, record.effective_batch_size / seconds, "samples/s"),
    ):
        if said is not None and abs(said / right - 1) > NEAR:
            yield Fault(
                name="profiler_overhead",
                line=report.line_of(key),
                where=next(line.label for line in report.lines if key in line.keys).split(" = ")[0],
                said=said,
                corrected=right,
                unit=unit,
                reason=reason,
            )


def _recomputation(report: Report, record: Record) -> Iterator[Fault]:
    """Gradient checkpointing runs the forward pass a second time inside the backward pass."""
    summary = report.summary
    if not record.gradient_checkpointing or summary.backward_factor != 2 or not summary.backward_seconds:
        return
    yield Fault(
        name="recomputation_left_out",
        line=report.line_of("backward_flops_per_second"),
        where="bwd FLOPS per GPU",
        said=summary.backward_flops_per_second,
        corrected=3 * summary.forward_flops / summary.backward_seconds,
        unit="FLOP/s",
        reason="gradient checkpointing was on: the backward pass also runs the forward pass again, so that it "
        "computes 3 forward passes and not 2 ('recompute_fwd_factor': 1.0 would have said so)",
    )


# What a module's printed size says that it must have: parameters, tokens that went through it.


def linear_size(module: Module) -> tuple[int, int] | None:
    """(in, out) features of a linear layer; None for anything else."""
    wide, narrow = module.details.get("in_features"), module.details.get("out_features")
    return (wide, narrow) if isinstance(wide, int) and isinstance(narrow, int) else None


def embedding_size(module: Module) -> tuple[int, int] | None:
    """(rows, dimension) of an embedding; None for anything else."""
    rows, dimension = module.details.get("rows"), module.details.get("dimension")
    return (rows, dimension) if isinstance(rows, int) and isinstance(dimension, int) else None


def parameters_by_size(module: Module) -> int | None:
    """Parameters of a linear layer (in x out, and out more with a bias) or an embedding (rows x dimension)."""
    linear, embedding = linear_size(module), embedding_size(module)
    if linear is not None:
        return linear[0] * linear[1] + (linear[1] if module.details.get("bias") else 0)
    return embedding[0] * embedding[1] if embedding is not None else None


def missing_parameters(module: Module) -> int:
    """How many of its parameters by size the report left out: those that lie on other ranks."""
    expected, said = parameters_by_size(module), module.parameters
    if expected is None or said is None or said >= expected - 2 * rounding(expected):
        return 0
    return expected - round(said)


def tokens_through(module: Module) -> float | None:
    """Tokens that a linear layer was given, by its MACs / (in x out); None for anything else."""
    size = linear_size(module)
    return module.macs / (size[0] * size[1]) if size is not None and all(size) and module.macs else None


def shared_size(root: Module) -> tuple[int, int] | None:
    """(rows, dimension) of the token embedding: the largest one. Others of that size are the same matrix."""
    sizes = [size for _, module in root.walk() if (size := embedding_size(module))]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def matrix_of(path: str, module: Module, shared: tuple[int, int] | None) -> Hashable:
    """The same for modules that hold one matrix, the token embedding; a module's own path for all others.

    The report does not say what is shared. T5 and most language models give one matrix to the encoder's and the
    decoder's embedding and, without a bias, to the output layer.
    """
    linear = linear_size(module)
    is_head = linear is not None and shared == linear[::-1] and not module.details.get("bias")
    return shared if shared is not None and (embedding_size(module) == shared or is_head) else path


# Attention's products of queries with keys: a second witness of how many tokens a layer saw.

CLEAR = 5
"""How many times the rounding of the figures the products must be: below it they drown in it."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A module whose own MACs are those of its products."""

    path: str
    inner: int
    """Width of the queries, all heads together."""
    query_tokens: float
    """Of the whole batch, by the first linear layer's MACs."""
    key_tokens: float
    """By the second one's."""
    macs: float
    """Of the products alone: what the linear layers leave."""

    def products(self, rows: int, times: float = 1.0) -> float:
        """MACs of queries x keys and weights x values, 2 x rows x T x S x inner.

        Args:
            rows: of the batch.
            times: how often the linear layers were counted.
        """
        return 2 * self.query_tokens * self.key_tokens / times**2 * self.inner / rows


def attentions(root: Module) -> list[Attention]:
    """Attention modules: linear layers (queries first, the output last), and more MACs than theirs."""
    found = ((path, module, _attention(path, module)) for path, module in root.walk())
    return [attention for _, _, attention in found if attention is not None]


def times_counted(root: Module, rows: int) -> float | None:
    """How often linear layers were counted, as attention's products have it: 1.0 as it should be, 2.0 under ZeRO-3.

    The products grow with the square of the tokens; the linear layers' MACs claim a number of tokens, and with it
    products. Their ratio to those reported is the square of the answer. The median over all attention modules;
    None where the model has none.
    """
    ratios = [sqrt(each.products(rows) / each.macs) for each in attentions(root)]
    return median(ratios) if ratios else None


def _attention(path: str, module: Module) -> Attention | None:
    layers = list(_linear_children(module))
    if len(layers) < 2 or module.macs is None:
        return None
    own = module.macs - sum(child.macs or 0.0 for child in module.children)
    unsure = rounding(module.macs) + sum(rounding(child.macs) for child in module.children)
    queries, keys = tokens_through(layers[0]), tokens_through(layers[1 if len(layers) > 2 else 0])
    output = linear_size(layers[-1])
    if not queries or not keys or output is None or own < CLEAR * unsure:
        return None
    return Attention(path=path, inner=output[0], query_tokens=queries, key_tokens=keys, macs=own)


def _linear_children(module: Module) -> Iterator[Module]:
    return (child for child in module.children if linear_size(child) is not None)


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
    names = sorted({module.class_name for _, module in root.walk()})
    found = [_share(name, [m for _, m in root.walk() if m.class_name == name], root) for name in names]
    return sorted(found, key=lambda share: (share.macs, share.latency_seconds), reverse=True)


def _share(name: str, modules: list[Module], root: Module) -> ClassShare:
    macs, seconds = _own(modules, "macs"), _own(modules, "latency_seconds")
    return ClassShare(
        class_name=name,
        modules=len(modules),
        macs=macs,
        macs_percent=_percent(macs, root.macs),
        latency_seconds=seconds,
        latency_percent=_percent(seconds, root.latency_seconds),
    )


def _own(modules: Iterable[Module], figure: str) -> float:
    """What modules have beyond their children."""
    return sum(_rest(module, figure) for module in modules)


def _rest(module: Module, figure: str) -> float:
    """What a module has beyond its children; nothing where that is what rounding has left."""
    parts = [total(child, figure) for child in module.children]
    rest = total(module, figure) - sum(parts)
    return rest if rest > rounding(total(module, figure)) + sum(map(rounding, parts)) else 0.0


def _percent(part: float, whole: float | None) -> float | None:
    return 100 * part / whole if whole else None


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
        return (self.linear_macs if self.planned_macs is None else self.planned_macs) + self.attention_macs


def closed_form(root: Module, rows: int) -> ClosedForm | None:
    """The count for a tree whose linear layers are counted once; None where other layers compute too (`Conv2d`).

    Tokens are whole numbers: a layer's MACs / (in x out), rounded.
    """
    leaves = [module for _, module in root.walk() if not module.children]
    if any(module.macs and linear_size(module) is None for module in leaves):
        return None
    linear = sum(round(tokens_through(leaf) or 0) * size[0] * size[1] for leaf in leaves if (size := linear_size(leaf)))
    known = _known_t5(root)
    return ClosedForm(
        linear_macs=linear,
        attention_macs=sum(each.products(rows) for each in attentions(root)),
        planned_macs=_planned(root, known[1]) if known else None,
        model=known[0] if known else None,
    )


def _planned(root: Module, shape: T5Shape) -> float | None:
    """A third of a training step's FLOPs are forward, and two make a MAC.

    The plan lets every target token through the output layer. Here only those with a label go through it, so the
    others are taken off again.
    """
    modules = dict(root.walk())
    source = _tokens(modules, "encoder.block.0.layer.0.SelfAttention.q")
    target = _tokens(modules, "decoder.block.0.layer.0.SelfAttention.q")
    labels = _tokens(modules, "lm_head")
    if source is None or target is None or labels is None:
        return None
    return shape.training_flops(source, target) / 6 - shape.vocabulary * shape.d_model * (target - labels)


def _tokens(modules: dict[str, Module], path: str) -> int | None:
    tokens = tokens_through(modules[path]) if path in modules else None
    return None if tokens is None else round(tokens)


def _known_t5(root: Module) -> tuple[str, T5Shape] | None:
    """The T5 of `zeropods.plan` with this tree's sizes."""
    from zeropods.plan.shapes import T5_SHAPES

    modules = dict(root.walk())
    paths = ("encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.1.DenseReluDense.wi")
    layers = len([path for path in modules if path.startswith("encoder.block.") and path.count(".") == 2])
    seen = (*(linear_size(modules[path]) for path in paths if path in modules), shared_size(root), layers)
    for name, shape in T5_SHAPES.items():
        inner, rows = shape.heads * shape.d_kv, shape.vocabulary
        if seen == ((shape.d_model, inner), (shape.d_model, shape.d_ff), (rows, shape.d_model), shape.layers):
            return name, shape
    return None


# Figures of a summary that follow from others of it.

Figures = dict[str, Any]
"""By the names of `Summary`; None where there is none."""

TOLERANCE = 0.02
"""What rounding to two decimals may do to a quotient of such figures, and some more."""


def derived(figures: Mapping[str, Any]) -> Figures:
    """Those that follow, by DeepSpeed's own formulas; None where one of their parts is."""
    flops, factor = figures["forward_flops"], figures["backward_factor"]
    forward, backward = figures["forward_seconds"], figures["backward_seconds"]
    iteration = _sum(forward, backward, figures["step_seconds"])
    whole = None if factor is None else (1 + factor) * flops
    return {
        "forward_flops_per_second": _rate(flops, forward),
        "backward_flops_per_second": _rate(None if factor is None else factor * flops, backward),
        "forward_backward_flops_per_second": _rate(whole, _sum(forward, backward)),
        "iteration_seconds": iteration,
        "flops_per_second": _rate(whole, iteration),
        "samples_per_second": _rate(_product(figures["batch_size_per_gpu"], figures["world_size"]), iteration),
    }


def followed(figures: Mapping[str, Any]) -> Figures:
    """All figures, those that follow set right where they contradict the others."""
    wrong = contradictions(figures)
    return {name: wrong.get(name, value) for name, value in figures.items()}


def contradictions(figures: Mapping[str, Any]) -> Figures:
    """What would follow, of those figures that say something else than that."""
    return {
        name: computed
        for name, computed in derived(figures).items()
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


def _product(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left * right


# A report with its known faults taken out.

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
        parameters_percent=_percent_mend(module.parameters, root.parameters),
        macs_percent=_percent_mend(module.macs, root.macs),
        latency_percent=_percent_mend(module.latency_seconds, root.latency_seconds),
        children=tuple(_with_shares(child, root) for child in module.children),
    )


def _percent_mend(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


# MACs that were counted twice, or that arithmetic does not find.

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


# Latencies that are the time of day.

WHY = "the root's forward pass has begun when the profiler hooks it, its timer never starts: this is the time of day"


def latency_faults(report: Report, mended: Mended) -> Iterator[Fault]:
    """`1.8 Gs` at the root, its FLOP/s, and the summary's latency where DeepSpeed has not timed it itself."""
    root, summary = report.root, report.summary
    if is_clock(summary.forward_seconds):
        yield Fault(
            name="forward_latency",
            line=report.line_of("forward_seconds"),
            where="fwd latency",
            said=summary.forward_seconds,
            corrected=mended.figures["forward_seconds"],
            unit="s",
            reason=f"{WHY}; right is at least the sum of what is inside the model",
        )
    if root is None or mended.root is None or not is_clock(root.latency_seconds):
        return
    inside = "every '% latency' of the tree is a share of it; right is the summary's forward latency"
    for name, figure, unit, reason in (
        ("root_latency", "latency_seconds", "s", f"{WHY}; {inside}"),
        ("root_flops_per_second", "flops_per_second", "FLOP/s", "FLOPs / the time of day"),
    ):
        said, right = getattr(root, figure), getattr(mended.root, figure)
        yield Fault(
            name=name, line=root.number, where=root.class_name, said=said, corrected=right, unit=unit, reason=reason
        )


# Parameters that were left out, or counted in several places.


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


# What is wrong with a report, each fault with the figure that would be right.


def faults(report: Report, mended: Mended, record: Record | None = None) -> list[Fault]:
    """All that is wrong with a report, or easily misread.

    Args:
        mended: the same report, mended.
        record: of the run that was profiled, where there is one.
    """
    return [
        *latency_faults(report, mended),
        *token_faults(report, mended),
        *closed_form_faults(report, mended),
        *sharded_faults(report, mended),
        *shared_faults(report, mended),
        *_contradictions(report),
        *_step(report),
        *_several(report),
        *(run_faults(report, record) if record is not None else ()),
    ]


def _contradictions(report: Report) -> Iterator[Fault]:
    """Figures of the summary that do not follow from the others, by their own formulas."""
    said = vars(report.summary)
    if is_clock(report.summary.forward_seconds):
        return
    for name, computed in contradictions(said).items():
        yield Fault(
            name="contradicts_itself",
            line=report.line_of(name),
            where=next(line.label for line in report.lines if name in line.keys),
            said=said[name],
            corrected=computed,
            unit="s" if name.endswith("_seconds") else "1/s",
            reason="the other lines of the summary give another figure: the report was changed, or a line is missing",
        )


def _step(report: Report) -> Iterator[Fault]:
    step = report.summary.step
    if report.summary.world_size is not None and step > 0:
        yield Fault(
            name="profiled_step",
            line=report.number + 1,
            where="Profile Summary at step",
            said=step,
            corrected=None,
            unit="",
            reason=f"this is step {step} counted from 1, and 'profile_step: {step - 1}' asked for it: "
            "DeepSpeed profiles the step after that many",
        )


def _several(report: Report) -> Iterator[Fault]:
    if report.reports > 1:
        yield Fault(
            name="several_reports",
            line=report.number,
            where="the file",
            said=report.reports,
            corrected=None,
            unit="",
            reason="this is the last; where gradients are accumulated, that of the pass before the optimizer's step",
        )


# A report that was read, mended and checked: what the command line and the notebooks show.


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A report and what is wrong with it."""

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
            "tree": _cut(self.report.root, depth),
            "corrected_tree": _cut(root, depth),
        }


def check(path: Path) -> Checked:
    """Read a report and check it; against its run too, where the run's record lies beside it.

    Args:
        path: the report, or a run folder.

    Raises:
        UserError: there is no report, or not a whole one.
    """
    report = read_report(path)
    record, run = _record(report.path.parent)
    right = mended(report)
    return Checked(report=report, mended=right, faults=tuple(faults(report, right, record)), run=run)


def _record(folder: Path) -> tuple[Record | None, str]:
    """The record beside the report; a report can be read without it."""
    if not (folder / "record.json").is_file():
        return None, "not compared with its run: no record.json beside the report"
    try:
        return read_record(folder), "compared with record.json beside it"
    except UserError as error:
        return None, f"not compared with its run: {error}"


def _cut(module: Module | None, depth: int | None) -> dict[str, Any] | None:
    """A tree as dictionaries, down to a depth."""
    if module is None:
        return None
    values = {name: value for name, value in vars(module).items() if name != "children"}
    below = () if depth == 0 else module.children
    return {**values, "children": [_cut(child, None if depth is None else depth - 1) for child in below]}


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
    alike = not differences(first, second)
    return [
        Compared(
            name=name,
            first=first[name],
            second=second[name],
            ratio=_ratio(first[name], second[name]) if alike else None,
        )
        for name in COMPARED
    ]


def _ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second is not None else None
