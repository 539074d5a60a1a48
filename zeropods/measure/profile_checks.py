"""What is wrong with a profiler report, and the figures that would be right."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from math import nan, sqrt
from pathlib import Path
from statistics import median

from zeropods.errors import UserError
from zeropods.measure.profile import Figures, Module, Report, read_report, rounding
from zeropods.measure.record import Record, read_record

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
class Checked:
    """A report, what it should have said, and what is wrong with it."""

    report: Report
    figures: Figures
    """Figures of the summary, corrected; None where one cannot be known."""
    root: Module | None
    """The tree with shares computed anew; sums where DeepSpeed prints no figures. None where the tree is not whole."""
    times_counted: float | None
    """How often linear layers were counted; None where nothing tells."""
    missing_parameters: int
    """Parameters that lie on other ranks, each matrix once."""
    closed_form_macs: float | None
    faults: tuple[Fault, ...] = ()
    run: str = ""
    """Whether it was compared with its run, in words."""

    def to_json(self, depth: int | None = None) -> dict[str, object]:
        """Everything as plain numbers; the tree down to a depth, all of it if None."""
        root = self.root
        return {
            "file": str(self.report.path),
            "line": self.report.number,
            "reports": self.report.reports,
            "missing": self.report.missing or None,
            "run": self.run,
            "summary": self.report.summary,
            "corrected": self.figures,
            "shares": shares(self.figures),
            "closed_form_macs": self.closed_form_macs,
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
        UserError: there is no report.
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
    return replace(check_report(report, record), run=run)


def check_report(report: Report, record: Record | None = None) -> Checked:
    """Correct a report that was read, and find its faults.

    Args:
        record: of the run that was profiled, where there is one.
    """
    checked = _corrected(report)
    found = (_latency_faults, _count_faults, _parameter_faults, _reading_faults)
    faults = [fault for look in found for fault in look(checked)]
    return replace(checked, faults=(*faults, *(_run_faults(report, record) if record is not None else ())))


# Figures of a summary that follow from others of it.

BY_FORWARD_TIME = (
    "forward_flops_per_second", "forward_backward_flops_per_second", "iteration_seconds", "flops_per_second",
    "samples_per_second",
)  # fmt: skip


def contradictions(figures: Figures) -> Figures:
    """What follows by DeepSpeed's own formulas, of those figures that say something else than that."""
    of = {key: nan if value is None else value for key, value in figures.items()}
    flops, backward_flops = of["forward_flops"], of["backward_factor"] * of["forward_flops"]
    forward, backward = of["forward_seconds"], of["backward_seconds"]
    iteration = forward + backward + of["step_seconds"]
    follows = {
        "forward_flops_per_second": flops / (forward or nan),
        "backward_flops_per_second": backward_flops / (backward or nan),
        "forward_backward_flops_per_second": (flops + backward_flops) / (forward + backward or nan),
        "iteration_seconds": iteration,
        "flops_per_second": (flops + backward_flops) / (iteration or nan),
        "samples_per_second": of["batch_size_per_gpu"] * of["world_size"] / (iteration or nan),
    }
    # What is not known compares with nothing.
    return {key: computed for key, computed in follows.items() if abs(of[key] - computed) > TOLERANCE * computed}


def shares(figures: Figures) -> dict[str, float] | None:
    """Shares of forward, backward and the optimizer's step in an iteration; None where they were not timed."""
    parts = {part: figures[f"{part}_seconds"] for part in ("forward", "backward", "step")}
    whole = _sum(*parts.values())
    return {part: (seconds or 0.0) / whole for part, seconds in parts.items()} if whole else None


