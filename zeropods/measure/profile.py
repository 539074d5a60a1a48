"""A report of DeepSpeed's flops profiler, read into numbers: whatever of it is whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import isfinite
from pathlib import Path

from zeropods.errors import UserError

Figures = dict[str, float | None]
"""Figures of a summary by the keys of `FIGURES`; None where there is none."""


@dataclass(frozen=True)
class SummaryLine:
    """A line of the summary, and what its figure means."""

    key: str
    label: str
    """What stands before the value, in small letters and without the formula, which differs between versions."""
    unit: str
    """One of `UNITS`; nothing for a count."""
    meaning: str


FIGURES = (
    SummaryLine("step", "", "", "number of the profiled step, counted from 1"),
    SummaryLine("world_size", "world size", "", "processes of the run, one per GPU"),
    SummaryLine("data_parallel_size", "data parallel size", "", "processes that each work on rows of their own"),
    SummaryLine("model_parallel_size", "model parallel size", "",
                "processes that one copy of the model is cut over; ZeRO cuts none, it shards"),
    SummaryLine("batch_size_per_gpu", "batch size per gpu", "", "rows of one forward pass of one process"),
    SummaryLine("expert_tensor_parallelism", "expert tensor parallelism enabled", "",
                "whether the experts of a mixture are cut over processes as well"),
    SummaryLine("parameters_per_gpu", "params per gpu", "parameters",
                "parameters that this process holds, tied ones once"),
    SummaryLine("model_parameters", "params of model", "parameters",
                "the line above x model parallel size; under ZeRO-3 as wrong as that"),
    SummaryLine("non_expert_parameters", "non-expert params of model", "parameters",
                "parameters outside a mixture's experts"),
    SummaryLine("expert_parameters", "expert params of model", "parameters", "parameters of all experts of a mixture"),
    SummaryLine("forward_macs", "fwd macs per gpu", "MACs",
                "multiply-adds of one forward pass; attention, layers and output, padding included"),
    SummaryLine("forward_flops", "fwd flops per gpu", "FLOPs",
                "a multiply-add is two, and the work that is no product (activations, sums, norms) comes on top"),
    SummaryLine("model_forward_flops", "fwd flops of model", "FLOPs", "the line above x model parallel size"),
    SummaryLine("forward_seconds", "fwd latency", "s",
                "wall time of one forward pass, with the profiler's own stops at each module"),
    # Its first words are those of the forward FLOPs: only the formula tells the two lines apart.
    SummaryLine("forward_flops_per_second", "fwd flops per gpu = fwd flops per gpu / fwd latency", "FLOP/s",
                "forward FLOPs / forward time"),
    SummaryLine("backward_factor", "", "", "a backward pass is taken for so many forward ones"),
    SummaryLine("backward_seconds", "bwd latency", "s",
                "wall time of the backward pass, the exchange of gradients included"),
    SummaryLine("backward_flops_per_second", "bwd flops per gpu", "FLOP/s",
                "twice the forward FLOPs / backward time: an assumption, nothing is counted here"),
    SummaryLine("forward_backward_flops_per_second", "fwd+bwd flops per gpu", "FLOP/s",
                "three times the forward FLOPs / both times"),
    SummaryLine("step_seconds", "step latency", "s",
                "wall time of the optimizer's step; with ZeRO the exchange of parameters is in it"),
    SummaryLine("iteration_seconds", "iter latency", "s",
                "forward + backward + step; loading data and logging are not in it"),
    SummaryLine("flops_per_second", "flops per gpu", "FLOP/s", "three times the forward FLOPs / the line above"),
    SummaryLine("samples_per_second", "samples/second", "samples/s", "rows of all processes / the line above"),
)  # fmt: skip
"""The summary, line by line. Times are of rank 0: one forward pass, one backward pass, one step of the optimizer."""
ALWAYS_THERE = ("parameters_per_gpu", "forward_macs", "forward_flops", "forward_seconds", "forward_flops_per_second")
"""What a report has of every model, with an engine or without."""


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
    """Its name as its parent calls it; empty for the root."""
    class_name: str
    parameters: float | None = None
    parameters_percent: float | None = None
    macs: float | None = None
    macs_percent: float | None = None
    latency_seconds: float | None = None
    latency_percent: float | None = None
    flops_per_second: float | None = None
    details: dict[str, object] = field(default_factory=dict)
    """What the class says of itself: `in_features`, `out_features`; of an embedding `rows` and `dimension`."""
    children: list[Module] = field(default_factory=list)

    def walk(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Itself and all modules below it with their dotted paths, a parent before its children."""
        yield path, self
        for child in self.children:
            yield from child.walk(f"{path}.{child.name}" if path else child.name)

    def total(self, figure: str) -> float:
        """`parameters`, `macs` or `latency_seconds`; the sum of its children where it has none of its own."""
        own = getattr(self, figure)
        return own if own is not None else sum(child.total(figure) for child in self.children)

    @property
    def linear(self) -> tuple[int, int] | None:
        """(in, out) features of a linear layer; None for anything else."""
        return self._sizes("in_features", "out_features")

    @property
    def embedding(self) -> tuple[int, int] | None:
        """(rows, dimension) of an embedding; None for anything else."""
        return self._sizes("rows", "dimension")

    @property
    def parameters_by_size(self) -> int | None:
        """Parameters of a linear layer (in x out, and out more with a bias) or an embedding (rows x dimension)."""
        if self.linear is not None:
            return self.linear[0] * self.linear[1] + (self.linear[1] if self.details.get("bias") else 0)
        return self.embedding[0] * self.embedding[1] if self.embedding is not None else None

    @property
    def tokens(self) -> float | None:
        """Tokens that a linear layer was given, by its MACs / (in x out); None for anything else."""
        size = self.linear
        return self.macs / (size[0] * size[1]) if size is not None and all(size) and self.macs else None

    def to_json(self, depth: int | None = None) -> dict[str, object]:
        """Plain values, down to a depth, all of it if None."""
        below = () if depth == 0 else self.children
        return {**vars(self), "children": [child.to_json(None if depth is None else depth - 1) for child in below]}

    def _sizes(self, first: str, second: str) -> tuple[int, int] | None:
        one, two = self.details.get(first), self.details.get(second)
        return (one, two) if isinstance(one, int) and isinstance(two, int) else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report of a file."""

    path: Path
    number: int
    """Line of its heading, the first of the file being 1."""
    reports: int
    """How many the file holds; this is the last."""
    text: str
    """This report alone, as it was printed."""
    summary: Figures
    lines: dict[str, tuple[int, str]]
    """Number and label, without its formula, of each line of the summary that was read, by key."""
    depths: tuple[Depth, ...]
    root: Module | None
    """None where the report has no detailed part (`"detailed": false`)."""
    tree_is_whole: bool
    """Whether all modules were read: figures of a tree that is cut off do not sum up."""
    missing: str
    """What a whole report would have, or could not be read, in one line; empty where it is whole."""

    def line_of(self, key: str) -> int:
        """Number of the line that gives a figure of the summary; of the step if it has none."""
        return self.lines[key][0] if key in self.lines else self.number + 1


# Read a report from a file: its own, a log that holds one, or what was copied from a page.

HEADING = re.compile(r"(?P<prefix>.*?)-+ DeepSpeed Flops Profiler -+\s*")
"""Before it what pdsh or a logger puts before every line (`pod1: `)."""
AGGREGATED = re.compile(r"-+ Aggregated Profile per GPU -+", re.IGNORECASE)
DETAILED = re.compile(r"-+ Detailed Profile per GPU -+", re.IGNORECASE)
END = re.compile(r"-{40,}")


def read_report(path: Path) -> Report:
    """The report of a file, of a run folder its `profile.txt`; the last one where the file holds several.

    A file holds several where the profiler writes to a log, or where gradients are accumulated: there the last is
    that of the pass which the optimizer's step follows.

    Raises:
        UserError: there is no report in it, or nothing but its heading.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path}: not there; give a report's file or a run folder, as notebook 03_train_pods makes them"
        )
    path = path / "profile.txt" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path}: not there; train with a profiled configuration, such as dsconfig/zero1profiler.json")
    return parse_report(path, path.read_text(encoding="utf-8", errors="replace"))


