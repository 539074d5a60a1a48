"""How a run ended: the ranks' own word, or what its supervisor saw, as a status with a reason and a pod."""

from __future__ import annotations

import csv
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from zeropods.errors import UserError
from zeropods.launch.heartbeat import LEASE_SECONDS, SILENT_SECONDS, Pulse
from zeropods.measure.heartbeat import Beat, read_beats
from zeropods.measure.record import RankMeasurement, Record, compose_record, first_failure, read_rank, write_record
from zeropods.measure.run_folder import CONFIG, LOCK, is_held, locked

# How a run ends: what its supervisor sees, as a status with a reason and a pod.

GONE_SECONDS = 3.0
"""A pod without ssh that does not answer for so long is lost; longer than between two answers."""
FAILED_SECONDS = 5.0
"""Where pdsh says that a pod's ranks failed, the others' have so long to say what they make of it."""
ABSENT_SECONDS = 12.0
"""Ranks leave together; a pod whose ranks are gone for so long, while others stay, has lost them."""
START_SECONDS = 60.0
"""A pod whose ranks are not there so long after another's were seen will not have them."""
FIRST_SECONDS = 180.0
"""From the launcher's start to the first rank on any pod: two imports of DeepSpeed on a busy machine."""


@dataclass(frozen=True)
class Verdict:
    """Why a supervisor ends a run. A status of None leaves it to what the ranks measured."""

    status: str | None = None
    reason: str | None = None
    pod: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a supervisor sees of a run at one moment."""

    pulses: Sequence[Pulse]
    launcher_status: int | None = None
    """Of DeepSpeed's launcher, negative for a signal; None while it runs."""
    signal: str | None = None
    """The name of a signal that asks for the end, if one came."""
    failed_sessions: Mapping[str, float] = field(default_factory=dict)
    """Seconds since pdsh told of a failure, by pod."""
    done: frozenset[str] = frozenset()
    """Pods whose ranks have all ended well."""
    since_start: float = 0.0
    """Seconds since the launcher's start."""
    timeout_seconds: float | None = None
    """How many of them the run may take; None for as many as it likes."""
    since_first_rank: float = 0.0
    """Seconds since the first process of the run was seen on any pod."""
    since_measured: float = 0.0
    """Seconds since all ranks had measured what there is to measure."""
    stands_still: Verdict | None = None
    """Where the ranks' beats say that nothing goes on."""


def judge(sight: Sight) -> Verdict | None:
    """The verdict on a run, None while it may go on."""
    if sight.signal is not None:
        return Verdict("interrupted", sight.signal)
    found = _refused(sight.pulses) or _lost(sight) or _ended(sight) or _failed(sight) or _alone(sight)
    return found or sight.stands_still or _overdue(sight) or _late(sight)


def _refused(pulses: Sequence[Pulse]) -> Verdict | None:
    """A pod that has ended the run already: no heartbeat came through for longer than the lease."""
    refused = next((pulse for pulse in pulses if pulse.refused), None)
    if refused is None:
        return None
    reason = "ended the run, because this launcher was silent for longer than its lease"
    return Verdict("failed", f"{refused.pod.name} ({refused.pod.address}) {reason}", refused.pod.name)


def _lost(sight: Sight) -> Verdict | None:
    """A pod that has been silent for too long; where its ssh is gone too, for less."""
    for pulse in sorted(sight.pulses, key=lambda pulse: -pulse.silent_seconds):
        patience = GONE_SECONDS if pulse.pod.name in sight.failed_sessions else SILENT_SECONDS
        if pulse.silent_seconds > patience:
            return Verdict("pod_lost", _silent(pulse), pulse.pod.name)
    return None


def _ended(sight: Sight) -> Verdict | None:
    """The launcher has ended, or waits for something that is no rank."""
    if sight.launcher_status is not None:
        return Verdict(None, _how_it_ended(sight.launcher_status))
    seen = all(pulse.most for pulse in sight.pulses)
    absent = min(pulse.absent_seconds or 0.0 for pulse in sight.pulses)
    if seen and absent > ABSENT_SECONDS:
        return Verdict(None, "the ranks have ended, and something that they left keeps their ssh sessions open")
    if sight.since_measured > ABSENT_SECONDS:
        return Verdict(None, "all ranks have measured, and something keeps the launcher waiting")
    return None


def _failed(sight: Sight) -> Verdict | None:
    """A pod whose ranks have failed, by pdsh's word, while others still run."""
    pod, seconds = max(sight.failed_sessions.items(), key=lambda session: session[1], default=("", 0.0))
    if seconds < FAILED_SECONDS:
        return None
    return Verdict(None, f"its ranks or its ssh session ended {seconds:.0f} s before the others'", pod)


