"""What a profiler report should have said: its figures corrected, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nan, sqrt
from pathlib import Path
from statistics import median
from typing import NamedTuple

from zeropods.errors import UserError
from zeropods.measure.profile import EMBEDDING, Figures, Module, Report, read_report, rounding
from zeropods.measure.profile_contradictions import (
    SUMMARY_RATES,
    Fault,
    Judgement,
    contradictions,
    fault_of_line,
    is_time_of_day,
    judge_report,
)
from zeropods.measure.record import RECORD, Record, read_record

TWICE = (1.8, 2.2)
"""Range in which a factor is taken for 2."""
ONCE = (0.9, 1.1)
"""Range in which a factor is taken for 1."""
CLEAR = 5
"""Least size of attention's products, as a multiple of the figures' rounding error: smaller ones
are lost in it."""
AGREEMENT = 0.03
"""Share by which a profiler's count may differ from the closed form."""
NEAR_USUAL = 0.05
"""Share by which a profiled step may differ from the run's other steps without being reported."""
BY_FORWARD_TIME = (
    "forward_backward_flops_per_second",
    "iteration_seconds",
    "flops_per_second",
    "samples_per_second",
)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A report, what it should have said, and what is wrong with it."""

    report: Report
    figures: Figures
    """Figures of the summary, corrected; None where one cannot be known."""
    root: Module | None
    """The tree with shares computed anew, and sums where DeepSpeed prints no figures; None if the
    tree is not whole."""
    closed_form_macs: float | None
    passes: int | None = 1
    """Number of passes of a step whose time the summary has; None for an unknown number above 1."""
    faults: tuple[Fault, ...] = ()
    run: str = ""
    """Whether it was compared with its run, in words."""

    def to_json(self, depth: int | None = None) -> dict[str, object]:
        """Everything as plain values; the trees down to a depth, or whole if `depth` is None."""
        printed_root = self.report.root
        classes = [] if self.root is None else by_class(self.root)
        return {
            "file": str(self.report.path),
            "line": self.report.line_number,
            "reports": self.report.reports_in_file,
            "missing": self.report.missing or None,
            "run": self.run,
            "passes": self.passes,
            "summary": self.report.summary,
            "corrected": self.figures,
            "shares": shares(self.figures),
            "closed_form_macs": self.closed_form_macs,
            "faults": [asdict(fault) for fault in self.faults],
            "aggregated": [asdict(level) for level in self.report.depths],
            "classes": [asdict(share) for share in classes],
            "tree": None if printed_root is None else printed_root.to_json(depth),
            "corrected_tree": None if self.root is None else self.root.to_json(depth),
        }


def check(path: Path) -> Checked:
    """Read and check a report, or that of a run folder; also against its run, if the run's record
    lies beside it.

    `UserError` where there is no report.
    """
    report = read_report(path)
    folder = report.path.parent
    if not (folder / RECORD).is_file():
        comparison = f"not compared with its run: there is no {RECORD} beside it"
        return replace(check_report(report), run=comparison)
    try:
        record = read_record(folder)
    except UserError as error:
        return replace(check_report(report), run=f"not compared with its run: {error}")
    return replace(check_report(report, record), run=f"compared with {RECORD} beside it")


def check_report(report: Report, record: Record | None = None) -> Checked:
    """Correct a report that was read, and find its faults.

    Args:
        record: that of the run beside the report. Where it is the profiled run, its usual step
            takes the place of a profiled one that is not near it, and shows more faults; where it
            is another run, that is a fault.
    """
    passes = None
    if record is not None and not _signs_of_another_run(report, record):
        passes = record.gradient_accumulation_steps
    judgement = judge_report(report, passes)
    corrected = _corrected(report, judgement)
    faults = (*_faults(corrected), *judgement.faults)
    checked = replace(corrected.checked, faults=faults)
    if record is None:
        return checked
    return _compared_with(checked, record)


def shares(figures: Figures) -> dict[str, float] | None:
    """Shares of forward, backward and the optimizer's step in an iteration; None where one of them
    was not timed, or all took no time."""
    known = {}
    for part in ("forward", "backward", "step"):
        seconds = figures[f"{part}_seconds"]
        if seconds is None:
            return None
        known[part] = seconds
    whole = sum(known.values())
    if not whole:
        return None
    return {part: seconds / whole for part, seconds in known.items()}


def _ratio(part: float | None, whole: float | None, times: float = 1.0) -> float | None:
    """A part of a whole; None where either is not known, or the whole is zero."""
    if part is None or not whole:
        return None
    return times * part / whole


# A report with its known faults taken out: a clock in place of the root's latency, linear layers
# counted twice, parameters left out.


class _Corrected(NamedTuple):
    """A corrected report, without what cannot be relied on, and what was corrected in its tree."""

    checked: Checked
    times_counted: float | None
    """How often linear layers were counted; None where nothing shows it."""
    missing_parameters: int
    """Number of parameters that lie on other ranks, each matrix counted once."""


def _corrected(report: Report, judgement: Judgement) -> _Corrected:
    """The report with what its figures, and those of its tree, say of one another."""
    printed = None
    if report.tree_is_whole and judgement.tree_is_possible:
        printed = report.root
    figures = dict(report.summary)
    if is_time_of_day(figures["forward_seconds"]):
        figures |= _without_clock(figures, printed)
    # Without an engine, DeepSpeed prints 0 here.
    figures["model_parameters"] = figures["model_parameters"] or None
    root = None
    closed_form_macs = None
    times_counted = None
    missing_parameters = 0
    if printed is not None:
        rows = figures["batch_size_per_gpu"]
        times_counted = _times_counted(printed, rows)
        root = deepcopy(printed)
        missing_parameters = _mend_root(root, printed, times_counted)
        surplus_macs = printed.total("macs") - root.total("macs")
        figures |= _counts_of_tree(figures, surplus_macs, missing_parameters)
        root.latency_seconds = printed.latency_seconds
        _follow_summary(root, figures, judgement.passes)
        if rows:
            closed_form_macs = _closed_form_macs(root, rows)
    for key in judgement.unknown:
        figures[key] = None
    figures |= contradictions(figures)
    # DeepSpeed counts the FLOPs and rows of one pass in the time of all of them.
    passes = judgement.passes or 1
    for key in SUMMARY_RATES:
        rate = figures[key]
        if rate is not None:
            figures[key] = rate * passes
    # Processes that share a model have the same rows.
    copies = figures["model_parallel_size"] or 1
    figures["samples_per_second"] = _ratio(figures["samples_per_second"], copies)
    checked = Checked(
        report=report,
        figures=figures,
        root=root,
        closed_form_macs=closed_form_macs,
        passes=judgement.passes,
    )
    return _Corrected(checked, times_counted, missing_parameters)


def _without_clock(figures: Figures, root: Module | None) -> Figures:
    """Figures of a summary whose forward time is the time of day, worked out from the modules
    inside the root; None where these are not known."""
    seconds = 0.0
    if root is not None:
        seconds = sum(child.total("latency_seconds") for child in root.children)
    right: Figures = {
        "forward_seconds": seconds or None,
        "forward_flops_per_second": _ratio(figures["forward_flops"], seconds),
    }
    if not seconds:
        for key in BY_FORWARD_TIME:
            right[key] = None
    return right


def _times_counted(root: Module, rows: float | None) -> float | None:
    """How often linear layers were counted, by attention's products; None where nothing shows
    it."""
    products = _attentions(root, rows) if rows else []
    if not products:
        return None
    # The products grow with the square of the tokens that the linear layers claim.
    return median(sqrt(product.claimed / product.reported) for product in products)


def _is_double(times_counted: float | None) -> bool:
    return times_counted is not None and TWICE[0] < times_counted < TWICE[1]


def _mend_root(root: Module, printed: Module, times_counted: float | None) -> int:
    """Correct the counts of a tree in place; return how many parameters it lacks, each matrix
    counted once.

    Args:
        root: a copy of `printed`, which is corrected.
        printed: the tree as the report has it.
        times_counted: how often linear layers were counted; None where nothing shows it.
    """
    embeddings = []
    for _, module in printed.walk():
        size = module.sizes(*EMBEDDING)
        if size is not None:
            embeddings.append(size)
    largest_embedding = max(embeddings, default=None)
    missing = _mend(root, _is_double(times_counted), largest_embedding)
    # Figures are printed with few digits, the root's with the fewest. Where the root's MACs were no
    # more than the sum of its children's, the corrected ones of the children are summed.
    parts = [child.total("macs") for child in printed.children]
    rounding_error = rounding(printed.macs) + sum(map(rounding, parts))
    if printed.macs and abs(printed.macs - sum(parts)) <= rounding_error:
        root.macs = sum(child.total("macs") for child in root.children)
    return sum(missing.values())


def _mend(module: Module, is_double: bool, shared: tuple[int, int] | None) -> dict[Hashable, int]:
    """Correct a module in place, from its leaves up; return how many parameters it lacks, by
    matrix.

    Args:
        shared: (rows, dimension) of the token embedding, the largest one. The report does not say
            what is shared: T5 and most language models use this matrix as the encoder's and the
            decoder's embedding and, without a bias, as the output layer, so any matrix of its size
            is taken to be it.
    """
    printed_macs = module.total("macs")
    seconds = module.total("latency_seconds")
    parameters = module.total("parameters")
    surplus_macs = 0.0
    if is_double and module.linear is not None:
        surplus_macs = printed_macs / 2
    missing: dict[Hashable, int] = {}
    for child in module.children:
        before = child.total("macs")
        missing |= _mend(child, is_double, shared)
        surplus_macs += before - child.total("macs")
    missing |= _missing_from_matrix(module, shared)
    if module.flops_per_second is not None and seconds:
        mended_rate = module.flops_per_second - 2 * surplus_macs / seconds
        module.flops_per_second = max(0.0, mended_rate)
    module.parameters = parameters + sum(missing.values())
    module.macs = printed_macs - surplus_macs
    module.latency_seconds = seconds
    return missing


def _missing_from_matrix(module: Module, shared: tuple[int, int] | None) -> dict[Hashable, int]:
    """How many parameters a linear layer or an embedding has fewer than its size implies, by its
    matrix; empty where it has all of them."""
    linear = module.linear
    embedding = module.sizes(*EMBEDDING)
    has_bias = bool(module.details.get("bias"))
    rows, columns = linear or embedding or (0, 0)
    expected = rows * columns
    if has_bias:
        expected += columns
    printed = module.parameters
    if printed is None or printed >= expected - 2 * rounding(expected):
        return {}
    sizes_as_embedding = [embedding]
    if linear is not None:
        # The output layer has the embedding's matrix the other way round: from dimension to rows.
        sizes_as_embedding.append(linear[::-1])
    is_shared = shared is not None and not has_bias and shared in sizes_as_embedding
    # Equal keys are one matrix, which counts once; a matrix of its own has a key of its own.
    matrix = shared if is_shared else id(module)
    return {matrix: expected - round(printed)}


def _counts_of_tree(figures: Figures, surplus_macs: float, missing_parameters: int) -> Figures:
    """Counts of a summary without MACs that were counted twice, and with parameters that lie on
    other ranks."""
    copies = figures["model_parallel_size"] or 1
    changes = {
        "parameters_per_gpu": missing_parameters,
        "model_parameters": missing_parameters * copies,
        "forward_macs": -surplus_macs,
        "forward_flops": -2 * surplus_macs,
        "model_forward_flops": -2 * surplus_macs * copies,
    }
    counts: Figures = {}
    for key, change in changes.items():
        printed = figures[key]
        if printed is not None:
            counts[key] = printed + change
    return counts


def _follow_summary(root: Module, figures: Figures, passes: int | None) -> None:
    """Give the root of a tree the corrected figures of the summary, the time of one pass in place
    of the time of day, and compute the shares of all modules anew."""
    if is_time_of_day(root.latency_seconds):
        root.latency_seconds = _ratio(figures["forward_seconds"], passes)
    root.parameters = figures["parameters_per_gpu"]
    root.flops_per_second = _ratio(figures["forward_flops"], root.latency_seconds)
    for _, module in root.walk():
        module.parameters_percent = _ratio(module.parameters, root.parameters, 100)
        module.macs_percent = _ratio(module.macs, root.macs, 100)
        module.latency_percent = _ratio(module.latency_seconds, root.latency_seconds, 100)


class _Products(NamedTuple):
    """MACs of an attention module's products, queries x keys and weights x values together."""

    reported: float
    claimed: float
    """As the tokens of its linear layers imply them."""


