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
"""Least MACs of attention's products, as a multiple of the figures' rounding error: smaller ones
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
"""Keys of the summary's other figures into which DeepSpeed works the forward time."""


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
    """In words, whether the report was compared with the record of its run, and if not, why."""

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
    """Read a report and check it, also against its run where a record that can be read lies beside
    the report.

    Args:
        path: the report's file, or the run folder that contains it.

    Raises:
        UserError: there is no report.
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
        record: the record beside the report. Where it is that of the profiled run, figures of the
            run's usual step replace those of the profiled step that are not near them, and more
            faults can be seen; where it is that of another run, this is a fault.
    """
    passes = None
    if record is not None and not _signs_of_another_run(report, record):
        passes = record.gradient_accumulation_steps
    judgement = judge_report(report, passes)
    correction = _correct(report, judgement)
    faults = (*_faults(correction), *judgement.faults)
    checked = replace(correction.checked, faults=faults)
    if record is None:
        return checked
    return _compared_with(checked, record)


def shares(figures: Figures) -> dict[str, float] | None:
    """Shares of `forward`, `backward` and the optimizer's `step` in the time of all three; None
    where one of them was not timed, or all took no time."""
    seconds_by_part = {}
    for part in ("forward", "backward", "step"):
        seconds = figures[f"{part}_seconds"]
        if seconds is None:
            return None
        seconds_by_part[part] = seconds
    whole = sum(seconds_by_part.values())
    if not whole:
        return None
    return {part: seconds / whole for part, seconds in seconds_by_part.items()}


def _ratio(part: float | None, whole: float | None, factor: float = 1.0) -> float | None:
    """`factor` x part / whole; None where either is not known, or the whole is zero."""
    if part is None or not whole:
        return None
    return factor * part / whole


# A report with its known faults taken out: a clock in place of the root's latency, linear layers
# counted twice, parameters left out.


class _Correction(NamedTuple):
    """A corrected report, without figures that cannot be relied on, and what was found out about
    its tree."""

    checked: Checked
    """The report; its faults are still to be added."""
    times_counted: float | None
    """How often linear layers were counted; None where nothing shows it."""
    missing_parameters: int
    """Number of parameters that lie on other ranks, each matrix counted once."""


def _correct(report: Report, judgement: Judgement) -> _Correction:
    """Correct the figures of a report, and a copy of its tree, by what they say of one another."""
    printed_root = None
    if report.tree_is_whole and judgement.tree_is_possible:
        printed_root = report.root
    figures = dict(report.summary)
    if is_time_of_day(figures["forward_seconds"]):
        figures |= _without_clock(figures, printed_root)
    # Without an engine, DeepSpeed prints 0 here.
    figures["model_parameters"] = figures["model_parameters"] or None
    root = None
    closed_form_macs = None
    times_counted = None
    missing_parameters = 0
    if printed_root is not None:
        rows = figures["batch_size_per_gpu"]
        times_counted = _times_counted(printed_root, rows)
        root = deepcopy(printed_root)
        missing_parameters = _mend_root(root, printed_root, times_counted)
        surplus_macs = printed_root.total("macs") - root.total("macs")
        figures |= _counts_of_tree(figures, surplus_macs, missing_parameters)
        _follow_summary(root, figures, judgement.passes)
        if rows:
            closed_form_macs = _closed_form_macs(root, rows)
    for key in judgement.unknown:
        figures[key] = None
    # Last, since what DeepSpeed worked out from a figure that is corrected by now is wrong too.
    figures |= contradictions(figures)
    figures |= _rates_of_step(figures, judgement.passes or 1)
    checked = Checked(
        report=report,
        figures=figures,
        root=root,
        closed_form_macs=closed_form_macs,
        passes=judgement.passes,
    )
    return _Correction(checked, times_counted, missing_parameters)


