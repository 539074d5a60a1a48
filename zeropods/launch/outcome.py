"""How a run ends: when a pod counts as lost, whose fault an end is, what is recorded of it; and its log."""

from __future__ import annotations

import csv
import math
import queue
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.measure.heartbeat import Beat, read_beats
from zeropods.measure.record import (
    CONFIG,
    LOCK,
    RankMeasurement,
    Record,
    RunConfig,
    compose_record,
    first_failure,
    read_config,
    read_rank,
    write_record,
)
from zeropods.measure.run_folder import locked
from zeropods.pods.leases import HAS_ENDED
from zeropods.programs import is_held
from zeropods.tables import GIB, progress

if TYPE_CHECKING:
    from zeropods.pods.rendezvous import Pod


SILENT_SECONDS = 8.0
"""A pod that has not answered for so long counts as lost."""
GONE_SECONDS = 3.0
"""A pod without ssh that does not answer for so long is lost; longer than between two answers."""
FAILED_SECONDS = 5.0
"""Where pdsh says that a pod's ranks failed, the others' have so long to say what they make of it."""
MEASURED_SECONDS = 12.0
"""What the ranks have left behind when all have measured or ended, or a launcher, is waited for so long."""
START_SECONDS = 180.0
"""From the launcher's start to the first rank on each pod: two imports of DeepSpeed on a busy machine."""
LOCKED_SECONDS, POLL_SECONDS = 15.0, 0.2
"""Rank 0 of a pod that was lost may hold `run.lock` until its lease has run out."""
UNSAID = "it was killed, or ended without saying why"
NEVER_A_CAUSE = {"timeout": ("interrupted", "failed")}
"""By the supervisor's verdict, what ranks say because of it: those that are ended later miss the others."""


@dataclass(frozen=True)
class Ending:
    """Why a supervisor ends a run. A status of None leaves it to what the ranks measured."""

    status: str | None = None
    reason: str | None = None
    pod: str | None = None


@dataclass(frozen=True)
class PodState:
    """What is known of a run on one pod."""

    pod: Pod
    answered_at: float
    """When it answered last, by the monotonic clock."""
    most: int = 0
    """Most processes of the run that any answer told of."""
    absent_since: float | None = None
    """By the same clock: since when the pod has no process of the run any more."""
    oom_kills: int = 0
    """Processes that the kernel has ended for want of memory since the run was opened."""
    error: str | None = None
    """Why the last question got no answer."""

    @property
    def silent_seconds(self) -> float:
        """Since the last answer."""
        return time.monotonic() - self.answered_at


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a supervisor sees of a run at one moment."""

    pods: Sequence[PodState] = ()
    launcher_status: int | None = None
    """Exit status of DeepSpeed's launcher, negative for a signal; None while it runs."""
    signal: str | None = None
    """The name of a signal that asks for the end, if one came."""
    failed_sessions: Mapping[str, float] = field(default_factory=dict)
    """Seconds since pdsh told of a failure, by pod."""
    since_start: float = 0.0
    """Seconds since the launcher's start."""
    timeout_seconds: float | None = None
    """How many of them the run may take; None for as many as it likes."""
    since_measured: float = 0.0
    """Seconds since all ranks had measured what there is to measure."""
    hang: Ending | None = None
    """What the ranks' heartbeats say where nothing goes on."""


def judge(state: Observation) -> Ending | None:
    """The verdict on a run, None while it may go on."""
    if state.signal is not None:
        return Ending("interrupted", state.signal)
    return _lost(state) or _launcher_ended(state) or state.hang or _late(state)


def _lost(state: Observation) -> Ending | None:
    """A pod that has been silent for too long, or that has ended the run already."""
    for seen in sorted(state.pods, key=lambda seen: -seen.silent_seconds):
        pod = f"{seen.pod.name} ({seen.pod.address})"
        if HAS_ENDED in (seen.error or ""):
            # No renewal came through for longer than the lease.
            reason = f"{pod} ended the run, because this launcher was silent for longer than its lease"
            return Ending("failed", reason, seen.pod.name)
        # Where a pod's ssh is gone too, it is lost sooner.
        if seen.silent_seconds > (GONE_SECONDS if seen.pod.name in state.failed_sessions else SILENT_SECONDS):
            why = f" ({seen.error})" if seen.error else ""
            reason = f"{pod} has not answered for {seen.silent_seconds:.0f} s{why}"
            return Ending("pod_lost", reason, seen.pod.name)
    return None


