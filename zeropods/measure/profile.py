"""Read a report of DeepSpeed's flops profiler into numbers: whatever of it is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    """The text before the value, in lower case and without the formula, which differs between versions."""
    unit: str
    """Unit of the figure; empty for a count."""
    meaning: str


FIGURES = {row[0]: SummaryLine(*row) for row in (
    ("step", "profile summary at step", "", "number of the profiled step, counted from 1"),
    ("world_size", "world size", "", "processes of the run, one per GPU"),
    ("data_parallel_size", "data parallel size", "", "processes that each work on their own rows"),
    ("model_parallel_size", "model parallel size", "",
     "processes that one copy of the model is split across; ZeRO does not split it, it shards"),
    ("batch_size_per_gpu", "batch size per gpu", "", "rows of one forward pass of one process"),
    ("expert_tensor_parallelism", "expert tensor parallelism enabled", "",
     "whether the experts of a mixture are split across processes as well"),
    ("parameters_per_gpu", "params per gpu", "parameters", "parameters held by this process, tied ones counted once"),
    ("model_parameters", "params of model", "parameters",
     "the line above x model parallel size; just as wrong under ZeRO-3"),
    ("non_expert_parameters", "non-expert params of model", "parameters", "parameters outside a mixture's experts"),
    ("expert_parameters", "expert params of model", "parameters", "parameters of all experts of a mixture"),
    ("forward_macs", "fwd macs per gpu", "MACs",
     "multiply-adds of one forward pass; attention, layers and output, padding included"),
    ("forward_flops", "fwd flops per gpu", "FLOPs",
     "two per multiply-add, plus all work that is not a product (activations, sums, norms)"),
    ("model_forward_flops", "fwd flops of model", "FLOPs", "the line above x model parallel size"),
    ("forward_seconds", "fwd latency", "s",
     "wall time of one forward pass, with the profiler's own stops at each module"),
    # Its first words are those of the forward FLOPs: only the formula tells the two lines apart.
    ("forward_flops_per_second", "fwd flops per gpu = fwd flops per gpu / fwd latency", "FLOP/s",
     "forward FLOPs / forward time"),
    ("backward_factor", "", "", "a backward pass is assumed to cost this many forward passes"),
    ("backward_seconds", "bwd latency", "s", "wall time of the backward pass, including the exchange of gradients"),
    ("backward_flops_per_second", "bwd flops per gpu", "FLOP/s",
     "twice the forward FLOPs / backward time: an assumption, nothing is counted here"),
    ("forward_backward_flops_per_second", "fwd+bwd flops per gpu", "FLOP/s",
     "three times the forward FLOPs / both times"),
    ("step_seconds", "step latency", "s",
     "wall time of the optimizer's step; with ZeRO, including the exchange of parameters"),
    ("iteration_seconds", "iter latency", "s", "forward + backward + step; excluding data loading and logging"),
    ("flops_per_second", "flops per gpu", "FLOP/s", "three times the forward FLOPs / the line above"),
    ("samples_per_second", "samples/second", "samples/s", "rows of all processes / the line above"),
)}  # fmt: skip
"""Lines of the summary by key. Times are rank 0's: one forward pass, one backward pass, one step of the optimizer."""
ALWAYS_THERE = ("parameters_per_gpu", "forward_macs", "forward_flops", "forward_seconds", "forward_flops_per_second")
"""Keys of the lines that a report has for every model, with an engine or without."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The top classes of modules at one depth of the tree, the root being 0."""

    number: int
    """Number of its line in the file."""
    depth: int
    parameters: dict[str, float] = field(default_factory=dict)
    macs: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Module:
    """One module of the tree with everything below it; figures are None for one that runs nothing (`ModuleList`)."""

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
    """What the class prints about itself: `in_features`, `out_features`; for an embedding `rows` and `dimension`."""
    children: list[Module] = field(default_factory=list)

    def walk(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the module and all modules below it with their dotted paths, a parent before its children."""
        yield path, self
        for child in self.children:
            yield from child.walk(f"{path}.{child.name}" if path else child.name)

    def total(self, figure: str) -> float:
        """Its `parameters`, `macs` or `latency_seconds`; the sum over its children where it has none of its own."""
        own = getattr(self, figure)
        return own if own is not None else sum(child.total(figure) for child in self.children)

    @property
    def linear(self) -> tuple[int, int] | None:
        """(in, out) features of a linear layer; None for anything else."""
        return self.sizes("in_features", "out_features")

    def sizes(self, first: str, second: str) -> tuple[int, int] | None:
        """Two whole numbers of `details`, such as an embedding's `rows` and `dimension`; None unless both are there."""
        one, two = self.details.get(first), self.details.get(second)
        return (one, two) if isinstance(one, int) and isinstance(two, int) else None

    @property
    def tokens(self) -> float | None:
        """Number of tokens that a linear layer was given: its MACs / (in x out); None for anything else."""
        size = self.linear
        return self.macs / (size[0] * size[1]) if size is not None and all(size) and self.macs else None

    def to_json(self, depth: int | None = None) -> dict[str, object]:
        """The tree as plain values, down to a depth, or all of it if `depth` is None."""
        below = () if depth == 0 else self.children
        return {**vars(self), "children": [child.to_json(None if depth is None else depth - 1) for child in below]}


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report of a file."""

    path: Path
    number: int
    """Line number of its heading; the first line of the file is 1."""
    reports: int
    """Number of reports in the file; this one is the last."""
    text: str
    """This report alone, as it was printed."""
    summary: Figures
    lines: dict[str, tuple[int, str]]
    """Line number and label, without its formula, of each line of the summary that was read, by key."""
    depths: list[Depth]
    root: Module | None
    """The tree of modules; None where the report has no detailed part (`"detailed": false`)."""
    tree_is_whole: bool
    """Whether all modules were read: figures of a tree that is cut off do not add up."""
    missing: str
    """What this report lacks, or what of it could not be read, in one line; empty where the report is complete."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Text of each figure of the summary that cannot be, such as a time below zero, by key; the summary has None."""


# Read a report from a file: one of its own, a log that contains one, or text that was copied from a page.

HEADING = re.compile(r"(?P<prefix>.*?)-+ DeepSpeed Flops Profiler -+\s*")
"""Heading of a report, with the `prefix` that pdsh or a logger puts before every line (`pod1: `)."""
PART = re.compile(r"-+ (aggregated|detailed) profile per gpu -+")
END = re.compile(r"-{40,}")

Lines = list[tuple[int, str]]
"""Lines of a part of a report, with their numbers in the file."""


def read_report(path: Path) -> Report:
    """The report in a file, or in the `profile.txt` of a run folder; the last one where the file has several.

    A file has several reports where the profiler writes to a log, or where gradients are accumulated: then the last
    one is that of the pass that the optimizer's step follows.

    Raises:
        UserError: there is no report in the file, or nothing but its heading.
    """
    path = Path(path)
    path = path / "profile.txt" if path.is_dir() else path
    if not path.is_file():
        remedy = "give a report's file, or the folder of a run with a configuration such as dsconfig/zero1profiler.json"
        raise UserError(f"{path}: {no_file(path)}; {remedy}")
    return parse_report(path, path.read_text(encoding="utf-8", errors="replace"))


def parse_report(path: Path, text: str) -> Report:
    """The last report of a text that was read from `path`."""
    lines = text.splitlines()
    headings = [(number, match["prefix"]) for number, line in enumerate(lines, 1) if (match := HEADING.fullmatch(line))]
    if not headings:
        raise UserError(f"{path}:1: no '--- DeepSpeed Flops Profiler ---' in {len(lines)} lines; give a profile.txt")
    start, prefix = headings[-1]
    parts: dict[str, Lines] = {"summary": [], "aggregated": [], "detailed": []}
    part, own, has_end = parts["summary"], list[str](), False
    for number, line in enumerate(lines[start - 1 :], start):
        # Lines of a log that have another source are left out.
        if prefix.strip() and not line.startswith(prefix):
            continue
        own.append(line.removeprefix(prefix))
        if has_end := END.fullmatch(own[-1].strip()) is not None:
            break
        if heading := PART.fullmatch(own[-1].strip().lower()):
            part = parts[heading[1]]
        elif own[-1].strip():
            part.append((number, own[-1]))
    unread: Lines = []
    impossible: dict[str, str] = {}
    summary, found = _read_summary(parts["summary"], unread, impossible)
    depths = _read_depths(parts["aggregated"], unread)
    root, is_whole = _read_tree(parts["detailed"], unread)
    if not (found.keys() - {"step"} or depths or root):
        remedy = "give the report exactly as DeepSpeed printed it"
        raise UserError(f"{path}:{start}: there is a heading but no figure below it; {remedy}")
    # Without the closing line, it is unknown whether the report was to have a tree.
    there = {
        "the part by depth": depths,
        "a part of the tree": is_whole or root is None,
        "the tree of modules": has_end or root,
        "the closing line of dashes": has_end,
    }
    absent = [FIGURES[key].label for key in ALWAYS_THERE if key not in found]
    absent += [name for name, is_there in there.items() if not is_there]
    missing = [f"it lacks {', '.join(absent)}"] if absent else []
    if unread:
        number, line = unread[0]
        first = f"line {number}, {' '.join(line.split())!r:.60}"
        missing += [f"{len(unread)} of its lines cannot be read; the first is {first}"]
    return Report(
        path=path,
        number=start,
        reports=len(headings),
        text="\n".join(own),
        summary=summary,
        lines=found,
        depths=depths,
        root=root,
        tree_is_whole=is_whole,
        missing="; ".join(missing),
        impossible=impossible,
    )


# Numbers as DeepSpeed's profiler prints them: `602.28 MMACs`, `1.05 M`, `200.99 us`.

POWERS = {"T": 12, "G": 9, "B": 9, "M": 6, "K": 3, "k": 3, "": 0, "m": -3, "u": -6}
"""Powers of ten by prefix; billions of parameters are B (`number_to_string` of deepspeed 0.19.8's profiler.py)."""
PRINTED = {"MACs": ("MACs", ""), "FLOP/s": ("FLOPS",), "s": ("s",), "%": ("%",)}
"""Text that follows the prefix for each unit; other units have none. Before 0.10, the summary's MACs had only their
prefix."""
HALF_OF_THE_LAST_DECIMAL = 0.005
"""Half of the last decimal of a figure; figures are printed with two decimals."""
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d\d?)?)\s*([TGBMKkmu]?)(MACs|FLOPS|s|%|)")