def _attentions(root: Module, rows: float) -> list[_Products]:
    """The products of each attention module.

    Such a module has linear layers (queries first, the output last), and more MACs than theirs. The
    products have 2 x rows x T x S x inner MACs.
    """
    products = []
    for _, module in root.walk():
        layers = [child for child in module.children if child.linear is not None]
        if len(layers) < 2 or module.macs is None:
            continue
        reported = module.macs - sum(child.macs or 0.0 for child in module.children)
        unsure = rounding(module.macs) + sum(rounding(child.macs) for child in module.children)
        has_keys = len(layers) > 2
        query_tokens = layers[0].tokens
        key_tokens = layers[1].tokens if has_keys else query_tokens
        output = layers[-1].linear
        is_clear = reported >= CLEAR * unsure
        if query_tokens and key_tokens and output is not None and is_clear:
            claimed = 2 * query_tokens * key_tokens * output[0] / rows
            products.append(_Products(reported, claimed))
    return products


def _closed_form_macs(root: Module, rows: float) -> float | None:
    """MACs of a forward pass for a tree whose linear layers are counted once, from layer sizes x
    whole tokens.

    In x out x tokens of each linear layer, plus attention's products; None where other layers
    compute too (`Conv2d`).
    """
    linear_macs = 0
    for _, module in root.walk():
        if module.children:
            continue
        size = module.linear
        if size is not None:
            linear_macs += round(module.tokens or 0) * size[0] * size[1]
        elif module.macs:
            return None
    return linear_macs + sum(product.claimed for product in _attentions(root, rows))


