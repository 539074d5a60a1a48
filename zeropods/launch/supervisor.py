"""The supervisor of a run on several pods: starts it, watches it, leaves nothing of it behind, and restarts it."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zeropods import files
from zeropods.launch import planning
from zeropods.launch.child import await_end, bound_argv, check_timeout, child_environment, exit_status
from zeropods.launch.command import RUN, Launch, runner_argv, runner_environment, write_environment
from zeropods.launch.hangs import HangDetector, check_step_timeout
from zeropods.launch.lease import RunLease
from zeropods.launch.log import LOG, PdshLog, following
from zeropods.launch.outcome import Ending, Observation, Ranks, UnopenedError, judge, record_run, verdict_of_ranks
from zeropods.launch.restart import JOURNAL, AttemptEnd, Restarts, in_one_line, journal_entry, next_attempt
from zeropods.measure.record import Record
from zeropods.measure.run_folder import LAUNCH_LOCK, locked
from zeropods.pods.hostfile import write_hostfile
from zeropods.pods.processes import descendants, ending_in_order, processes_with, send

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

POLL_SECONDS = 0.2
LATE_SECONDS = 3.0
"""A look that comes so long after the one before: this process was stopped, or its machine slept."""
GRACE_SECONDS = 8.0
"""From SIGTERM to SIGKILL of ranks that shall stop: time to write what they measured."""
LOST_GRACE_SECONDS = 4.0
"""The same where a pod was lost: the others wait for it and seldom hear a signal."""
LEAVE_SECONDS = 5.0
"""How long pdsh may take to end after the last rank."""
ANSWER_SECONDS = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How a launch is supervised."""

    show: Callable[[str], object] = lambda line: None
    """Gets every line that the ranks write, from another thread."""
    argv: Callable[[Launch, Path], list[str]] = runner_argv
    """Makes the launcher's command from the launch and its hostfile."""
    timeout_seconds: float | None = None
    """A run that takes longer, from the launcher's start and with all its attempts, is ended."""
    step_timeout: float | None = None
    """Seconds without a step, or a batch of an evaluation, after which a run is ended; derived from those that were
    seen if not given; 0: never."""

    def __post_init__(self) -> None:
        check_timeout(self.timeout_seconds)
        check_step_timeout(self.step_timeout)


def run_launch(
    planned: Launch, cluster: Cluster, restarts: Restarts | None = None, supervision: Supervision | None = None
) -> Record:
    """Run a launch; after a lost pod or a killed rank, go on with the pods that are left. Returns the last record.

    A run that is finished already is left as it is. The effective batch stays as it is. Every attempt but the last has
    its record in `attempts/`.
    """
    restarts, supervision = restarts or Restarts(), supervision or Supervision()
    restarts.check(planned)
    earlier = planning.record_of(planned)
    if earlier is not None:
        print(f"{planned.folder}: this run is finished; nothing to do", file=sys.stderr)
        return earlier
    began, opened, journal = time.monotonic(), False, list[dict[str, Any]]()
    current, left, seconds = planned, cluster, supervision.timeout_seconds
    while True:
        rest = seconds and max(1.0, seconds - (time.monotonic() - began))
        end = _attempt(current, left, replace(supervision, timeout_seconds=rest))
        if not end.calls_for_another or current.restarts >= restarts.most:
            return end.result()
        opened = opened or end.record is not None
        left = _answering(left, end.lost)
        following_launch = next_attempt(planned, left, restarts, opened=opened)
        if isinstance(following_launch, str):
            print(f"{planned.folder}: does not go on by itself: {following_launch}", file=sys.stderr)
            return end.result()
        current = replace(following_launch, restarts=current.restarts + 1)
        journal.append(journal_entry(end, current, [pod.name for pod in left.pods]))
        files.write_json(planned.folder / JOURNAL, {"restarts": journal})
        print(f"{planned.folder}: {in_one_line(journal[-1], current.restarts, restarts.most)}", file=sys.stderr)


def _answering(cluster: Cluster, lost: str | None) -> Cluster:
    """The cluster with the pods whose agents answer now; without one that was lost, whatever it says."""
    told = zip(cluster.pods, cluster.statuses(ANSWER_SECONDS), strict=True)
    return replace(cluster, pods=tuple(pod for pod, said in told if said.is_ready and pod.name != lost))


def _attempt(planned: Launch, cluster: Cluster, supervision: Supervision) -> AttemptEnd:
    with ending_in_order():
        planning.check_pods(planned, cluster)
        run = secrets.token_hex(8)
        marked = replace(planned, exported={**planned.exported, RUN: run})
        pods = cluster.pods[: len(planned.hosts)]
        with locked(planned.folder, LAUNCH_LOCK), RunLease(pods, cluster.secret, run) as lease:
            planning.remember(planned)
            attempt = Attempt(marked, supervision, lease, share_machine=cluster.backend == "local")
            return attempt.to_its_end()


