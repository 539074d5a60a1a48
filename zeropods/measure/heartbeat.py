"""Heartbeats, the ranks' part of hang detection: they show that a rank runs, how far it has come,
and where it is.

Each rank writes `ranks/N.beat` of the run folder about once a second; `launch.lost_pods_and_hangs`
reads them all. A rank answers the signal that asks for its stacks in `stacks/N.txt`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType

STACKS = int(signal.SIGRTMIN) + 7
"""Signal that asks a rank for the stacks of its threads. Its default action ends a process, so it
may only be sent to one that catches it."""
BEAT_BYTES = 4096
"""Size of every heartbeat in bytes: written over the previous one, it needs no room on a disk that
has become full."""
FRAMES = 24
"""Maximum number of stack frames in a heartbeat."""
BEAT_PAUSE_SECONDS = 1.0
JOIN_SECONDS = 5.0
"""Most seconds to wait for the thread's end: a file system that hangs must not keep a rank from
ending."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat of a rank."""

    rank: int
    pid: int
    began_unix_seconds: float
    """When this attempt began, by the rank's own clock."""
    alive: int
    """Counter that goes up with every heartbeat, whatever the main thread does."""
    marks: int
    """Counter of finished pieces of work: a forward and backward pass, a step, a batch of an
    evaluation."""
    step: int
    """Number of finished optimizer steps."""
    phase: str
    patient: bool
    """Whether the rank's present work has no such pieces: loading, the first step, saving."""
    stack: tuple[str, ...]
    """The main thread's stack, innermost first: `FILE:LINE FUNCTION`."""
    called_from: str | None
    """The innermost of these frames that belongs neither to Python nor to an installed package."""

    def place(self) -> str:
        """Where the main thread is, and from where in the user's or our own code it was called, in
        words."""
        innermost = self.stack[0] if self.stack else "an unknown place"
        if self.called_from in (None, innermost):
            return innermost
        return f"{innermost}, called from {self.called_from}"


def beat_file(folder: Path, rank: int) -> Path:
    """The file of a rank's heartbeat; it exists from the beginning of an attempt to its end."""
    return folder / "ranks" / f"{rank}.beat"


def write_beat(folder: Path, beat: Beat) -> None:
    """Write a heartbeat over the previous one of its rank; `OSError` where that is impossible.

    The file is closed each time: a network file system shows what was closed.
    """
    stack = list(beat.stack[:FRAMES])
    text = _encoded(beat, stack)
    while len(text) > BEAT_BYTES and stack:
        # The outermost frames are left out until the rest fits.
        stack.pop()
        text = _encoded(beat, stack)
    handle = os.open(beat_file(folder, beat.rank), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, text.ljust(BEAT_BYTES), 0)
    finally:
        os.close(handle)


def _encoded(beat: Beat, stack: list[str]) -> bytes:
    """A heartbeat as JSON, with `stack` in place of its own."""
    return json.dumps({**asdict(beat), "stack": stack}).encode()


