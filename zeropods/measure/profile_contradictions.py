"""Figures of a profiler report that cannot be, or that contradict one another: nothing is worked
out from them.

A report says many things twice. The summary's rates follow from its counts and times; its counts
and its forward time are also those of the tree's root, and of the only class at depth 0; a module
has no less than the modules inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import NamedTuple

from zeropods.measure.profile import EMBEDDING, FIGURES, Figures, Module, Report, amount, rounding

ROUNDING_TOLERANCE = 0.02
"""Share by which rounding to two decimals may change a quotient of such figures, with some
margin."""
TIME_OF_DAY_SECONDS = 1e8
"""Three years: a longer time is no latency, but `time.time() - 0`."""
SUMMARY_TIMES = ("forward_seconds", "backward_seconds", "step_seconds", "iteration_seconds")
FLOP_RATES = (
    "forward_flops_per_second",
    "backward_flops_per_second",
    "forward_backward_flops_per_second",
    "flops_per_second",
)
SUMMARY_RATES = (*FLOP_RATES, "samples_per_second")
"""Rates of a summary; all of them count the work of one pass."""
MOST_PASSES = 64
"""Largest number of passes that is recognised by its time."""
WHOLE_PASSES = 0.03
"""Share by which the time of several passes may differ from that many times the time of one."""
MOST_BESIDES = 0.1
"""Largest share by which a root's time may exceed that of the modules inside it, where passes are
recognised by their time; and FLOPs those of multiply-adds, where FLOPs are recognised by these."""
MOST_OUTSIDE = 3.0
"""Largest forward time of one pass, as a multiple of that of the root or of the modules inside it:
the rest is what the root, and DeepSpeed before and after it, do themselves."""
MOST_TIMES = MOST_PASSES * MOST_OUTSIDE
"""Largest forward time of a summary, as the same multiple: a longer one is in another unit."""
SHARED_TIME = 0.1
"""Share of its parent's time by which modules may exceed it: one that is called from two places
counts in both."""


@dataclass(frozen=True)
class Fault:
    """A fault of a report: what the report says, and what would be right."""

    name: str
    """One of the names in docs/profiler.md."""
    line: int
    """Line number in the report's file; the first line is 1."""
    where: str
    """Label of the line in the summary, or the module, in words."""
    said: float | None
    """The figure as printed."""
    corrected: float | None
    """The right figure; None where nothing is to be corrected, or where it cannot be known."""
    unit: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the figures of a report say of one another."""

    passes: int | None = 1
    """Number of forward and backward passes whose time the summary has, of which FLOPs and rows are
    those of one; None where there are several, and their number is not known."""
    unknown: frozenset[str] = frozenset()
    """Keys of the summary's figures that cannot be relied on."""
    tree_is_possible: bool = True
    """Whether no module of the tree has a figure that cannot be."""
    faults: tuple[Fault, ...] = ()


class Findings(NamedTuple):
    """Contradictions between some figures of a report and others."""

    unknown: set[str]
    """Keys of the summary's figures that cannot be relied on."""
    faults: list[Fault]


def judge_report(report: Report, passes: int | None = None) -> Judgement:
    """Hold the figures of a report against one another.

    Args:
        passes: number of passes of an optimizer step, from the run's record; None where the run is
            not known.
    """
    faults_of_modules = list(_impossible_modules(report))
    faults = [*_impossible_figures(report), *faults_of_modules, *_parallel_size_faults(report)]
    unknown = {*report.impossible, *_following_from_impossible(report)}
    passes_timed: int | None = 1
    # Where the timer was never started, the forward time is the time of day, which says nothing.
    if not is_time_of_day(report.summary["forward_seconds"]):
        by_tree = _findings_by_tree(report, passes)
        by_formulas = _findings_by_formulas(report, by_tree.unknown)
        unknown |= by_formulas.unknown | by_tree.unknown
        faults += [*by_formulas.faults, *by_tree.faults]
        if "forward_seconds" not in unknown:
            passes_timed, faults_of_passes = _count_timed_passes(report, passes)
            faults += faults_of_passes
    if passes_timed is None:
        # There were several passes, and nobody knows how many.
        unknown.update(SUMMARY_RATES)
    faults += _excess_faults(report)
    return Judgement(
        passes=passes_timed,
        unknown=frozenset(unknown),
        tree_is_possible=not faults_of_modules,
        faults=tuple(faults),
    )


