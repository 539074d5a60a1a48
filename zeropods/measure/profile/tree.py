"""The detailed part of a report: the model as `print(model)` shows it, with figures at each module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeropods.errors import UserError
from zeropods.measure.profile.details import read_details
from zeropods.measure.profile.report import Module
from zeropods.measure.profile.units import amount

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