def parse_report(path: Path, text: str) -> Report:
    """The last report of a text that was read from `path`."""
    lines = text.splitlines()
    headings = [(number, match["prefix"]) for number, line in enumerate(lines, 1) if (match := HEADING.fullmatch(line))]
    if not headings:
        raise UserError(f"{path}:1: no '--- DeepSpeed Flops Profiler ---' in {len(lines)} lines; give a profile.txt")
    start, prefix = headings[-1]
    summary, depths, tree = _Summary(), _Depths(), _Tree()
    part: _Summary | _Depths | _Tree = summary
    own, unread, has_end = list[str](), list[str](), False
    for number, line in enumerate(lines[start - 1 :], start):
        # Lines of others in a log are left out.
        if prefix.strip() and not line.startswith(prefix):
            continue
        own.append(line.removeprefix(prefix))
        text = own[-1].strip()
        if has_end := END.fullmatch(text) is not None:
            break
        if AGGREGATED.fullmatch(text):
            part = depths
        elif DETAILED.fullmatch(text):
            part = tree
        elif text and not part.take(number, own[-1]):
            unread.append(f"line {number}, {' '.join(text.split())!r:.60}")
    if not (summary.lines or depths.found or tree.root):
        raise UserError(f"{path}:{start}: a heading and no figure below it; give the report as DeepSpeed printed it")
    said = [_lacks(summary, depths, tree, has_end)]
    said += [f"{len(unread)} of its lines cannot be read, the first is {unread[0]}"] if unread else []
    return Report(
        path=path,
        number=start,
        reports=len(headings),
        text="\n".join(own),
        summary={each.key: summary.values.get(each.key) for each in FIGURES},
        lines=summary.lines,
        depths=tuple(depths.found),
        root=_expanded(tree.root)[0] if tree.root else None,
        tree_is_whole=tree.is_whole,
        missing="; ".join(filter(None, said)),
    )


