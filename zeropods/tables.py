"""Tables, progress bars and the help of a command.

They are what people read, in a terminal, in a notebook or on a page.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeropods.programs import in_kernel

if TYPE_CHECKING:
    from rich.table import Table as Drawing
    from tqdm import tqdm

LEAST_NUMBER, MOST_NUMBER = 1e-15, 1e15
"""Bounds of the numbers that flags take; products and quotients of such numbers are still
finite."""
GIB, MIB = 2**30, 2**20
"""Bytes of the units in which people read memory; records hold bytes."""
SECONDS_PER_HOUR = 3_600


def shortened(texts: Sequence[str], most: int) -> list[str]:
    """The first `most` texts, and a last one such as `3 more` for the others; all texts where a
    single one would be left out."""
    if len(texts) <= most + 1:
        return list(texts)
    return [*texts[:most], f"{len(texts) - most} more"]


def counted(number: int, word: str) -> str:
    """A number with its noun: `1 row`, `32 rows`, `2 processes`."""
    if number == 1:
        return f"{number:,} {word}"
    ending = "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{ending}"


def nearest_multiples(number: int, divisor: int) -> str:
    """The multiples of a divisor just below and above a number, such as `64 or 96`; only the one
    above where the one below is 0."""
    below = number // divisor * divisor
    above = below + divisor
    if below == 0:
        return f"{above}"
    return f"{below} or {above}"


def digits(value: float) -> str:
    """A number of at least 0 without an exponent.

    It has three significant digits below 1, four above, and is whole from 1,000.
    """
    # Three decimal places would show nothing of it, and `g` may write an exponent.
    if value < 0.0005:
        return "0.000" if value else "0"
    if value >= 1_000:
        return f"{value:,.0f}"
    significant = 3 if value < 1 else 4
    return f"{value:#.{significant}g}".rstrip(".")


# A table that people read: in a notebook, on a page, in Markdown.

CELL_STYLE = "text-align: left; white-space: pre-line"
"""CSS of a cell; without it JupyterLab would align text to the right."""

INTERVAL = re.compile(r"\[[\d., ]+\]")
"""An interval such as `[0.78, 1.02]`, within which no line is broken."""
GLUE = "\N{BRAILLE PATTERN BLANK}"
"""A blank at which a terminal's lines are not wrapped."""
READABLE = 20
"""Smallest width in characters to which a column of a terminal's table is narrowed."""
MOST_KEY_COLUMNS = 3
"""Largest number of columns that are repeated in each part of a wide table, to tell its rows
apart."""
UNBROKEN = r"<span style='white-space: nowrap'>\g<0></span>"
"""What `INTERVAL.sub` puts in the place of an interval in HTML."""


