"""The supervisor of a run on several pods: it starts, watches and restarts the run, and leaves
nothing of it behind."""

from __future__ import annotations

import math
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from psutil import Process

from zeropods import files
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.launch.causes import first_cause
from zeropods.launch.command import Launch, runner_argv, runner_environment
from zeropods.launch.logs import RunLog, shown_progress
from zeropods.launch.lost_pods_and_hangs import (
    Ending,
    HangDetector,
    PodState,
    check_timeouts,
    judge,
)
from zeropods.launch.outcome import Ranks, UnopenedError, record_run
from zeropods.launch.restart import (
    JOURNAL,
    calls_for_another,
    check_restarts,
    journal_entry,
    next_attempt,
    restart_line,
    saved_checkpoints,
)
from zeropods.launch.unopened import record_unopened
from zeropods.measure.exits import exits_noted
from zeropods.measure.record import LAUNCH_LOCK, Record
from zeropods.measure.run_folder import locked
from zeropods.pods.hostfile import write_hostfile
from zeropods.pods.leases import RUN_SECONDS
from zeropods.pods.preflight import ANEW, NO_ANSWER, Expectation, Preflight
from zeropods.pods.processes import (
    RUN,
    descendants,
    end,
    ending_in_order,
    noted_signals,
    processes_with,
    start_bound,
)
from zeropods.pods.rendezvous import Pod
from zeropods.pods.start import replace_lost_pods
from zeropods.pods.wire import WireError, ask_all
from zeropods.programs import child_environment
from zeropods.tables import progress
from zeropods.train.deepspeed_config import CPU_ADAM, QUANTIZER, is_quantized, operation_of

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster, PodStatus

LAUNCHER_POLL_SECONDS = 0.2
LATE_CHECK_SECONDS = 3.0
"""A longer pause than this, in seconds, between two checks means that this process was stopped, or
its machine asleep."""
RANKS_GRACE_SECONDS = 8.0
"""Seconds from SIGTERM to SIGKILL for ranks that must stop, in which they can write what they
measured."""
LOST_GRACE_SECONDS = 4.0
"""The same where a pod was lost: the ranks of the others wait for it and seldom react to a
signal."""
LAUNCHER_END_SECONDS = 5.0
"""Seconds that the launcher may take to end after the last rank."""
RENEWAL_SECONDS = 1.5
"""Seconds between two renewals of the lease."""
AGENT_ANSWER_SECONDS = 3.0
"""Seconds that an agent may take to answer."""
OPEN_SECONDS = 5.0
"""The same when a run is opened, or when the pods' statuses are asked for."""
RUN_STOP_SECONDS = 15.0
"""Seconds that a pod may take to end a run, after the ranks' grace period."""
ASK_AGAIN_SECONDS = 300.0
"""Seconds for which a restart repeats the checks of pods whose agents answer, but whose checks do
not."""
ASK_AGAIN_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How a launch is supervised."""

    show: Callable[[str], object] = lambda line: None
    """Function that is called with every line that the ranks write."""
    argv: Callable[[Launch, Path], list[str]] = runner_argv
    """Function that makes the launcher's command from the launch and its hostfile."""
    timeout_seconds: float | None = None
    """Seconds after which a run is ended, counted from the launcher's start and over all its
    attempts."""
    step_timeout: float | None = None
    """Seconds without a step, or a batch of an evaluation, after which a run is ended; derived from
    the pauses so far if not given; 0 means never."""
    restarts: int = 0
    """Number of times that a run may restart by itself, after a pod was lost or a rank was
    killed."""
    replace_lost: bool = False
    """Whether a new CML worker is started, once in a run, in the place of each that is lost, before
    the run restarts."""
    min_pods: int | None = None
    """Fewest pods for a restart, 1 if not given. If given, the run may also begin on so few if
    others are dead."""

    def __post_init__(self) -> None:
        check_timeouts(self.timeout_seconds, self.step_timeout)


