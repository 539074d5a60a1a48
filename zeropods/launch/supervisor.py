"""The supervisor of a run on several pods: starts it, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch import planning
from zeropods.launch.bound import bound_argv
from zeropods.launch.child import check_timeout, child_environment, has_ended
from zeropods.launch.command import RUN, Launch, runner_argv, runner_environment, write_environment
from zeropods.launch.hangs import Standstill, carries, check_step_timeout, save_stacks
from zeropods.launch.heartbeat import Heartbeat
from zeropods.launch.local import LOG, following, train_arguments
from zeropods.launch.outcome import Ranks, Sight, UnopenedError, Verdict, judge, record_run
from zeropods.launch.planning import check_pods, plan_launch
from zeropods.measure.record import Record
from zeropods.measure.run_folder import LAUNCH_LOCK, locked
from zeropods.pods.hostfile import write_hostfile
from zeropods.pods.processes import descendants, ending_in_order, find_process, processes_with, send
from zeropods.report.run import Run

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster
    from zeropods.pods.state import Pod


# What the ranks write: line by line, with the pod's name, to a log and to whoever watches.

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


# What a supervisor sees of a run, moment by moment.

LATE_SECONDS = 3.0
"""A look that comes so long after the one before: this process was stopped, or its machine slept."""


class Sighting:
    """Looks at launcher, agents, ranks and output; remembers since when things are as they are."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        heartbeat: Heartbeat,
        ranks: Ranks,
        written: Output,
        signals: list[str],
        timeout_seconds: float | None = None,
        standstill: Standstill | None = None,
    ) -> None:
        self._process = process
        self._heartbeat = heartbeat
        self._ranks = ranks
        self._written = written
        self._signals = signals
        self._timeout_seconds = timeout_seconds
        self._standstill = standstill
        self._started = self._looked = time.monotonic()
        self._first_rank: float | None = None
        self._measured: float | None = None

    def now(self) -> Sight:
        """What is seen at this moment."""
        now = time.monotonic()
        if now - self._looked > LATE_SECONDS:
            self._heartbeat.forgive()
        self._looked = now
        pulses = self._heartbeat.pulses()
        if self._first_rank is None and any(pulse.most for pulse in pulses):
            self._first_rank = now
        if self._measured is None and self._ranks.have_all_measured():
            self._measured = now
        quiet = any(pulse.most and not pulse.processes for pulse in pulses) or self._measured is not None
        return Sight(
            pulses=pulses,
            launcher_status=self._launcher_status(),
            signal=self._signals[0] if self._signals else None,
            failed_sessions=self._written.failed_sessions(),
            done=self._ranks.done() if quiet else frozenset(),
            since_start=now - self._started,
            timeout_seconds=self._timeout_seconds,
            since_first_rank=0.0 if self._first_rank is None else now - self._first_rank,
            since_measured=0.0 if self._measured is None else now - self._measured,
            stands_still=self._standstill.look() if self._standstill and self._measured is None else None,
        )

    def _launcher_status(self) -> int | None:
        """The launcher's exit status, negative for a signal. It is left to be reaped: its number stays its own."""
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


# The end of what a launcher started on this machine: itself, pdsh, every ssh of pdsh, and ranks that nobody minds.


def end_tree(pid: int) -> None:
    """SIGKILL a process that is ours to reap, and everything below it.

    pdsh puts each ssh into a session of its own, so that a process group would not reach them.
    """
    top = find_process(pid)
    below = descendants(pid)
    for process in (*([] if top is None else [top]), *below):
        send(process, signal.SIGKILL)


def end_marked(run: str) -> None:
    """SIGKILL every process of this machine that carries a run's mark.

    For pods of this machine only. Their agents have ended the run; this is for a pod whose agent and
    warden were both killed, whose ranks nobody else would end.
    """
    for process in processes_with(RUN, run):
        send(process, signal.SIGKILL)


# The supervisor of a run on several pods: starts it, watches it, and leaves nothing of it behind.