def is_time_of_day(seconds: float | None) -> bool:
    """Whether a latency is the time of day: the root's timer was never started."""
    return seconds is not None and seconds > TIME_OF_DAY_SECONDS


REASONS_OF_CONTRADICTIONS = {
    "impossible_figure": "{text} is no possible figure; nothing is worked out from it",
    "sizes_contradict": (
        "{data} processes with rows of their own x {model} that share a model are not {world} "
        "processes: the report was changed, or the model was divided in other ways too"
    ),
    "model_parallel": (
        "{model} processes work on the same rows, but DeepSpeed counts the rows of all {world}: "
        "the figure is {model} times too high; FLOPs are those of this process's part of the model"
    ),
    "contradicts_itself": (
        "the other lines of the summary give another figure: the report was changed, or a line is "
        "missing"
    ),
    "summary_contradicts_tree": (
        "{where} has {other}: one of the two is wrong, and nothing is worked out from {what}"
    ),
    "accumulated_passes": (
        "the time of all {passes} passes of a step, since gradients are accumulated, while FLOPs "
        "and rows are those of one pass: FLOP/s and samples/s are {passes} times too low as "
        "printed; so is the backward time of all passes"
    ),
    "part_exceeds_whole": "{part} inside it has {amount}{others}: the report was changed",
    "parts_exceed_whole": (
        "the modules inside it have {amount} together{others}: the report was changed"
    ),
}
"""Why a figure is wrong, by the name of the fault."""
SEVERAL_PASSES = (
    "{times:.1f} times that of the model's one pass in the tree: the time of several passes, since "
    "gradients are accumulated, but of how many is not known, so that no rate is worked out from it"
)
"""What is said of accumulated passes whose number is not known."""
DOUBTFUL = (
    "lines that follow from it give other figures, and which of them is right cannot be known: the "
    "report was changed"
)
"""Why a figure is doubtful that other lines follow from."""


def fault_of_line(
    report: Report, name: str, key: str, corrected: float | None, reason: str
) -> Fault:
    """A fault in the summary's figure `key`, placed at the figure's line, or at the first line of
    the summary where the figure has none."""
    first_line = (report.line_number + 1, FIGURES[key].label)
    number, label = report.lines.get(key, first_line)
    return Fault(
        name=name,
        line=number,
        where=label,
        said=report.summary[key],
        corrected=corrected,
        unit=FIGURES[key].unit,
        reason=reason,
    )


def _line_fault(
    report: Report, name: str, key: str, corrected: float | None = None, **details: object
) -> Fault:
    """A fault in a line of the summary; `details` fill the reason that `REASONS_OF_CONTRADICTIONS`
    has for its name."""
    reason = REASONS_OF_CONTRADICTIONS[name].format(**details)
    return fault_of_line(report, name, key, corrected, reason)


# Figures that cannot be.


def _impossible_figures(report: Report) -> Iterator[Fault]:
    """A fault for each figure of the summary that cannot be, with the number that was printed, if
    it is one: the summary has None."""
    for key, text in report.impossible.items():
        fault = _line_fault(report, "impossible_figure", key, text=repr(text))
        yield replace(fault, said=amount(text, FIGURES[key].unit))


def _following_from_impossible(report: Report) -> Iterator[str]:
    """Keys of the figures that DeepSpeed has worked out from figures that cannot be."""
    for formula in formulas(report.summary):
        if any(key in report.impossible for key in formula.inputs):
            yield formula.key
    # The inputs of a formula do not name these two.
    if "world_size" in report.impossible or "batch_size_per_gpu" in report.impossible:
        yield "samples_per_second"