def _launcher_ended(state: Observation) -> Ending | None:
    """The launcher has ended, or waits for something that is no rank; or the ranks of one pod have failed."""
    status = state.launcher_status
    if status is not None:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return Ending(None, f"DeepSpeed's launcher {how}") if status else Ending()
    absent = [seen.answered_at - seen.absent_since if seen.absent_since else 0.0 for seen in state.pods]
    if min(absent, default=0.0) > MEASURED_SECONDS:
        return Ending(None, "the ranks have ended, and something that they left keeps their ssh sessions open")
    if state.since_measured > MEASURED_SECONDS:
        return Ending(None, "all ranks have measured, and something keeps the launcher waiting")
    failed, seconds = max(state.failed_sessions.items(), key=lambda session: session[1], default=("", 0.0))
    if seconds > FAILED_SECONDS:
        return Ending(None, f"its ranks or its ssh session ended {seconds:.0f} s before the others'", failed)
    return None


def _late(state: Observation) -> Ending | None:
    """The run has had its time, or has never begun on a pod."""
    if state.timeout_seconds is not None and state.since_start > state.timeout_seconds:
        # What is left for an attempt is less by the moment that was spent on beginning it.
        return Ending("timeout", f"took longer than {round(state.timeout_seconds, 2):g} s")
    missing = next((seen.pod.name for seen in state.pods if not seen.most), None)
    if missing is not None and state.since_start > START_SECONDS:
        return Ending("failed", f"no process of the run within {START_SECONDS:.0f} s", missing)
    return None


def check_timeout(seconds: float | None) -> None:
    """Refuse a time that ends a run at once, or never."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UserError(f"--timeout {seconds:g}; expected more than 0 seconds")


# What the ranks of a launch have written into its folder


class Ranks:
    """The ranks of one launch, by what they measured since it began."""

    def __init__(self, folder: Path, pods: Sequence[str | None] = ()) -> None:
        """`pods`: the name of each rank's pod, in the order of ranks; None where it has none."""
        self.pods = tuple(pods)
        self.folder = folder
        self.before = written_at(folder / CONFIG)
        """What the folder said when the launch began."""

    def have_opened_the_run(self) -> bool:
        """Whether rank 0 has begun an attempt: what lies in the folder is this launch's."""
        return written_at(self.folder / CONFIG) != self.before

    def have_all_measured(self) -> bool:
        """Whether every rank has written its last word."""
        return self.have_opened_the_run() and len(self._files()) == len(self.pods)

    def measured(self) -> list[RankMeasurement]:
        """What each rank measured; a file that is damaged counts as none."""
        found = []
        for path in self._files() if self.have_opened_the_run() else ():
            try:
                found.append(read_rank(path))
            except UserError:
                continue
        return [rank for rank in found if rank.rank in range(len(self.pods))]

    def _files(self) -> list[Path]:
        return [path for path in (self.folder / "ranks").glob("*.json") if path.stem.isdigit()]


def written_at(path: Path) -> int | None:
    """What changes when a file is written anew; None where there is none."""
    return path.stat().st_mtime_ns if path.is_file() else None


def verdict_of_ranks(
    ranks: Ranks, verdict: Ending, out_of_memory: frozenset[str | None] = frozenset(), *, is_certain: bool = False
) -> Ending:
    """The verdict by what the ranks measured; without a status where all of them ended well, whatever came after.

    Where one pod lost its ranks first, what they say is the cause, and the errors of others follow from
    it. A rank that was interrupted is never a cause: nobody but the supervisor and its agents did that. A rank
    that left nothing, on a pod where the kernel has ended a process for want of memory, is that process.

    Args:
        out_of_memory: pods where the kernel has ended a process for want of memory.
        is_certain: whether a verdict with a status counts whatever a rank says that did not end well.
    """
    measured, pods = ranks.measured(), ranks.pods
    missing = sorted(set(range(len(pods))) - {rank.rank for rank in measured})
    if not missing and all(rank.status == "ok" for rank in measured):
        return Ending()
    if verdict.status == "pod_lost" or (is_certain and verdict.status is not None):
        return verdict
    unsaid = [rank for rank in missing if verdict.pod in (None, pods[rank])]
    killed = next((rank for rank in unsaid if pods[rank] in out_of_memory), None)
    if killed is not None and verdict.status is None:
        return Ending("oom", killed_for_memory(ranks.folder, killed), pods[killed])
    follows = NEVER_A_CAUSE.get(verdict.status or "", ("interrupted",))
    here = [rank for rank in measured if verdict.pod in (None, pods[rank.rank]) and rank.status not in follows]
    cause = first_failure(here)
    if cause is not None:
        place = f"rank {cause.rank}: " if len(pods) > 1 else ""
        return Ending(cause.status, f"{place}{cause.reason}", pods[cause.rank])
    if verdict.status is not None:
        return verdict
    if unsaid:
        reason = f"rank {unsaid[0]} left no measurement: {verdict.reason or UNSAID}"
        return Ending("failed", reason, pods[unsaid[0]])
    return Ending("failed", verdict.reason or "the launcher ended before the ranks", verdict.pod)


