"""What is wrong with a profiler report, and the figures that would be right."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nan, sqrt
from pathlib import Path
from statistics import median

from zeropods.errors import UserError
from zeropods.measure.profile import EMBEDDING, Figures, Module, Report, read_report, rounding
from zeropods.measure.profile_contradictions import (
    RATES,
    Fault,
    Judgement,
    contradictions,
    fault_of_line,
    is_clock,
    judge,
)
from zeropods.measure.record import RECORD, Record, read_record

TWICE, ONCE = (1.8, 2.2), (0.9, 1.1)
"""Ranges in which a factor is taken for 2, or for 1."""
CLEAR = 5
"""Least size of attention's products, as a multiple of the figures' rounding error: smaller ones are lost in it."""
AGREEMENT = 0.03
"""Share by which a profiler's count may differ from the closed form."""
NEAR = 0.05
"""Share by which a profiled step may differ from the run's other steps without being reported."""
BY_FORWARD_TIME = ("forward_backward_flops_per_second", "iteration_seconds", "flops_per_second", "samples_per_second")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A report, what it should have said, and what is wrong with it."""

    report: Report
    figures: Figures
    """Figures of the summary, corrected; None where one cannot be known."""
    root: Module | None
    """The tree with shares computed anew, and sums where DeepSpeed prints no figures; None if the tree is not whole."""
    closed_form_macs: float | None
    passes: int | None = 1
    """Number of passes of a step whose time the summary has; None for an unknown number above 1."""
    faults: tuple[Fault, ...] = ()
    run: str = ""
    """Whether it was compared with its run, in words."""

    def to_json(self, depth: int | None = None) -> dict[str, object]:
        """Everything as plain numbers; the tree down to a depth, or all of it if `depth` is None."""
        root = self.root
        return {
            "file": str(self.report.path),
            "line": self.report.number,
            "reports": self.report.reports,
            "missing": self.report.missing or None,
            "run": self.run,
            "passes": self.passes,
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
    """Read and check a report, or that of a run folder; also against its run, if the run's record lies beside it.

    `UserError` where there is no report.
    """
    report = read_report(path)
    if not (report.path.parent / RECORD).is_file():
        return replace(check_report(report), run=f"not compared with its run: there is no {RECORD} beside it")
    try:
        return replace(check_report(report, read_record(report.path.parent)), run=f"compared with {RECORD} beside it")
    except UserError as error:
        return replace(check_report(report), run=f"not compared with its run: {error}")


def check_report(report: Report, record: Record | None = None) -> Checked:
    """Correct a report that was read, and find its faults; `record` is that of the profiled run, if there is one."""
    of_run = record is not None and not _unlike(report, record)
    judgement = judge(report, record.gradient_accumulation_steps if of_run and record is not None else None)
    checked, times, missing = _corrected(report, judgement)
    checked = replace(checked, faults=(*_faults(checked, times, missing), *judgement.faults))
    return checked if record is None else _beside(checked, record)


def shares(figures: Figures) -> dict[str, float] | None:
    """Shares of forward, backward and the optimizer's step in an iteration; None where they were not timed."""
    seconds = {part: figures[f"{part}_seconds"] for part in ("forward", "backward", "step")}
    known = {part: each for part, each in seconds.items() if each is not None}
    whole = sum(known.values())
    return {part: each / whole for part, each in known.items()} if whole and len(known) == len(seconds) else None


def _ratio(part: float | None, whole: float | None, times: float = 1.0) -> float | None:
    return times * part / whole if part is not None and whole else None


# A report with its known faults taken out: a clock in place of the root's latency, linear layers counted twice,
# parameters left out.


