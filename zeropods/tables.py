"""Tables, progress bars and the help of a command: what people read, in a terminal, in a notebook, on a page."""

from __future__ import annotations

import argparse
import html
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeropods.programs import in_kernel

if TYPE_CHECKING:
    from tqdm import tqdm

LEAST, MOST = 1e-15, 1e15
"""Bounds of the numbers that flags take; products and quotients of such numbers are still finite."""
GIB, MIB = 2**30, 2**20
"""Bytes of the units in which people read memory; records hold bytes."""


def counted(number: int, word: str) -> str:
    """A number with its noun: `1 row`, `32 rows`, `2 processes`."""
    several = "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{'' if number == 1 else several}"


def digits(value: float) -> str:
    """A number of at least 0 without an exponent: three significant digits below 1, four above, whole from 1,000."""
    if value < 0.0005:
        return "0.000" if value else "0"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:#.{3 if value < 1 else 4}g}".rstrip(".")


# A table that people read: in a notebook, on a page, in Markdown.

CELL_STYLE = "text-align: left; white-space: pre-line"
"""CSS of a cell; without it JupyterLab would align text to the right."""

INTERVAL = re.compile(r"\[[\d., ]+\]")
"""An interval such as `[0.78, 1.02]`, within which no line is broken."""
GLUE = "\N{BRAILLE PATTERN BLANK}"
"""A blank at which a terminal's lines are not wrapped."""
READABLE = 20
"""Smallest width of a wide column in a terminal, in characters."""
KEYS = 3
"""Largest number of columns that serve to tell the rows of a wide table apart."""
WHOLE = r"<span style='white-space: nowrap'>\g<0></span>"


@dataclass(frozen=True)
class Table:
    """Cells of text under headings; all rows are as long as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, object]], title: str = "") -> Table:
        """A table from rows that map headings to values; the first row gives the header."""
        found = list(lines)
        header = tuple(found[0]) if found else ()
        return cls(header, tuple(tuple(str(line[name]) for name in header) for line in found), title)

    @classmethod
    def of_facts(cls, facts: Mapping[str, object]) -> Table:
        """A table with a line for each fact: its name and its value."""
        return cls(("", "value"), tuple((name, str(value)) for name, value in facts.items()))

    def to_html(self) -> str:
        """The table as HTML; each cell carries its heading, so that a narrow page can show a row as a card."""
        title = f"<h2>{html.escape(self.title)}</h2>" if self.title else ""
        heads = [html.escape(heading) for heading in self.header]
        head = "".join(f"<th scope='col' style='{CELL_STYLE}'>{each}</th>" for each in heads)
        body = ""
        for row in self.rows:
            shown = zip(heads, (INTERVAL.sub(WHOLE, html.escape(text)) for text in row), strict=True)
            cells = (f"<td data-heading='{each}' style='{CELL_STYLE}'>{text}</td>" for each, text in shown)
            body += f"<tr>{''.join(cells)}</tr>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{title}<div class='table' style='overflow-x: auto'>{table}</div>"

    def to_markdown(self) -> str:
        """The table as Markdown, with aligned columns for people who read the text itself."""
        lines = [[markdown_text(text) for text in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        title = f"## {self.title}\n\n" if self.title else ""
        padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        return title + "".join(f"| {' | '.join(line)} |\n" for line in padded)

    def to_text(self, width: int) -> str:
        """The table in lines of at most `width` characters: cells wrap between words.

        Columns for which there is no room follow below, each time beside those that tell the rows apart.
        """
        from rich import box
        from rich.console import Console
        from rich.table import Table as Drawing
        from rich.text import Text

        places = range(len(self.header))
        cells = [max((len(line) for row in self.rows for line in row[n].splitlines()), default=0) for n in places]
        words = [max(map(len, heading.split(" "))) for heading in self.header]
        least = [max(word, min(cell, READABLE)) for word, cell in zip(words, cells, strict=True)]
        keys = next((n for n in range(1, KEYS + 1) if len({row[:n] for row in self.rows}) == len(self.rows)), 1)
        parts: list[list[int]] = [[]]
        for place in places:
            # Each column has two blanks and a line besides its text.
            if sum(least[n] + 3 for n in (*parts[-1], place)) >= width and place > keys:
                parts.append(list(range(keys)))
            parts[-1].append(place)
        console = Console(width=width)
        with console.capture() as said:
            console.print(Text(self.title))
            for part in parts:
                drawing = Drawing(box=box.MARKDOWN)
                for n in part:
                    natural = max(words[n], cells[n], 1)
                    heading = textwrap.fill(self.header[n], natural)
                    drawing.add_column(Text(heading), overflow="fold", no_wrap=natural == least[n])
                for row in self.rows:
                    glued = (INTERVAL.sub(lambda found: found[0].replace(" ", GLUE), row[n]) for n in part)
                    drawing.add_row(*map(Text, glued))
                console.print(drawing)
        lines = "".join(f"{line.rstrip()}\n" for line in said.get().replace(GLUE, " ").strip("\n ").splitlines())
        return re.sub(r"\n{3,}", "\n\n", lines)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        """In a terminal, text no wider than the terminal; elsewhere Markdown."""
        return self.to_text(shutil.get_terminal_size().columns) if sys.stdout.isatty() else self.to_markdown()


def wrapped(text: str, indent: str = "") -> str:
    """Wrap paragraphs, one per line, between words at the terminal's width; elsewhere return them unchanged.

    Args:
        text: the paragraphs; rows of tables among them, which fit the terminal already, stay as they are.
        indent: what is put before each line of a paragraph but its first.
    """
    if not sys.stdout.isatty():
        return text
    fill = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent=indent).fill
    return "\n".join(line if line.endswith("|") else fill(line) for line in text.split("\n"))


def markdown_text(text: str) -> str:
    """Text made to stay on one line and in its cell, with HTML and `|` escaped."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", r"\|")