POLL_SECONDS = 0.2
GRACE_SECONDS = 8.0
"""From SIGTERM to SIGKILL of ranks that shall stop: time to write what they measured."""
LOST_GRACE_SECONDS = 4.0
"""The same where a pod was lost: the others wait for it and seldom hear a signal."""
LEAVE_SECONDS = 5.0
"""How long pdsh may take to end after the last rank."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    heartbeat: Heartbeat,
    ranks: Ranks,
    output: Callable[[IO[bytes]], Output],
    tick: Callable[[], object] = lambda: None,
    timeout_seconds: float | None = None,
    standstill: Standstill | None = None,
) -> tuple[Verdict, Output]:
    """Run a launcher over pods whose lease `heartbeat` holds; returns how it ended and what it wrote.

    However this ends, no process of the run is left on any pod that answers, nor here; a pod that does
    not answer ends them by itself when its lease runs out. DeepSpeed's runner never gets SIGINT or
    SIGTERM: it would answer with `pkill -f` on every pod, which ends other runs too.

    Args:
        command: DeepSpeed's launcher, or pdsh itself; every process that it starts on a pod carries the mark.
        tick: called some times a second.
        timeout_seconds: from the launcher's start; a run that takes longer is ended.
        standstill: watches the ranks' beats; a run that stands still is ended, and the stacks of its ranks are kept.
    """
    with noted_signals() as signals, _runner(command, environment) as process:
        assert process.stdout is not None
        written = output(process.stdout)
        verdict = None
        try:
            sighting = Sighting(process, heartbeat, ranks, written, signals, timeout_seconds, standstill)
            verdict = _watch(sighting, tick)
            if standstill is not None and verdict is standstill.found:
                save_stacks(standstill.folder, standstill.beats(), heartbeat.ask_for_stacks, carries(heartbeat.run))
        finally:
            unanswered = _stop(process, heartbeat, verdict)
            end_tree(process.pid)
            process.wait()
            written.close()
    return _by_agents(verdict, unanswered), written


def _watch(sighting: Sighting, tick: Callable[[], object]) -> Verdict:
    while True:
        verdict = judge(sighting.now())
        if verdict is not None:
            return verdict
        # A terminal that is gone ends no run by itself; SIGHUP does.
        with suppress(OSError):
            tick()
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes], heartbeat: Heartbeat, verdict: Verdict | None) -> dict[str, str]:
    """End the ranks first; pdsh and the runner then end by themselves, or are killed by the caller.

    Returns:
        why, by the name of each pod whose agent did not say that nothing is left.
    """
    lost = verdict is not None and verdict.status == "pod_lost"
    unanswered = heartbeat.stop_run(LOST_GRACE_SECONDS if lost else GRACE_SECONDS)
    if not lost:
        # Its last lines are still on their way.
        deadline = time.monotonic() + LEAVE_SECONDS
        while not has_ended(process) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    return unanswered


def _by_agents(verdict: Verdict, unanswered: dict[str, str]) -> Verdict:
    """Where the launcher ended badly and an agent is gone, the pod was lost: it ended, or was brought down."""
    if verdict.status is not None or verdict.reason is None or not unanswered:
        return verdict
    pod, why = next(iter(unanswered.items()))
    return Verdict("pod_lost", f"{pod} has ended: {why}", pod)


@contextmanager
def _runner(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher in a session of its own: a terminal's Ctrl-C does not reach it. It dies with this process."""
    process = subprocess.Popen(
        bound_argv(list(command), signal.SIGKILL),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=dict(environment),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            end_tree(process.pid)
            process.wait()


@contextmanager
def noted_signals() -> Iterator[list[str]]:
    """Names of the SIGINT, SIGTERM and SIGHUP that came; they interrupt nothing, so that no clean-up is cut short."""
    noted: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {
        number: signal.signal(number, lambda number, frame: noted.append(signal.Signals(number).name))
        for number in SIGNALS
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# A training script on several pods: checked, supervised, recorded.


def launch(
    cluster: Cluster,
    script: str | Path = "textsql_train.py",
    *,
    pods: int | None = None,
    export: Sequence[str] = (),
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    restarts: int = 0,
    min_pods: int = 1,
    **flags: Any,
) -> Run:
    """Run a training script on the pods of a cluster, and return its run.

    A run that is finished already is returned as it is. Ctrl-C ends the run, which leaves its record.
    `UserError` says why it failed.

    Args:
        pods: on how many of them; all if not given.
        export: names of environment variables that the ranks need as they are here.
        timeout_seconds: a run that takes longer, from the launcher's start, is ended.
        step_timeout: seconds without a step, or a batch of an evaluation, after which a run is ended; derived from
            those that were seen if not given; 0: never.
        restarts: how often it may go on by itself with the pods that are left, where one is lost or a rank is killed.
        min_pods: on how few.
        flags: the script's flags, without their dashes; None leaves a flag out.
    """
    from zeropods.launch.restart import Restarts, run_restarting

    planned = plan_launch(cluster, script, train_arguments(**flags), pods=pods, export=export)
    wanted = Restarts(most=restarts, min_pods=min_pods)
    record = run_restarting(
        planned, cluster, wanted, export=export, timeout_seconds=timeout_seconds, step_timeout=step_timeout
    )
    if record.status != "ok":
        raise UserError(failure(planned.folder, record))
    return Run(planned.folder)


def run_launch(
    planned: Launch,
    cluster: Cluster,
    show: Callable[[str], object] = lambda line: None,
    argv: Callable[[Launch, Path], list[str]] = runner_argv,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    look: Callable[[], object] = lambda: None,
) -> Record:
    """Run it to its end, supervised, and return its record.

    Args:
        show: gets every line that the ranks write, from another thread.
        argv: makes the launcher's command from the launch and its hostfile.
        timeout_seconds: a run that takes longer, from the launcher's start, is ended.
        step_timeout: as `launch` has it.
        look: called some times a second, for as long as nothing has ended the run.
    """
    check_timeout(timeout_seconds)
    check_step_timeout(step_timeout)
    earlier = planning.record_of(planned)
    if earlier is not None:
        print(f"{planned.folder}: this run is finished; nothing to do", file=sys.stderr)
        return earlier
    with ending_in_order():
        check_pods(planned, cluster)
        run = secrets.token_hex(8)
        marked = replace(planned, exported={**planned.exported, RUN: run})
        chosen = cluster.pods[: len(planned.hosts)]
        with locked(planned.folder, LAUNCH_LOCK), Heartbeat(chosen, cluster.secret, run) as heartbeat:
            return _supervised(marked, cluster, chosen, heartbeat, show, argv, timeout_seconds, step_timeout, look)


def _supervised(
    planned: Launch,
    cluster: Cluster,
    pods: Sequence[Pod],
    heartbeat: Heartbeat,
    show: Callable[[str], object],
    argv: Callable[[Launch, Path], list[str]],
    timeout_seconds: float | None,
    step_timeout: float | None,
    look: Callable[[], object],
) -> Record:
    planning.remember(planned)
    ranks = Ranks(
        planned.folder, [pod.name for pod, host in zip(pods, planned.hosts, strict=True) for _ in range(host.slots)]
    )
    hostfile, variables = planned.folder / "launch.hostfile", planned.folder / "launch.environment"
    write_hostfile(hostfile, planned.hosts)
    write_environment(variables, planned.exported)
    names = {pod.address: pod.name for pod in pods}
    with following(planned.folder) as tick:
        verdict, output = supervise(
            argv(planned, hostfile),
            runner_environment(planned, variables, child_environment()),
            heartbeat,
            ranks,
            lambda pipe: Output(pipe, planned.folder / LOG, names, show),
            lambda: (look(), tick()),
            timeout_seconds,
            Standstill(planned.folder, ranks.pods, step_timeout, ranks.have_opened_the_run),
        )
    if cluster.backend == "local":
        end_marked(heartbeat.run)
    if not ranks.have_opened_the_run():
        lines = output.tail(verdict.pod) or output.tail()
        reason = verdict.reason or "it ended before the ranks had opened the run"
        raise UnopenedError(planned.folder, verdict.status or "failed", reason, lines, LOG)
    return record_run(planned.folder, verdict, output, ranks, heartbeat.pods_out_of_memory(), planned.restarts)


def failure(folder: Path, record: Record) -> str:
    """Why a run ended without success, with the last lines that it wrote."""
    pod = f"{record.pod}: " if record.pod else ""
    lines = "\n".join(record.last_lines)
    return f"{folder}: {record.status}: {pod}{record.reason}; last lines of {LOG}:\n{lines}"