class Attempt:
    """One attempt of a launch whose lease is held.

    However it ends, no process of the run is left on any pod that answers, nor here; a pod that does not answer ends
    them by itself when its lease runs out. DeepSpeed's runner never gets SIGINT or SIGTERM: it would answer with
    `pkill -f` on every pod, which ends other runs too.
    """

    def __init__(self, planned: Launch, supervision: Supervision, lease: RunLease, *, share_machine: bool) -> None:
        """`share_machine`: whether all pods are on this machine."""
        self._planned, self._supervision, self._lease = planned, supervision, lease
        self._share_machine = share_machine
        slots = [host.slots for host in planned.hosts]
        names = [pod.name for pod, number in zip(lease.pods, slots, strict=True) for _ in range(number)]
        self._ranks = Ranks(planned.folder, names)
        self._hangs = HangDetector(
            planned.folder, supervision.step_timeout, self._ranks.have_opened_the_run, self._ranks.pods
        )
        self._began = self._looked = time.monotonic()
        self._first_rank: float | None = None
        self._measured: float | None = None

    def to_its_end(self) -> AttemptEnd:
        """Start the launcher, watch it until there is a verdict, end everything, and record the run."""
        with noted_signals() as signals, following(self._planned.folder) as tick, self._launcher() as process:
            assert process.stdout is not None
            log, verdict = self._log(process.stdout), None
            try:
                while verdict is None:
                    # A terminal that is gone ends no run by itself; SIGHUP does.
                    with suppress(OSError):
                        tick()
                    time.sleep(POLL_SECONDS)
                    verdict = judge(self._state(process, log, signals))
                end = AttemptEnd()
                if verdict is self._hangs.found:
                    self._hangs.save_stacks(self._lease.ask_for_stacks)
            finally:
                unanswered = self._stop(process, verdict)
                log.close()
        try:
            end.record = self._record(self._by_agents(verdict, unanswered), log)
        except UnopenedError as error:
            end.unopened = error
        return end

    @contextmanager
    def _launcher(self) -> Iterator[subprocess.Popen[bytes]]:
        """The launcher in a session of its own: a terminal's Ctrl-C does not reach it. It dies with this process."""
        folder = self._planned.folder
        hostfile, variables = folder / "launch.hostfile", folder / "launch.environment"
        write_hostfile(hostfile, self._planned.hosts)
        write_environment(variables, self._planned.exported)
        process = subprocess.Popen(
            bound_argv(self._supervision.argv(self._planned, hostfile), signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=runner_environment(self._planned, variables, child_environment()),
        )
        self._began = self._looked = time.monotonic()
        try:
            yield process
        finally:
            end_tree(process)

    def _log(self, pipe: IO[bytes]) -> PdshLog:
        names = {pod.address: pod.name for pod in self._lease.pods}
        return PdshLog(pipe, self._planned.folder / LOG, names, self._supervision.show)

    def _state(self, process: subprocess.Popen[bytes], log: PdshLog, signals: list[str]) -> Observation:
        """What is seen of launcher, agents, ranks and output at this moment, and since when it is so."""
        now = time.monotonic()
        if now - self._looked > LATE_SECONDS:
            self._lease.forgive()
        self._looked = now
        pods = self._lease.states()
        if self._first_rank is None and any(pod.most for pod in pods):
            self._first_rank = now
        if self._measured is None and self._ranks.have_all_measured():
            self._measured = now
        quiet = any(pod.most and not pod.processes for pod in pods) or self._measured is not None
        return Observation(
            pods=pods,
            launcher_status=exit_status(process),
            signal=signals[0] if signals else None,
            failed_sessions=log.failed_sessions(),
            done=self._ranks.done() if quiet else frozenset(),
            since_start=now - self._began,
            timeout_seconds=self._supervision.timeout_seconds,
            since_first_rank=0.0 if self._first_rank is None else now - self._first_rank,
            since_measured=0.0 if self._measured is None else now - self._measured,
            hang=self._hangs.look() if self._measured is None else None,
        )

    def _stop(self, process: subprocess.Popen[bytes], verdict: Ending | None) -> dict[str, str]:
        """End the ranks first; pdsh and the runner then end by themselves, or are killed.

        Returns:
            why, by the name of each pod whose agent did not say that nothing is left.
        """
        lost = verdict is not None and verdict.status == "pod_lost"
        unanswered = self._lease.stop_run(LOST_GRACE_SECONDS if lost else GRACE_SECONDS)
        if not lost:
            # Its last lines are still on their way.
            await_end(process, LEAVE_SECONDS)
        end_tree(process)
        if self._share_machine:
            end_marked(self._lease.run)
        return unanswered

    def _by_agents(self, verdict: Ending, unanswered: dict[str, str]) -> Ending:
        """Where the launcher ended badly and an agent is gone, the pod was lost: it ended, or was brought down."""
        if verdict.status is not None or verdict.reason is None or not unanswered:
            return verdict
        pod, why = next(iter(unanswered.items()))
        return Ending("pod_lost", f"{pod} has ended: {why}", pod)

    def _record(self, verdict: Ending, log: PdshLog) -> Record:
        folder = self._planned.folder
        if not self._ranks.have_opened_the_run():
            raise UnopenedError(folder, verdict, log.tail(verdict.pod))
        killed = self._lease.pods_out_of_memory()
        return record_run(
            folder, lambda: verdict_of_ranks(self._ranks, verdict, killed), log, restarts=self._planned.restarts
        )


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a child of ours and everything below it, and reap it.

    pdsh puts each ssh into a session of its own, so that a process group would not reach them.
    """
    if process.returncode is None:
        below = descendants(process.pid)
        process.kill()
        for each in below:
            send(each, signal.SIGKILL)
        process.wait()


def end_marked(run: str) -> None:
    """SIGKILL every process of this machine that carries a run's mark.

    For pods of this machine only. Their agents have ended the run; this is for a pod whose agent and
    warden were both killed, whose ranks nobody else would end.
    """
    for process in processes_with(RUN, run):
        send(process, signal.SIGKILL)


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