def run_launch(planned: Launch, cluster: Cluster, supervision: Supervision | None = None) -> Record:
    """Run a launch; after a lost pod or a killed rank, restart it on the pods that are left.

    The effective batch size never changes. The run folder gets the record of the last attempt, and
    those of earlier attempts in `attempts/`.

    Returns:
        The record of the last attempt; the record that is already there if this run is finished.

    Raises:
        UnopenedError: the last attempt ended before its ranks had opened the run.
        UserError: the run cannot begin as requested, or a pod lacks what a restart needs. A pod
            that is already dead is an error only if `min_pods` is not given; otherwise it is left
            out like a lost one.
    """
    supervision = supervision or Supervision()
    check_restarts(planned, supervision.restarts, supervision.min_pods)
    if supervision.replace_lost and not cluster.backend_class.can_replace:
        raise UserError("--replace: is for CML workers; leave it out")
    earlier = command.finished_record(planned)
    if earlier is not None:
        return earlier
    current, left = _launch_to_begin_with(planned, cluster, supervision.min_pods)
    with ending_in_order(), locked(planned.folder, LAUNCH_LOCK):
        attempts = _Attempts(planned, cluster, supervision, left)
        while True:
            outcome, decided_at = attempts.run(current)
            following = attempts.prepare_next(current, outcome)
            if following is None:
                return _record_or_raise(current, outcome)
            attempts.note_restart(following, outcome, decided_at)
            current = following


class _Attempts:
    """The attempts of one launch: what they share, and which pods are left for the next one."""

    def __init__(
        self, planned: Launch, cluster: Cluster, supervision: Supervision, left: Cluster
    ) -> None:
        self._planned = planned
        self._cluster = cluster
        self._supervision = supervision
        self._left = left
        """The cluster with the pods that are left."""
        self._began = time.monotonic()
        self._has_opened = False
        """Whether an attempt has opened the run."""
        self._saved_before = saved_checkpoints(planned.folder)
        """The checkpoints that were there before the first attempt."""
        self._may_replace = supervision.replace_lost
        """Whether lost pods may still be replaced, which happens once."""
        self._journal: list[dict[str, object]] = []

    def run(self, launch: Launch) -> tuple[Record | UnopenedError, float]:
        """Make one attempt on the pods that are left; returns what `_attempt` returns."""
        supervision = _with_time_left(self._supervision, self._began)
        outcome, decided_at = _attempt(launch, self._left, supervision)
        self._has_opened = self._has_opened or isinstance(outcome, Record)
        return outcome, decided_at

    def prepare_next(self, current: Launch, outcome: Record | UnopenedError) -> Launch | None:
        """Prepare the pods for another attempt, and return the launch for it; None where the
        attempt with this outcome was the last.

        Pods that no longer answer are left out from now on, and may be replaced by new ones. Where
        a restart is due but impossible, a line on stderr says why.
        """
        supervision = self._supervision
        if not calls_for_another(outcome) or current.restarts >= supervision.restarts:
            return None
        self._left = _still_answering(self._left, outcome)
        if self._may_replace and len(self._left.pods) < len(self._planned.hosts):
            self._replace_lost_pods()
        has_saved = bool(saved_checkpoints(self._planned.folder) - self._saved_before)
        following = next_attempt(
            self._planned,
            self._left,
            supervision.min_pods or 1,
            opened=self._has_opened,
            has_saved=has_saved,
        )
        if not isinstance(following, Launch):
            print(f"{self._planned.folder}: not restarted: {following}", file=sys.stderr)
            return None
        return replace(following, restarts=current.restarts + 1)

    def _replace_lost_pods(self) -> None:
        """Start new pods in the place of the lost ones, at most once in a run; where they do not
        come up, a line on stderr says why."""
        self._may_replace = False
        names_left = [pod.name for pod in self._left.pods]
        lost = [pod.name for pod in self._cluster.pods if pod.name not in names_left]
        seconds = _with_time_left(self._supervision, self._began).timeout_seconds
        if seconds is None:
            seconds = math.inf
        try:
            self._left = replace_lost_pods(self._cluster, lost, seconds)
        except (UserError, OSError) as error:
            # The run can still go on with the pods that are left.
            place = f"{self._planned.folder}: {', '.join(lost)}"
            print(f"{place}: not replaced: {error}", file=sys.stderr)

    def note_restart(
        self, following: Launch, outcome: Record | UnopenedError, decided_at: float
    ) -> None:
        """Write into the journal, and on stderr, what ended an attempt and how the run goes on.

        Args:
            following: the launch with which it goes on.
            decided_at: when the attempt was found to be over, in seconds since 1970.
        """
        planned = self._planned
        entry = journal_entry(
            planned,
            following,
            self._left,
            status=outcome.status,
            pod=outcome.pod,
            rank=outcome.rank,
            reason=outcome.reason,
            steps=outcome.steps,
            found_unix_seconds=decided_at,
        )
        self._journal.append(entry)
        files.write_json(planned.folder / JOURNAL, {"restarts": self._journal})
        how = f"restart {following.restarts} of {self._supervision.restarts}"
        print(f"{planned.folder}: {restart_line(entry, how)}", file=sys.stderr)
        if following.launcher != planned.launcher:
            reason = f"{self._left.why_not_pdsh()}, so the pods' agents start the ranks"
            print(f"{planned.folder}: {reason}", file=sys.stderr)