def _impossible_modules(report: Report) -> Iterator[Fault]:
    """A fault for each figure of a module that is below zero."""
    if report.root is None:
        return
    name = "impossible_figure"
    for path, module in report.root.walk():
        where = path or module.class_name
        for figure, unit in UNITS_HELD_AGAINST.items():
            value = getattr(module, figure)
            if value is not None and value < 0:
                reason = REASONS_OF_CONTRADICTIONS[name].format(text=f"{value:g} {unit}")
                yield Fault(
                    name=name,
                    line=module.number,
                    where=where,
                    said=value,
                    corrected=None,
                    unit=unit,
                    reason=reason,
                )


def _parallel_size_faults(report: Report) -> Iterator[Fault]:
    """A fault for numbers of processes that do not fit together, and one for samples/s that count
    the same samples once for each part of a divided model."""
    world = report.summary["world_size"]
    replicas = report.summary["data_parallel_size"]
    parts = report.summary["model_parallel_size"]
    if not (world and replicas and parts):
        return
    # Pipeline stages, of which the report says nothing, divide the processes as well.
    is_divisible = world % (replicas * parts) == 0
    if not is_divisible:
        yield _line_fault(
            report, "sizes_contradict", "world_size", world=world, data=replicas, model=parts
        )
    rate = report.summary["samples_per_second"]
    if parts > 1 and rate is not None:
        yield _line_fault(
            report, "model_parallel", "samples_per_second", rate / parts, world=world, model=parts
        )


# The summary against itself.


class Formula(NamedTuple):
    """A line of the summary that follows from others."""

    key: str
    inputs: tuple[str, ...]
    """Keys of the figures that it follows from, but for `backward_factor`, batch size and
    number of ranks."""
    computed: float
    """What they come to; NaN where one of them is not known."""


def formulas(figures: Figures) -> list[Formula]:
    """DeepSpeed's own formulas with the figures of a summary."""
    # NaN goes through all arithmetic: what follows from a figure that is not known is NaN too.
    known = {key: nan if value is None else value for key, value in figures.items()}
    forward_flops = known["forward_flops"]
    backward_flops = known["backward_factor"] * forward_flops
    flops = forward_flops + backward_flops
    forward = known["forward_seconds"]
    backward = known["backward_seconds"]
    iteration = forward + backward + known["step_seconds"]
    rows = known["batch_size_per_gpu"] * known["world_size"]
    parts = ("forward_seconds", "backward_seconds", "step_seconds")
    return [
        Formula(
            "forward_flops_per_second",
            ("forward_flops", "forward_seconds"),
            _rate(forward_flops, forward),
        ),
        Formula(
            "backward_flops_per_second",
            ("forward_flops", "backward_seconds"),
            _rate(backward_flops, backward),
        ),
        Formula(
            "forward_backward_flops_per_second",
            ("forward_flops", "forward_seconds", "backward_seconds"),
            _rate(flops, forward + backward),
        ),
        Formula("iteration_seconds", parts, iteration),
        Formula("flops_per_second", ("forward_flops", *parts), _rate(flops, iteration)),
        Formula("samples_per_second", parts, _rate(rows, iteration)),
    ]


def _rate(amount_done: float, seconds: float) -> float:
    """An amount per second; NaN where there is no time."""
    return amount_done / (seconds or nan)


def contradictions(figures: Figures) -> dict[str, float]:
    """What follows from DeepSpeed's own formulas, by key, where the figure is known and is another
    one."""
    computed = {}
    for formula in formulas(figures):
        if not _holds(formula, figures):
            computed[formula.key] = formula.computed
    return computed


def _is_known(formula: Formula, figures: Figures) -> bool:
    return figures[formula.key] is not None and not isnan(formula.computed)


