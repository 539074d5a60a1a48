"""A report of DeepSpeed's flops profiler, read into numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

Numbered = Sequence[tuple[int, str]]
"""Lines with their numbers in the file, the first being 1."""
WHOLE = "give a report as it was written, whole"

# What a report says, as numbers.


@dataclass(frozen=True, kw_only=True)
class ReportSummary:
    """The figures of `Profile Summary`; None where this report has no such line.

    Seconds are of rank 0, one forward pass, one backward pass and one step of the optimizer.
    """

    step: int
    """Number of the profiled step, the first being 1."""
    world_size: int | None = None
    data_parallel_size: int | None = None
    model_parallel_size: int | None = None
    batch_size_per_gpu: int | None = None
    """Rows of one forward pass."""
    expert_tensor_parallelism: bool | None = None
    parameters_per_gpu: float
    model_parameters: float | None = None
    non_expert_parameters: float | None = None
    expert_parameters: float | None = None
    forward_macs: float
    """Multiply-adds of a forward pass on one GPU."""
    forward_flops: float
    model_forward_flops: float | None = None
    forward_seconds: float
    forward_flops_per_second: float
    backward_factor: float | None = None
    """A backward pass is counted as so many forward ones: 2, and more with recomputation."""
    backward_seconds: float | None = None
    backward_flops_per_second: float | None = None
    forward_backward_flops_per_second: float | None = None
    step_seconds: float | None = None
    iteration_seconds: float | None = None
    """Forward, backward and step."""
    flops_per_second: float | None = None
    samples_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the summary as it was printed."""

    number: int
    label: str
    text: str
    keys: tuple[str, ...]
    """What it gives of `ReportSummary`."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The top classes of modules at one depth of the tree, the root being 0."""

    number: int
    """Line of its first figures."""
    depth: int
    parameters: dict[str, float]
    macs: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the tree with everything below it; figures are None for one that runs nothing (`ModuleList`)."""

    number: int
    """Its line in the file."""
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
    details: dict[str, str | int | float | bool | tuple[int, ...]]
    """What the class says of itself: `in_features`, `out_features`; of an embedding `rows` and `dimension`."""
    children: tuple[Module, ...] = ()

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

    def to_json(self, depth: int | None = None) -> dict[str, Any]:
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
    """Line of its heading."""
    reports: int
    """How many the file holds; this is the last."""
    text: str
    """This report alone, as it was printed."""
    summary: ReportSummary
    lines: tuple[Line, ...]
    """Lines of the summary."""
    depths: tuple[Depth, ...]
    root: Module | None
    """None where the report has no detailed part (`"detailed": false`)."""

    def line_of(self, key: str) -> int:
        """Number of the line that gives a figure of the summary; the heading's for the step."""
        return next((line.number for line in self.lines if key in line.keys), self.number + 1)

    def label_of(self, key: str) -> str:
        """Label of that line."""
        return next(line.label for line in self.lines if key in line.keys)


# Read a report from a file: its own, or a log that holds one.

HEADING = re.compile(r"(?P<prefix>.*?)-+ DeepSpeed Flops Profiler -+\s*")
"""Before it what pdsh or a logger puts before every line (`pod1: `)."""
STEP = re.compile(r"Profile Summary at step (.*):")
AGGREGATED = re.compile(r"-+ Aggregated Profile per GPU -+", re.IGNORECASE)
DETAILED = re.compile(r"-+ Detailed Profile per GPU -+", re.IGNORECASE)
END = re.compile(r"-{40,}")
BEFORE_FIGURES = "step (weights update latency), iter latency"
"""In the last line of the notations, behind which the summary's figures begin."""
BEFORE_TREE = "The fwd latency listed in the top module's profile"
"""In the last line before the tree; its number differs between versions."""