def _corrected(report: Report, judgement: Judgement) -> tuple[Checked, float | None, int]:
    """The corrected report, without what cannot be relied on; how often linear layers were counted, None where nothing
    shows it; and the number of parameters that lie on other ranks, each matrix counted once."""
    said = report.root if report.tree_is_whole and judgement.tree_is_possible else None
    figures, passes = dict(report.summary), judgement.passes
    if is_clock(figures["forward_seconds"]):
        inside = 0.0 if said is None else sum(child.total("latency_seconds") for child in said.children)
        figures["forward_seconds"] = inside or None
        figures["forward_flops_per_second"] = _ratio(figures["forward_flops"], inside)
        if not inside:
            figures |= dict.fromkeys(BY_FORWARD_TIME)
    # Without an engine, DeepSpeed prints 0 here.
    figures["model_parameters"] = figures["model_parameters"] or None
    rows, times, missing, form, root = figures["batch_size_per_gpu"], None, 0, None, deepcopy(said)
    if said is not None and root is not None:
        if rows and (products := _attentions(said, rows)):
            # The products grow with the square of the tokens that the linear layers claim.
            times = median(sqrt(claimed / reported) for reported, claimed in products)
        embeddings = [size for _, module in said.walk() if (size := module.sizes(*EMBEDDING))]
        is_twice = times is not None and TWICE[0] < times < TWICE[1]
        missing = sum(_mend(root, is_twice, max(embeddings, default=None)).values())
        # Where the root's MACs were only the sum of its children's, they are summed anew: children have more digits.
        parts = [child.total("macs") for child in said.children]
        if said.macs and abs(said.macs - sum(parts)) <= rounding(said.macs) + sum(map(rounding, parts)):
            root.macs = sum(child.total("macs") for child in root.children)
        less, copies = said.total("macs") - root.total("macs"), figures["model_parallel_size"] or 1
        changes = {
            "parameters_per_gpu": missing,
            "model_parameters": missing * copies,
            "forward_macs": -less,
            "forward_flops": -2 * less,
            "model_forward_flops": -2 * less * copies,
        }
        figures |= {key: value + change for key, change in changes.items() if (value := figures[key]) is not None}
        of_one_pass = None if passes is None else _ratio(figures["forward_seconds"], passes)
        root.latency_seconds = of_one_pass if is_clock(said.latency_seconds) else said.latency_seconds
        root.parameters = figures["parameters_per_gpu"]
        root.flops_per_second = _ratio(figures["forward_flops"], root.latency_seconds)
        for _, module in root.walk():
            module.parameters_percent = _ratio(module.parameters, root.parameters, 100)
            module.macs_percent = _ratio(module.macs, root.macs, 100)
            module.latency_percent = _ratio(module.latency_seconds, root.latency_seconds, 100)
        form = _closed_form_macs(root, rows) if rows else None
    figures |= dict.fromkeys(judgement.unknown)
    figures |= contradictions(figures)
    figures |= {key: rate * (passes or 1) for key in RATES if (rate := figures[key]) is not None}
    # Processes that share a model have the same rows.
    figures["samples_per_second"] = _ratio(figures["samples_per_second"], figures["model_parallel_size"] or 1)
    checked = Checked(report=report, figures=figures, root=root, closed_form_macs=form, passes=passes)
    return checked, times, missing


def _mend(module: Module, is_twice: bool, shared: tuple[int, int] | None) -> dict[Hashable, int]:
    """Correct a module in place, from its leaves up; return how many parameters it lacks, by matrix.

    Args:
        shared: (rows, dimension) of the token embedding, the largest one. The report does not say what is shared: T5
            and most language models use this matrix as the encoder's and the decoder's embedding and, without a bias,
            as the output layer, so any matrix of its size is taken to be it.
    """
    missing: dict[Hashable, int] = {}
    said, seconds, parameters = (module.total(figure) for figure in ("macs", "latency_seconds", "parameters"))
    less = said / 2 if is_twice and module.linear is not None else 0.0
    for child in module.children:
        before = child.total("macs")
        missing |= _mend(child, is_twice, shared)
        less += before - child.total("macs")
    linear, embedding, bias = module.linear, module.sizes(*EMBEDDING), bool(module.details.get("bias"))
    rows, columns = linear or embedding or (0, 0)
    expected = rows * columns + bias * columns
    if module.parameters is not None and parameters < expected - 2 * rounding(expected):
        is_shared = shared is not None and not bias and shared in (embedding, linear and linear[::-1])
        missing[shared if is_shared else id(module)] = expected - round(parameters)
    if module.flops_per_second is not None and seconds:
        module.flops_per_second = max(0.0, module.flops_per_second - 2 * less / seconds)
    module.parameters = parameters + sum(missing.values())
    module.macs, module.latency_seconds = said - less, seconds
    return missing