def _holds(formula: Formula, figures: Figures) -> bool:
    """Whether a line has what its formula gives; True too where the line's figure, or one that it
    follows from, is not known."""
    printed = figures[formula.key]
    if printed is None or isnan(formula.computed):
        return True
    return abs(printed - formula.computed) <= ROUNDING_TOLERANCE * formula.computed


def _findings_by_formulas(report: Report, unknown_by_tree: set[str]) -> Findings:
    """Keys of figures that cannot be relied on, and a fault for each line that contradicts others
    and for each other figure that is unknown.

    A figure is sound where a formula with it holds; the forward FLOPs also where the tree has the
    same. Where a formula does not hold and all its inputs are sound, the line is wrong, and the
    inputs give its right value. Otherwise nobody knows which figure was changed: the line is
    unknown, and so are those inputs that are not sound.

    Args:
        unknown_by_tree: keys of figures that contradict the tree; lines that follow from them get
            no fault here.
    """
    summary = report.summary
    known_formulas = [formula for formula in formulas(summary) if _is_known(formula, summary)]
    sound = _sound_figures(report, known_formulas)
    unknown = set[str]()
    faults = list[Fault]()
    for formula in known_formulas:
        if _holds(formula, summary) or unknown_by_tree.intersection(formula.inputs):
            continue
        doubtful = [key for key in formula.inputs if key not in sound]
        if doubtful:
            unknown.update((formula.key, *doubtful))
        corrected = None if doubtful else formula.computed
        faults.append(_line_fault(report, "contradicts_itself", formula.key, corrected))
    lines_with_fault = {fault.where for fault in faults}
    # In the order of the summary, which a set does not have.
    for key in FIGURES:
        if key not in unknown:
            continue
        _, label = report.lines[key]
        if label not in lines_with_fault:
            faults.append(fault_of_line(report, "contradicts_itself", key, None, DOUBTFUL))
    return Findings(unknown, faults)


def _sound_figures(report: Report, known_formulas: list[Formula]) -> set[str]:
    """Keys of the figures in formulas that hold, and of the forward FLOPs where the tree confirms
    them."""
    sound = set[str]()
    if _has_flops_of_tree(report):
        sound.add("forward_flops")
    for formula in known_formulas:
        if _holds(formula, report.summary):
            sound.update((formula.key, *formula.inputs))
    return sound


# The summary against the tree, and against the class at depth 0, which is the root too.

UNITS_HELD_AGAINST = {"parameters": "parameters", "macs": "MACs", "latency_seconds": "s"}
"""Units of a module's figures that are held against others."""
ROOT_COUNTS = {"parameters_per_gpu": "parameters", "forward_macs": "macs"}
"""Counts of a summary that the root has as well, and the name that they have there."""
UNKNOWN_WITH_COUNT = {
    "parameters_per_gpu": ("parameters_per_gpu", "model_parameters"),
    "forward_macs": ("forward_macs",),
    "forward_flops": ("forward_flops", "model_forward_flops"),
}
"""Keys that cannot be relied on where the count, by its key, contradicts the tree."""


class Root(NamedTuple):
    """What a part of the report besides the summary says of the whole model."""

    where: str
    """The line and the part, in words."""
    figures: Mapping[str, float | None]
    """`parameters`, `macs` and `latency_seconds`, which is None where it is the time of day."""


def roots(report: Report) -> list[Root]:
    """What the only class at depth 0 and the root of the tree say, in this order; each is left out
    where it was not read."""
    parts = []
    for depth in report.depths:
        names = {*depth.parameters, *depth.macs, *depth.seconds}
        if depth.depth == 0 and len(names) == 1:
            (name,) = names
            figures = {
                "parameters": depth.parameters.get(name),
                "macs": depth.macs.get(name),
                "latency_seconds": _latency(depth.seconds.get(name)),
            }
            parts.append(Root(f"line {depth.number}, depth 0,", figures))
    root = report.root
    if root is not None and root.macs is not None:
        figures = {
            "parameters": root.parameters,
            "macs": root.macs,
            "latency_seconds": _latency(root.latency_seconds),
        }
        parts.append(Root(f"line {root.number}, the tree's root,", figures))
    return parts