# Where MACs and time go: all modules of the tree by their class, each figure counted once.


@dataclass(frozen=True)
class ClassShare:
    """What the modules of one class do themselves, without the modules inside them. All classes add
    up to the root."""

    class_name: str
    modules: int
    macs: float
    macs_percent: float | None
    latency_seconds: float
    latency_percent: float | None


def by_class(root: Module) -> list[ClassShare]:
    """The classes of a tree, most MACs first, then most time."""
    modules_by_class: dict[str, list[Module]] = {}
    for _, module in root.walk():
        modules_by_class.setdefault(module.class_name, []).append(module)
    classes = []
    for class_name in sorted(modules_by_class):
        modules = modules_by_class[class_name]
        macs = sum(_done_itself(module, "macs") for module in modules)
        seconds = sum(_done_itself(module, "latency_seconds") for module in modules)
        share = ClassShare(
            class_name=class_name,
            modules=len(modules),
            macs=macs,
            macs_percent=_ratio(macs, root.macs, 100),
            latency_seconds=seconds,
            latency_percent=_ratio(seconds, root.latency_seconds, 100),
        )
        classes.append(share)
    return sorted(classes, key=lambda share: (share.macs, share.latency_seconds), reverse=True)


def _done_itself(module: Module, figure: str) -> float:
    """A module's figure without those of the modules inside it."""
    whole = module.total(figure)
    parts = [child.total(figure) for child in module.children]
    rest = whole - sum(parts)
    # A difference that rounding explains counts as none.
    unsure = rounding(whole) + sum(map(rounding, parts))
    return rest if rest > unsure else 0.0