def amount(text: str, unit: str) -> float | None:
    """The number in a text like `602.28 MMACs`, an integer for a plain count; None where it is not one in this unit."""
    match = NUMBER.fullmatch(text.strip())
    if match is None or match[3] not in PRINTED.get(unit, ("",)):
        return None
    if not unit and text.strip().isdecimal():
        return int(text)
    return float(Decimal(match[1]).scaleb(POWERS[match[2]]))


def rounding(value: float | None) -> float:
    """How far a printed figure may be from the counted one: half of its last decimal, in the unit that was printed."""
    if not value:
        return 0.0
    unit = next((10.0**power for power in (12, 9, 6, 3, 0, -3) if value >= 10.0**power), 1e-6)
    return HALF_OF_THE_LAST_DECIMAL * unit


# The parts of a report, each read from its lines; lines that belong to it but cannot be read go to `unread`.

LABELS = {figure.label: figure for figure in FIGURES.values() if figure.label}
STEP = re.compile(r"(Profile Summary at step) (\S.*):")
SUMMARY_LINE = re.compile(r"(?P<label>.*\S):\s+(?P<value>\S.*)")
FACTOR = re.compile(r"= ([\d.]+) \* fwd flops per gpu / bwd latency")


SIZES = ("world_size", "data_parallel_size", "model_parallel_size", "batch_size_per_gpu")
"""Keys of figures that are whole numbers above zero."""
NO_NUMBER = re.compile(r"(?:nan|[+-]?inf)\b.*", re.IGNORECASE)
"""Text of a quotient that Python could not compute."""


