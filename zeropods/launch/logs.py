"""What a run writes while it runs: its log line by line, with the pods' names, and the progress
that it reports."""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from zeropods.measure.heartbeat import read_beats
from zeropods.measure.record import read_config
from zeropods.tables import SampleRate, progress

LAUNCH_LOG = "launch.log"
"""File in the run folder that holds what the ranks wrote to stdout and stderr, attempt after
attempt."""
LAST_LINES = 8
"""Number of last lines that a record has."""
KEPT_LINES = 200
"""Number of last lines of all pods that are kept, so that those of one pod can be chosen."""
BEATS_LOOK_SECONDS = 1.0
"""Pause between two looks at the ranks' heartbeats, for the line of progress."""
MOST_WAITING = 100_000
"""Most lines that wait for a slow reader; further ones are not shown."""
SHOW_SECONDS = 5.0
"""Seconds to wait for a slow reader at the end."""
OF_LAUNCHER = re.compile(r"\[[\d:., -]+\] \[[A-Z]+\] \[(?:launch|runner)\.py:")
"""Matches a line that DeepSpeed's launcher logged; the last words of the script stand between two
of these lines."""
OF_SCRIPT = re.compile(r"(?:\S+: )?zeropods: (.+)")
"""Matches what one of our scripts says when it refuses to train, after its pod's name where it ran
on a pod."""
LINE = re.compile(r"step (\d+) (loss|eval_loss) ([\d.e+-]*\d|nan|inf|-inf)$", re.MULTILINE)
"""Matches what `train.log` says about a step."""
SESSION_END = re.compile(
    r"(?:pdsh@[^:]*|agents): (?P<address>\S+): "
    r"(?:(?:ssh|launcher) exited with exit code|(?:ssh )?(?P<killed>killed by signal)) "
    r"(?P<number>\d+)"
)
"""Matches what pdsh writes when a pod's command fails or its connection breaks, and what
`launch/over_agents.py` writes in its place; of a success they say nothing."""


class GrowingFile:
    """A file to which another process appends lines; those that are there already do not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def new_lines(self, *, ended: bool = False) -> list[str]:
        """The complete lines added since the last call, each returned once; none where there is no
        file. If nothing more is added (`ended`), a last line without a newline counts too."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        if not ended:
            new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        if not new:
            return []
        return new.decode("utf-8", "replace").removesuffix("\n").split("\n")


@contextmanager
def shown_progress(folder: Path) -> Iterator[Callable[[], None]]:
    """Show a progress bar over the optimizer steps of a run inside a `with` block; yields a
    function that updates it, to be called several times per second."""
    log = GrowingFile(folder / "train.log")
    with progress("train", "steps") as bar:
        losses: dict[str, str] = {}
        rate: SampleRate | None = None
        looked_at = time.monotonic()

        def update() -> None:
            nonlocal looked_at, rate
            for step, name, loss in LINE.findall("\n".join(log.new_lines())):
                # Where a step was logged, the run has its `config.json`.
                bar.total = bar.total or _planned_steps(folder)
                losses[name] = f"{float(loss):.4g}"
                bar.update(int(step) - bar.n)
                if rate is None:
                    rate = SampleRate(read_config(folder).effective_batch_size)
                rate.count(int(step))
            if time.monotonic() - looked_at > BEATS_LOOK_SECONDS:
                looked_at = time.monotonic()
                speed = {} if rate is None else rate.shown()
                values = {**losses, **speed, **ranks_doing(folder)}
                bar.set_postfix(values, refresh=False)

        yield update
        bar.leave = bar.n > 0
        # Where a time limit ended the run, the steps that were done are the total.
        bar.total = bar.total or bar.n or None


def _planned_steps(folder: Path) -> int | None:
    """Number of steps by the run's `config.json`; None where a time limit ends the run, or it has
    no `epochs`."""
    config = read_config(folder)
    settings = config.identity
    if settings.get("max_train_seconds") or "epochs" not in settings:
        return None
    steps_per_epoch = math.ceil(config.train_rows / config.effective_batch_size)
    if settings["max_steps"] > 0:
        return int(settings["max_steps"])
    return math.ceil(settings["epochs"] * steps_per_epoch)


