"""Read a report of DeepSpeed's flops profiler into numbers: whatever of it is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from zeropods.errors import UserError
from zeropods.files import no_file

Figures = dict[str, float | None]
"""Figures of a summary by the keys of `FIGURES`; None where the report has no such figure."""


class SummaryLine(NamedTuple):
    """A line of the summary, and what its figure means."""

    key: str
    label: str
    """The text before the value, in lower case and without the formula, which differs between
    versions."""
    unit: str
    """Unit of the figure; empty for a count."""
    meaning: str


SUMMARY_LINES = (
    SummaryLine(
        key="step",
        label="profile summary at step",
        unit="",
        meaning="number of the profiled step, counted from 1",
    ),
    SummaryLine(
        key="world_size",
        label="world size",
        unit="",
        meaning="processes of the run, one per GPU",
    ),
    SummaryLine(
        key="data_parallel_size",
        label="data parallel size",
        unit="",
        meaning="processes that each work on their own rows",
    ),
    SummaryLine(
        key="model_parallel_size",
        label="model parallel size",
        unit="",
        meaning=(
            "processes that one copy of the model is split across; "
            "ZeRO does not split it, it shards"
        ),
    ),
    SummaryLine(
        key="batch_size_per_gpu",
        label="batch size per gpu",
        unit="",
        meaning="rows of one forward pass of one process",
    ),
    SummaryLine(
        key="expert_tensor_parallelism",
        label="expert tensor parallelism enabled",
        unit="",
        meaning="whether the experts of a mixture are split across processes as well",
    ),
    SummaryLine(
        key="parameters_per_gpu",
        label="params per gpu",
        unit="parameters",
        meaning="parameters held by this process, tied ones counted once",
    ),
    SummaryLine(
        key="model_parameters",
        label="params of model",
        unit="parameters",
        meaning="the line above x model parallel size; just as wrong under ZeRO-3",
    ),
    SummaryLine(
        key="non_expert_parameters",
        label="non-expert params of model",
        unit="parameters",
        meaning="parameters outside a mixture's experts",
    ),
    SummaryLine(
        key="expert_parameters",
        label="expert params of model",
        unit="parameters",
        meaning="parameters of all experts of a mixture",
    ),
    SummaryLine(
        key="forward_macs",
        label="fwd macs per gpu",
        unit="MACs",
        meaning="multiply-adds of one forward pass; attention, layers and output, padding included",
    ),
    SummaryLine(
        key="forward_flops",
        label="fwd flops per gpu",
        unit="FLOPs",
        meaning=(
            "two per multiply-add, plus all work that is not a product (activations, sums, norms)"
        ),
    ),
    SummaryLine(
        key="model_forward_flops",
        label="fwd flops of model",
        unit="FLOPs",
        meaning="the line above x model parallel size",
    ),
    SummaryLine(
        key="forward_seconds",
        label="fwd latency",
        unit="s",
        meaning="wall time of one forward pass, with the profiler's own stops at each module",
    ),
    # Its first words are those of the forward FLOPs: only the formula tells the two lines apart.
    SummaryLine(
        key="forward_flops_per_second",
        label="fwd flops per gpu = fwd flops per gpu / fwd latency",
        unit="FLOP/s",
        meaning="forward FLOPs / forward time",
    ),
    SummaryLine(
        key="backward_factor",
        label="",
        unit="",
        meaning="a backward pass is assumed to cost this many forward passes",
    ),
    SummaryLine(
        key="backward_seconds",
        label="bwd latency",
        unit="s",
        meaning="wall time of the backward pass, including the exchange of gradients",
    ),
    SummaryLine(
        key="backward_flops_per_second",
        label="bwd flops per gpu",
        unit="FLOP/s",
        meaning="twice the forward FLOPs / backward time: an assumption, nothing is counted here",
    ),
    SummaryLine(
        key="forward_backward_flops_per_second",
        label="fwd+bwd flops per gpu",
        unit="FLOP/s",
        meaning="three times the forward FLOPs / both times",
    ),
    SummaryLine(
        key="step_seconds",
        label="step latency",
        unit="s",
        meaning=(
            "wall time of the optimizer's step; with ZeRO, including the exchange of parameters"
        ),
    ),
    SummaryLine(
        key="iteration_seconds",
        label="iter latency",
        unit="s",
        meaning="forward + backward + step; excluding data loading and logging",
    ),
    SummaryLine(
        key="flops_per_second",
        label="flops per gpu",
        unit="FLOP/s",
        meaning="three times the forward FLOPs / the line above",
    ),
    SummaryLine(
        key="samples_per_second",
        label="samples/second",
        unit="samples/s",
        meaning="rows of all processes / the line above",
    ),
)
"""Lines of the summary in their order. Times are rank 0's: one forward pass, one backward pass, one
step of the optimizer."""
FIGURES = {line.key: line for line in SUMMARY_LINES}
"""The same lines by key."""
ALWAYS_THERE = (
    "parameters_per_gpu",
    "forward_macs",
    "forward_flops",
    "forward_seconds",
    "forward_flops_per_second",
)
"""Keys of the lines that a report has for every model, with an engine or without."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The top classes of modules at one depth of the tree, the root being 0: their figures by
    class name."""

    number: int
    """Number of its line in the file."""
    depth: int
    parameters: dict[str, float] = field(default_factory=dict)
    macs: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Forward latencies."""