def _latency(seconds: float | None) -> float | None:
    """A latency; None where it is the time of day."""
    return None if is_time_of_day(seconds) else seconds


def _findings_by_tree(report: Report, passes: int | None) -> Findings:
    """Keys of the summary's figures that contradict the tree, with those that follow from them; and
    a fault for each figure that contradicts."""
    findings = Findings(set(), [])
    for root in roots(report):
        _compare_counts(report, root, findings)
        _compare_flops(report, root, findings)
    contradiction = _contradicting_time(report, passes)
    if contradiction is not None:
        where, seconds = contradiction
        findings.unknown.update((*SUMMARY_TIMES, *SUMMARY_RATES))
        time = f"{seconds:.4g} s"
        findings.faults.append(
            _tree_fault(report, "forward_seconds", where, time, "the summary's times")
        )
    return findings


def _compare_counts(report: Report, root: Root, findings: Findings) -> None:
    """Add to `findings` the counts of the summary that the root contradicts, unless they are there
    already."""
    for key, name in ROOT_COUNTS.items():
        printed = report.summary[key]
        count_of_root = root.figures[name]
        if printed is None or count_of_root is None or key in findings.unknown:
            continue
        rounding_error = rounding(printed) + rounding(count_of_root)
        tolerance = max(rounding_error, ROUNDING_TOLERANCE * max(printed, count_of_root))
        if abs(printed - count_of_root) > tolerance:
            findings.unknown.update(UNKNOWN_WITH_COUNT[key])
            other = f"{count_of_root:.4g} {FIGURES[key].unit}"
            findings.faults.append(_tree_fault(report, key, root.where, other))


def _compare_flops(report: Report, root: Root, findings: Findings) -> None:
    """Add to `findings` the FLOPs of the summary where the root's multiply-adds contradict them,
    unless they are there already."""
    flops = report.summary["forward_flops"]
    macs = root.figures["macs"]
    if flops is None or not macs or "forward_flops" in findings.unknown:
        return
    # Each multiply-add is two FLOPs, and other work comes on top.
    if flops < 2 * macs * (1 - ROUNDING_TOLERANCE):
        findings.unknown.update((*UNKNOWN_WITH_COUNT["forward_flops"], *FLOP_RATES))
        findings.faults.append(_tree_fault(report, "forward_flops", root.where, f"{macs:.4g} MACs"))


def _has_flops_of_tree(report: Report) -> bool:
    """Whether the tree's root and the class at depth 0, as far as they were read, confirm the
    summary's FLOPs: two for each multiply-add, and at most `MOST_BESIDES` more."""
    flops = report.summary["forward_flops"]
    macs_of_roots = [root.figures["macs"] for root in roots(report)]
    if flops is None or not macs_of_roots:
        return False
    for macs in macs_of_roots:
        if not macs:
            return False
        if not 1 - ROUNDING_TOLERANCE <= flops / (2 * macs) <= 1 + MOST_BESIDES:
            return False
    return True


def _tree_fault(report: Report, key: str, where: str, other: str, what: str = "it") -> Fault:
    """A fault in a line of the summary that the tree, or the class at depth 0, contradicts.

    Args:
        where: the part of the report with another figure, in words.
        other: this figure, with its unit.
        what: what nothing is worked out from, in words; `it` is the line's own figure.
    """
    return _line_fault(report, "summary_contradicts_tree", key, where=where, other=other, what=what)