def _lacks(summary: _Summary, depths: _Depths, tree: _Tree, has_end: bool) -> str:
    absent = [each.label for each in FIGURES if each.key in ALWAYS_THERE and each.key not in summary.lines]
    absent += [] if depths.found else ["the part by depth"]
    if tree.root is not None and not tree.is_whole:
        absent.append("a part of the tree")
    # Without the closing line nobody knows whether there was to be a tree.
    absent += [] if has_end or tree.root else ["the tree of modules"]
    absent += [] if has_end else ["the closing line of dashes"]
    return f"it lacks {', '.join(absent)}" if absent else ""


# Numbers as DeepSpeed's profiler prints them: `602.28 MMACs`, `1.05 M`, `200.99 us`.

LARGE = {"T": 12, "G": 9, "M": 6, "K": 3, "k": 3, "": 0}
PREFIXES = LARGE | {"m": -3, "u": -6}
UNITS = {
    # Billions of parameters are B, never G. Before 0.10 MACs of the summary have their prefix alone.
    "parameters": {"T": 12, "B": 9, "M": 6, "K": 3, "k": 3, "": 0},
    "MACs": {f"{prefix}MACs": power for prefix, power in LARGE.items()} | {"T": 12, "G": 9, "M": 6, "K": 3},
    "FLOPs": LARGE,
    "FLOP/s": {f"{prefix}FLOPS": power for prefix, power in PREFIXES.items()},
    "s": {f"{prefix}s": power for prefix, power in PREFIXES.items()},
    "samples/s": {"": 0},
    "": {"": 0},
    "%": {"%": 0},
}
"""How each unit is printed, as powers of ten (`number_to_string` of deepspeed 0.19.8's profiler.py)."""
HALF_OF_THE_LAST_DECIMAL = 0.005
"""Figures are printed with two."""
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?)\s*(\S*)", re.IGNORECASE)