@dataclass(kw_only=True)
class Module:
    """One module of the tree with everything below it; figures are None for one that runs nothing
    (`ModuleList`)."""

    number: int
    """Number of its line in the file."""
    name: str
    """Name that its parent gives it; empty for the root."""
    class_name: str
    parameters: float | None = None
    parameters_percent: float | None = None
    macs: float | None = None
    macs_percent: float | None = None
    latency_seconds: float | None = None
    latency_percent: float | None = None
    flops_per_second: float | None = None
    details: dict[str, object] = field(default_factory=dict)
    """What the class prints about itself: `in_features`, `out_features`; for an embedding `rows`
    and `dimension`."""
    children: list[Module] = field(default_factory=list)

    def walk(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the module and all modules below it with their dotted paths, a parent before its
        children."""
        yield path, self
        for child in self.children:
            child_path = f"{path}.{child.name}" if path else child.name
            yield from child.walk(child_path)

    def total(self, figure: str) -> float:
        """The module's `parameters`, `macs` or `latency_seconds`, as `figure` names it; the sum
        over its children where it has none itself."""
        value = getattr(self, figure)
        if value is not None:
            return value
        return sum(child.total(figure) for child in self.children)

    @property
    def linear(self) -> tuple[int, int] | None:
        """(in, out) features of a linear layer; None for anything else."""
        return self.sizes("in_features", "out_features")

    def sizes(self, first: str, second: str) -> tuple[int, int] | None:
        """Two whole numbers of `details`, such as an embedding's `rows` and `dimension`; None
        unless both are there."""
        first_size = self.details.get(first)
        second_size = self.details.get(second)
        if isinstance(first_size, int) and isinstance(second_size, int):
            return first_size, second_size
        return None

    @property
    def tokens(self) -> float | None:
        """Number of tokens that a linear layer was given, those of all rows: its MACs / (in x out).
        None for anything else, and for a layer without MACs."""
        size = self.linear
        if size is None or not all(size) or not self.macs:
            return None
        return self.macs / (size[0] * size[1])

    def to_json(self, depth: int | None = None) -> dict[str, object]:
        """The tree as plain values, down to a depth, or all of it if `depth` is None."""
        children = []
        if depth != 0:
            depth_below = None if depth is None else depth - 1
            children = [child.to_json(depth_below) for child in self.children]
        return {**vars(self), "children": children}


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report of a file."""

    path: Path
    line_number: int
    """Line number of its heading; the first line of the file is 1."""
    reports_in_file: int
    """Number of reports in the file; this one is the last."""
    text: str
    """This report alone, as it was printed."""
    summary: Figures
    lines: dict[str, tuple[int, str]]
    """Line number and label, without its formula, of each line of the summary that was read, by
    key."""
    depths: list[Depth]
    root: Module | None
    """The tree of modules; None where the report has no detailed part (`"detailed": false`)."""
    tree_is_whole: bool
    """Whether all modules were read: figures of a tree that is cut off do not add up."""
    missing: str
    """What this report lacks, or what of it could not be read, in one line; empty where the report
    is complete."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Text of each figure of the summary that cannot be, such as a time below zero, by key;
    `summary` has None for these."""


# Read a report from a file: one of its own, a log that contains one, or text that was copied from a
# page.

REPORT_HEADING = re.compile(r"(?P<prefix>.*?)-+ DeepSpeed Flops Profiler -+\s*")
"""Heading of a report, with the `prefix` that pdsh or a logger puts before every line
(`pod1: `)."""
PART_HEADING = re.compile(r"-+ (aggregated|detailed) profile per gpu -+")
CLOSING_LINE = re.compile(r"-{40,}")

Lines = list[tuple[int, str]]
"""Lines of a part of a report, with their numbers in the file."""


def read_report(path: Path) -> Report:
    """The report in a file, or in the `profile.txt` of a run folder; the last one where the file
    has several.

    A file has several reports where the profiler writes to a log, or where gradients are
    accumulated: then the last one is that of the pass that the optimizer's step follows.

    Raises:
        UserError: there is no report in the file, or nothing but its heading.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "profile.txt"
    if not path.is_file():
        raise UserError(
            f"{path}: {no_file(path)}; give a report's file, or the folder of a run with a "
            "configuration such as dsconfig/zero1profiler.json"
        )
    return parse_report(path, path.read_text(encoding="utf-8", errors="replace"))


def parse_report(path: Path, text: str) -> Report:
    """The last report of a text that was read from `path`.

    Raises:
        UserError: there is no report in the text, or nothing but its heading.
    """
    lines = text.splitlines()
    headings = _headings(lines)
    if not headings:
        raise UserError(
            f"{path}:1: no '--- DeepSpeed Flops Profiler ---' in {len(lines)} lines; "
            "give a profile.txt"
        )
    start, prefix = headings[-1]
    printed = _divide(lines, start, prefix)
    unread: Lines = []
    impossible: dict[str, str] = {}
    summary, summary_lines = _read_summary(printed.parts["summary"], unread, impossible)
    depths = _read_depths(printed.parts["aggregated"], unread)
    root, tree_is_whole = _read_tree(printed.parts["detailed"], unread)
    # The number of the step says nothing of what was measured.
    figures_of_summary = summary_lines.keys() - {"step"}
    has_figures = figures_of_summary or depths or root
    if not has_figures:
        raise UserError(
            f"{path}:{start}: there is a heading but no figure below it; "
            "give the report exactly as DeepSpeed printed it"
        )
    absent = [FIGURES[key].label for key in ALWAYS_THERE if key not in summary_lines]
    if not depths:
        absent.append("the part by depth")
    absent += _absent_at_end(root, tree_is_whole, printed.has_closing_line)
    return Report(
        path=path,
        line_number=start,
        reports_in_file=len(headings),
        text="\n".join(printed.lines),
        summary=summary,
        lines=summary_lines,
        depths=depths,
        root=root,
        tree_is_whole=tree_is_whole,
        missing=_missing_text(absent, unread),
        impossible=impossible,
    )


def _absent_at_end(root: Module | None, tree_is_whole: bool, has_closing_line: bool) -> list[str]:
    """What a report lacks of its last part, the tree, and of its end, in words."""
    absent = []
    if root is not None and not tree_is_whole:
        absent.append("a part of the tree")
    if root is None and not has_closing_line:
        # The report breaks off; whether it was to have a tree is unknown.
        absent.append("the tree of modules")
    if not has_closing_line:
        absent.append("the closing line of dashes")
    return absent


def _headings(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Line number, from 1, and prefix of the heading of each report."""
    headings = []
    for number, line in enumerate(lines, 1):
        match = REPORT_HEADING.fullmatch(line)
        if match:
            headings.append((number, match["prefix"]))
    return headings


@dataclass
class _Printed:
    """One report as it was printed, divided into its parts."""

    lines: list[str] = field(default_factory=list)
    """All lines, without the prefix."""
    parts: dict[str, Lines] = field(
        default_factory=lambda: {"summary": [], "aggregated": [], "detailed": []}
    )
    """The lines that are not blank, by part; those that head a part, or close the report, are left
    out."""
    has_closing_line: bool = False


def _divide(lines: Sequence[str], start: int, prefix: str) -> _Printed:
    """Divide into its parts the report whose heading is on line `start` and has this prefix; it
    goes to its closing line, or to the last line of the file."""
    printed = _Printed()
    lines_of_part = printed.parts["summary"]
    has_prefix = prefix.strip() != ""
    for number, whole_line in enumerate(lines[start - 1 :], start):
        # Lines of a log that have another source are left out.
        if has_prefix and not whole_line.startswith(prefix):
            continue
        line = whole_line.removeprefix(prefix)
        printed.lines.append(line)
        text = line.strip()
        if CLOSING_LINE.fullmatch(text):
            printed.has_closing_line = True
            break
        heading = PART_HEADING.fullmatch(text.lower())
        if heading:
            lines_of_part = printed.parts[heading[1]]
        elif text:
            lines_of_part.append((number, line))
    return printed


def _missing_text(absent: Sequence[str], unread: Lines) -> str:
    """What a report lacks, and how many lines could not be read, with the first of them; empty for
    neither."""
    sentences = []
    if absent:
        sentences.append(f"it lacks {', '.join(absent)}")
    if unread:
        number, line = unread[0]
        first = " ".join(line.split())
        sentences.append(
            f"{len(unread)} of its lines cannot be read; the first is line {number}, {first!r:.60}"
        )
    return "; ".join(sentences)


# Numbers as DeepSpeed's profiler prints them: `602.28 MMACs`, `1.05 M`, `200.99 us`.

POWERS = {"T": 12, "G": 9, "B": 9, "M": 6, "K": 3, "k": 3, "": 0, "m": -3, "u": -6}
"""Powers of ten by prefix; billions of parameters are B (`number_to_string` of deepspeed 0.19.8's
profiler.py)."""
PRINTED_UNITS = {"MACs": ("MACs", ""), "FLOP/s": ("FLOPS",), "s": ("s",), "%": ("%",)}
"""Text that follows the prefix for each unit; other units have none. Before 0.10, the summary's
MACs had only their prefix."""
HALF_OF_THE_LAST_DECIMAL = 0.005
"""Half of the last decimal of a figure; figures are printed with two decimals."""
PRINTED_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d\d?)?)\s*([TGBMKkmu]?)(MACs|FLOPS|s|%|)")