def _rates_of_step(figures: Figures, passes: int) -> Figures:
    """Rates of a summary, as far as they are known, with the work of all `passes` of a step, and
    with the samples of processes that share a model counted once."""
    rates: Figures = {}
    for key in SUMMARY_RATES:
        rate = figures[key]
        if rate is not None:
            # DeepSpeed divides the FLOPs and samples of one pass by the time of all of them.
            rates[key] = rate * passes
    # Processes that share a model train on the same samples.
    model_parts = figures["model_parallel_size"] or 1
    rates["samples_per_second"] = _ratio(rates.get("samples_per_second"), model_parts)
    return rates


def _without_clock(figures: Figures, root: Module | None) -> Figures:
    """Corrections of a summary whose forward time is the time of day.

    The sum over the modules inside the root takes its place. Where no such time is known, neither
    is any figure that follows from it; where one is known, `contradictions` computes these later.
    """
    seconds = 0.0
    if root is not None:
        seconds = sum(child.total("latency_seconds") for child in root.children)
    corrections: Figures = {
        "forward_seconds": seconds or None,
        "forward_flops_per_second": _ratio(figures["forward_flops"], seconds),
    }
    if not seconds:
        for key in BY_FORWARD_TIME:
            corrections[key] = None
    return corrections


def _times_counted(root: Module, rows: float | None) -> float | None:
    """By what factor linear layers were counted, about 1 or 2: the tokens that their MACs imply,
    over those that the MACs of attention's products imply. None where no attention shows it.

    Args:
        rows: rows of the profiled pass; None where they are not known.
    """
    products = _attention_products(root, rows) if rows else []
    if not products:
        return None
    # `implied` follows from the linear layers' tokens, `reported` is the report's; both are of
    # products, which grow with the square of the tokens.
    return median(sqrt(product.implied / product.reported) for product in products)


def _is_twice(times_counted: float | None) -> bool:
    return times_counted is not None and TWICE[0] < times_counted < TWICE[1]


def _mend_root(root: Module, printed_root: Module, times_counted: float | None) -> int:
    """Correct the counts of a tree in place; return how many parameters it lacks, each matrix
    counted once.

    Args:
        root: a copy of `printed_root`, which is corrected.
        printed_root: the tree as the report has it.
        times_counted: how often linear layers were counted; None where nothing shows it.
    """
    embedding_sizes = []
    for _, module in printed_root.walk():
        size = module.sizes(*EMBEDDING)
        if size is not None:
            embedding_sizes.append(size)
    largest_embedding = max(embedding_sizes, default=None)
    missing = _mend(root, _is_twice(times_counted), largest_embedding)
    # What is not printed for the whole model is not known, whatever its parts take together.
    root.latency_seconds = printed_root.latency_seconds
    # Figures are printed with few digits, the root's with the fewest. Where the root's MACs were no
    # more than the sum of its children's, the corrected ones of the children are summed.
    printed_macs = [child.total("macs") for child in printed_root.children]
    rounding_error = rounding(printed_root.macs) + sum(map(rounding, printed_macs))
    if printed_root.macs and abs(printed_root.macs - sum(printed_macs)) <= rounding_error:
        root.macs = sum(child.total("macs") for child in root.children)
    return sum(missing.values())


def _mend(
    module: Module, are_linears_doubled: bool, shared_size: tuple[int, int] | None
) -> dict[Hashable, int]:
    """Correct a module and those inside it in place; return how many parameters they lack, by
    matrix.

    A module without figures of its own gets the sums over its children.

    Args:
        are_linears_doubled: whether the MACs of linear layers were counted twice.
        shared_size: (rows, dimension) of the token embedding, taken to be the embedding with the
            most rows; None where there is none. The report does not say what is shared: T5 and most
            language models use this matrix as the encoder's and the decoder's embedding and,
            without a bias, as the output layer, so any matrix of its size is taken to be it.
    """
    printed_macs = module.total("macs")
    seconds = module.total("latency_seconds")
    parameters = module.total("parameters")
    surplus_macs = 0.0
    if are_linears_doubled and module.linear is not None:
        surplus_macs = printed_macs / 2
    missing: dict[Hashable, int] = {}
    for child in module.children:
        printed_macs_of_child = child.total("macs")
        missing |= _mend(child, are_linears_doubled, shared_size)
        surplus_macs += printed_macs_of_child - child.total("macs")
    missing |= _missing_from_matrix(module, shared_size)
    if module.flops_per_second is not None and seconds:
        surplus_rate = 2 * surplus_macs / seconds
        # Rounding may leave a little less than nothing.
        module.flops_per_second = max(0.0, module.flops_per_second - surplus_rate)
    module.parameters = parameters + sum(missing.values())
    module.macs = printed_macs - surplus_macs
    module.latency_seconds = seconds
    return missing