# All that is wrong with a report, or easily misread.

CLOCK = (
    "the root's forward pass has already begun when the profiler hooks it, so its timer never "
    "starts and this is the time of day"
)
REASONS_OF_FAULTS = {
    "forward_latency": (
        f"{CLOCK}; the right value is at least the sum over the modules inside the model"
    ),
    "root_latency": (
        f"{CLOCK}; every '% latency' of the tree is a share of it; the right value is the "
        "summary's forward latency"
    ),
    "root_flops_per_second": "FLOPs / the time of day",
    "linear_counted_twice": (
        "ZeRO-3 runs a linear layer as a function of its own, and the profiler counts both that "
        "function and the product inside it: its MACs imply {times:.2f} times as many tokens as "
        "attention's products do; FLOPs and FLOP/s are wrong as well"
    ),
    "tokens_contradict": (
        "linear layers imply {times:.2f} times as many tokens as attention's products do: the "
        "batch is not that of the summary, or part of the model is counted differently"
    ),
    "differs_from_closed_form": (
        "even when corrected, it is {percent:+.1f} % off the closed form (layer sizes x tokens, "
        "plus attention)"
    ),
    "sharded_parameters": (
        "ZeRO-3 shards parameters, and those on other ranks are counted as 0; the right value "
        "follows from the printed sizes, with embeddings and an output layer of the same size "
        "counted once; layers without a size are taken as printed"
    ),
    "shared_parameters": (
        "more than the model has: one matrix is in several {name}, and counted in each"
    ),
    "profiled_step": (
        "this is step {step} counted from 1, requested by 'profile_step: {before}': DeepSpeed "
        "profiles the step after that one"
    ),
    "several_reports": (
        "this is the last report in the file; with gradient accumulation, it is the one of the "
        "pass before the optimizer's step"
    ),
    "another_run": (
        "the record beside the report has a different figure: the report is from another run"
    ),
    "unusual_step": (
        "a single step, quicker than the run's usual one even with the profiler: its batch had "
        "fewer tokens, or the time between two steps is not included; the right value is the "
        "median of the run's own timed steps{remark}"
    ),
    "profiler_overhead": (
        "a single step, with a profiler that stops at every module and without the time between "
        "two steps; the right value is the median of the run's own timed steps{remark}"
    ),
    "recomputation_left_out": (
        "gradient checkpointing was on: the backward pass also runs the forward pass again, so it "
        "costs 3 forward passes, not 2 ('recompute_fwd_factor': 1.0 would have accounted for that)"
    ),
}
"""Why a figure is wrong, by the name of the fault."""