def amount(text: str, unit: str) -> float | None:
    """The number in a text like `602.28 MMACs`, an integer for a plain count; None where the text
    is no number in this unit."""
    match = PRINTED_NUMBER.fullmatch(text.strip())
    if match is None or match[3] not in PRINTED_UNITS.get(unit, ("",)):
        return None
    if not unit and text.strip().isdecimal():
        return int(text)
    return float(Decimal(match[1]).scaleb(POWERS[match[2]]))


def rounding(value: float | None) -> float:
    """Rounding error of a printed figure: it may be half of its last decimal away from the counted
    one, in the unit that was printed, such as 0.005 M for `1.05 M`."""
    if not value:
        return 0.0
    for power in (12, 9, 6, 3, 0, -3):
        unit = 10.0**power
        if value >= unit:
            return HALF_OF_THE_LAST_DECIMAL * unit
    return HALF_OF_THE_LAST_DECIMAL * 1e-6


# The parts of a report, each read from its lines; lines that belong to it but cannot be read go to
# `unread`.

LINES_BY_LABEL = {line.label: line for line in SUMMARY_LINES if line.label}
STEP_LINE = re.compile(r"(Profile Summary at step) (\S.*):")
SUMMARY_LINE = re.compile(r"(?P<label>.*\S):\s+(?P<value>\S.*)")
BACKWARD_FACTOR = re.compile(r"= ([\d.]+) \* fwd flops per gpu / bwd latency")