def _with_time_left(supervision: Supervision, began: float) -> Supervision:
    """The same supervision with the time that is left of its timeout, which counts since `began` on
    the monotonic clock."""
    seconds = supervision.timeout_seconds
    if seconds is None:
        return supervision
    seconds_left = seconds - (time.monotonic() - began)
    # 0 or less would be refused as a timeout; with a second, the attempt soon ends as timed out.
    return replace(supervision, timeout_seconds=max(1.0, seconds_left))


def _record_or_raise(current: Launch, outcome: Record | UnopenedError) -> Record:
    """The last attempt's record. If its ranks had not opened the run, write a record that says why,
    and raise the `UnopenedError`."""
    if isinstance(outcome, Record):
        return outcome
    # The error that is raised says more than a disk that is full.
    with suppress(OSError):
        record_unopened(current, outcome)
    raise outcome


def _launch_to_begin_with(
    planned: Launch, cluster: Cluster, min_pods: int | None
) -> tuple[Launch, Cluster]:
    """The launch with which a run begins, and the cluster with the pods for it: as planned if all
    of its pods are ready, otherwise on those that are, if `min_pods` allows it.

    Lines on stderr name pods that are busy with another run, and say what is left out. `UserError`
    where the run may not begin on the pods that are ready.
    """
    statuses = cluster.statuses(OPEN_SECONDS)
    planned_statuses = statuses[: len(planned.hosts)]
    busy = [status.pod for status in planned_statuses if status.runs]
    if busy:
        names = ", ".join(busy)
        print(
            f"{names}: already busy with another run; both will be slower",
            file=sys.stderr,
            flush=True,
        )
    not_ready = [
        f"{status.pod}: {status.status}" for status in planned_statuses if not status.is_ready
    ]
    if not not_ready:
        return planned, cluster
    reason = "; ".join(not_ready)
    remaining = _with_ready_pods(cluster, statuses)
    remedy = f"see 'zeropods pods check', then {ANEW}"
    if min_pods is None:
        raise UserError(f"{reason}; {remedy}, or begin on those that answer: --min-pods N")
    launch_or_obstacle = next_attempt(planned, remaining, min_pods, opened=False, has_saved=False)
    if not isinstance(launch_or_obstacle, Launch):
        raise UserError(f"{reason}; {launch_or_obstacle}; {remedy}")
    launch = launch_or_obstacle
    # Nothing was begun yet, so this goes into no journal: it is only shown as a restart would be.
    entry = journal_entry(planned, launch, remaining, status="pod_lost", pod=None, reason=reason)
    print(f"{planned.folder}: {restart_line(entry, 'begins')}", file=sys.stderr)
    return launch, remaining