@dataclass(frozen=True)
class Table:
    """Cells of text under headings; all rows are as long as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, object]], title: str = "") -> Table:
        """A table from rows that map headings to values.

        The headings of the first row are the header. Every row must have them; others are left out.
        """
        mappings = list(lines)
        header = tuple(mappings[0]) if mappings else ()
        rows = []
        for mapping in mappings:
            rows.append(tuple(str(mapping[name]) for name in header))
        return cls(header, tuple(rows), title)

    @classmethod
    def of_facts(cls, facts: Mapping[str, object]) -> Table:
        """A table with a line for each fact: its name and its value."""
        rows = [(name, str(value)) for name, value in facts.items()]
        return cls(("", "value"), tuple(rows))

    def to_html(self) -> str:
        """The table as HTML.

        Each cell carries its heading, so that a narrow page can show a row as a card.
        """
        title = f"<h2>{html.escape(self.title)}</h2>" if self.title else ""
        headings = [html.escape(heading) for heading in self.header]
        head = ""
        for heading in headings:
            head += f"<th scope='col' style='{CELL_STYLE}'>{heading}</th>"
        body = ""
        for row in self.rows:
            cells = ""
            for heading, cell in zip(headings, row, strict=True):
                text = INTERVAL.sub(UNBROKEN, html.escape(cell))
                cells += f"<td data-heading='{heading}' style='{CELL_STYLE}'>{text}</td>"
            body += f"<tr>{cells}</tr>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{title}<div class='table' style='overflow-x: auto'>{table}</div>"

    def to_markdown(self) -> str:
        """The table as Markdown, with aligned columns for people who read the text itself."""
        lines = [[markdown_text(text) for text in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        markdown = f"## {self.title}\n\n" if self.title else ""
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            markdown += f"| {' | '.join(cells)} |\n"
        return markdown

    def to_text(self, width: int) -> str:
        """The table in lines of at most `width` characters: cells wrap between words.

        Columns for which there is no room follow below, each time beside those that tell the rows
        apart.
        """
        from rich.console import Console
        from rich.text import Text

        widths = self._widths()
        console = Console(width=width)
        with console.capture() as capture:
            console.print(Text(self.title))
            for columns in self._parts(widths, width):
                console.print(self._drawing(columns, widths, width))
        text = capture.get().replace(GLUE, " ").strip("\n ")
        lines = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        return re.sub(r"\n{3,}", "\n\n", lines)

    def _widths(self) -> list[_Width]:
        """The width of each column."""
        widths = []
        for column, heading in enumerate(self.header):
            word = max(len(word) for word in heading.split(" "))
            line = 0
            for row in self.rows:
                line = max([line, *map(len, row[column].splitlines())])
            widths.append(_Width(word, line))
        return widths

    def _parts(self, widths: Sequence[_Width], width: int) -> list[list[int]]:
        """The columns of each part into which the table is divided where it is wider than `width`.

        Every part begins with the key columns. In a table that is not too wide there is one part.
        """
        key_count = self._key_columns()
        parts: list[list[int]] = [[]]
        for column in range(len(self.header)):
            has_room = _have_room([*parts[-1], column], widths, width)
            # The first column after the key columns stays in the first part, room or not: no part
            # consists of key columns alone.
            if not has_room and column > key_count:
                parts.append(list(range(key_count)))
            parts[-1].append(column)
        return parts

    def _key_columns(self) -> int:
        """How many columns, counted from the first, tell all rows apart; 1 where that takes more
        than `MOST_KEY_COLUMNS`."""
        for count in range(1, MOST_KEY_COLUMNS + 1):
            keys = {row[:count] for row in self.rows}
            if len(keys) == len(self.rows):
                return count
        return 1

    def _drawing(self, columns: Sequence[int], widths: Sequence[_Width], width: int) -> Drawing:
        """Some columns as a table of rich, in lines of at most `width` characters.

        Where there is no room for them, all but the first may be broken within words, since rich
        would cut off what must not be wrapped.
        """
        from rich import box
        from rich.table import Table as Drawing
        from rich.text import Text

        has_room = _have_room(columns, widths, width)
        drawing = Drawing(box=box.MARKDOWN)
        for column in columns:
            natural = widths[column].natural
            heading = textwrap.fill(self.header[column], natural)
            is_narrow = natural == widths[column].least
            stays_unwrapped = is_narrow and (has_room or column == 0)
            drawing.add_column(Text(heading), overflow="fold", no_wrap=stays_unwrapped)
        for row in self.rows:
            drawing.add_row(*[Text(_glued(row[column])) for column in columns])
        return drawing

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        """Text as wide as there is room for in a terminal, or where `COLUMNS` says so; elsewhere
        Markdown."""
        columns = columns_to_fill()
        if columns is None:
            return self.to_markdown()
        return self.to_text(columns)


@dataclass(frozen=True)
class _Width:
    """How wide a column of a table is, in characters."""

    word: int
    """The longest word of the heading."""
    line: int
    """The longest line of the cells."""

    @property
    def least(self) -> int:
        """The width below which a column is hard to read."""
        return max(self.word, min(self.line, READABLE))

    @property
    def natural(self) -> int:
        """The width at which no cell wraps, nor any word of the heading."""
        return max(self.word, self.line, 1)


def _have_room(columns: Sequence[int], widths: Sequence[_Width], width: int) -> bool:
    """Whether lines of at most `width` characters hold these columns."""
    # Each column has two blanks and a line besides its text.
    needed = sum(widths[column].least + 3 for column in columns)
    return needed < width


def _glued(text: str) -> str:
    """The text with `GLUE` for each blank of an interval, so that no line is wrapped there."""
    return INTERVAL.sub(lambda interval: interval[0].replace(" ", GLUE), text)


def columns_to_fill() -> int | None:
    """The width of the terminal on stdout or, in a pipe, the number in `COLUMNS`; None in a pipe
    without a number above 0 there."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    is_width = columns.isdecimal() and int(columns) > 0
    if is_width:
        return int(columns)
    return None