def _is_impossible(figure: SummaryLine, text: str, value: float | None) -> bool:
    """Whether a figure in its place cannot be: below zero, a time of zero, a size that is no whole number."""
    if NO_NUMBER.fullmatch(text):
        return True
    if figure.key in SIZES:
        return not isinstance(value, int) or value < 1
    if value is None:
        return False
    return value < 0 or (value == 0 and figure.unit == "s")


def _read_summary(
    lines: Lines, unread: Lines, impossible: dict[str, str]
) -> tuple[Figures, dict[str, tuple[int, str]]]:
    """All figures, one per line after its label; and number and label of each line that was read, both by key.

    Args:
        impossible: receives the text of each figure that cannot be, by key; its value is None.
    """
    values: Figures = dict.fromkeys(FIGURES)
    found: dict[str, tuple[int, str]] = {}
    for number, line in lines:
        match = SUMMARY_LINE.fullmatch(STEP.sub(r"\1: \2", line.strip()))
        if match is None:
            continue
        # Older versions, and copies of the profiler outside DeepSpeed, spell some labels differently.
        label = match["label"].lower().replace("paralel", "parallel").replace("per device", "per gpu")
        figure = LABELS.get(label) or LABELS.get(label.split(" = ")[0])
        value = amount(match["value"], figure.unit) if figure else None
        value = {"True": True, "False": False}.get(match["value"], value)
        if figure is not None and figure.key not in found and _is_impossible(figure, match["value"], value):
            impossible[figure.key] = match["value"]
            found[figure.key] = (number, match["label"].split(" = ")[0])
            continue
        if figure is None or figure.key in found or value is None:
            unread.append((number, line))
            continue
        values[figure.key], found[figure.key] = value, (number, match["label"].split(" = ")[0])
        if factor := FACTOR.search(label):
            values["backward_factor"] = float(factor[1])
    return values, found