def amount(text: str, unit: str) -> float | None:
    """The number of such as `602.28 MMACs`, whole where it is a count; None where it is none in this unit."""
    match = NUMBER.fullmatch(text.strip())
    power = UNITS[unit].get(match[2]) if match else None
    if match is None or power is None:
        return None
    if not unit and match[1].isdecimal():
        return int(match[1])
    value = float(Decimal(match[1]).scaleb(power))
    return value if isfinite(value) else None


def rounding(value: float | None) -> float:
    """How far a figure may be from the counted one: half of its last decimal, in the unit that it was printed with."""
    if not value:
        return 0.0
    unit = next((10.0**power for power in (12, 9, 6, 3, 0, -3) if value >= 10.0**power), 1e-6)
    return HALF_OF_THE_LAST_DECIMAL * unit


# The parts of a report. Each takes one line after the other, and answers False to one that belongs to it and cannot be
# read.

LABELS = {figure.label: figure for figure in FIGURES if figure.label}
STEP = re.compile(r"Profile Summary at step (\d+):")
SUMMARY_LINE = re.compile(r"(?P<label>.*\S):\s+(?P<value>\S.*)")
FACTOR = re.compile(r"= ([\d.]+) \* fwd flops per gpu / bwd latency")


class _Summary:
    """One figure a line, behind its label."""

    def __init__(self) -> None:
        self.values: Figures = {}
        self.lines: dict[str, tuple[int, str]] = {}

    def take(self, number: int, line: str) -> bool:
        match = SUMMARY_LINE.fullmatch(line.strip())
        if match is None:
            step = STEP.fullmatch(line.strip())
            self.values |= {"step": int(step[1])} if step else {}
            return step is not None or not line.startswith("Profile Summary")
        # As older versions, and copies of the profiler outside DeepSpeed, spell them.
        label = match["label"].lower().replace("paralel", "parallel").replace("per device", "per gpu")
        figure = LABELS.get(label) or LABELS.get(label.split(" = ")[0])
        if figure is None or figure.key in self.lines:
            return False
        value = {"True": True, "False": False}.get(match["value"], amount(match["value"], figure.unit))
        if value is None:
            return False
        self.values[figure.key], self.lines[figure.key] = value, (number, match["label"].split(" = ")[0])
        if factor := FACTOR.search(label):
            self.values["backward_factor"] = float(factor[1])
        return True


DEPTH = re.compile(r"depth (\d+):")
ROW = re.compile(r"(params|MACs|fwd latency) +- +\{(.*)\}")
PAIR = re.compile(r"'([^']+)': '([^']+)'")


class _Depths:
    """The top classes at each depth: `params`, `MACs` and `fwd latency`, each as `{'CLASS': 'FIGURE', ...}`."""

    def __init__(self) -> None:
        self.found: list[Depth] = []

    def take(self, number: int, line: str) -> bool:
        text = line.strip()
        if heading := DEPTH.fullmatch(text):
            self.found.append(Depth(number=number, depth=int(heading[1])))
            return True
        row = ROW.fullmatch(text)
        if row is None or not self.found:
            return not text.startswith(("params ", "MACs ", "fwd latency "))
        last = self.found[-1]
        table, unit = {
            "params": (last.parameters, "parameters"), "MACs": (last.macs, "MACs"), "fwd latency": (last.seconds, "s")
        }[row[1]]  # fmt: skip
        pairs = [(class_name, amount(figure, unit)) for class_name, figure in PAIR.findall(row[2])]
        table |= {class_name: figure for class_name, figure in pairs if figure is not None}
        return bool(table) and len(table) == len(pairs)