SIZES = ("world_size", "data_parallel_size", "model_parallel_size", "batch_size_per_gpu")
"""Keys of figures that are whole numbers above zero."""
NO_NUMBER = re.compile(r"(?:nan|[+-]?inf)\b.*", re.IGNORECASE)
"""Text of a quotient that Python could not compute."""


def _is_impossible(line: SummaryLine, text: str, value: float | None) -> bool:
    """Whether no run can have the figure of a line: it is below zero, NaN or infinite, a time of
    zero, or a size that is no whole number above zero.

    Args:
        value: the figure that `text` says; None where the text cannot be read.
    """
    if NO_NUMBER.fullmatch(text):
        return True
    if line.key in SIZES:
        return not isinstance(value, int) or value < 1
    if value is None:
        return False
    is_time_of_zero = value == 0 and line.unit == "s"
    return value < 0 or is_time_of_zero


def _read_summary(
    lines: Lines, unread: Lines, impossible: dict[str, str]
) -> tuple[Figures, dict[str, tuple[int, str]]]:
    """All figures of a summary; and number and label of each line that was read. Both are by key.

    Args:
        unread: receives the lines that cannot be read.
        impossible: receives the text of each figure that cannot be, by key; the figure is None.
    """
    figures: Figures = dict.fromkeys(FIGURES)
    lines_read: dict[str, tuple[int, str]] = {}
    for number, line in lines:
        # A line has its value after a colon, but that of the step before it: it is made alike.
        match = SUMMARY_LINE.fullmatch(STEP_LINE.sub(r"\1: \2", line.strip()))
        if match is None:
            continue
        label = _current_label(match["label"])
        # Some labels are told apart only by their formula, so the whole label is tried first.
        known_line = LINES_BY_LABEL.get(label) or LINES_BY_LABEL.get(_without_formula(label))
        if known_line is None or known_line.key in lines_read:
            unread.append((number, line))
            continue
        key = known_line.key
        number_and_label = (number, _without_formula(match["label"]))
        value = _summary_value(match["value"], known_line.unit)
        if _is_impossible(known_line, match["value"], value):
            impossible[key] = match["value"]
            lines_read[key] = number_and_label
        elif value is None:
            unread.append((number, line))
        else:
            figures[key] = value
            lines_read[key] = number_and_label
            # The line of the backward FLOP/s says in its formula how often a forward pass counts.
            factor = BACKWARD_FACTOR.search(label)
            if factor:
                figures["backward_factor"] = float(factor[1])
    return figures, lines_read