DEPTH = re.compile(r"depth (\d+):")
TOPS = {"params": ("parameters", "parameters"), "MACs": ("macs", "MACs"), "fwd latency": ("seconds", "s")}
"""Figure and unit, by label."""
PAIR = re.compile(r"'([^']+)': '([^']+)'")


def _read_depths(lines: Lines, unread: Lines) -> list[Depth]:
    """The top classes at each depth: `params`, `MACs` and `fwd latency`, each as `{'CLASS': 'FIGURE', ...}`."""
    found: list[Depth] = []
    for number, line in lines:
        label, _, figures = line.strip().partition(" - ")
        if heading := DEPTH.fullmatch(line.strip()):
            found.append(Depth(number=number, depth=int(heading[1])))
        elif (top_of := next((each for each in TOPS if label.startswith(each)), None)) is not None:
            key, unit = TOPS[top_of]
            tops = {name: amount(figure, unit) for name, figure in PAIR.findall(figures)}
            # A second table for a figure belongs to another depth, whose heading is missing.
            is_odd = not found or bool(getattr(found[-1], key))
            if found and not is_odd:
                getattr(found[-1], key).update({name: top for name, top in tops.items() if top is not None})
            if is_odd or not tops or None in tops.values() or not figures.endswith("}"):
                unread.append((number, line))
    return found