# The help of a command.


class Help(argparse.HelpFormatter):
    """Help with a line for most flags, each with its default; the usage names only what has to be given."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Show the optional flags as `FLAG` only: they are listed below, and need not be listed twice."""
        needed = [each for each in actions if each.required or not each.option_strings]
        flags = argparse.Action([], "flags", nargs="*", metavar="FLAG")
        super().add_usage(usage, [*needed, flags] if len(needed) < len(actions) else needed, [], prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        # A switch that takes no value has no default to show.
        is_plain = isinstance(default, str | int | float) and action.nargs != 0
        says_it = default == argparse.SUPPRESS or "(default: " in text
        return f"{text} (default: %(default)s)" if is_plain and not says_it else text


def number(text: str, least: float = LEAST) -> float:
    """A number, also in the form `5e8`, of at least `least` and at most `MOST`."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40}; expected a number") from None
    if not least <= value <= MOST:
        more = "more than 0" if value <= 0 < least else f"{least:g} to {MOST:g}"
        raise argparse.ArgumentTypeError(f"{text:.40}; expected {more}")
    return value


def whole(text: str) -> int:
    """A whole number of at least 1."""
    value = number(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text:.40}; expected a whole number")
    return int(value)


def not_negative(text: str) -> float:
    """A number of at least 0."""
    return number(text, least=0)


# One progress bar, on a terminal and in a notebook; lines elsewhere.

LINE_SECONDS = 20.0
"""Seconds between two lines about progress in a pipe or a log."""


class ProgressLines:
    """Progress in a pipe or a log: a line on stderr every `LINE_SECONDS` until the work is done.

    It is used in the place of a tqdm bar, and has what this project uses of one. Work that takes less writes nothing.
    """

    def __init__(self, what: str, unit: str, total: int | None, every_seconds: float) -> None:
        self.total = total
        self.n = 0
        """How many were done so far."""
        self.leave = True
        self._what = what
        self._unit = unit
        self._postfix = ""
        self._every_seconds = every_seconds
        self._over = threading.Event()

    def __enter__(self) -> ProgressLines:
        threading.Thread(target=self._write, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def update(self, done: float | None = 1) -> None:
        """Count so many more as done."""
        self.n += int(done or 0)

    def set_postfix(self, values: Mapping[str, object], refresh: bool = True) -> None:
        """Add values by name to the lines from now on."""
        self._postfix = "".join(f", {name} {value}" for name, value in values.items())

    def _write(self) -> None:
        began = time.monotonic()
        # Nobody may read any more what is said here, which is no reason for the work to end.
        with suppress(OSError, ValueError):
            while not self._over.wait(self._every_seconds):
                done = f"{self.n:,}" if self.total is None else f"{self.n:,} of {self.total:,}"
                seconds = time.monotonic() - began
                print(
                    f"{self._what}: {done} {self._unit}{self._postfix} ({seconds:.0f} s)", file=sys.stderr, flush=True
                )


def progress(
    what: str, unit: str, total: int | None = None, *, at_once: bool = True, every_seconds: float = LINE_SECONDS
) -> tqdm | ProgressLines:
    """A bar for a `with` block; its `update` takes how many were done since the last call.

    Where stderr is neither a terminal nor a notebook's, it is lines.

    Args:
        at_once: False to show nothing where there is nothing to do.
        every_seconds: pause between two lines.
    """
    in_notebook = in_kernel()
    if not in_notebook and not sys.stderr.isatty():
        return ProgressLines(what, unit, total, every_seconds)
    from tqdm import tqdm

    return tqdm(
        desc=what,
        unit=f" {unit}",
        total=total,
        delay=0 if at_once and total != 0 else 1e-6,
        mininterval=0.5,
        # A terminal's own width is used there.
        ncols=100 if in_notebook else None,
        file=sys.stderr,
        # A notebook cannot write above its last line: a bar within another takes the other's place.
        position=0 if in_notebook else None,
    )


def said_above(line: str) -> None:
    """Print a line above the progress bar, on stderr: stdout is for the result."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