def _missing_from_matrix(
    module: Module, shared_size: tuple[int, int] | None
) -> dict[Hashable, int]:
    """By the key of its matrix, how many parameters a linear layer or an embedding has fewer than
    its size implies; empty where it has all of them, and for any other module.

    Modules of the shared size have the same key, so that their one matrix counts once.
    """
    linear = module.linear
    embedding = module.sizes(*EMBEDDING)
    has_bias = bool(module.details.get("bias"))
    # For a linear layer these are its inputs and outputs.
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
    is_shared = shared_size is not None and not has_bias and shared_size in sizes_as_embedding
    key = shared_size if is_shared else id(module)
    return {key: expected - round(printed)}


def _counts_of_tree(figures: Figures, surplus_macs: float, missing_parameters: int) -> Figures:
    """The counts that a summary has, without MACs that were counted twice, and with parameters that
    lie on other ranks."""
    model_parts = figures["model_parallel_size"] or 1
    changes = {
        "parameters_per_gpu": missing_parameters,
        "model_parameters": missing_parameters * model_parts,
        "forward_macs": -surplus_macs,
        "forward_flops": -2 * surplus_macs,
        "model_forward_flops": -2 * surplus_macs * model_parts,
    }
    counts: Figures = {}
    for key, change in changes.items():
        printed = figures[key]
        if printed is not None:
            counts[key] = printed + change
    return counts


def _follow_summary(root: Module, figures: Figures, passes: int | None) -> None:
    """Change a tree in place: the root gets the corrected figures of the summary, and the time of
    one pass in place of the time of day; the shares of all modules are computed anew.

    Args:
        passes: number of passes whose time the summary has; None where it is not known.
    """
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
    implied: float
    """As the tokens of its linear layers imply them."""


def _attention_products(root: Module, rows: float) -> list[_Products]:
    """The MACs of each attention module's products, where they stand out of the rounding error.

    A module counts as attention if it has two linear layers or more (queries first, the output
    last) and more MACs than its children together. With T query and S key tokens in each of the
    rows, and heads of `inner` features together, which the output layer takes in, its products have
    2 x rows x T x S x inner MACs.
    """
    products = []
    for _, module in root.walk():
        layers = [child for child in module.children if child.linear is not None]
        if len(layers) < 2 or module.macs is None:
            continue
        reported = module.macs - sum(child.macs or 0.0 for child in module.children)
        rounding_error = rounding(module.macs)
        rounding_error += sum(rounding(child.macs) for child in module.children)
        is_clear = reported >= CLEAR * rounding_error
        # Tokens of all rows, rows x T and rows x S. With two layers, the first makes queries and
        # keys.
        query_tokens = layers[0].tokens
        key_tokens = layers[1].tokens if len(layers) > 2 else query_tokens
        output = layers[-1].linear
        if query_tokens and key_tokens and output is not None and is_clear:
            inner, _ = output
            implied = 2 * query_tokens * key_tokens * inner / rows
            products.append(_Products(reported, implied))
    return products


def _closed_form_macs(root: Module, rows: float) -> float | None:
    """MACs of a forward pass by arithmetic, for a tree whose linear layers are counted once.

    They are the sum of in x out x tokens over the linear layers, plus attention's products. None
    where other layers compute too (`Conv2d`).
    """
    linear_macs = 0
    for _, module in root.walk():
        if module.children:
            continue
        size = module.linear
        if size is not None:
            # They are worked out from printed MACs, which are rounded; tokens are whole.
            tokens = round(module.tokens or 0)
            linear_macs += tokens * size[0] * size[1]
        elif module.macs:
            return None
    return linear_macs + sum(product.implied for product in _attention_products(root, rows))


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
        macs = sum(_without_children(module, "macs") for module in modules)
        seconds = sum(_without_children(module, "latency_seconds") for module in modules)
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