def killed_for_memory(folder: Path, rank: int) -> str:
    """The reason of a run of which the kernel ended a rank: phase, step and the peak of its memory as sampled."""
    beat = read_beats(folder).get(rank)
    if beat is None:
        return f"rank {rank}: killed by the kernel, out of memory"
    peak = _peak_bytes(folder / "memory" / f"{rank}.csv", beat)
    sampled = "" if peak is None else f", peak resident {peak / GIB:.2f} GiB"
    return f"rank {rank}: killed by the kernel, out of memory: phase {beat.phase}, {beat.step} steps done{sampled}"


def _peak_bytes(path: Path, beat: Beat) -> float | None:
    """The most bytes that were resident in the attempt that a heartbeat is of; None where none were sampled."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [(row["unix_seconds"], row["resident_bytes"]) for row in csv.DictReader(file)]
    except (OSError, KeyError):
        return None
    # The last line may have been cut off.
    values = [float(value) for at, value in rows if value and at and float(at) >= beat.began_unix_seconds - 1.0]
    return max(values, default=None)


# What is recorded of a supervised run


class UnopenedError(UserError):
    """A run that ended before its ranks had opened its folder: there is nothing to record."""

    steps = 0

    def __init__(self, folder: Path, verdict: Ending, lines: Sequence[str]) -> None:
        self.status, self.pod = verdict.status or "failed", verdict.pod
        self.reason = verdict.reason or "it ended before the ranks had opened the run"
        refusal = OF_SCRIPT.match(lines[-1]) if lines and verdict.status is None else None
        if refusal:
            super().__init__(refusal[1])
        else:
            super().__init__("\n".join([f"{folder}: {self.status}: {self.reason}; last lines of {LOG}:", *lines]))


def record_run(
    ranks: Ranks,
    verdict: Ending,
    log: RunLog,
    *,
    out_of_memory: frozenset[str | None] = frozenset(),
    is_certain: bool = False,
    restarts: int = 0,
) -> Record:
    """Write `record.json` of a run whose ranks have ended, and return it; `UnopenedError` where they never began.

    What holds the folder for longer than a lease is out of reach; the supervisor's own lock still keeps others out.

    Args:
        verdict: the supervisor's, which `verdict_of_ranks` takes up.
        restarts: how often the launch had gone on by itself.
    """
    folder = ranks.folder
    if not ranks.have_opened_the_run():
        raise UnopenedError(folder, verdict, log.tail(verdict.pod))
    deadline = time.monotonic() + LOCKED_SECONDS
    while is_held(folder / LOCK) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    with nullcontext() if is_held(folder / LOCK) else locked(folder):
        said = verdict_of_ranks(ranks, verdict, out_of_memory, is_certain=is_certain)
        lines = [] if said.status is None else log.tail(said.pod)
        record = compose_record(
            folder, status=said.status, reason=said.reason, pod=said.pod, last_lines=lines, restarts=restarts
        )
        write_record(folder, record)
    return record


def failure(folder: Path, record: Record) -> str:
    """Why a run ended without success, with the last lines that it wrote."""
    pod = f"{record.pod}: " if record.pod else ""
    lines = "\n".join(record.last_lines)
    return f"{folder}: {record.status}: {pod}{record.reason}; last lines of {LOG}:\n{lines}"


# What a run writes: its log line by line, with the pods' names, and the progress that the log tells of.

LOG = "launch.log"
"""In the run folder: what the ranks wrote on stdout and stderr, attempt after attempt."""
LAST_LINES, KEPT_LINES = 8, 200
MOST_WAITING, SHOW_SECONDS = 100_000, 5.0
"""Lines that wait for a terminal to take them, further ones are not shown; at the end so long is waited for it."""
OF_LAUNCHER = re.compile(r"\[[\d:., -]+\] \[[A-Z]+\] \[launch\.py:")
"""In a line that DeepSpeed's launcher has logged: what the script said last stands between two of them."""
OF_SCRIPT = re.compile(r"(?:\S+: )?zeropods: (.+)")
"""What a script of ours said when it refused to train, behind its pod's name where it ran on one."""
LINE = re.compile(r"step (\d+) (loss|eval_loss) ([\d.e+-]*\d|nan|inf|-inf)$")
"""What `train.log` says of a step."""
SESSION_END = re.compile(r"pdsh@[^:]*: (\S+): (?:ssh exited with exit code|ssh killed by signal|killed by signal) \d+")
"""What pdsh writes when a pod's command fails or its connection breaks; of one that ends well it says nothing."""