def _alone(sight: Sight) -> Verdict | None:
    """A pod that has lost its ranks while another still has some; ranks that have ended well are not lost."""
    if not any(pulse.processes for pulse in sight.pulses):
        return None
    for pulse in sight.pulses:
        gone = pulse.most and not pulse.processes and (pulse.absent_seconds or 0.0) > ABSENT_SECONDS
        if gone and pulse.pod.name not in sight.done:
            return Verdict(None, f"its ranks ended {pulse.absent_seconds:.0f} s before the others'", pulse.pod.name)
    return None


def _overdue(sight: Sight) -> Verdict | None:
    """The run has had its time."""
    if sight.timeout_seconds is None or sight.since_start <= sight.timeout_seconds:
        return None
    return Verdict("timeout", overdue(sight.timeout_seconds))


def overdue(seconds: float) -> str:
    """The reason of a run that was ended because it took too long."""
    return f"took longer than {seconds:g} s"


def _late(sight: Sight) -> Verdict | None:
    """A pod where no process of the run has been seen at all."""
    missing = next((pulse for pulse in sight.pulses if not pulse.most), None)
    if missing is None:
        return None
    if sight.since_first_rank > START_SECONDS:
        reason = f"no process of the run within {START_SECONDS:.0f} s of the first on another pod"
        return Verdict("failed", reason, missing.pod.name)
    if sight.since_first_rank == 0.0 and sight.since_start > FIRST_SECONDS:
        return Verdict("failed", f"no process of the run on any pod within {FIRST_SECONDS:.0f} s")
    return None


def _how_it_ended(status: int) -> str | None:
    if status == 0:
        return None
    if status > 0:
        return f"DeepSpeed's launcher ended with status {status}"
    return f"DeepSpeed's launcher was ended by {signal.Signals(-status).name}"


def _silent(pulse: Pulse) -> str:
    why = f" ({pulse.error})" if pulse.error else ""
    return f"{pulse.pod.name} ({pulse.pod.address}) has not answered for {pulse.silent_seconds:.0f} s{why}"


# What is known of a rank that the kernel ended for want of memory: it could write nothing itself.

GIB = 2**30


def killed_for_memory(folder: Path, rank: int) -> str:
    """The reason of a run whose rank was killed: phase, step and the peak of its memory as it was sampled."""
    beat = read_beats(folder).get(rank)
    if beat is None:
        return f"rank {rank}: killed by the kernel, out of memory"
    peak = peak_bytes(folder / "memory" / f"{rank}.csv", beat)
    sampled = "" if peak is None else f", peak resident {peak / GIB:.2f} GiB"
    return f"rank {rank}: killed by the kernel, out of memory: phase {beat.phase}, {beat.step} steps done{sampled}"


def peak_bytes(path: Path, beat: Beat) -> float | None:
    """The most bytes that were resident in the attempt that a beat is of; None where none were sampled."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [(row["unix_seconds"], row["resident_bytes"]) for row in csv.DictReader(file)]
    except (OSError, KeyError):
        return None
    # The last line may have been cut off.
    values = [float(value) for at, value in rows if value and at and float(at) >= beat.began_unix_seconds - 1.0]
    return max(values, default=None)


def unmeasured(folder: Path) -> int | None:
    """The rank that began and has left no measurement; None where there is none."""
    ranks = (rank for rank in sorted(read_beats(folder)) if not (folder / "ranks" / f"{rank}.json").exists())
    return next(ranks, None)


# What the ranks of a run have written into its folder since a launch began.


class Ranks:
    """The ranks of one launch, by what they measured."""

    def __init__(self, folder: Path, pods: Sequence[str]) -> None:
        """`pods`: the name of each rank's pod, in the order of ranks."""
        self.pods = tuple(pods)
        self.folder = folder
        self.before = self.stamp()
        """What the folder said when the launch began."""

    def have_opened_the_run(self) -> bool:
        """Whether rank 0 has begun an attempt: what lies in the folder is this launch's."""
        return self.stamp() != self.before

    def have_all_measured(self) -> bool:
        """Whether every rank has written its last word."""
        return self.have_opened_the_run() and len(list(self._files())) == len(self.pods)

    def measured(self) -> list[RankMeasurement]:
        """What each rank measured; a file that is damaged counts as none."""
        found = []
        for path in self._files() if self.have_opened_the_run() else ():
            try:
                found.append(read_rank(path))
            except UserError:
                continue
        return [rank for rank in found if rank.rank in range(len(self.pods))]

    def done(self) -> frozenset[str]:
        """Pods whose ranks have all ended well."""
        well = {rank.rank for rank in self.measured() if rank.status == "ok"}
        return frozenset(self.pods) - {pod for rank, pod in enumerate(self.pods) if rank not in well}

    def _files(self) -> list[Path]:
        return [path for path in (self.folder / "ranks").glob("*.json") if path.stem.isdigit()]

    def stamp(self) -> int | None:
        """What changes when the ranks open the run."""
        path = self.folder / CONFIG
        return path.stat().st_mtime_ns if path.is_file() else None