def _of_line(report: Report, name: str, key: str, right: float | None, **details: object) -> Fault:
    """A fault in a line of the summary, for the reason that its name has here."""
    return fault_of_line(report, name, key, right, REASONS_OF_FAULTS[name].format(**details))


def _faults(corrected: _Corrected) -> Iterator[Fault]:
    """Latencies, counts and parameters that are not those of the model and of this step; figures
    that do not follow from the others; figures that are easily misread."""
    checked = corrected.checked
    yield from _time_of_day_faults(checked)
    yield from _count_faults(checked, corrected.times_counted)
    yield from _parameter_faults(checked, corrected.missing_parameters)
    report = checked.report
    step = report.summary["step"]
    if report.summary["world_size"] is not None and step:
        yield _of_line(report, "profiled_step", "step", None, step=step, before=step - 1)
    if report.reports_in_file > 1:
        name = "several_reports"
        yield Fault(
            name=name,
            line=report.line_number,
            where="the file",
            said=report.reports_in_file,
            corrected=None,
            unit="",
            reason=REASONS_OF_FAULTS[name],
        )


def _time_of_day_faults(checked: Checked) -> Iterator[Fault]:
    """Latencies that are the time of day, such as `1.8 Gs` (since 1970), because DeepSpeed never
    started that timer: of the root, with its FLOP/s, and of the summary."""
    report = checked.report
    if is_time_of_day(report.summary["forward_seconds"]):
        seconds = checked.figures["forward_seconds"]
        yield _of_line(report, "forward_latency", "forward_seconds", seconds)
    root = report.root
    corrected_root = checked.root
    if root is None or corrected_root is None or not is_time_of_day(root.latency_seconds):
        return
    reason = REASONS_OF_FAULTS["root_latency"]
    if checked.passes != 1:
        number = checked.passes or "unknown number of"
        reason = f"{reason}, divided by the {number} passes of a step"
    yield Fault(
        name="root_latency",
        line=root.number,
        where=root.class_name,
        said=root.latency_seconds,
        corrected=corrected_root.latency_seconds,
        unit="s",
        reason=reason,
    )
    yield Fault(
        name="root_flops_per_second",
        line=root.number,
        where=root.class_name,
        said=root.flops_per_second,
        corrected=corrected_root.flops_per_second,
        unit="FLOP/s",
        reason=REASONS_OF_FAULTS["root_flops_per_second"],
    )


def _count_faults(checked: Checked, times: float | None) -> Iterator[Fault]:
    """Linear layers and attention that imply different numbers of tokens; a count that arithmetic
    does not confirm."""
    of_line = partial(_of_line, checked.report)
    macs = checked.figures["forward_macs"]
    if _is_double(times):
        yield of_line("linear_counted_twice", "forward_macs", macs, times=times)
    elif times is not None and not ONCE[0] < times < ONCE[1]:
        yield of_line("tokens_contradict", "forward_macs", None, times=times)
    closed_form = checked.closed_form_macs
    if not closed_form or macs is None:
        return
    difference = macs / closed_form - 1
    if abs(difference) > AGREEMENT:
        percent = 100 * difference
        yield of_line("differs_from_closed_form", "forward_macs", closed_form, percent=percent)