def _current_label(label: str) -> str:
    """A label as `LINES_BY_LABEL` has it: in lower case, and not as older versions, and copies of
    the profiler outside DeepSpeed, spell it."""
    return label.lower().replace("paralel", "parallel").replace("per device", "per gpu")


def _without_formula(label: str) -> str:
    return label.split(" = ")[0]


def _summary_value(text: str, unit: str) -> float | None:
    """The number in a line of the summary, or its truth value; None where the text is neither."""
    if text == "True":
        return True
    if text == "False":
        return False
    return amount(text, unit)


DEPTH_HEADING = re.compile(r"depth (\d+):")
TOP_FIGURES = {
    "params": ("parameters", "parameters"),
    "MACs": ("macs", "MACs"),
    "fwd latency": ("seconds", "s"),
}
"""Figure and unit, by label."""
TOP_CLASS = re.compile(r"'([^']+)': '([^']+)'")


def _read_depths(lines: Lines, unread: Lines) -> list[Depth]:
    """The top classes at each depth: `params`, `MACs` and `fwd latency`, each as
    `{'CLASS': 'FIGURE', ...}`.

    Args:
        unread: receives the tables that cannot be read, or only in part.
    """
    depths: list[Depth] = []
    for number, line in lines:
        text = line.strip()
        heading = DEPTH_HEADING.fullmatch(text)
        if heading:
            depths.append(Depth(number=number, depth=int(heading[1])))
            continue
        label, _, table = text.partition(" - ")
        top_figure = _top_figure(label)
        if top_figure is None:
            continue
        key, unit = top_figure
        amounts = {name: amount(figure, unit) for name, figure in TOP_CLASS.findall(table)}
        # A second table of the same figure belongs to another depth, whose heading is missing.
        is_first_of_figure = bool(depths) and not getattr(depths[-1], key)
        # Of a table that can be read in part, the part is used, and the line counts as unread.
        if is_first_of_figure:
            readable = {name: value for name, value in amounts.items() if value is not None}
            getattr(depths[-1], key).update(readable)
        is_complete = bool(amounts) and None not in amounts.values() and table.endswith("}")
        if not is_first_of_figure or not is_complete:
            unread.append((number, line))
    return depths