def _without_children(module: Module, figure: str) -> float:
    """A module's figure without those of the modules inside it; 0 where rounding may explain the
    difference."""
    whole = module.total(figure)
    parts = [child.total(figure) for child in module.children]
    difference = whole - sum(parts)
    rounding_error = rounding(whole) + sum(map(rounding, parts))
    return difference if difference > rounding_error else 0.0


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


def _line_fault(
    report: Report, name: str, key: str, corrected: float | None, **details: object
) -> Fault:
    """A fault in a line of the summary; `details` fill the reason that `REASONS_OF_FAULTS` has for
    its name."""
    return fault_of_line(report, name, key, corrected, REASONS_OF_FAULTS[name].format(**details))


def _faults(correction: _Correction) -> Iterator[Fault]:
    """Times, counts and parameters that had to be corrected or cannot be confirmed; then what is
    easily misread: which step was profiled, and which of several reports this is."""
    checked = correction.checked
    yield from _time_of_day_faults(checked)
    yield from _count_faults(checked, correction.times_counted)
    yield from _parameter_faults(checked, correction.missing_parameters)
    report = checked.report
    step = report.summary["step"]
    # A report without a world size was made without an engine, and `profile_step` is an engine's.
    if report.summary["world_size"] is not None and step:
        yield _line_fault(report, "profiled_step", "step", None, step=step, before=step - 1)
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
    """A fault for the summary's forward latency where it is the time of day, such as `1.8 Gs`
    (since 1970), because DeepSpeed never started its timer; one for the root's latency where it is
    that, and one for the FLOP/s that DeepSpeed made of it."""
    report = checked.report
    if is_time_of_day(report.summary["forward_seconds"]):
        seconds = checked.figures["forward_seconds"]
        yield _line_fault(report, "forward_latency", "forward_seconds", seconds)
    root = report.root
    corrected_root = checked.root
    if root is None or corrected_root is None or not is_time_of_day(root.latency_seconds):
        return
    reason = REASONS_OF_FAULTS["root_latency"]
    if checked.passes != 1:
        # The corrected latency is that of one pass, the summary's that of all.
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


def _count_faults(checked: Checked, times_counted: float | None) -> Iterator[Fault]:
    """Linear layers and attention that imply different numbers of tokens; corrected MACs that
    arithmetic does not confirm."""
    line_fault = partial(_line_fault, checked.report)
    macs = checked.figures["forward_macs"]
    if _is_twice(times_counted):
        yield line_fault("linear_counted_twice", "forward_macs", macs, times=times_counted)
    elif times_counted is not None and not ONCE[0] < times_counted < ONCE[1]:
        yield line_fault("tokens_contradict", "forward_macs", None, times=times_counted)
    closed_form = checked.closed_form_macs
    if not closed_form or macs is None:
        return
    difference = macs / closed_form - 1
    if abs(difference) > AGREEMENT:
        percent = 100 * difference
        yield line_fault("differs_from_closed_form", "forward_macs", closed_form, percent=percent)


def _parameter_faults(checked: Checked, missing_parameters: int) -> Iterator[Fault]:
    """One fault where layers have fewer parameters than their sizes imply; else one for each class
    that has more of them at a depth than the model has."""
    report = checked.report
    if missing_parameters:
        corrected = checked.figures["parameters_per_gpu"]
        yield _line_fault(report, "sharded_parameters", "parameters_per_gpu", corrected)
        return
    parameters_of_model = report.summary["parameters_per_gpu"]
    if parameters_of_model is None:
        return
    name = "shared_parameters"
    for depth in report.depths:
        for class_name, parameters in depth.parameters.items():
            most = parameters_of_model + rounding(parameters) + rounding(parameters_of_model)
            if parameters > most:
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
    """What a record says, by key, where the report's summary says something else; empty where
    nothing shows that the report is of another run."""
    expected = {
        "world_size": record.world_size,
        "batch_size_per_gpu": record.per_device_train_batch_size,
    }
    profile_step = (record.deepspeed or {}).get("flops_profiler", {}).get("profile_step")
    if profile_step is not None:
        # DeepSpeed profiles the step after it.
        expected["step"] = profile_step + 1
    signs: dict[str, float | None] = {}
    for key, value in expected.items():
        # A line that the report lacks shows nothing.
        if report.summary[key] not in (None, value):
            signs[key] = value
    return signs