def _expanded(module: Module) -> list[Module]:
    """The module; several where torch has printed equal ones of a list once, `(0-5): 6 x T5Block(...)`."""
    module.children = [each for child in module.children for each in _expanded(child)]
    numbers = re.fullmatch(r"(\d+)-(\d+)", module.name)
    if numbers is None:
        return [module]
    return [replace(module, name=str(number)) for number in range(int(numbers[1]), int(numbers[2]) + 1)]


MODULE = re.compile(r"(?:\((?P<name>[^)]*)\): )?(?:\d+ x )?(?P<class>[^\s()]+)\((?P<rest>.*)")
MODULE_FIGURES = re.compile(
    r"(?P<parameters>[^=,]+?)(?: = |, )(?P<parameters_percent>[\d.e+-]+%) Params, "
    r"(?P<macs>[^=,]+?)(?: = |, )(?P<macs_percent>[\d.e+-]+%) MACs, "
    r"(?P<latency_seconds>[^=,]+?)(?: = |, )(?P<latency_percent>[\d.e+-]+%) (?:latency|time), "
    r"(?P<flops_per_second>[^,]+)(?:, ?(?P<details>.*))?"
)
"""Before 0.10 a comma stood where the equals sign is now, and one behind the last figure."""
MODULE_UNITS = {
    "parameters": "parameters", "parameters_percent": "%", "macs": "MACs", "macs_percent": "%",
    "latency_seconds": "s", "latency_percent": "%", "flops_per_second": "FLOP/s",
}  # fmt: skip
ELIDED = "..."
"""What people write in place of modules that they leave out."""


class _Tree:
    """The model as `print(model)` shows it, with figures at each module: what is in another is indented more."""

    def __init__(self) -> None:
        self.root: Module | None = None
        self.is_whole = False
        self._root_indent = 0
        self._open: list[tuple[int, Module]] = []
        """Modules whose lines are being read, with their indents."""
        self._leaves_out = False

    def take(self, number: int, line: str) -> bool:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text == ")":
            self._close(indent)
            return True
        if self.root is not None and indent <= self._root_indent:
            # No line of the tree any more.
            self._open = []
            return True
        is_read = self._module_or_figures(number, indent, text)
        self._leaves_out |= not is_read
        return is_read

    def _module_or_figures(self, number: int, indent: int, text: str) -> bool:
        match = MODULE.fullmatch(text)
        is_leaf = match is not None and match["rest"].endswith(")")
        if match is None or not (is_leaf or not match["rest"]) or (self.root is None and match["name"] is not None):
            return self._figures_of_last(text)
        self._close(indent)
        module = Module(number=number, name=match["name"] or "", class_name=match["class"])
        if self._open:
            self._open[-1][1].children.append(module)
        else:
            self.root, self._root_indent = module, indent
        self._open.append((indent, module))
        if not is_leaf:
            return True
        is_read = self._figures_of_last(match["rest"][:-1])
        self._close(indent)
        return is_read

    def _figures_of_last(self, text: str) -> bool:
        """Give a line's figures to the module that was opened last; others of its lines say nothing that is needed."""
        match = MODULE_FIGURES.fullmatch(text)
        if match is None or not self._open:
            return self.root is None or not ("Params" in text or ELIDED in text)
        module = self._open[-1][1]
        read = {key: amount(match[key], unit) for key, unit in MODULE_UNITS.items()}
        if None in read.values() or module.parameters is not None:
            return False
        vars(module).update(read, details=_read_details(module.class_name, match["details"] or ""))
        return True

    def _close(self, indent: int) -> None:
        """End the modules that are indented as much, or more."""
        while self._open and self._open[-1][0] >= indent:
            self.is_whole = self._open.pop()[1] is self.root and not self._leaves_out


POSITIONS = {"Embedding": ("rows", "dimension"), "LayerNorm": ("normalized_shape",)}
"""Names of what a class prints without one."""
DETAIL = re.compile(r"(?:[^,(\[]|\([^)]*\)|\[[^\]]*\])+")


def _read_details(class_name: str, text: str) -> dict[str, object]:
    """What a class says behind its figures, `in_features=128, bias=False`; what has no name is numbered from 0."""
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