class GrowingFile:
    """A file to which another process appends lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def lines(self, *, ended: bool = False) -> list[str]:
        """The complete lines that were added since the last call; where nothing more will come, all of them."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new if ended else new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", "replace").removesuffix("\n").split("\n") if whole else []


class TrainLog(GrowingFile):
    """`train.log` of a run."""

    def entries(self) -> list[tuple[int, str, float]]:
        """Step, name (`loss` or `eval_loss`) and value of the losses that were logged since the last call."""
        return [(int(m[1]), m[2], float(m[3])) for m in map(LINE.search, self.lines()) if m]


@contextmanager
def following(folder: Path) -> Iterator[Callable[[], None]]:
    """A progress bar over the optimizer steps of a run; call what it yields now and then."""
    log = TrainLog(folder / "train.log")
    with progress("train", "steps") as bar:

        def tick() -> None:
            for step, name, loss in log.entries():
                bar.total = bar.total or planned_steps(read_config(folder))
                bar.set_postfix({name: f"{loss:.4g}"}, refresh=False)
                bar.update(step - bar.n)

        yield tick
        bar.leave = bar.n > 0
        # Where the clock ended it, what was done was all.
        bar.total = bar.total or bar.n or None


def planned_steps(config: RunConfig) -> int | None:
    """Optimizer steps of a run, by its `config.json`; None where the clock ends it."""
    asked = config.identity
    if asked.get("max_train_seconds") or "epochs" not in asked:
        return None
    if asked["max_steps"] > 0:
        return int(asked["max_steps"])
    return math.ceil(asked["epochs"] * math.ceil(config.train_rows / config.effective_batch_size))


class RunLog(GrowingFile):
    """The log of a run: to it the run's processes append; here each line is shown, and the last ones are kept."""

    def __init__(self, folder: Path, show: Callable[[str], object] = lambda line: None) -> None:
        """`folder`: of the run, made where it is not there; `show` gets every line that is added from now on."""
        super().__init__(folder / LOG)
        folder.mkdir(parents=True, exist_ok=True)
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._shown: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        # A terminal that takes nothing, or is gone, ends no run and keeps nobody from watching it.
        self._shower = threading.Thread(target=self._show, args=(show,), daemon=True)
        self._shower.start()

    def read(self, *, ended: bool = False) -> None:
        """Take up the lines that are new, as `GrowingFile.lines` has them."""
        for line in map(self.named, self.lines(ended=ended)):
            self._last.append(line)
            with suppress(queue.Full):
                self._shown.put_nowait(line)
        if ended:
            with suppress(queue.Full):
                self._shown.put_nowait(None)
            self._shower.join(SHOW_SECONDS)

    def _show(self, show: Callable[[str], object]) -> None:
        while (line := self._shown.get()) is not None:
            with suppress(OSError):
                show(line)

    def named(self, line: str) -> str:
        """A line with the name of its pod, where it does not begin with that."""
        return line

    def tail(self, pod: str | None = None) -> list[str]:
        """The last lines of a pod; of all where it wrote none, or none is named."""
        lines = [line for line in self._last if not OF_LAUNCHER.search(line)]
        return ([line for line in lines if line.startswith(f"{pod}: ")] or lines)[-LAST_LINES:]


class PdshLog(RunLog):
    """What pdsh writes: `ADDRESS: ` before each line; known addresses are replaced by the pods' names."""

    def __init__(self, folder: Path, show: Callable[[str], object], names: Mapping[str, str]) -> None:
        """`names`: of the pods, by address."""
        super().__init__(folder, show)
        self._names = names
        self._failed: dict[str, float] = {}

    def failed_sessions(self) -> dict[str, float]:
        """Seconds since pdsh said that a pod's session has failed, by the pod's name."""
        now = time.monotonic()
        return {pod: now - at for pod, at in self._failed.items()}

    def named(self, line: str) -> str:
        match = SESSION_END.fullmatch(line)
        if match:
            self._failed.setdefault(self._names.get(match[1], match[1]), time.monotonic())
        address, colon, text = line.partition(": ")
        return f"{self._names.get(address, address)}{colon}{text}"