def wrapped(text: str, indent: str = "") -> str:
    """Wrap paragraphs, one per line, between words at the terminal's width, or at `COLUMNS`.

    In a pipe without `COLUMNS` they are returned unchanged.

    Args:
        text: the paragraphs; rows of tables among them, which fit the terminal already, stay as
            they are.
        indent: what is put before each line of a paragraph but its first.
    """
    columns = columns_to_fill()
    if columns is None:
        return text
    wrapper = textwrap.TextWrapper(columns, subsequent_indent=indent)
    lines = []
    for line in text.split("\n"):
        is_row = line.endswith("|")
        lines.append(line if is_row else wrapper.fill(line))
    return "\n".join(lines)


def markdown_text(text: str) -> str:
    """The text on one line, with HTML and `|` escaped, so that it stays in its cell of a table."""
    line = " ".join(text.split())
    return html.escape(line, quote=False).replace("|", r"\|")


# The help of a command.


class Help(argparse.HelpFormatter):
    """Help with a line for most flags, each with its default.

    The usage names required arguments only, and `FLAG` for all others.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def add_usage(
        self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None
    ) -> None:
        """Show the optional flags as `FLAG` only, since they are listed below the usage."""
        # An argument without option strings is given by its position.
        shown = [action for action in actions if action.required or not action.option_strings]
        if len(shown) < len(actions):
            shown.append(argparse.Action([], "flags", nargs="*", metavar="FLAG"))
        super().add_usage(usage, shown, [], prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        # A switch that takes no value has no default to show.
        is_switch = action.nargs == 0
        has_default = isinstance(default, str | int | float) and default != argparse.SUPPRESS
        if is_switch or not has_default or "(default: " in text:
            return text
        return f"{text} (default: %(default)s)"


def number(text: str, least: float = LEAST_NUMBER) -> float:
    """The number of a flag's text, from `least` to `MOST_NUMBER`; the form `5e8` is read too.

    This function and the two below are types for argparse, which shows their
    `ArgumentTypeError` as a message about the flag.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40}; expected a number") from None
    if not least <= value <= MOST_NUMBER:
        expected = f"{least:g} to {MOST_NUMBER:g}"
        if value <= 0 < least:
            expected = "more than 0"
        raise argparse.ArgumentTypeError(f"{text:.40}; expected {expected}")
    return value


def whole(text: str) -> int:
    """The whole number of a flag's text, at least 1."""
    value = number(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text:.40}; expected a whole number")
    return int(value)


def not_negative(text: str) -> float:
    """The number of a flag's text, at least 0."""
    return number(text, least=0)


# One progress bar, on a terminal and in a notebook; lines elsewhere.

LINE_SECONDS = 10.0
"""Seconds between two lines about progress in a pipe or a log."""