def _compared_with(checked: Checked, record: Record) -> Checked:
    """A checked report with the faults that the record beside it shows, and with the figures of
    the run's usual step (`_usual_figures`).

    Where the record is that of another run, nothing is added but this fault.
    """
    report = checked.report
    signs = _signs_of_another_run(report, record)
    if signs:
        faults = [_line_fault(report, "another_run", key, value) for key, value in signs.items()]
        return replace(checked, faults=(*checked.faults, *faults))
    usual_figures = _usual_figures(checked, record)
    faults = _faults_of_step(report, usual_figures, record.gradient_accumulation_steps)
    backward = report.summary["backward_seconds"]
    leaves_out_recomputation = report.summary["backward_factor"] == 2
    if record.gradient_checkpointing and leaves_out_recomputation and backward:
        corrected = _ratio(report.summary["forward_flops"], backward, 3)
        name = "recomputation_left_out"
        faults.append(_line_fault(report, name, "backward_flops_per_second", corrected))
    figures = checked.figures | usual_figures
    return replace(checked, figures=figures, faults=(*checked.faults, *faults))


def _usual_figures(checked: Checked, record: Record) -> Figures:
    """Time and rates of the run's usual step, those left out that the printed ones are near to.

    Its time is the median of rank 0's timed steps, without those of warm-up and the profiler. Its
    FLOPs are those of the profiled pass, times the passes of a step.
    """
    step_seconds = None
    if record.rank_0 is not None:
        step_seconds = record.rank_0.step_seconds
    if step_seconds is None or not step_seconds.median:
        return {}
    usual_seconds = step_seconds.median
    # What is not known is NaN, and so is all that follows from it; no comparison with NaN is true.
    forward_flops = checked.figures["forward_flops"] or nan
    backward_factor = checked.figures["backward_factor"] or nan
    flops = record.gradient_accumulation_steps * (1 + backward_factor) * forward_flops
    figures = {
        "iteration_seconds": usual_seconds,
        "flops_per_second": flops / usual_seconds,
        "samples_per_second": record.effective_batch_size / usual_seconds,
    }
    usual_figures: Figures = {}
    for key, figure in figures.items():
        printed = checked.report.summary[key] or nan
        if abs(printed / figure - 1) > NEAR_USUAL:
            usual_figures[key] = figure
    return usual_figures


def _faults_of_step(report: Report, usual_figures: Figures, passes: int) -> list[Fault]:
    """Faults of a profiled step: its time, and its rows per second, are not the run's usual ones.

    Args:
        usual_figures: what `_usual_figures` returns.
        passes: number of forward and backward passes of a step.
    """
    printed_seconds = report.summary["iteration_seconds"] or 0.0
    usual_seconds = usual_figures.get("iteration_seconds") or 0.0
    is_quicker = printed_seconds < usual_seconds
    name = "profiler_overhead"
    # With several passes, a shorter time shows nothing: it may be that of one pass.
    if is_quicker and passes == 1:
        name = "unusual_step"
    faults = []
    if "iteration_seconds" in usual_figures:
        seconds = usual_figures["iteration_seconds"]
        faults.append(_line_fault(report, name, "iteration_seconds", seconds, remark=""))
    if "samples_per_second" in usual_figures:
        # DeepSpeed counts the rows of one pass in the time of a whole step.
        remark = ""
        if passes > 1:
            remark = f"; as printed it has the rows of one pass of {passes}"
        rate = usual_figures["samples_per_second"]
        faults.append(_line_fault(report, name, "samples_per_second", rate, remark=remark))
    return faults