def _still_answering(cluster: Cluster, outcome: Record | UnopenedError) -> Cluster:
    """The cluster with only those of its pods that are ready after an attempt. The pod that the
    attempt has lost is left out, even if it answers again."""
    statuses = []
    for status in cluster.statuses(OPEN_SECONDS):
        is_lost = outcome.status == "pod_lost" and status.pod == outcome.pod
        if not is_lost:
            statuses.append(status)
    return _with_ready_pods(cluster, statuses)


def _with_ready_pods(cluster: Cluster, statuses: Sequence[PodStatus]) -> Cluster:
    """The cluster with only those of its pods that are ready according to their statuses."""
    ready = {status.pod for status in statuses if status.is_ready}
    return replace(cluster, pods=tuple(pod for pod in cluster.pods if pod.name in ready))


def _attempt(
    planned: Launch, cluster: Cluster, supervision: Supervision
) -> tuple[Record | UnopenedError, float]:
    """Check the pods, take a lease for this attempt, and run it.

    Returns:
        The record, or why there is none; and when the verdict was reached, in seconds since 1970.

    Raises:
        UserError: a pod that answers lacks what the launch needs.
    """
    check_began = time.monotonic()
    try:
        _require_pods(planned, cluster, supervision.timeout_seconds)
    except UserError as error:
        dead_pod = _first_dead_pod(planned, cluster)
        if dead_pod is None:
            raise
        # The pod was there a moment ago, so it counts as lost, like one that dies during the run.
        verdict = Ending("pod_lost", str(error), dead_pod)
        return UnopenedError(planned.folder, verdict, ()), time.time()
    # The checks before the first attempt come before the launcher's start, from which the timeout
    # counts; those of a restart come after it.
    if planned.restarts > 0:
        supervision = _with_time_left(supervision, check_began)
    run = secrets.token_hex(8)
    marked = replace(planned, exported={**planned.exported, RUN: run})
    pods = cluster.pods[: len(planned.hosts)]
    # The ranks of a script that is not ours are not forked, so no pod has to import torch for them.
    forks = planned.call.kind is not None
    with exits_noted(planned.folder), RunLease(pods, cluster.secret, run, forks=forks) as lease:
        command.remember(planned)
        return _LeasedRun(marked, supervision, lease).run()


def _first_dead_pod(planned: Launch, cluster: Cluster) -> str | None:
    """Name of the first pod of a launch that does not answer; None where all do."""
    for status in cluster.statuses(OPEN_SECONDS)[: len(planned.hosts)]:
        if not status.is_ready:
            return status.pod
    return None