class ProgressLines:
    """Progress in a pipe or a log: a line on stderr every `LINE_SECONDS` until the work is done.

    It is used in the place of a tqdm bar, and has those methods and attributes of one that this
    project uses. Work that takes less time than `LINE_SECONDS` writes nothing. The lines are
    written by a thread while the `with` block runs.
    """

    def __init__(self, what: str, unit: str, total: int | None, every_seconds: float) -> None:
        self.total = total
        self.n = 0
        """How many were done so far."""
        self.leave = True
        """Set for tqdm's bars by their users; without effect here."""
        self._what = what
        self._unit = unit
        self._postfix = ""
        self._every_seconds = every_seconds
        self._first: tuple[float, int] | None = None
        """When `update` was first called, and how much was done then: the part that an earlier run
        did may come in one such call, and says nothing about the speed of this one."""
        self._updated_at = 0.0
        self._over = threading.Event()
        """Set at the end of the `with` block."""

    def __enter__(self) -> ProgressLines:
        threading.Thread(target=self._write, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def update(self, done: float | None = 1) -> None:
        """Count `done` more as done."""
        self.n += int(done or 0)
        self._updated_at = time.monotonic()
        if self._first is None:
            self._first = (self._updated_at, self.n)

    def set_postfix(self, values: Mapping[str, object], refresh: bool = True) -> None:
        """Show these values, each after its name, at the end of the lines from now on."""
        self._postfix = "".join(f", {name} {value}" for name, value in values.items())

    def _write(self) -> None:
        """Print how far the work is at regular intervals, until it is over."""
        began = time.monotonic()
        # Printing fails where nobody reads stderr any more, which is no reason for an error.
        with suppress(OSError, ValueError):
            while not self._over.wait(self._every_seconds):
                done = f"{self.n:,}"
                if self.total is not None:
                    done = f"{done} of {self.total:,}"
                seconds = time.monotonic() - began
                state = f"{done} {self._unit}{self._postfix}{self._time_left()}"
                print(f"{self._what}: {state} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    def _time_left(self) -> str:
        """How much longer the work will take at its mean speed since the first `update`, such as `,
        80 s left`; empty while that speed or the total is not known."""
        if self.total is None or self._first is None:
            return ""
        first_at, done_before = self._first
        done = self.n - done_before
        seconds = self._updated_at - first_at
        remaining = self.total - self.n
        if done <= 0 or remaining <= 0:
            return ""
        left_at_last_update = remaining * seconds / done
        left = left_at_last_update - (time.monotonic() - self._updated_at)
        return f", {duration_text(max(0.0, left))} left"


class SampleRate:
    """Samples per second of a training, without its first step and what happens between steps."""

    def __init__(self, samples_per_step: int) -> None:
        self._samples_per_step = samples_per_step
        self._last_step: int | None = None
        self._counts_from = 0.0
        """When the last step, or the pause after it, ended."""
        self._timed_steps = 0
        self._seconds = 0.0
        """Time that the timed steps took, pauses left out."""

    def count(self, step: int) -> None:
        """Count the steps up to this one, which has just ended.

        The first call only starts the clock, so that the first step is left out.
        """
        now = time.monotonic()
        if self._last_step is not None and step > self._last_step:
            self._timed_steps += step - self._last_step
            self._seconds += now - self._counts_from
        self._last_step = step
        self._counts_from = now

    def pause(self) -> None:
        """Leave out the time since the last step: it went into an evaluation, or a checkpoint.

        To be called when the pause ends.
        """
        self._counts_from = time.monotonic()

    def shown(self) -> dict[str, str]:
        """The rate by the name `speed`, for `set_postfix`; empty as long as it is unknown."""
        if self._seconds <= 0:
            return {}
        rate = self._timed_steps * self._samples_per_step / self._seconds
        return {"speed": f"{digits(rate)} samples/s"}


def duration_text(seconds: float) -> str:
    """A time in seconds, minutes or hours, such as `80 s`, `12 min` or `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / SECONDS_PER_HOUR:.1f} h"


def progress(
    what: str,
    unit: str,
    total: int | None = None,
    *,
    at_once: bool = True,
    every_seconds: float = LINE_SECONDS,
) -> tqdm | ProgressLines:
    """A progress bar for a `with` block; its `update` takes how many were done since the last call.

    Where stderr is neither a terminal nor a notebook's, lines are printed in the place of a bar.

    Args:
        what: the work, at the beginning of the bar.
        unit: what is counted, in the plural.
        total: how many there are to do; None if that is not known.
        at_once: whether the bar is shown from the beginning; if not, from the first `update`. Where
            `total` is 0 it never is.
        every_seconds: time between two lines.
    """
    in_notebook = in_kernel()
    if not in_notebook and not sys.stderr.isatty():
        return ProgressLines(what, unit, total, every_seconds)
    from tqdm import tqdm

    is_at_once = at_once and total != 0
    # With any delay, tqdm shows the bar at the first update only.
    delay = 0 if is_at_once else 1e-6
    return tqdm(
        desc=what,
        unit=f" {unit}",
        total=total,
        delay=delay,
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
