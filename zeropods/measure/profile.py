"""A report of DeepSpeed's flops profiler, read into numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

# What a report says, as numbers.


@dataclass(frozen=True, kw_only=True)
class Summary:
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
    """In its file, the first being 1."""
    label: str
    text: str
    keys: tuple[str, ...]
    """What it gives of `Summary`."""


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
    """As its parent calls it; empty for the root."""
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


def total(module: Module, figure: str) -> float:
    """`parameters`, `macs` or `latency_seconds` of a module; the sum of its children where it has none of its own."""
    own = getattr(module, figure)
    return own if own is not None else sum(total(child, figure) for child in module.children)


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
    summary: Summary
    lines: tuple[Line, ...]
    """Of the summary."""
    depths: tuple[Depth, ...]
    root: Module | None
    """None where the report has no detailed part (`"detailed": false`)."""

    def line_of(self, key: str) -> int:
        """Number of the line that gives a figure of the summary; the heading's for the step."""
        return next((line.number for line in self.lines if key in line.keys), self.number + 1)


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
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{place}: {text.strip()!r}; expected a number and its unit: {_units(kind)}")
    power = UNITS[kind].get(match[2])
    if power is None:
        raise UserError(f"{place}: {text.strip()!r}: unknown unit {match[2]!r}; expected {_units(kind)}")
    value = float(Decimal(match[1]).scaleb(power))
    if not isfinite(value):
        raise UserError(f"{place}: {text.strip()!r}; expected a number that a computer can hold")
    return value


def rounding(value: float | None) -> float:
    """How far a figure may be from the counted one: half of its last decimal, in the unit that it was printed with."""
    if not value:
        return 0.0
    unit = next((10.0**power for power in (12, 9, 6, 3, 0, -3) if value >= 10.0**power), 1e-6)
    return HALF_OF_THE_LAST_DECIMAL * unit


def whole(text: str, place: str) -> int:
    """A count; `UserError` where it is none."""
    if not text.strip().isascii() or not text.strip().isdigit():
        raise UserError(f"{place}: {text.strip()!r}; expected a whole number")
    return int(text)


def _units(kind: str) -> str:
    named = [unit or "none" for unit in UNITS[kind]]
    return " | ".join(named)


# The summary of a report: one figure a line, each line under a label.

SUMMARY_HEADING = re.compile(r"Profile Summary at step (.*):")
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


def read_summary(path: str, numbered: Iterable[tuple[int, str]], step: int, end: int) -> tuple[Summary, list[Line]]:
    """The figures of the summary's lines.

    Args:
        path: the file, for errors.
        numbered: lines with their numbers, from after the notations up to the next part.
        step: as the heading has it.
        end: number of the line after the last.

    Raises:
        UserError: a line that is none of a summary, twice the same, one that must be there is missing.
    """
    values: dict[str, Any] = {"step": step}
    lines = []
    for number, line in numbered:
        if not line.strip():
            continue
        read = _line(f"{path}:{number}", number, line)
        if values.keys() & read[1].keys():
            raise UserError(f"{path}:{number}: a second {read[0].label!r}; give a report as it was written")
        values |= read[1]
        lines.append(read[0])
    needed = [field.name for field in fields(Summary) if field.default is MISSING]
    missing = next((name for name in needed if name not in values), None)
    if missing:
        wanted = next(label for label, (key, _) in LABELS.items() if key == missing)
        raise UserError(f"{path}:{end}: the summary ends without {wanted!r}; give a report as it was written, whole")
    return Summary(**values), lines


def step_of(path: str, number: int, line: str) -> int:
    """The step that the heading names."""
    match = SUMMARY_HEADING.fullmatch(line.strip())
    if match is None:
        raise UserError(f"{path}:{number}: {line.strip()!r:.60}; expected 'Profile Summary at step N:'")
    return whole(match[1], f"{path}:{number}")


def _line(place: str, number: int, line: str) -> tuple[Line, dict[str, Any]]:
    label, colon, text = line.rpartition(": ")
    known = _known(label.strip().rstrip(":"))
    if not colon or known is None:
        raise UserError(f"{place}: {line.strip()!r:.60}; expected a line of the summary, as 'fwd latency:  55.98 ms'")
    key, kind = known
    values: dict[str, Any] = {key: _summary_value(text, kind, place)}
    factor = FACTOR.search(label)
    if factor:
        values["backward_factor"] = amount(factor[1], "", place)
    return Line(number=number, label=label.strip().rstrip(":"), text=text.strip(), keys=tuple(values)), values


def _known(label: str) -> tuple[str, str] | None:
    name = label.lower()
    return LABELS.get(name) or LABELS.get(name.split(" = ")[0])


def _summary_value(text: str, kind: str, place: str) -> float | int | bool:
    if kind == "count":
        return whole(text, place)
    if kind == "truth":
        return text.strip() == "True"
    return amount(text, kind, place)


# What a module's class says of itself behind its figures: `in_features=128, out_features=512, bias=False`.

Detail = str | int | float | bool | tuple[int, ...]
POSITIONS: dict[str, tuple[str, ...]] = {
    "Embedding": ("rows", "dimension"),
    "LayerNorm": ("normalized_shape",),
}
"""Names of what a class prints without one."""
PART = re.compile(r"(?:[^,(\[]|\([^)]*\)|\[[^\]]*\])+")

WHOLE_DETAILS = re.compile(r"-?[0-9]{1,18}")
REAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,2})?")
SIZES = re.compile(r"\([0-9]{1,18}(?:, ?[0-9]{1,18})*,?\)")


def read_details(class_name: str, text: str) -> dict[str, Detail]:
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
    if WHOLE_DETAILS.fullmatch(text):
        return int(text)
    return float(text) if REAL.fullmatch(text) else text


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