def _top_figure(label: str) -> tuple[str, str] | None:
    """Figure and unit of the table of top classes that has this label; None for any other line."""
    for beginning, figure_and_unit in TOP_FIGURES.items():
        if label.startswith(beginning):
            return figure_and_unit
    return None


MODULE = re.compile(
    r"(?:\((?P<name>[^)]*)\): )?(?:\d+ x )?(?P<class>[^\s()]+)\((?:(?P<leaf>.*)\))?"
)
MODULE_FIGURES = re.compile(
    r"(?P<parameters>[^=,]+?)(?: = |, )(?P<parameters_percent>[\d.e+-]+%) Params, "
    r"(?P<macs>[^=,]+?)(?: = |, )(?P<macs_percent>[\d.e+-]+%) MACs, "
    r"(?P<latency_seconds>[^=,]+?)(?: = |, )(?P<latency_percent>[\d.e+-]+%) (?:latency|time), "
    r"(?P<flops_per_second>[^,]+)(?:, ?(?P<details>.*))?"
)
"""Figures of a module. Before 0.10, a comma stood in place of the equals sign, and another after
the last figure."""
MODULE_FIGURE_UNITS = {
    "parameters": "parameters",
    "parameters_percent": "%",
    "macs": "MACs",
    "macs_percent": "%",
    "latency_seconds": "s",
    "latency_percent": "%",
    "flops_per_second": "FLOP/s",
}
ELIDED = "..."
"""Text that people write in place of modules that they leave out."""


class _OpenModule(NamedTuple):
    """A module whose closing bracket has not been reached."""

    indent: int
    module: Module


def _read_tree(lines: Lines, unread: Lines) -> tuple[Module | None, bool]:
    """The root of the tree, None where there is none, and whether all of it was read.

    The tree is printed as `print(model)` shows the model, with figures at each module. A module
    inside another one is indented more; a module without parts is on one line with its figures.

    Args:
        unread: receives the lines whose figures cannot be read.
    """
    root: Module | None = None
    open_modules: list[_OpenModule] = []
    # `unread` may hold lines of other parts already.
    unread_before = len(unread)
    is_closed = False
    for number, line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        # Modules that are indented as far, or further, have ended.
        open_modules = [outer for outer in open_modules if outer.indent < indent]
        if root is not None and not open_modules:
            # The root's own closing bracket, or a line that is no longer part of the tree.
            is_closed = text == ")"
            break
        match = MODULE.fullmatch(text)
        if root is None and not _is_root(match):
            continue
        # The figures of a module that has parts are on lines of their own, within it.
        figures_text = text
        if match:
            module = _add_module(match, number, indent, open_modules)
            root = root or module
            figures_text = match["leaf"] or ""
        if not _stands_for_figures(figures_text):
            continue
        # On a line of their own, they are figures of the last module that began. There is one: the
        # lines before the root were skipped.
        could_be_read = _take_figures(module, figures_text)
        if not could_be_read:
            unread.append((number, line))
    if root is None:
        return None, False
    is_whole = is_closed and len(unread) == unread_before
    # Only a name such as `0-5` stands for several modules, and the root has none.
    (expanded_root,) = _expanded(root)
    return expanded_root, is_whole