def _attentions(root: Module, rows: float) -> list[tuple[float, float]]:
    """For each attention module, the MACs of its products as reported, and as its linear layers' tokens imply them.

    Such a module has linear layers (queries first, the output last), and more MACs than theirs. The products
    queries x keys and weights x values together have 2 x rows x T x S x inner MACs.
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


def _closed_form_macs(root: Module, rows: float) -> float | None:
    """MACs of a forward pass for a tree whose linear layers are counted once, from layer sizes x whole tokens.

    In x out x tokens of each linear layer, plus attention's products; None where other layers compute too (`Conv2d`).
    """
    leaves = [module for _, module in root.walk() if not module.children]
    if any(module.macs and module.linear is None for module in leaves):
        return None
    linear = sum(round(leaf.tokens or 0) * leaf.linear[0] * leaf.linear[1] for leaf in leaves if leaf.linear)
    return linear + sum(claimed for _, claimed in _attentions(root, rows))


# Where MACs and time go: all modules of the tree by their class, each figure counted once.


@dataclass(frozen=True)
class ClassShare:
    """What the modules of one class do themselves, without the modules inside them. All classes add up to the root."""

    class_name: str
    modules: int
    macs: float
    macs_percent: float | None
    latency_seconds: float
    latency_percent: float | None


def by_class(root: Module) -> list[ClassShare]:
    """The classes of a tree, most MACs first, then most time."""
    own: dict[str, list[dict[str, float]]] = {}
    for _, module in root.walk():
        done = own.setdefault(module.class_name, [])
        done.append({})
        for figure in ("macs", "latency_seconds"):
            parts, whole = [child.total(figure) for child in module.children], module.total(figure)
            # A difference that rounding explains counts as none.
            is_more = whole - sum(parts) > rounding(whole) + sum(map(rounding, parts))
            done[-1][figure] = whole - sum(parts) if is_more else 0.0
    found = []
    for name, each in sorted(own.items()):
        macs, seconds = (sum(figures[key] for figures in each) for key in ("macs", "latency_seconds"))
        percents = _ratio(macs, root.macs, 100), _ratio(seconds, root.latency_seconds, 100)
        found.append(ClassShare(name, len(each), macs, percents[0], seconds, percents[1]))
    return sorted(found, key=lambda share: (share.macs, share.latency_seconds), reverse=True)


# All that is wrong with a report, or easily misread.

CLOCK = (
    "the root's forward pass has already begun when the profiler hooks it, so its timer never starts and this is the "
    "time of day"
)
REASONS = {
    "forward_latency": f"{CLOCK}; the right value is at least the sum over the modules inside the model",
    "root_latency": (
        f"{CLOCK}; every '% latency' of the tree is a share of it; the right value is the summary's forward latency"
    ),
    "root_flops_per_second": "FLOPs / the time of day",
    "linear_counted_twice": (
        "ZeRO-3 runs a linear layer as a function of its own, and the profiler counts both that function and the "
        "product inside it: its MACs imply {times:.2f} times as many tokens as attention's products do; FLOPs and "
        "FLOP/s are wrong as well"
    ),
    "tokens_contradict": (
        "linear layers imply {times:.2f} times as many tokens as attention's products do: the batch is not that of "
        "the summary, or part of the model is counted differently"
    ),
    "differs_from_closed_form": (
        "even when corrected, it is {percent:+.1f} % off the closed form (layer sizes x tokens, plus attention)"
    ),
    "sharded_parameters": (
        "ZeRO-3 shards parameters, and those on other ranks are counted as 0; the right value follows from the printed "
        "sizes, with embeddings and an output layer of the same size counted once; layers without a size are taken as "
        "printed"
    ),
    "shared_parameters": "more than the model has: one matrix is in several {name}, and counted in each",
    "profiled_step": (
        "this is step {step} counted from 1, requested by 'profile_step: {before}': DeepSpeed profiles the step after "
        "that one"
    ),
    "several_reports": (
        "this is the last report in the file; with gradient accumulation, it is the one of the pass before the "
        "optimizer's step"
    ),
    "another_run": "the record beside the report has a different figure: the report is from another run",
    "unusual_step": (
        "a single step, quicker than the run's usual one even with the profiler: its batch had fewer tokens, or the "
        "time between two steps is not included; the right value is the median of the run's own timed steps{passes}"
    ),
    "profiler_overhead": (
        "a single step, with a profiler that stops at every module and without the time between two steps; the right "
        "value is the median of the run's own timed steps{passes}"
    ),
    "recomputation_left_out": (
        "gradient checkpointing was on: the backward pass also runs the forward pass again, so it costs 3 forward "
        "passes, not 2 ('recompute_fwd_factor': 1.0 would have accounted for that)"
    ),
}
"""Why a figure is wrong, by the name of the fault."""


def _of_line(report: Report, name: str, key: str, right: float | None, **details: object) -> Fault:
    """A fault in a line of the summary, for the reason that its name has here."""
    return fault_of_line(report, name, key, right, REASONS[name].format(**details))


def _faults(checked: Checked, times: float | None, missing: int) -> Iterator[Fault]:
    """Latencies, counts and parameters that are not those of the model and of this step; figures that do not follow
    from the others; figures that are easily misread."""
    report, summary, figures = checked.report, checked.report.summary, checked.figures
    root, right, of_line = report.root, checked.root, partial(_of_line, report)
    # A latency such as `1.8 Gs` at the root, its FLOP/s, and the summary's latency if DeepSpeed did not time it itself.
    if is_clock(summary["forward_seconds"]):
        yield of_line("forward_latency", "forward_seconds", figures["forward_seconds"])
    if root is not None and right is not None and is_clock(root.latency_seconds):
        for name, key, unit in (
            ("root_latency", "latency_seconds", "s"),
            ("root_flops_per_second", "flops_per_second", "FLOP/s"),
        ):
            values = getattr(root, key), getattr(right, key)
            by_passes = f", divided by the {checked.passes or 'unknown number of'} passes of a step"
            by_passes = "" if checked.passes == 1 else by_passes
            reason = f"{REASONS[name]}{by_passes if name == 'root_latency' else ''}"
            yield Fault(name, root.number, root.class_name, *values, unit, reason)
    # Linear layers and attention that imply different numbers of tokens; a count that arithmetic does not confirm.
    macs, form = figures["forward_macs"], checked.closed_form_macs
    if times is not None and TWICE[0] < times < TWICE[1]:
        yield of_line("linear_counted_twice", "forward_macs", macs, times=times)
    elif times is not None and not ONCE[0] < times < ONCE[1]:
        yield of_line("tokens_contradict", "forward_macs", None, times=times)
    if form and macs is not None and abs(macs / form - 1) > AGREEMENT:
        yield of_line("differs_from_closed_form", "forward_macs", form, percent=100 * (macs / form - 1))
    # Layers with fewer parameters than their size implies, or else depths at which a class has more than the model.
    model = summary["parameters_per_gpu"]
    if missing:
        yield of_line("sharded_parameters", "parameters_per_gpu", figures["parameters_per_gpu"])
    elif model is not None:
        for depth, name, said in ((each, *said) for each in report.depths for said in each.parameters.items()):
            if said > model + rounding(said) + rounding(model):
                reason = REASONS["shared_parameters"].format(name=name)
                where = f"depth {depth.depth}, {name}"
                yield Fault("shared_parameters", depth.number, where, said, None, "parameters", reason)
    if summary["world_size"] is not None and (step := summary["step"]):
        yield of_line("profiled_step", "step", None, step=step, before=step - 1)
    if report.reports > 1:
        reason = REASONS["several_reports"]
        yield Fault("several_reports", report.number, "the file", report.reports, None, "", reason)


def _unlike(report: Report, record: Record) -> dict[str, float | None]:
    """Figures of a summary that are not those of the run whose record lies beside it, with the run's."""
    step = (record.deepspeed or {}).get("flops_profiler", {}).get("profile_step")
    expected = {
        "world_size": record.world_size,
        "batch_size_per_gpu": record.per_device_train_batch_size,
        "step": report.summary["step"] if step is None else step + 1,
    }
    return {key: value for key, value in expected.items() if report.summary[key] not in (None, value)}