def read_tree(path: str, numbered: Sequence[tuple[int, str]]) -> Module:
    """The root of the modules.

    Args:
        path: the file, for errors.
        numbered: the lines of the tree with their numbers, from the root's on, up to the line that closes it.

    Raises:
        UserError: a line that is no part of a tree, figures in another form, or an end before the tree's.
    """
    reader = _Reader(path, [(number, line) for number, line in numbered if line.strip()])
    (root,) = reader.module(0)
    reader.expect_end()
    return root


class _Reader:
    """Lines of a tree, one after the other."""

    def __init__(self, path: str, lines: list[tuple[int, str]]) -> None:
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
                raise UserError(
                    f"{self._path}:{self._lines[-1][0]}: ends inside the module of line {opened}; "
                    "give a report as it was written, whole"
                )
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
            details=read_details(class_name, figures["details"] or ""),
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


# The part of a report that is aggregated by depth: the top classes of modules by parameters, MACs and latency.

OPENING = re.compile(r"Top (?:\d+ )?modules in terms of .* at different model depths:")
DEPTH = re.compile(r"depth (\d+):")
AGGREGATED_KINDS = {"params": "params", "MACs": "MACs", "fwd latency": "s"}
"""Rows of a depth in their order, and the kind of their figures."""
ROW = re.compile(r" +(params|MACs|fwd latency) +- +(\{.*\})")


def read_depths(path: str, numbered: Sequence[tuple[int, str]]) -> list[Depth]:
    """The depths of this part, from the root on.

    Args:
        path: the file, for errors.
        numbered: the lines of this part with their numbers, its heading left out.

    Raises:
        UserError: a line that is none of this part.
    """
    lines = [(number, line) for number, line in numbered if line.strip() and not OPENING.fullmatch(line.strip())]
    return [_depth(path, lines[start : start + 4]) for start in range(0, len(lines), 4)]


def _depth(path: str, lines: Sequence[tuple[int, str]]) -> Depth:
    number, line = lines[0]
    heading = DEPTH.fullmatch(line.strip())
    if heading is None:
        raise UserError(f"{path}:{number}: {line.strip()!r:.60}; expected 'depth N:'")
    if len(lines) < 4:
        raise UserError(f"{path}:{lines[-1][0]}: depth {heading[1]} ends here; give a report as it was written, whole")
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


# Read a report from a file: its own, or a log that holds one.

HEADING = re.compile(r"(?P<prefix>.*?)-+ DeepSpeed Flops Profiler -+\s*")
"""Before it what pdsh or a logger puts before every line (`pod1: `)."""
AGGREGATED = re.compile(r"-+ Aggregated Profile per GPU -+", re.IGNORECASE)
DETAILED = re.compile(r"-+ Detailed Profile per GPU -+", re.IGNORECASE)
END = re.compile(r"-{40,}")
BEFORE_FIGURES = "step (weights update latency), iter latency"
"""In the last line of the notations, behind which the summary's figures begin."""
BEFORE_TREE = "The fwd latency listed in the top module's profile"
"""In the last line before the tree; its number differs between versions."""
WHOLE = "give a report as it was written, whole"


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
    headings = [(number, match) for number, line in enumerate(lines, 1) if (match := HEADING.fullmatch(line))]
    if not headings:
        raise UserError(f"{path}:1: no '--- DeepSpeed Flops Profiler ---' in {len(lines)} lines; give a profile.txt")
    number, match = headings[-1]
    section = _section(path, lines, number, match["prefix"])
    summary, found = read_summary(
        str(path), section.summary, step_of(str(path), *section.heading), section.summary_ends
    )
    return Report(
        path=path,
        number=number,
        reports=len(headings),
        text="\n".join(line for _, line in section.all),
        summary=summary,
        lines=tuple(found),
        depths=tuple(read_depths(str(path), section.aggregated)),
        root=_root(path, section),
    )


Numbered = list[tuple[int, str]]


@dataclass(frozen=True)
class _Section:
    """The lines of one report by its parts."""

    all: Numbered
    heading: tuple[int, str]
    summary: Numbered
    summary_ends: int
    aggregated: Numbered
    detailed: Numbered


def _section(path: Path, lines: list[str], start: int, prefix: str) -> _Section:
    """Cut a report into its parts; `start` is the number of its heading. Lines of others in a log are left out."""
    own = [
        (number, line.removeprefix(prefix))
        for number, line in enumerate(lines[start - 1 :], start)
        if line.startswith(prefix) or not prefix.strip()
    ]
    end = _find(path, own, END, "its closing line of dashes")
    own = own[: end + 1]
    if len(own) < 2:
        raise UserError(f"{path}:{start}: a heading and nothing more; {WHOLE}")
    figures = _after(path, own, BEFORE_FIGURES)
    aggregated = _find(path, own, AGGREGATED, "'--- Aggregated Profile per GPU ---'")
    detailed = next((index for index, (_, line) in enumerate(own) if DETAILED.fullmatch(line.strip())), None)
    return _Section(
        all=own,
        heading=own[1],
        summary=own[figures:aggregated],
        summary_ends=own[aggregated][0],
        aggregated=own[aggregated + 1 : detailed if detailed is not None else end],
        detailed=own[detailed:end] if detailed is not None else [],
    )


def _root(path: Path, section: _Section) -> Module | None:
    if not section.detailed:
        return None
    tree = section.detailed[_after(path, section.detailed, BEFORE_TREE) :]
    if not any(line.strip() for _, line in tree):
        raise UserError(f"{path}:{section.detailed[-1][0]}: no module below 'Detailed Profile'; {WHOLE}")
    return read_tree(str(path), tree)


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