def _contradicting_time(report: Report, passes: int | None) -> tuple[str, float] | None:
    """Where the report has a time that contradicts the summary's forward time, in words, and this
    time in seconds; None where none does."""
    forward = report.summary["forward_seconds"]
    if forward is None:
        return None
    one_pass = forward / passes_of(report, passes)
    for root in roots(report):
        seconds = root.figures["latency_seconds"]
        if not seconds or seconds < 0:
            continue
        rounding_error = rounding(seconds) + rounding(forward)
        is_shorter = one_pass < seconds * (1 - ROUNDING_TOLERANCE) - rounding_error
        is_in_another_unit = one_pass > MOST_TIMES * seconds
        if is_shorter or is_in_another_unit:
            return root.where, seconds
    inside = seconds_inside(report)
    if report.root is None or inside is None:
        return None
    # Their sum may exceed the time of a pass: a module that is called from two places counts twice.
    if not (1 - SHARED_TIME) * inside <= one_pass <= MOST_TIMES * inside:
        return f"line {report.root.number}, the sum of the modules inside the root,", inside
    return None


def seconds_inside(report: Report) -> float | None:
    """Seconds of the modules inside the root together; None where the tree is not whole, or has no
    times."""
    root = report.root
    if root is None or not report.tree_is_whole:
        return None
    return sum(child.total("latency_seconds") for child in root.children) or None


# Passes whose time a summary has together.


def _count_timed_passes(report: Report, passes: int | None) -> tuple[int | None, list[Fault]]:
    """Number of passes whose time the summary has, None for an unknown one above 1; and a fault
    where it is not 1.

    Args:
        passes: number of passes of an optimizer step; None where the run is not known.
    """
    name = "accumulated_passes"
    key = "forward_seconds"
    passes_timed = passes_of(report, passes)
    if passes_timed > 1:
        return passes_timed, [_line_fault(report, name, key, passes=passes_timed)]
    times = _times_one_pass(report)
    if passes is None and times is not None and times > MOST_OUTSIDE:
        reason = SEVERAL_PASSES.format(times=times)
        return None, [fault_of_line(report, name, key, None, reason)]
    return 1, []


def seconds_of_root(report: Report) -> float | None:
    """Seconds of the one pass that the root's latency is of; None where neither the tree nor depth
    0 has it, or has but a time of day."""
    for root in roots(report):
        latency = root.figures["latency_seconds"]
        if latency is not None and latency > 0:
            return latency
    return None


def _times_one_pass(report: Report) -> float | None:
    """The summary's forward time as a multiple of the tree's, which is that of one pass; None where
    either is not known, or where the summary has the time of one call (`passes_of`)."""
    forward = report.summary["forward_seconds"]
    one_pass = seconds_of_root(report) or seconds_inside(report)
    has_timers_of_step = report.summary["backward_seconds"] is not None
    if forward is None or not one_pass or not has_timers_of_step:
        return None
    return forward / one_pass


def passes_of(report: Report, passes: int | None) -> int:
    """Number of passes whose time the summary has: 1 unless the run or the report itself says more.

    DeepSpeed's timers of a step run through all of its passes; a summary without a backward time
    has that of one call. Where the run is not known, N passes are recognised by a forward time that
    is N times the root's own; where that is not known either, by N reports in the file and a
    forward time of N times what the modules inside the root take.

    Args:
        passes: number of passes of an optimizer step; None where the run is not known.
    """
    forward = report.summary["forward_seconds"]
    if forward is None or report.summary["backward_seconds"] is None:
        return 1
    seconds = seconds_of_root(report)
    if passes is not None:
        if seconds is None:
            return passes
        # Rows differ in length, and so passes in time: all of them need not take exactly `passes`
        # times as long as one. A time of less than half of that is the time of one.
        has_time_of_all = passes / 2 <= forward / seconds
        return passes if has_time_of_all else 1
    if seconds is not None:
        times = round(forward / seconds)
        is_whole = abs(forward - times * seconds) <= WHOLE_PASSES * times * seconds
        return times if is_whole and 1 < times <= MOST_PASSES else 1
    inside = seconds_inside(report)
    if inside is None:
        return 1
    ratio_to_reports = forward / (report.reports_in_file * inside)
    is_one_pass_a_report = 1 - ROUNDING_TOLERANCE <= ratio_to_reports <= 1 + MOST_BESIDES
    return report.reports_in_file if is_one_pass_a_report else 1