# What is recorded of a supervised run: the ranks' own word, or what its supervisor saw.

PATIENCE_SECONDS, POLL_SECONDS = 5.0, 0.2
UNSAID = "it was killed, or ended without saying why"
NEVER_A_CAUSE = {"timeout": ("interrupted", "failed")}
"""By the supervisor's verdict, what ranks say because of it: those that are ended later miss the others."""


class Written(Protocol):
    """What the ranks wrote."""

    def tail(self, pod: str | None = None) -> list[str]:
        """The last lines, of one pod if it is named."""


class UnopenedError(UserError):
    """A run that ended before its ranks had opened its folder: there is nothing to record."""

    def __init__(self, folder: Path, status: str, reason: str, lines: list[str], log: str) -> None:
        super().__init__("\n".join([f"{folder}: {status}: {reason}; last lines of {log}:", *lines]))
        self.status = status
        self.reason = reason


def record_run(
    folder: Path,
    verdict: Verdict,
    output: Written,
    ranks: Ranks,
    out_of_memory: frozenset[str] = frozenset(),
    restarts: int = 0,
) -> Record:
    """Write `record.json` of a run whose ranks have ended, and return it.

    Rank 0 of a pod that was lost may live on until its lease runs out, and hold `run.lock` so long. What
    holds it longer is out of reach; the supervisor's own lock still keeps others out.

    Args:
        out_of_memory: pods where the kernel has ended a process for want of memory.
        restarts: how often the launch had gone on by itself.
    """
    return record_final(folder, lambda: of_ranks(ranks, verdict, out_of_memory), output, restarts)


def record_final(folder: Path, final: Callable[[], Verdict], output: Written, restarts: int = 0) -> Record:
    """`record_run` with a verdict that is asked for once the ranks have let go of the folder."""
    await_lock(folder, LEASE_SECONDS + PATIENCE_SECONDS)
    with nullcontext() if is_held(folder / LOCK) else locked(folder):
        said = final()
        lines = [] if said.status is None else output.tail(said.pod) or output.tail()
        record = compose_record(
            folder, status=said.status, reason=said.reason, pod=said.pod, last_lines=lines, restarts=restarts
        )
        write_record(folder, record)
    return record


def await_lock(folder: Path, seconds: float) -> None:
    """Wait until rank 0, which has ended or will, holds a run folder no longer; at most so long."""
    deadline = time.monotonic() + seconds
    while is_held(folder / LOCK) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def of_ranks(ranks: Ranks, verdict: Verdict, out_of_memory: frozenset[str] = frozenset()) -> Verdict:
    """The verdict by what the ranks measured; without a status where all of them ended well, whatever came after.

    Where one pod lost its ranks first, what they say is the cause, and the errors of others follow from
    it. A rank that was interrupted is never a cause: nobody but the supervisor and its agents did that. A rank
    that left nothing, on a pod where the kernel has ended a process for want of memory, is that process.
    """
    measured, pods = ranks.measured(), ranks.pods
    found = {rank.rank for rank in measured}
    missing = [rank for rank in range(len(pods)) if rank not in found]
    if not missing and all(rank.status == "ok" for rank in measured):
        return Verdict()
    if verdict.status == "pod_lost":
        return verdict
    unsaid = [rank for rank in missing if verdict.pod in (None, pods[rank])]
    killed = next((rank for rank in unsaid if pods[rank] in out_of_memory), None)
    if killed is not None and verdict.status is None:
        return Verdict("oom", killed_for_memory(ranks.folder, killed), pods[killed])
    here = [rank for rank in measured if verdict.pod in (None, pods[rank.rank])]
    follows = NEVER_A_CAUSE.get(verdict.status or "", ("interrupted",))
    cause = first_failure([rank for rank in here if rank.status not in follows])
    if cause is not None:
        return Verdict(cause.status, f"rank {cause.rank}: {cause.reason}", pods[cause.rank])
    if verdict.status is not None:
        return verdict
    if unsaid:
        reason = f"rank {unsaid[0]} left no measurement: {verdict.reason or UNSAID}"
        return Verdict("failed", reason, pods[unsaid[0]])
    return Verdict("failed", verdict.reason or "the launcher ended before the ranks", verdict.pod)