def read_beats(folder: Path) -> dict[int, Beat]:
    """The last heartbeat of every rank that has one; a heartbeat that is being written at this
    moment is left out."""
    beats = {}
    for path in (folder / "ranks").glob("*.beat"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            document = json.loads(path.read_bytes())
            document["stack"] = tuple(document["stack"])
            beat = Beat(**document)
            beats[beat.rank] = beat
    return beats


class HeartbeatWriter:
    """A thread that writes a rank's heartbeat each second inside a `with` block; it costs a step
    two additions."""

    def __init__(self, folder: Path, rank: int, phase: Callable[[], str]) -> None:
        """Prepare to write into a run folder; `phase` tells what the rank is doing. Nothing is
        written yet."""
        self.training = False
        """Whether training steps are running now, one after another; set from outside."""
        self.step = 0
        """Number of the last finished optimizer step."""
        self._folder = folder
        self._rank = rank
        self._phase = phase
        self._began = time.time()
        self._marks = 0
        self._alive = 0
        self._main = 0
        """Identifier of the main thread."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._signal_handling = contextlib.ExitStack()
        """Closes what `stacks_on_signal` has set up, if it could be."""

    def __enter__(self) -> HeartbeatWriter:
        self._main = threading.get_ident()
        self._began = time.time()
        # Training itself complains about a disk that is full.
        with contextlib.suppress(OSError):
            beat_file(self._folder, self._rank).parent.mkdir(parents=True, exist_ok=True)
            stacks = self._folder / "stacks" / f"{self._rank}.txt"
            self._signal_handling.enter_context(stacks_on_signal(stacks))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(JOIN_SECONDS)
        # An empty file or folder that cannot be removed must not end the rank.
        with contextlib.suppress(OSError):
            self._signal_handling.close()
        # After the thread's end, since it would write the file anew.
        self._remove()

    def mark(self, step: int | None = None) -> None:
        """Count a finished piece of work; `step` is its number if it is an optimizer step."""
        self._marks += 1
        if step is not None:
            self.step = step

    def _run(self) -> None:
        """Write a heartbeat at regular intervals until the `with` block ends."""
        while True:
            # A function of its own looks at the main thread's frames, and lets go of them when it
            # returns. Frames that this thread held while it waits would keep their variables alive,
            # such as all gradients in an optimizer's step.
            beat = self._next_beat()
            try:
                write_beat(self._folder, beat)
            except OSError:
                # An old heartbeat would count as a hang; a rank without one is not watched.
                self._remove()
            if self._ending.wait(BEAT_PAUSE_SECONDS):
                return

    def _next_beat(self) -> Beat:
        """Count a heartbeat, and return it with the main thread's stack of this moment."""
        self._alive += 1
        phase = self._phase()
        frames: list[FrameType] = []
        innermost = sys._current_frames().get(self._main)
        if innermost is not None:
            frames = [frame for frame, _ in traceback.walk_stack(innermost)]
        # Work whose finished pieces `mark` counts.
        has_pieces = phase == "evaluate" or (phase == "steady" and self.training)
        return Beat(
            rank=self._rank,
            pid=os.getpid(),
            began_unix_seconds=self._began,
            alive=self._alive,
            marks=self._marks,
            step=self.step,
            phase=phase,
            patient=not has_pieces,
            stack=tuple(map(place_of, frames)),
            called_from=_innermost_own_place(frames),
        )

    def _remove(self) -> None:
        """Remove this rank's heartbeat, if there is one."""
        # A file that cannot be removed must not end the rank.
        with contextlib.suppress(OSError):
            beat_file(self._folder, self._rank).unlink(missing_ok=True)


@contextlib.contextmanager
def stacks_on_signal(path: Path) -> Iterator[None]:
    """Within the block, write the stacks of all threads into a file whenever `STACKS` arrives,
    whichever thread holds Python's lock.

    A file from before is removed first. At the end the file is removed if it is empty, and then its
    folder if that is empty too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # Once faulthandler is unregistered, the signal must not have its default effect, the end of
        # the process.
        if threading.current_thread() is threading.main_thread():
            signal.signal(STACKS, signal.SIG_IGN)
        faulthandler.register(STACKS, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS)
    if path.stat().st_size == 0:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def place_of(frame: FrameType) -> str:
    """`FILE:LINE FUNCTION`; a file of Python, of a package or below the working directory has a
    relative path."""
    path = frame.f_code.co_filename
    for root in (*_installed(), os.getcwd() + os.sep):
        path = path.removeprefix(root)
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


def _innermost_own_place(frames: list[FrameType]) -> str | None:
    """The place of the first frame that belongs neither to Python nor to an installed package."""
    for frame in frames:
        if _is_own(frame):
            return place_of(frame)
    return None


def _is_own(frame: FrameType) -> bool:
    """Whether a frame belongs to the user's or our own code."""
    path = frame.f_code.co_filename
    # Code that was not read from a file has a name such as `<frozen importlib>`.
    return os.path.isabs(path) and not path.startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    """Folders of installed packages and of Python's own modules, each with a slash at its end.
    Packages come first, since their folders may lie below Python's."""
    paths = sysconfig.get_paths()
    return tuple(paths[name] + os.sep for name in ("purelib", "platlib", "stdlib"))