# A module against the modules inside it.


class Excess(NamedTuple):
    """A module with less of a figure than one of the modules inside it, or all of them together."""

    times: float
    """What the modules inside have, as a multiple of what the module has."""
    name: str
    """Name of the fault: `part_exceeds_whole` for one of the modules inside, `parts_exceed_whole`
    for all of them together."""
    path: str
    """Dotted path of the module."""
    module: Module
    part: str
    """Name of the one module inside; empty for all of them."""
    amount: float
    """What the modules inside have."""


def _excess_faults(report: Report) -> Iterator[Fault]:
    """For each figure up to two faults: one for modules that a module inside exceeds, one for those
    that all inside exceed together."""
    if report.root is None:
        return
    for figure, unit in UNITS_HELD_AGAINST.items():
        excesses = []
        for path, module in report.root.walk():
            excess = _excess(path, module, figure)
            if excess is not None:
                excesses.append(excess)
        for name in ("part_exceeds_whole", "parts_exceed_whole"):
            excesses_of_name = [excess for excess in excesses if excess.name == name]
            if excesses_of_name:
                yield _fault_of_excesses(excesses_of_name, figure, unit)


def _fault_of_excesses(excesses: list[Excess], figure: str, unit: str) -> Fault:
    """One fault for all excesses of the same name and figure, placed where the excess is
    largest."""
    worst = max(excesses, key=lambda excess: excess.times)
    others = ""
    if len(excesses) > 1:
        others = f", and {len(excesses) - 1} more modules are alike"
    reason = REASONS_OF_CONTRADICTIONS[worst.name].format(
        part=worst.part, amount=f"{worst.amount:.4g} {unit}", others=others
    )
    module = worst.module
    where = worst.path or module.class_name
    return Fault(
        name=worst.name,
        line=module.number,
        where=where,
        said=getattr(module, figure),
        corrected=None,
        unit=unit,
        reason=reason,
    )


def _excess(path: str, module: Module, figure: str) -> Excess | None:
    """By what the modules inside a module exceed it in a figure; None where they do not, or where
    the figure is not known.

    Of both kinds of excess, that of a single module inside is returned.
    """
    whole = getattr(module, figure)
    if whole is None or whole < 0 or not module.children:
        return None
    is_time = figure == "latency_seconds"
    # A root whose latency is the time of day contains everything.
    if is_time and is_time_of_day(whole):
        return None
    parts = [(child.total(figure), child.name) for child in module.children]
    largest, largest_name = max(parts)
    together = sum(part for part, _ in parts)
    tolerance = rounding(whole) + sum(rounding(part) for part, _ in parts)
    if is_time:
        tolerance += SHARED_TIME * whole
    # A whole that was printed as 0 is no divisor.
    divisor = max(whole, tolerance)
    if largest > whole + tolerance:
        return Excess(
            times=largest / divisor,
            name="part_exceeds_whole",
            path=path,
            module=module,
            part=largest_name,
            amount=largest,
        )
    if together <= whole + tolerance:
        return None
    if figure == "parameters" and _is_by_sharing(module, together - whole, tolerance):
        return None
    return Excess(
        times=together / divisor,
        name="parts_exceed_whole",
        path=path,
        module=module,
        part="",
        amount=together,
    )


def _is_by_sharing(module: Module, excess: float, tolerance: float) -> bool:
    """Whether a matrix that several modules inside a module share explains that these have more
    parameters together than it has: the excess is once or several times the matrix."""
    for _, inner in module.walk():
        size = inner.linear or inner.sizes(*EMBEDDING)
        if size is None:
            continue
        rows, columns = size
        if not rows:
            continue
        # A matrix that is in all children is counted once too often for each child but one.
        for times in range(1, len(module.children)):
            if abs(excess - times * rows * columns) <= tolerance:
                return True
    return False