def _parameter_faults(checked: Checked, missing: int) -> Iterator[Fault]:
    """Layers with fewer parameters than their size implies, or else depths at which a class has
    more than the model."""
    report = checked.report
    if missing:
        right = checked.figures["parameters_per_gpu"]
        yield _of_line(report, "sharded_parameters", "parameters_per_gpu", right)
        return
    model = report.summary["parameters_per_gpu"]
    if model is None:
        return
    name = "shared_parameters"
    for depth in report.depths:
        for class_name, parameters in depth.parameters.items():
            if parameters > model + rounding(parameters) + rounding(model):
                yield Fault(
                    name=name,
                    line=depth.number,
                    where=f"depth {depth.depth}, {class_name}",
                    said=parameters,
                    corrected=None,
                    unit="parameters",
                    reason=REASONS_OF_FAULTS[name].format(name=class_name),
                )


# A report and the run whose record lies beside it.


def _signs_of_another_run(report: Report, record: Record) -> dict[str, float | None]:
    """Those figures of a record of which the report's summary has others; with any the report is of
    another run."""
    expected = {
        "world_size": record.world_size,
        "batch_size_per_gpu": record.per_device_train_batch_size,
    }
    profile_step = (record.deepspeed or {}).get("flops_profiler", {}).get("profile_step")
    if profile_step is not None:
        # DeepSpeed profiles the step after it.
        expected["step"] = profile_step + 1
    unlike: dict[str, float | None] = {}
    for key, value in expected.items():
        if report.summary[key] not in (None, value):
            unlike[key] = value
    return unlike


def _compared_with(checked: Checked, record: Record) -> Checked:
    """A report with the faults that its run's record shows, and with the figures of the run's usual
    step.

    These come from rank 0's timed steps, without those of warm-up and the profiler, where the
    profiled step is not near them. FLOP/s are the FLOPs of the profiled pass, times the passes of a
    step, in the time of the usual step.
    """
    report = checked.report
    signs = _signs_of_another_run(report, record)
    if signs:
        faults = [_of_line(report, "another_run", key, right) for key, right in signs.items()]
        return replace(checked, faults=(*checked.faults, *faults))
    usual = _usual_figures(checked, record)
    faults = _faults_of_step(report, usual, record.gradient_accumulation_steps)
    backward = report.summary["backward_seconds"]
    counts_two_passes = report.summary["backward_factor"] == 2
    if record.gradient_checkpointing and counts_two_passes and backward:
        right = _ratio(report.summary["forward_flops"], backward, 3)
        name = "recomputation_left_out"
        faults.append(_of_line(report, name, "backward_flops_per_second", right))
    return replace(checked, figures=checked.figures | usual, faults=(*checked.faults, *faults))


def _usual_figures(checked: Checked, record: Record) -> Figures:
    """Figures of the run's usual step, for those that the profiled step is not near to."""
    timed = None
    if record.rank_0 is not None:
        timed = record.rank_0.step_seconds
    if timed is None or not timed.median:
        return {}
    # What is not known is NaN, and so is all that follows from it; no comparison with NaN is true.
    forward_flops = checked.figures["forward_flops"] or nan
    backward_factor = checked.figures["backward_factor"] or nan
    flops = record.gradient_accumulation_steps * (1 + backward_factor) * forward_flops
    figures = {
        "iteration_seconds": timed.median,
        "flops_per_second": flops / timed.median,
        "samples_per_second": record.effective_batch_size / timed.median,
    }
    usual: Figures = {}
    for key, right in figures.items():
        printed = checked.report.summary[key] or nan
        if abs(printed / right - 1) > NEAR_USUAL:
            usual[key] = right
    return usual


def _faults_of_step(report: Report, usual: Figures, passes: int) -> list[Fault]:
    """Faults of a profiled step: its time, and its rows per second, are not the run's usual ones.

    Args:
        usual: the run's usual figures, but for those that the profiled step is near to.
        passes: number of forward and backward passes of a step.
    """
    printed_seconds = report.summary["iteration_seconds"] or 0.0
    usual_seconds = usual.get("iteration_seconds") or 0.0
    is_quicker = printed_seconds < usual_seconds
    name = "profiler_overhead"
    if is_quicker and passes == 1:
        name = "unusual_step"
    faults = []
    if "iteration_seconds" in usual:
        seconds = usual["iteration_seconds"]
        faults.append(_of_line(report, name, "iteration_seconds", seconds, remark=""))
    if "samples_per_second" in usual:
        # DeepSpeed counts the rows of one pass in the time of a whole step.
        remark = ""
        if passes > 1:
            remark = f"; as printed it has the rows of one pass of {passes}"
        rate = usual["samples_per_second"]
        faults.append(_of_line(report, name, "samples_per_second", rate, remark=remark))
    return faults