MODULE = re.compile(r"(?:\((?P<name>[^)]*)\): )?(?:\d+ x )?(?P<class>[^\s()]+)\((?:(?P<leaf>.*)\))?")
MODULE_FIGURES = re.compile(
    r"(?P<parameters>[^=,]+?)(?: = |, )(?P<parameters_percent>[\d.e+-]+%) Params, "
    r"(?P<macs>[^=,]+?)(?: = |, )(?P<macs_percent>[\d.e+-]+%) MACs, "
    r"(?P<latency_seconds>[^=,]+?)(?: = |, )(?P<latency_percent>[\d.e+-]+%) (?:latency|time), "
    r"(?P<flops_per_second>[^,]+)(?:, ?(?P<details>.*))?"
)
"""Figures of a module. Before 0.10, a comma stood in place of the equals sign, and another after the last figure."""
MODULE_UNITS = {
    "parameters": "parameters", "parameters_percent": "%", "macs": "MACs", "macs_percent": "%",
    "latency_seconds": "s", "latency_percent": "%", "flops_per_second": "FLOP/s",
}  # fmt: skip
ELIDED = "..."
"""Text that people write in place of modules that they leave out."""


def _read_tree(lines: Lines, unread: Lines) -> tuple[Module | None, bool]:
    """The model as `print(model)` shows it, with figures at each module, and whether all of it was read.

    A module inside another one is indented more; a module without parts is on one line with its figures.
    """
    root: Module | None = None
    inside: list[tuple[int, Module]] = []
    unread_before = len(unread)
    for number, line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        inside = [each for each in inside if each[0] < indent]
        if root is not None and not inside:
            # The root's own closing bracket, or a line that is no longer part of the tree.
            return _expanded(root)[0], text == ")" and len(unread) == unread_before
        match = MODULE.fullmatch(text)
        if match and (inside or not match["name"]):
            last = Module(number=number, name=match["name"] or "", class_name=match["class"])
            if inside:
                inside[-1][1].children.append(last)
            if match["leaf"] is None:
                inside.append((indent, last))
            root, text = root or last, match["leaf"] or ""
        if root is None or not ("Params" in text or ELIDED in text):
            continue
        figures = MODULE_FIGURES.fullmatch(text)
        read = {key: amount(figures[key], unit) if figures else None for key, unit in MODULE_UNITS.items()}
        if figures is None or None in read.values() or last.parameters is not None:
            unread.append((number, line))
        else:
            vars(last).update(read, details=_read_details(last.class_name, figures["details"] or ""))
    return root and _expanded(root)[0], False


def _expanded(module: Module) -> list[Module]:
    """The module, or several where torch has printed equal modules of a list only once, `(0-5): 6 x T5Block(...)`."""
    module.children = [each for child in module.children for each in _expanded(child)]
    numbers = re.fullmatch(r"(\d+)-(\d+)", module.name)
    if numbers is None:
        return [module]
    several = [deepcopy(module) for _ in range(int(numbers[1]), int(numbers[2]) + 1)]
    for number, each in enumerate(several, int(numbers[1])):
        each.name = str(number)
    return several


EMBEDDING = ("rows", "dimension")
POSITIONS = {"Embedding": EMBEDDING, "LayerNorm": ("normalized_shape",)}
"""Names of the values that a class prints without a name."""
DETAIL = re.compile(r"(?:[^,(\[]|\([^)]*\)|\[[^\]]*\])+")


def _read_details(class_name: str, text: str) -> dict[str, object]:
    """What a class prints after its figures, `in_features=128, bias=False`; unnamed values are numbered from 0."""
    details: dict[str, object] = {}
    names = POSITIONS.get(class_name.rpartition(".")[2], ())
    for position, part in enumerate(part.strip() for part in DETAIL.findall(text)):
        name, equals, value = part.partition("=")
        if not (equals and name.isidentifier()):
            name, value = names[position] if position < len(names) else str(position), part
        try:
            read = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            read = value
        details[name] = read if isinstance(read, (int, float, tuple)) else value
    return details
