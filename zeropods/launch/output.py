"""What the ranks write: line by line, with the pod's name, to a log and to whoever watches."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

LAST_LINES = 8
SESSION_END = re.compile(r"pdsh@[^:]*: (\S+): (?:ssh exited with exit code|ssh killed by signal|killed by signal) \d+")
"""What pdsh writes when a pod's command fails or its connection breaks; of one that ends well it says nothing."""


class Output:
    """Reads a pipe to its end in a thread of its own.

    pdsh puts `ADDRESS: ` before each line; known addresses are replaced by the pods' names.
    """

    def __init__(self, pipe: IO[bytes], log: Path, names: Mapping[str, str], show: Callable[[str], object]) -> None:
        """`show` gets every line; it is called in the reader's thread."""
        self.last: deque[str] = deque(maxlen=200)
        self._failed: dict[str, float] = {}
        self._names = names
        self._show = show
        self._thread = threading.Thread(target=self._read, args=(pipe, log), daemon=True)
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Wait for the end of the pipe; a process that escaped and holds it open is not waited for."""
        self._thread.join(seconds)

    def failed_sessions(self) -> dict[str, float]:
        """Seconds since pdsh said that a pod's session has failed, by the pod's name."""
        now = time.monotonic()
        return {pod: now - at for pod, at in list(self._failed.items())}

    def tail(self, pod: str | None = None, lines: int = LAST_LINES) -> list[str]:
        """The last lines, of one pod if it is named."""
        chosen = [line for line in list(self.last) if pod is None or line.startswith(f"{pod}: ")]
        return chosen[-lines:]

    def _read(self, pipe: IO[bytes], log: Path) -> None:
        with pipe, open(log, "a", encoding="utf-8") as file:
            for raw in pipe:
                line = self._named(raw.decode("utf-8", "replace").rstrip("\n"))
                file.write(f"{line}\n")
                file.flush()
                self.last.append(line)
                self._note(line)
                # A terminal that is gone must not stop the reading: the pipe would fill, and the ranks wait.
                with suppress(OSError):
                    self._show(line)

    def _note(self, line: str) -> None:
        match = SESSION_END.fullmatch(line)
        if match:
            self._failed.setdefault(self._names.get(match[1], match[1]), time.monotonic())

    def _named(self, line: str) -> str:
        address, colon, text = line.partition(": ")
        return f"{self._names[address]}: {text}" if colon and address in self._names else line