def _beside(checked: Checked, record: Record) -> Checked:
    """A report with the faults that its run's record shows, and with the figures of the run's usual step.

    These come from rank 0's timed steps, without those of warm-up and the profiler, where the profiled step is not
    near them. FLOP/s are the FLOPs of the profiled pass, times the passes of a step, in the time of the usual step.
    """
    summary, of_line = checked.report.summary, partial(_of_line, checked.report)
    found = [of_line("another_run", key, at) for key, at in _unlike(checked.report, record).items()]
    if found:
        return replace(checked, faults=(*checked.faults, *found))
    timed, passes, usual = record.rank_0 and record.rank_0.step_seconds, record.gradient_accumulation_steps, Figures()
    if timed and timed.median:
        flops, factor = checked.figures["forward_flops"] or nan, checked.figures["backward_factor"] or nan
        rates = {
            "iteration_seconds": timed.median,
            "flops_per_second": passes * (1 + factor) * flops / timed.median,
            "samples_per_second": record.effective_batch_size / timed.median,
        }
        usual |= {key: right for key, right in rates.items() if abs((summary[key] or nan) / right - 1) > NEAR}
    # DeepSpeed counts the rows of one pass in the time of a whole step.
    of_passes = {"samples_per_second": f"; as printed it has the rows of one pass of {passes}"} if passes > 1 else {}
    is_quicker = (summary["iteration_seconds"] or 0.0) < (usual.get("iteration_seconds") or 0.0)
    name = "unusual_step" if is_quicker and passes == 1 else "profiler_overhead"
    wrong = [key for key in ("iteration_seconds", "samples_per_second") if key in usual]
    found += [of_line(name, key, usual[key], passes=of_passes.get(key, "")) for key in wrong]
    backward = summary["backward_seconds"]
    if record.gradient_checkpointing and summary["backward_factor"] == 2 and backward:
        right = _ratio(summary["forward_flops"], backward, 3)
        found.append(of_line("recomputation_left_out", "backward_flops_per_second", right))
    return replace(checked, figures=checked.figures | usual, faults=(*checked.faults, *found))