def _require_pods(planned: Launch, cluster: Cluster, timeout_seconds: float | None) -> None:
    """Refuse a launch for which its pods lack something; `UserError` says what.

    At a restart nobody may be there to call again, and pods may be so busy that they are not
    checked in time: as long as their agents answer, they are asked again.

    Args:
        timeout_seconds: time that is left for the run; None for no limit.
    """
    seconds = ASK_AGAIN_SECONDS
    if timeout_seconds is not None:
        seconds = min(seconds, timeout_seconds)
    deadline = time.monotonic() + seconds
    while True:
        checks = _check_pods(planned, cluster)
        silent = checks.silent_pods()
        seconds_left = deadline - time.monotonic()
        may_ask_again = planned.restarts > 0 and bool(silent) and seconds_left > 0
        if not may_ask_again or _first_dead_pod(planned, cluster) is not None:
            checks.require()
            return
        how = "over ssh" if planned.launcher == command.PDSH else "to the checks"
        print(
            f"{planned.folder}: {', '.join(silent)}: {NO_ANSWER} {how}, but agents answer; "
            f"asked again, for {seconds_left:.0f} s at most",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(ASK_AGAIN_PAUSE_SECONDS)


def _check_pods(planned: Launch, cluster: Cluster) -> Preflight:
    """Check whether each of a launch's pods has what it needs; returns the results, good or bad."""
    deepspeed = planned.call.deepspeed
    needed_files: tuple[str, ...] = (str(planned.script),)
    operations = []
    if deepspeed is not None:
        needed_files = (*needed_files, deepspeed.path)
        # CPU Adam steps an optimizer in main memory, and has to be compiled. What steps one on a
        # GPU is compiled by the CUDA toolkit where that is, and the run says where it is not.
        if operation_of(deepspeed.config) == CPU_ADAM:
            operations.append(CPU_ADAM)
        if is_quantized(deepspeed.config):
            operations.append(QUANTIZER)
    expected = Expectation.of_this_machine(
        Path.cwd(), needed_files, master_port=planned.master_port, operations=operations
    )
    with progress("check", "pods", len(planned.hosts)) as bar:
        bar.leave = False
        over_ssh = planned.launcher == command.PDSH
        return cluster.preflight(expected, len(planned.hosts), over_ssh=over_ssh)


class _LeasedRun:
    """One attempt of a run whose pods are leased for it."""

    def __init__(self, planned: Launch, supervision: Supervision, lease: RunLease) -> None:
        folder = planned.folder
        self._planned = planned
        self._supervision = supervision
        self._lease = lease
        pods_of_ranks = [pod.name for pod in lease.pods for _ in range(pod.slots)]
        self._number_of_ranks = len(pods_of_ranks)
        self._ranks = Ranks(folder, pods_of_ranks)
        self._hangs = HangDetector(
            folder, supervision.step_timeout, self._ranks.have_opened_the_run, pods_of_ranks
        )
        names = {pod.address: pod.name for pod in lease.pods}
        self._log = RunLog(folder, supervision.show, names)

    def run(self) -> tuple[Record | UnopenedError, float]:
        """Start the launcher, watch it until there is a verdict, end everything, and record the
        run.

        However it ends, no process of the run is left on any pod that answers, nor here; a pod that
        does not answer ends its processes by itself when its lease runs out.

        Returns:
            The record, or why there is none; and when the verdict was reached, in Unix seconds.
        """
        verdict: Ending | None = None
        with noted_signals() as signals, shown_progress(self._planned.folder) as update:
            process = self._start_launcher()
            try:
                verdict = self._watch(process, signals, update)
                decided_at = time.time()
                # Before `_stop`: ranks that it ends are not to blame.
                self._ranks.note_exits()
                # Where a hang ends the run, `_watch` returns the detector's own object.
                if verdict is self._hangs.verdict:
                    self._hangs.save_stacks(lambda: self._lease.ask("stacks", AGENT_ANSWER_SECONDS))
            finally:
                is_lost = verdict is not None and verdict.status == "pod_lost"
                unanswered = _stop(process, self._lease, is_lost=is_lost)
                self._log.read(ended=True)
        verdict = self._with_silent_agents(verdict, unanswered)
        try:
            return self._record(verdict), decided_at
        except UnopenedError as error:
            return error, decided_at

    def _start_launcher(self) -> subprocess.Popen[bytes]:
        """Write the launcher's hostfile and environment file into the run folder, and start it; its
        output goes to the log."""
        planned = self._planned
        hostfile = planned.folder / "launch.hostfile"
        env_file = planned.folder / "launch.environment"
        write_hostfile(hostfile, planned.hosts)
        # DeepSpeed's environment file must have no blank line and no comment: DeepSpeed would raise
        # on them.
        variables = command.variables_of_ranks(planned, child_environment())
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        files.write_text(env_file, "".join(lines))
        environment = runner_environment(planned, env_file, child_environment())
        with open(self._log.path, "ab") as output:
            argv = self._supervision.argv(planned, hostfile)
            # The launcher dies with this process: by SIGKILL, since on SIGTERM DeepSpeed's runner
            # would do what `_stop` warns of.
            return start_bound(
                argv, signal.SIGKILL, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        signals: Sequence[str],
        update: Callable[[], object],
    ) -> Ending:
        """Watch the launcher and the pods until there is a verdict, and return it.

        Args:
            process: the launcher.
            signals: grows by the name of each signal that comes; the first one ends the run.
            update: is called several times per second to show progress.
        """
        began = time.monotonic()
        measured_at: float | None = None
        while True:
            # A terminal that is gone does not end a run by itself; SIGHUP does.
            with suppress(OSError):
                update()
            time.sleep(LAUNCHER_POLL_SECONDS)
            self._log.read()
            now = time.monotonic()
            if measured_at is None and len(self._ranks.files()) == self._number_of_ranks:
                measured_at = now
            states = self._lease.states()
            launcher_status = process.poll()
            since_measured = 0.0
            hang = None
            # A rank that has written its measurement is about to end, and works no more.
            if measured_at is None:
                hang = self._hangs.check()
            else:
                since_measured = now - measured_at
            verdict = judge(
                pods=states,
                launcher_status=launcher_status,
                signal_name=next(iter(signals), None),
                failed_sessions={pod: now - at for pod, at in self._log.failed_at.items()},
                since_start=now - began,
                timeout_seconds=self._supervision.timeout_seconds,
                since_measured=since_measured,
                hang=hang,
            )
            if verdict is not None:
                return verdict

    def _with_silent_agents(self, verdict: Ending, unanswered: Mapping[str, str]) -> Ending:
        """The verdict in view of agents that no longer answer: that a pod is lost, if the launcher
        ended badly and no rank elsewhere is known to be the cause; otherwise the same.

        Args:
            unanswered: why an agent gave no answer when it was to end the ranks, by pod name.
        """
        launcher_ended_badly = verdict.status is None and verdict.reason is not None
        if not unanswered or not launcher_ended_badly:
            return verdict
        # A rank that was seen to end by itself on a pod that answers ended the run, even if another
        # pod is slow to answer.
        seen_elsewhere = []
        for end_of_rank in self._ranks.ends():
            if end_of_rank.pod not in unanswered and end_of_rank.measured is None:
                seen_elsewhere.append(end_of_rank)
        if first_cause(seen_elsewhere) is not None:
            return verdict
        # The agent is gone: its pod has ended, or was brought down.
        pod, why = next(iter(unanswered.items()))
        return Ending("pod_lost", f"{pod} has ended: its agent does not answer ({why})", pod)

    def _record(self, verdict: Ending) -> Record:
        """Write the record of the run, in view of the OOM kills that the pods have counted;
        `UnopenedError` where the ranks had not opened the run."""
        kills = {state.pod.name: state.oom_kills for state in self._lease.states()}
        return record_run(
            self._ranks,
            verdict,
            self._log,
            out_of_memory=[pod for pod, count in kills.items() if count],
            uncounted=[pod for pod, count in kills.items() if count is None],
            restarts=self._planned.restarts,
        )


def _stop(process: subprocess.Popen[bytes], lease: RunLease, *, is_lost: bool) -> dict[str, str]:
    """Stop renewing the lease and end the ranks; pdsh and the runner, or what stands in their
    place, then end by themselves, or are killed.

    DeepSpeed's runner never gets SIGINT or SIGTERM: it would answer with `pkill -f` on every pod,
    which ends other runs too.

    Args:
        process: the launcher.
        is_lost: whether a pod was lost, so that waiting for the rest is seldom of use.

    Returns:
        Why an agent gave no answer, or the error that it answered with, by pod name.
    """
    try:
        lease.closed.set()
        grace = LOST_GRACE_SECONDS if is_lost else RANKS_GRACE_SECONDS
        unanswered = lease.ask("end", grace + RUN_STOP_SECONDS, grace_seconds=grace)
        if not is_lost:
            # The launcher's last lines are still on their way.
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAUNCHER_END_SECONDS)
    finally:
        if process.poll() is None:
            # pdsh puts each ssh into a session of its own, so a signal to the process group would
            # miss them.
            root = Process(process.pid)
            end(lambda: [root, *descendants(root.pid)], 0.0)
            process.wait()
    # Where a pod of this machine was frozen, or its agent and warden were both killed, nobody else
    # ends its ranks.
    end(lambda: processes_with(RUN, lease.run), 0.0)
    return unanswered


