"""The log that a job's nodes write, read while it grows."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from zeropods.launch.output import LAST_LINES

LABEL = re.compile(r" *(\d+): ?")
"""What `srun --label` puts before each line: the task's number, padded to the width of the largest."""


class JobLog:
    """The lines that were added since this was made; a task's number becomes its node's name."""

    def __init__(self, path: Path, show: Callable[[str], object]) -> None:
        """`show` gets every line."""
        self.nodes: Sequence[str] = ()
        """Names of the job's nodes, in the order of its tasks, once they are known."""
        self._path = path
        self._show = show
        self._offset = path.stat().st_size if path.is_file() else 0
        self._last: deque[str] = deque(maxlen=200)

    def read(self) -> None:
        """Take up the complete lines that are new."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.decode("utf-8", "replace").split("\n") if newline else ():
            self._last.append(self._named(line))
            # A terminal that is gone ends no run.
            with suppress(OSError):
                self._show(self._last[-1])

    def tail(self, pod: str | None = None) -> list[str]:
        """The last lines, of one node if it is named."""
        chosen = [line for line in self._last if pod is None or line.startswith(f"{pod}: ")]
        return chosen[-LAST_LINES:]

    def _named(self, line: str) -> str:
        match = LABEL.match(line)
        if match is None or int(match[1]) >= len(self.nodes):
            return line
        return f"{self.nodes[int(match[1])]}: {line[match.end() :]}"