def _is_root(match: re.Match[str] | None) -> bool:
    """Whether a line, by its match with `MODULE`, is that of the root, which has no name."""
    return match is not None and not match["name"]


def _add_module(
    match: re.Match[str], number: int, indent: int, open_modules: list[_OpenModule]
) -> Module:
    """Make the module of a line and add it to the innermost open one; it is the last of
    `open_modules` now unless it is a leaf."""
    module = Module(number=number, name=match["name"] or "", class_name=match["class"])
    if open_modules:
        open_modules[-1].module.children.append(module)
    if match["leaf"] is None:
        open_modules.append(_OpenModule(indent, module))
    return module


def _stands_for_figures(text: str) -> bool:
    """Whether a text has the figures of a module, or was written in their place."""
    return "Params" in text or ELIDED in text


def _take_figures(module: Module, text: str) -> bool:
    """Give a module the figures and details in a text; False, and nothing is changed, where they
    cannot be read, or where the module already has some."""
    match = MODULE_FIGURES.fullmatch(text)
    if match is None or module.parameters is not None:
        return False
    figures = {key: amount(match[key], unit) for key, unit in MODULE_FIGURE_UNITS.items()}
    if None in figures.values():
        return False
    for key, figure in figures.items():
        setattr(module, key, figure)
    module.details = _read_details(module.class_name, match["details"] or "")
    return True


def _expanded(module: Module) -> list[Module]:
    """The module, or copies of it where torch has printed equal modules of a list only once,
    `(0-5): 6 x T5Block(...)`; modules below it are expanded in place."""
    children = []
    for child in module.children:
        children += _expanded(child)
    module.children = children
    numbers = re.fullmatch(r"(\d+)-(\d+)", module.name)
    if numbers is None:
        return [module]
    copies = []
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        copy = deepcopy(module)
        copy.name = str(number)
        copies.append(copy)
    return copies


EMBEDDING = ("rows", "dimension")
"""Names of the two sizes of an embedding in `Module.details`."""
UNNAMED_DETAILS = {"Embedding": EMBEDDING, "LayerNorm": ("normalized_shape",)}
"""Names of the values that a class prints without a name."""
DETAIL = re.compile(r"(?:[^,(\[]|\([^)]*\)|\[[^\]]*\])+")
"""Matches one detail: text up to a comma that is outside of brackets."""


def _read_details(class_name: str, text: str) -> dict[str, object]:
    """What a class prints after its figures, such as `in_features=128, bias=False`, by name.

    A value that is printed without a name gets the one that `UNNAMED_DETAILS` has for its position,
    or else the position itself, from 0.
    """
    details: dict[str, object] = {}
    names = UNNAMED_DETAILS.get(class_name.rpartition(".")[2], ())
    for position, untrimmed in enumerate(DETAIL.findall(text)):
        detail = untrimmed.strip()
        name, equals, value = detail.partition("=")
        has_name = equals and name.isidentifier()
        if not has_name:
            name = names[position] if position < len(names) else str(position)
            value = detail
        details[name] = _literal(value)
    return details


def _literal(text: str) -> object:
    """A number, a truth value or a tuple that is written as in Python; any other text as it is."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    if isinstance(value, int | float | tuple):
        return value
    return text