def ranks_doing(folder: Path) -> dict[str, str]:
    """What the ranks of a run do while no steps come, as `ranks` and a text for a line of progress;
    empty while all of them train."""
    beats = read_beats(folder)
    if not beats:
        return {"ranks": "starting"}
    # `steady` is the phase of the steps.
    phases = {beat.phase.replace("_", " ") for beat in beats.values()} - {"steady"}
    if not phases:
        return {}
    return {"ranks": f"in {' and '.join(sorted(phases))}"}


class RunLog(GrowingFile):
    """The log of a run, to which the run's processes append; each new line is shown here, and the
    last ones are kept.

    pdsh, and `launch/over_agents.py` in its place, write `ADDRESS: ` before each line, and
    `srun --label` writes the task's number, padded.
    """

    def __init__(
        self,
        folder: Path,
        show: Callable[[str], object] = lambda line: None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Create the run folder if it does not exist, and start a thread that shows the lines which
        `read` puts up.

        Args:
            show: is called, in that thread, with each of these lines.
            names: the pods' names, by the prefix of their lines.
        """
        super().__init__(folder / LAUNCH_LOG)
        folder.mkdir(parents=True, exist_ok=True)
        self.names = dict(names or {})
        self.failed_at: dict[str, float] = {}
        """Monotonic time in seconds at which pdsh, or `launch/over_agents.py` in its place, said
        that a pod's session had failed, by the pod's name."""
        self.session_statuses: dict[str, int] = {}
        """Exit status of each of these sessions, in the order in which they failed; for a signal it
        is 128 plus the signal's number."""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._to_show: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        """Lines that wait for display; None ends it."""
        # A thread, so that somebody who reads this process's output and takes nothing (a full
        # pipe) does not block supervision; a daemon, so that this process can end all the same.
        self._display = threading.Thread(target=self._show, args=(show,), daemon=True)
        self._display.start()

    def read(self, *, ended: bool = False) -> None:
        """Put the new lines up for display, without waiting for it, keep the last ones, and note
        which sessions have failed. Where too many lines wait for display, the rest is not shown.

        Args:
            ended: whether no more lines come: one without a line end counts too, and the display
                gets `SHOW_SECONDS` to end.
        """
        for line in self.new_lines(ended=ended):
            self._note_session_end(line)
            named = self._named(line)
            self._last.append(named)
            with suppress(queue.Full):
                self._to_show.put_nowait(named)
        if ended:
            with suppress(queue.Full):
                self._to_show.put_nowait(None)
            self._display.join(SHOW_SECONDS)

    def _note_session_end(self, line: str) -> None:
        """Note that a pod's session has failed, if this is the first line that says so."""
        match = SESSION_END.fullmatch(line)
        if match is None:
            return
        address = match["address"]
        pod = self.names.get(address, address)
        status = int(match["number"])
        if match["killed"] is not None:
            status += 128
        self.failed_at.setdefault(pod, time.monotonic())
        self.session_statuses.setdefault(pod, status)

    def _named(self, line: str) -> str:
        """The line with its pod's name in place of what pdsh or srun has put before it."""
        place, _, text = line.lstrip(" ").partition(": ")
        if place not in self.names:
            return line
        return f"{self.names[place]}: {text}"

    def _show(self, show: Callable[[str], object]) -> None:
        """Show lines as they come, until None comes."""
        while (line := self._to_show.get()) is not None:
            # A reader that is gone must not keep later lines waiting.
            with suppress(OSError):
                show(line)

    def tail(self, pod: str | None = None) -> list[str]:
        """The last `LAST_LINES` lines of a pod, or of all pods where it wrote none or no pod is
        named; without those of DeepSpeed's launcher."""
        lines = [line for line in self._last if not OF_LAUNCHER.search(line)]
        of_pod = [line for line in lines if line.startswith(f"{pod}: ")]
        return (of_pod or lines)[-LAST_LINES:]