def _rate(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount is not None and seconds else None


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


# A report with its known faults taken out: a clock in place of the root's latency, linear layers counted twice,
# parameters left out.


def _corrected(report: Report) -> Checked:
    said, figures = report.root if report.tree_is_whole else None, dict(report.summary)
    if _is_clock(figures["forward_seconds"]):
        inside = 0.0 if said is None else sum(child.total("latency_seconds") for child in said.children)
        figures["forward_seconds"] = inside or None
    # Without an engine DeepSpeed prints 0 here.
    figures["model_parameters"] = figures["model_parameters"] or None
    rows, times, missing, root = figures["batch_size_per_gpu"], None, 0, None
    if said is not None:
        times = times_counted(said, rows) if rows else None
        root = deepcopy(said)
        left_out = _mend("", root, halve=_is_twice(times), shared=_shared_size(said))
        # The root's MACs are the sum of its children where they were nothing else: these have more digits.
        parts = [child.total("macs") for child in said.children]
        if said.macs and abs(said.macs - sum(parts)) <= rounding(said.macs) + sum(map(rounding, parts)):
            root.macs = sum(child.total("macs") for child in root.children)
        missing, less = sum(left_out.values()), (said.macs or 0.0) - (root.macs or 0.0)
        copies = figures["model_parallel_size"] or 1
        for key, change in (
            ("parameters_per_gpu", missing),
            ("model_parameters", missing * copies),
            ("forward_macs", -less),
            ("forward_flops", -2 * less),
            ("model_forward_flops", -2 * less * copies),
        ):
            figures[key] = _sum(figures[key], change)
        root.latency_seconds = figures["forward_seconds"] if _is_clock(said.latency_seconds) else said.latency_seconds
        root.parameters = figures["parameters_per_gpu"]
        root.flops_per_second = _rate(figures["forward_flops"], root.latency_seconds)
        for _, module in root.walk():
            module.parameters_percent = _percent(module.parameters, root.parameters)
            module.macs_percent = _percent(module.macs, root.macs)
            module.latency_percent = _percent(module.latency_seconds, root.latency_seconds)
    if figures["forward_seconds"] is None and report.summary["forward_seconds"] is not None:
        figures |= dict.fromkeys(BY_FORWARD_TIME)
    return Checked(
        report=report,
        figures=figures | contradictions(figures),
        root=root,
        times_counted=times,
        missing_parameters=missing,
        closed_form_macs=closed_form_macs(root, rows) if root is not None and rows else None,
    )


def _is_clock(seconds: float | None) -> bool:
    """Whether a latency is the time of day: the root's timer was never started."""
    return seconds is not None and seconds > CLOCK_SECONDS


def _is_twice(times: float | None) -> bool:
    return times is not None and TWICE[0] < times < TWICE[1]


def _mend(path: str, module: Module, halve: bool, shared: Hashable) -> dict[Hashable, int]:
    """Mend a module in place, from its leaves up; gives the parameters missing in it by the matrix they belong to."""
    missing: dict[Hashable, int] = {}
    said, seconds, parameters = (module.total(figure) for figure in ("macs", "latency_seconds", "parameters"))
    less = said / 2 if halve and module.linear is not None else 0.0
    for child in module.children:
        before = child.total("macs")
        missing |= _mend(f"{path}.{child.name}" if path else child.name, child, halve, shared)
        less += before - child.total("macs")
    expected = module.parameters_by_size
    if expected is not None and module.parameters is not None and parameters < expected - 2 * rounding(expected):
        missing[_matrix_of(path, module, shared)] = expected - round(parameters)
    if module.flops_per_second is not None and seconds:
        module.flops_per_second = max(0.0, module.flops_per_second - 2 * less / seconds)
    module.parameters = parameters + sum(missing.values())
    module.macs, module.latency_seconds = said - less, seconds
    return missing


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


def _percent(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


# Forward MACs by arithmetic. Attention's products of queries with keys tell how many tokens per layer saw.


def _attentions(root: Module, rows: float) -> list[tuple[float, float]]:
    """Of each attention module the MACs of its products as reported, and as the tokens of its linear layers have it.

    Such a module has linear layers (queries first, the output last), and more MACs than theirs. The products of
    queries x keys and weights x values are 2 x rows x T x S x inner.
    """
    found = []
    for _, module in root.walk():
        layers = [child for child in module.children if child.linear is not None]
        if len(layers) < 2 or module.macs is None:
            continue
        own = module.macs - sum(child.macs or 0.0 for child in module.children)
        unsure = rounding(module.macs) + sum(rounding(child.macs) for child in module.children)
        queries, keys, output = layers[0].tokens, layers[1 if len(layers) > 2 else 0].tokens, layers[-1].linear
        if queries and keys and output is not None and own >= CLEAR * unsure:
            found.append((own, 2 * queries * keys * output[0] / rows))
    return found


def times_counted(root: Module, rows: float) -> float | None:
    """How often linear layers were counted, as attention's products have it: 1.0 as it should be, 2.0 under ZeRO-3.

    The products grow with the square of the tokens; the linear layers' MACs claim a number of tokens, and with it
    products. Their ratio to those reported is the square of the answer. The median over all attention modules;
    None where the model has none.
    """
    ratios = [sqrt(claimed / said) for said, claimed in _attentions(root, rows)]
    return median(ratios) if ratios else None


def closed_form_macs(root: Module, rows: float) -> float | None:
    """MACs of a forward pass for a tree whose linear layers are counted once, by sizes of layers x whole tokens.

    In x out x tokens of each linear layer, and attention's products; None where other layers compute too (`Conv2d`).
    """
    leaves = [module for _, module in root.walk() if not module.children]
    if any(module.macs and module.linear is None for module in leaves):
        return None
    linear = sum(round(leaf.tokens or 0) * leaf.linear[0] * leaf.linear[1] for leaf in leaves if leaf.linear)
    return linear + sum(claimed for _, claimed in _attentions(root, rows))


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
CONTRADICTS = "the other lines of the summary give another figure: the report was changed, or a line is missing"
SEVERAL = "this is the last; where gradients are accumulated, that of the pass before the optimizer's step"


def _latency_faults(checked: Checked) -> Iterator[Fault]:
    """`1.8 Gs` at the root, its FLOP/s, and the summary's latency where DeepSpeed has not timed it itself."""
    report, root, right = checked.report, checked.report.root, checked.root
    said = report.summary["forward_seconds"]
    if _is_clock(said):
        line, seconds = report.line_of("forward_seconds"), checked.figures["forward_seconds"]
        reason = f"{CLOCK}; right is at least the sum of what is inside the model"
        yield Fault("forward_latency", line, "fwd latency", said, seconds, "s", reason)
    if root is None or right is None or not _is_clock(root.latency_seconds):
        return
    reason = f"{CLOCK}; every '% latency' of the tree is a share of it; right is the summary's forward latency"
    yield Fault("root_latency", root.number, root.class_name, root.latency_seconds, right.latency_seconds, "s", reason)
    rates, reason = (root.flops_per_second, right.flops_per_second), "FLOPs / the time of day"
    yield Fault("root_flops_per_second", root.number, root.class_name, *rates, "FLOP/s", reason)


def _count_faults(checked: Checked) -> Iterator[Fault]:
    """Linear layers and attention that do not mean the same number of tokens; a count that arithmetic does not find."""
    times, macs, form = checked.times_counted, checked.figures["forward_macs"], checked.closed_form_macs
    line, said = checked.report.line_of("forward_macs"), checked.report.summary["forward_macs"]
    if times is not None and not ONCE[0] < times < ONCE[1]:
        where = "fwd MACs per GPU, all FLOPs and FLOP/s"
        if _is_twice(times):
            yield Fault("linear_counted_twice", line, where, said, macs, "MACs", TWICE_BY.format(times=times))
        else:
            yield Fault("tokens_contradict", line, where, said, None, "MACs", UNCLEAR.format(times=times))
    if form and macs is not None and abs(macs / form - 1) > AGREEMENT:
        reason = f"differs from the closed form by {100 * (macs / form - 1):+.1f} % (sizes x tokens, and attention)"
        yield Fault("differs_from_closed_form", line, "fwd MACs per GPU", macs, form, "MACs", reason)


def _parameter_faults(checked: Checked) -> Iterator[Fault]:
    """Layers with fewer parameters than their size has; depths where a class has more parameters than the model."""
    report, model = checked.report, checked.report.summary["parameters_per_gpu"]
    if checked.missing_parameters:
        line, right = report.line_of("parameters_per_gpu"), checked.figures["parameters_per_gpu"]
        where = "params per GPU, params of layers"
        yield Fault("sharded_parameters", line, where, model, right, "parameters", SHARDED)
        return
    for depth in report.depths:
        for name, said in depth.parameters.items():
            if model is not None and said > model + rounding(said) + rounding(model):
                where = f"depth {depth.depth}, {name}"
                reason = f"more than the model has: one matrix is in several {name}, and counted in each"
                yield Fault("shared_parameters", depth.number, where, said, None, "parameters", reason)


def _reading_faults(checked: Checked) -> Iterator[Fault]:
    """Figures of the summary that do not follow from the others; what is easily misread."""
    report, summary = checked.report, checked.report.summary
    for key, computed in {} if _is_clock(summary["forward_seconds"]) else contradictions(summary).items():
        unit = "s" if key.endswith("_seconds") else "1/s"
        yield Fault("contradicts_itself", *report.lines[key], summary[key], computed, unit, CONTRADICTS)
    step = summary["step"]
    if summary["world_size"] is not None and step:
        reason = (
            f"this is step {step} counted from 1, and 'profile_step: {step - 1}' asked for it: "
            "DeepSpeed profiles the step after that many"
        )
        yield Fault("profiled_step", report.number + 1, "Profile Summary at step", step, None, "", reason)
    if report.reports > 1:
        yield Fault("several_reports", report.number, "the file", report.reports, None, "", SEVERAL)


def _run_faults(report: Report, record: Record) -> Iterator[Fault]:
    """Where the report and its run's record say different things."""
    summary, profiler = report.summary, (record.deepspeed or {}).get("flops_profiler", {})
    asked = profiler.get("profile_step")
    for key, expected in (
        ("world_size", record.world_size),
        ("batch_size_per_gpu", record.per_device_train_batch_size),
        ("step", summary["step"] if asked is None else asked + 1),
    ):
        said = summary[key]
        if said is not None and said != expected:
            reason = "the record beside the report has another figure: the report is of another run"
            yield Fault("another_run", report.line_of(key), key, said, expected, "", reason)
    yield from _speed_faults(report, record)
    backward = summary["backward_seconds"]
    if record.gradient_checkpointing and summary["backward_factor"] == 2 and backward:
        line, said = report.line_of("backward_flops_per_second"), summary["backward_flops_per_second"]
        flops = summary["forward_flops"]
        right = _rate(flops and 3 * flops, backward)
        yield Fault("recomputation_left_out", line, "bwd FLOPS per GPU", said, right, "FLOP/s", RECOMPUTED)


def _speed_faults(report: Report, record: Record) -> Iterator[Fault]:
    """A profiled step that took another time than rank 0's timed ones, those of warm-up and the profiler left out."""
    rank = record.rank_0
    seconds = rank.step_seconds.median if rank is not None and rank.step_seconds else None
    if not seconds or report.summary["iteration_seconds"] is None:
        return
    passes = record.gradient_accumulation_steps
    accumulated = f"; it is of one pass of {passes}, with a whole step of the optimizer" if passes > 1 else ""
    for key, right, unit in (
        ("iteration_seconds", seconds, "s"),
        ("samples_per_second", record.effective_batch_size / seconds, "samples/s"),
    ):
        said = report.summary[key]
        if said is not None and abs(said / right - 1) > NEAR:
            yield Fault("profiler_overhead", *report.lines[key], said, right, unit, OVERHEAD + accumulated)