def read_report(path: Path) -> Report:
    """The report of a file, of a run folder its `profile.txt`; the last one where the file holds several.

    A file holds several where the profiler writes to a log, or where gradients are accumulated: there the last is
    that of the pass which the optimizer's step follows.

    Raises:
        UserError: there is no report in it, it is cut off, or a line is not of a report; the first such line.
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
    # Lines of others in a log are left out.
    own = [
        (number, line.removeprefix(prefix))
        for number, line in enumerate(lines[start - 1 :], start)
        if line.startswith(prefix) or not prefix.strip()
    ]
    own = own[: _find(path, own, END, "its closing line of dashes") + 1]
    if len(own) < 2:
        raise UserError(f"{path}:{start}: a heading and nothing more; {WHOLE}")
    figures = _after(path, own, BEFORE_FIGURES)
    aggregated = _find(path, own, AGGREGATED, "'--- Aggregated Profile per GPU ---'")
    detailed = next((at for at, (_, line) in enumerate(own) if DETAILED.fullmatch(line.strip())), len(own) - 1)
    summary, found = _read_summary(str(path), own[1], own[figures:aggregated], own[aggregated][0])
    return Report(
        path=path,
        number=start,
        reports=len(headings),
        text="\n".join(line for _, line in own),
        summary=summary,
        lines=tuple(found),
        depths=tuple(_read_depths(str(path), own[aggregated + 1 : detailed])),
        root=_read_tree(path, own[detailed:-1]),
    )


def _find(path: Path, lines: Numbered, pattern: re.Pattern[str], what: str) -> int:
    for index, (_, line) in enumerate(lines):
        if pattern.fullmatch(line.strip()):
            return index
    raise UserError(f"{path}:{lines[-1][0]}: the report ends without {what}; {WHOLE}")


def _after(path: Path, lines: Numbered, words: str) -> int:
    """Index behind the line that holds these words."""
    for index, (_, line) in enumerate(lines):
        if words in line:
            return index + 1
    raise UserError(f"{path}:{lines[-1][0]}: no line with {words!r}; {WHOLE}")


# Numbers as DeepSpeed's profiler prints them: `602.28 MMACs`, `1.05 M`, `200.99 us`.

LARGE = {"T": 12, "G": 9, "M": 6, "K": 3, "": 0}
SMALL = {"m": -3, "u": -6}
UNITS: dict[str, dict[str, int]] = {
    # Billions of parameters are B, never G. Before 0.10: a small k, and MACs of the summary with their prefix alone.
    "params": {"T": 12, "B": 9, "M": 6, "K": 3, "k": 3, "": 0},
    "MACs": {f"{prefix}MACs": power for prefix, power in LARGE.items()} | {"T": 12, "G": 9, "M": 6, "K": 3},
    "flops": LARGE,
    "FLOPS": {f"{prefix}FLOPS": power for prefix, power in (LARGE | SMALL).items()},
    "s": {f"{prefix}s": power for prefix, power in (LARGE | SMALL).items()},
    "": {"": 0},
    "%": {"%": 0},
}
"""Units of each kind of figure as powers of ten (`number_to_string` of deepspeed 0.19.8's profiler.py)."""
HALF_OF_THE_LAST_DECIMAL = 0.005
"""Figures are printed with two."""
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(\S*)", re.IGNORECASE)


def amount(text: str, kind: str, place: str) -> float:
    """The number in MACs, parameters, FLOPs, FLOP/s, seconds or percent.

    Args:
        text: such as `602.28 MMACs`.
        kind: one of `UNITS`.
        place: `PATH:LINE`, for the error.

    Raises:
        UserError: no number, or a unit that this kind of figure has not.
    """
    text, units = text.strip(), " | ".join(unit or "none" for unit in UNITS[kind])
    match = NUMBER.fullmatch(text)
    if match is None:
        raise UserError(f"{place}: {text!r}; expected a number and its unit: {units}")
    power = UNITS[kind].get(match[2])
    if power is None:
        raise UserError(f"{place}: {text!r}: unknown unit {match[2]!r}; expected {units}")
    value = float(Decimal(match[1]).scaleb(power))
    if not isfinite(value):
        raise UserError(f"{place}: {text!r}; expected a number that a computer can hold")
    return value


def rounding(value: float | None) -> float:
    """How far a figure may be from the counted one: half of its last decimal, in the unit that it was printed with."""
    if not value:
        return 0.0
    unit = next((10.0**power for power in (12, 9, 6, 3, 0, -3) if value >= 10.0**power), 1e-6)
    return HALF_OF_THE_LAST_DECIMAL * unit


def _whole(text: str, place: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit():
        raise UserError(f"{place}: {text.strip()!r}; expected a whole number")
    return int(text)


# The summary of a report: one figure a line, each line under a label.

LABELS: dict[str, tuple[str, str]] = {
    "world size": ("world_size", "count"),
    "data parallel size": ("data_parallel_size", "count"),
    "model parallel size": ("model_parallel_size", "count"),
    "batch size per gpu": ("batch_size_per_gpu", "count"),
    "expert tensor parallelism enabled": ("expert_tensor_parallelism", "truth"),
    "params per gpu": ("parameters_per_gpu", "params"),
    "params of model": ("model_parameters", "params"),
    "non-expert params of model": ("non_expert_parameters", "params"),
    "expert params of model": ("expert_parameters", "params"),
    "fwd macs per gpu": ("forward_macs", "MACs"),
    "fwd flops per gpu": ("forward_flops", "flops"),
    "fwd flops of model": ("model_forward_flops", "flops"),
    "fwd latency": ("forward_seconds", "s"),
    "fwd flops per gpu = fwd flops per gpu / fwd latency": ("forward_flops_per_second", "FLOPS"),
    "bwd latency": ("backward_seconds", "s"),
    "bwd flops per gpu": ("backward_flops_per_second", "FLOPS"),
    "fwd+bwd flops per gpu": ("forward_backward_flops_per_second", "FLOPS"),
    "step latency": ("step_seconds", "s"),
    "iter latency": ("iteration_seconds", "s"),
    "flops per gpu": ("flops_per_second", "FLOPS"),
    "samples/second": ("samples_per_second", ""),
}
"""What a label stands for, without case and without the formula behind it, which differs between versions.
The forward pass's FLOPs and FLOP/s differ only in that formula."""
FACTOR = re.compile(r"= ([\d.]+) \* fwd flops per gpu / bwd latency", re.IGNORECASE)


def _read_summary(path: str, heading: tuple[int, str], lines: Numbered, end: int) -> tuple[ReportSummary, list[Line]]:
    """The figures of the summary's lines.

    Args:
        path: the file, for errors.
        lines: from after the notations up to the next part, whose number is `end`.

    Raises:
        UserError: a line that is none of a summary, twice the same, one that must be there is missing.
    """
    number, text = heading
    match = STEP.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{path}:{number}: {text.strip()!r:.60}; expected 'Profile Summary at step N:'")
    values: dict[str, Any] = {"step": _whole(match[1], f"{path}:{number}")}
    found = []
    for number, text in lines:
        if not text.strip():
            continue
        line, read = _read_line(f"{path}:{number}", number, text)
        if values.keys() & read.keys():
            raise UserError(f"{path}:{number}: a second {line.label!r}; give a report as it was written")
        values |= read
        found.append(line)
    needed = [field.name for field in fields(ReportSummary) if field.default is MISSING]
    missing = next((name for name in needed if name not in values), None)
    if missing:
        wanted = next(label for label, (key, _) in LABELS.items() if key == missing)
        raise UserError(f"{path}:{end}: the summary ends without {wanted!r}; {WHOLE}")
    return ReportSummary(**values), found


def _read_line(place: str, number: int, line: str) -> tuple[Line, dict[str, Any]]:
    before, colon, text = line.rpartition(": ")
    label = before.strip().rstrip(":")
    name = label.lower()
    key, kind = LABELS.get(name) or LABELS.get(name.split(" = ")[0]) or ("", "")
    if not colon or not key:
        raise UserError(f"{place}: {line.strip()!r:.60}; expected a line of the summary, as 'fwd latency:  55.98 ms'")
    values: dict[str, Any] = {}
    if kind == "count":
        values[key] = _whole(text, place)
    elif kind == "truth":
        values[key] = text.strip() == "True"
    else:
        values[key] = amount(text, kind, place)
    if factor := FACTOR.search(before):
        values["backward_factor"] = amount(factor[1], "", place)
    return Line(number=number, label=label, text=text.strip(), keys=tuple(values)), values


# The part of a report that is aggregated by depth: the top classes of modules by parameters, MACs and latency.

OPENING = re.compile(r"Top (?:\d+ )?modules in terms of .* at different model depths:")
DEPTH = re.compile(r"depth (\d+):")
AGGREGATED_KINDS = {"params": "params", "MACs": "MACs", "fwd latency": "s"}
"""Rows of a depth in their order, and the kind of their figures."""
ROW = re.compile(r" +(params|MACs|fwd latency) +- +(\{.*\})")


def _read_depths(path: str, numbered: Numbered) -> list[Depth]:
    """The depths of this part, from the root on.

    Args:
        path: the file, for errors.
        numbered: the lines of this part with their numbers, its heading left out.

    Raises:
        UserError: a line that is none of this part.
    """
    lines = [(number, line) for number, line in numbered if line.strip() and not OPENING.fullmatch(line.strip())]
    return [_depth(path, lines[start : start + 4]) for start in range(0, len(lines), 4)]


def _depth(path: str, lines: Numbered) -> Depth:
    number, line = lines[0]
    heading = DEPTH.fullmatch(line.strip())
    if heading is None:
        raise UserError(f"{path}:{number}: {line.strip()!r:.60}; expected 'depth N:'")
    if len(lines) < 4:
        raise UserError(f"{path}:{lines[-1][0]}: depth {heading[1]} ends here; {WHOLE}")
    params, macs, seconds = (
        _row(path, row, *wanted) for row, wanted in zip(lines[1:], AGGREGATED_KINDS.items(), strict=True)
    )
    return Depth(number=number, depth=int(heading[1]), parameters=params, macs=macs, seconds=seconds)


def _row(path: str, numbered: tuple[int, str], name: str, kind: str) -> dict[str, float]:
    number, line = numbered
    match = ROW.fullmatch(line)
    if match is None or match[1] != name:
        raise UserError(f"{path}:{number}: {line.strip()!r:.60}; expected \"{name} - {{'CLASS': 'FIGURE'}}\"")
    try:
        figures = ast.literal_eval(match[2])
    except (SyntaxError, ValueError, TypeError):
        figures = None
    if not isinstance(figures, dict):
        raise UserError(f"{path}:{number}: {match[2]!r:.60}; expected {{'CLASS': 'FIGURE'}}")
    return {str(name): amount(str(text), kind, f"{path}:{number}") for name, text in figures.items()}


# The detailed part of a report: the model as `print(model)` shows it, with figures at each module.

INDENT = 2
MODULE = re.compile(r"(?:\((?P<name>[^)]*)\): )?(?:(?P<times>\d+) x )?(?P<class>[^\s()]+)\((?P<rest>.*)")
FIGURES = re.compile(
    r"(?P<parameters>[^=,]+?)(?: = |, )(?P<parameters_percent>[\d.e+-]+%) Params, "
    r"(?P<macs>[^=,]+?)(?: = |, )(?P<macs_percent>[\d.e+-]+%) MACs, "
    r"(?P<latency_seconds>[^=,]+?)(?: = |, )(?P<latency_percent>[\d.e+-]+%) latency, "
    r"(?P<flops_per_second>[^,]+)(?:, ?(?P<details>.*))?",
    re.DOTALL,
)
"""Before 0.10 a comma stood where the equals sign is now, and one behind the last figure."""
MODULE_LINE = "a module, as '(q): Linear(16.38 K = 1.56% Params, ...)'"
KINDS = {"parameters": "params", "macs": "MACs", "latency_seconds": "s", "flops_per_second": "FLOPS"}


def _read_tree(path: Path, lines: Numbered) -> Module | None:
    """The root of the modules; None without a detailed part.

    Args:
        path: the file, for errors.
        lines: the detailed part, from its heading on.

    Raises:
        UserError: a line that is no part of a tree, figures in another form, or an end before the tree's.
    """
    if not lines:
        return None
    below = [(number, line) for number, line in lines[_after(path, lines, BEFORE_TREE) :] if line.strip()]
    if not below:
        raise UserError(f"{path}:{lines[-1][0]}: no module below 'Detailed Profile'; {WHOLE}")
    reader = _TreeReader(str(path), below)
    (root,) = reader.module(0)
    reader.expect_end()
    return root


class _TreeReader:
    """Lines of a tree, one after the other."""

    def __init__(self, path: str, lines: Numbered) -> None:
        self._path, self._lines, self._next = path, lines, 0

    def module(self, depth: int) -> tuple[Module, ...]:
        """The module of the next line with all below it; several where torch has printed `(0-5): 6 x`."""
        number, text = self._take(depth)
        match = MODULE.fullmatch(text)
        if match is None:
            raise self._error(number, text, MODULE_LINE)
        if match["rest"].endswith(")"):
            module = self._made(number, match, match["rest"][:-1], ())
        else:
            extra = [match["rest"]] if match["rest"] else []
            module = self._made(number, match, *self._inside(number, depth + 1, extra))
        return tuple(_each(module, match["times"]))

    def expect_end(self) -> None:
        """Nothing may follow the root."""
        if self._next < len(self._lines):
            raise self._error(*self._lines[self._next], "the end of the report")

    def _inside(self, opened: int, depth: int, extra: list[str]) -> tuple[str, tuple[Module, ...]]:
        """What stands between the parentheses of a module: its own lines, then its children."""
        children: list[Module] = []
        while True:
            if self._next == len(self._lines):
                last = f"{self._path}:{self._lines[-1][0]}"
                raise UserError(f"{last}: ends inside the module of line {opened}; {WHOLE}")
            text = self._lines[self._next][1]
            if text.rstrip() == " " * INDENT * (depth - 1) + ")":
                self._next += 1
                return "\n".join(extra), tuple(children)
            if children or (text.lstrip().startswith("(") and MODULE.fullmatch(text.strip())):
                children.extend(self.module(depth))
            elif extra and FIGURES.search(text):
                raise self._error(*self._lines[self._next], MODULE_LINE)
            else:
                extra.append(self._take(depth)[1])

    def _take(self, depth: int) -> tuple[int, str]:
        number, line = self._lines[self._next]
        if len(line) - len(line.lstrip(" ")) != INDENT * depth:
            raise self._error(number, line, f"{INDENT * depth} blanks before it")
        self._next += 1
        return number, line.strip()

    def _made(self, number: int, match: re.Match[str], extra: str, children: tuple[Module, ...]) -> Module:
        name, class_name = match["name"] or "", match["class"]
        if not extra:
            return Module(number=number, name=name, class_name=class_name, details={}, children=children)
        figures, line = FIGURES.fullmatch(extra), number + (not match["rest"])
        if figures is None:
            raise self._error(line, extra, "'PARAMS = P% Params, MACS = P% MACs, LATENCY = P% latency, FLOPS'")
        place = f"{self._path}:{line}"
        return Module(
            number=number,
            name=name,
            class_name=class_name,
            **{key: amount(figures[key], kind, place) for key, kind in KINDS.items()},
            **{key: amount(figures[key], "%", place) for key in figures.groupdict() if key.endswith("percent")},
            details=_read_details(class_name, figures["details"] or ""),
            children=children,
        )

    def _error(self, number: int, text: str, expected: str) -> UserError:
        return UserError(f"{self._path}:{number}: {text.strip()!r:.60}; expected {expected}")


def _each(module: Module, times: str | None) -> Iterator[Module]:
    """`(0-5): 6 x T5Block(...)` as six modules: torch prints equal ones of a list once."""
    if times is None:
        yield module
        return
    first = int(module.name.split("-")[0])
    for offset in range(int(times)):
        yield replace(module, name=str(first + offset))


# What a module's class says of itself behind its figures: `in_features=128, out_features=512, bias=False`.

Detail = str | int | float | bool | tuple[int, ...]
POSITIONS: dict[str, tuple[str, ...]] = {
    "Embedding": ("rows", "dimension"),
    "LayerNorm": ("normalized_shape",),
}
"""Names of what a class prints without one."""
PART = re.compile(r"(?:[^,(\[]|\([^)]*\)|\[[^\]]*\])+")
COUNT = re.compile(r"-?[0-9]{1,18}")
REAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,2})?")
SIZES = re.compile(r"\([0-9]{1,18}(?:, ?[0-9]{1,18})*,?\)")


def _read_details(class_name: str, text: str) -> dict[str, Detail]:
    """The details by name; what has none is numbered from 0."""
    details: dict[str, Detail] = {}
    names = POSITIONS.get(class_name.rpartition(".")[2], ())
    for position, part in enumerate(part.strip() for part in PART.findall(text)):
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            details[name] = _detail_value(value)
        else:
            details[names[position] if position < len(names) else str(position)] = _detail_value(part)
    return details


def _detail_value(text: str) -> Detail:
    if text in ("True", "False"):
        return text == "True"
    if SIZES.fullmatch(text):
        return tuple(int(size) for size in text.strip("(),").split(","))
    if COUNT.fullmatch(text):
        return int(text)
    return float(text) if REAL.fullmatch(text) else text