class RunLease:
    """A context manager that renews the lease of a run on its pods, and knows how long each of them
    has been silent.

    Entering it opens the run on every pod; a pod that does not answer then counts as silent from
    the beginning. A thread renews the lease until `closed` is set. If the supervisor is killed, the
    agents (`pods/leases.py`) end the run by themselves.
    """

    def __init__(self, pods: Sequence[Pod], secret: bytes, run: str, *, forks: bool) -> None:
        """Prepare the lease; nothing is sent yet.

        Args:
            run: name of the lease, which marks the run's processes on the pods.
            forks: whether each pod should have a server that forks the ranks.
        """
        self.pods = tuple(pods)
        self.run = run
        self.closed = threading.Event()
        """Event that stops the renewals once it is set."""
        self._forks = forks
        self._secret = secret
        self._states = {pod.name: PodState(pod, time.monotonic()) for pod in self.pods}
        self._looked_at = time.monotonic()
        """When `states` was last called, by the monotonic clock."""

    def __enter__(self) -> RunLease:
        self.ask("renew", OPEN_SECONDS, seconds=RUN_SECONDS, forks=self._forks)

        def keep() -> None:
            while not self.closed.wait(RENEWAL_SECONDS):
                self.ask("renew", AGENT_ANSWER_SECONDS, seconds=RUN_SECONDS)

        threading.Thread(target=keep, name="run lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()

    def states(self) -> list[PodState]:
        """State of the run on each pod.

        Call this several times per second: after a pause of more than `LATE_CHECK_SECONDS`, every
        pod counts as having answered just now.
        """
        now = time.monotonic()
        if now - self._looked_at > LATE_CHECK_SECONDS:
            # This process did not run for a while, and asked no pod: the silence was its own.
            states = self._states.items()
            self._states = {name: replace(state, answered_at=now) for name, state in states}
        self._looked_at = now
        return list(self._states.values())

    def ask(self, do: str, answer_seconds: float, **more: object) -> dict[str, str]:
        """Send a request about the run to the agents of all pods, and keep in their states what
        they answer and when.

        Args:
            do: name of the request: `renew`, `stacks` or `end`.
            answer_seconds: time that each agent has to answer.
            more: further fields of the request.

        Returns:
            By pod name, why an agent gave no answer, or the error that it answered with.
        """
        agents = [(pod.address, pod.control_port) for pod in self.pods]
        request = {"do": do, "run": self.run, **more}
        answers = ask_all(agents, self._secret, request, answer_seconds)
        errors = {}
        for pod, answer in zip(self.pods, answers, strict=True):
            state = self._states[pod.name]
            if isinstance(answer, WireError):
                errors[pod.name] = str(answer)
                self._states[pod.name] = replace(state, error=str(answer))
                continue
            now = time.monotonic()
            # Only the answer to `renew` counts processes; that to `stacks` has no OOM kills either.
            most_processes = answer.get("seen", state.most_processes)
            absent_since = None
            if most_processes > 0 and answer.get("processes") == 0:
                absent_since = state.absent_since or now
            kills = answer.get("oom_kills", state.oom_kills)
            self._states[pod.name] = PodState(pod, now, most_processes, absent_since, kills)
        return errors
