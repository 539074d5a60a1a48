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
"""Pause between two checks, in seconds, after which this process must have been stopped, or its
machine asleep."""
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
"""The same when a run is opened."""
RUN_STOP_SECONDS = 15.0
"""Seconds that a pod may take to end a run, after the ranks' grace period."""
ASK_AGAIN_SECONDS = 300.0
"""Seconds for which a restart asks again pods that live and do not answer their checks."""
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
    Returns the last record.

    A pod that is already dead is left out like a lost one if `min_pods` is given; otherwise
    `UserError` is raised.

    A run that is already finished is left as it is. The effective batch size never changes. Every
    attempt but the last has its record in `attempts/`.
    """
    supervision = supervision or Supervision()
    check_restarts(planned, supervision.restarts, supervision.min_pods)
    if supervision.replace_lost and not cluster.backend_class.can_replace:
        raise UserError("--replace: is for CML workers; leave it out")
    earlier = command.finished_record(planned)
    if earlier is not None:
        return earlier
    current, left = _launch_to_begin_with(planned, cluster, supervision.min_pods)
    attempts = _Attempts(planned, cluster, supervision, left)
    with ending_in_order(), locked(planned.folder, LAUNCH_LOCK):
        while True:
            outcome, decided_at = attempts.run(current)
            following = attempts.following(current, outcome)
            if following is None:
                return _record_of(current, outcome)
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
        self._began = time.monotonic()
        self._has_opened = False
        """Whether an attempt has opened the run."""
        self._saved_before = saved_checkpoints(planned.folder)
        """The checkpoints that were there before the first attempt."""
        self._may_replace = supervision.replace_lost
        self._journal: list[dict[str, object]] = []

    def run(self, launch: Launch) -> tuple[Record | UnopenedError, float]:
        """Make one attempt; returns as `_attempt`."""
        supervision = _with_time_left(self._supervision, self._began)
        outcome, decided_at = _attempt(launch, self._left, supervision)
        self._has_opened = self._has_opened or isinstance(outcome, Record)
        return outcome, decided_at

    def following(self, current: Launch, outcome: Record | UnopenedError) -> Launch | None:
        """The launch with which the run goes on after an attempt; None where it ends with it. Where
        it cannot go on, a line on stderr says why."""
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
        """Put new pods, once, into the place of those that are not left; where they do not come up,
        a line on stderr says why."""
        self._may_replace = False
        names_left = [pod.name for pod in self._left.pods]
        lost = [pod.name for pod in self._cluster.pods if pod.name not in names_left]
        seconds = _with_time_left(self._supervision, self._began).timeout_seconds
        if seconds is None:
            seconds = math.inf
        try:
            self._left = replace_lost_pods(self._cluster, lost, seconds)
        except (UserError, OSError) as error:
            place = f"{self._planned.folder}: {', '.join(lost)}"
            print(f"{place}: not replaced: {error}", file=sys.stderr)

    def note_restart(
        self, following: Launch, outcome: Record | UnopenedError, decided_at: float
    ) -> None:
        """Write into the journal, and on stderr, what ended an attempt and how the run goes on."""
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
    """The supervision of an attempt of a launch that began at this time of the monotonic clock."""
    seconds = supervision.timeout_seconds
    if seconds is None:
        return supervision
    left = seconds - (time.monotonic() - began)
    return replace(supervision, timeout_seconds=max(1.0, left))


def _record_of(current: Launch, outcome: Record | UnopenedError) -> Record:
    """The last attempt's record; if its ranks had not opened the run, raise that error, and leave a
    record of it."""
    if isinstance(outcome, Record):
        return outcome
    with suppress(OSError):
        record_unopened(current, outcome)
    raise outcome


def _launch_to_begin_with(
    planned: Launch, cluster: Cluster, min_pods: int | None
) -> tuple[Launch, Cluster]:
    """How a run begins: as planned if all of its pods answer, otherwise on those that do, if that
    was allowed."""
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
    silent = [
        f"{status.pod}: {status.status}" for status in planned_statuses if not status.is_ready
    ]
    if not silent:
        return planned, cluster
    dead = "; ".join(silent)
    remaining = _with_ready_pods(cluster, statuses)
    remedy = f"see 'zeropods pods check', then {ANEW}"
    if min_pods is None:
        raise UserError(f"{dead}; {remedy}, or begin on those that answer: --min-pods N")
    launch_or_reason = next_attempt(planned, remaining, min_pods, opened=False, has_saved=False)
    if not isinstance(launch_or_reason, Launch):
        raise UserError(f"{dead}; {launch_or_reason}; {remedy}")
    launch = launch_or_reason
    # Nothing was begun yet, so this goes into no journal: it is only shown as a restart would be.
    entry = journal_entry(planned, launch, remaining, status="pod_lost", pod=None, reason=dead)
    print(f"{planned.folder}: {restart_line(entry, 'begins')}", file=sys.stderr)
    return launch, remaining


def _still_answering(cluster: Cluster, outcome: Record | UnopenedError) -> Cluster:
    """The cluster with only those of its pods that are ready after an attempt; a pod that it has
    lost is not."""
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
        checks = _checks_of_pods(planned, cluster)
        silent = checks.silent_pods()
        left = deadline - time.monotonic()
        may_ask_again = planned.restarts > 0 and bool(silent) and left > 0
        if not may_ask_again or _first_dead_pod(planned, cluster) is not None:
            checks.require()
            return
        how = "over ssh" if planned.launcher == command.PDSH else "to the checks"
        print(
            f"{planned.folder}: {', '.join(silent)}: {NO_ANSWER} {how}, but agents answer; "
            f"asked again, for {left:.0f} s at most",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(ASK_AGAIN_PAUSE_SECONDS)


def _checks_of_pods(planned: Launch, cluster: Cluster) -> Preflight:
    """Check whether a launch's pods have what it needs."""
    deepspeed = planned.call.deepspeed
    needed: tuple[str, ...] = (str(planned.script),)
    operations = []
    if deepspeed is not None:
        needed = (*needed, deepspeed.path)
        # An optimizer in main memory is stepped by CPU Adam, which has to be compiled.
        if operation_of(deepspeed.config) == CPU_ADAM:
            operations.append(CPU_ADAM)
        if is_quantized(deepspeed.config):
            operations.append(QUANTIZER)
    expected = Expectation.of_this_machine(
        Path.cwd(), needed, master_port=planned.master_port, operations=operations
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
                self._ranks.note_exits()
                # The watch hands the detector's own verdict through where a hang ends the run.
                if verdict is self._hangs.verdict:
                    self._hangs.save_stacks(lambda: self._lease.ask("stacks", AGENT_ANSWER_SECONDS))
            finally:
                is_lost = verdict is not None and verdict.status == "pod_lost"
                unanswered = _stop(process, self._lease, is_lost=is_lost)
                self._log.read(ended=True)
        verdict = self._in_view_of(unanswered, verdict)
        try:
            return self._record(verdict), decided_at
        except UnopenedError as error:
            return error, decided_at

    def _start_launcher(self) -> subprocess.Popen[bytes]:
        """Write the launcher's hostfile and environment file, and start it."""
        planned = self._planned
        hostfile = planned.folder / "launch.hostfile"
        variables = planned.folder / "launch.environment"
        write_hostfile(hostfile, planned.hosts)
        # DeepSpeed's environment file must have no blank line and no comment: DeepSpeed would raise
        # on them.
        of_ranks = command.variables_of_ranks(planned, child_environment())
        lines = [f"{name}={value}\n" for name, value in of_ranks.items()]
        files.write_text(variables, "".join(lines))
        environment = runner_environment(planned, variables, child_environment())
        with open(self._log.path, "ab") as output:
            argv = self._supervision.argv(planned, hostfile)
            # The launcher dies with this process.
            return start_bound(
                argv, signal.SIGKILL, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        signals: Sequence[str],
        update: Callable[[], object],
    ) -> Ending:
        """Watch the launcher and the pods until there is a verdict.

        Args:
            signals: names of signals that came; the first one ends the run.
            update: is called several times per second.
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
            status = process.poll()
            since_measured = 0.0
            hang = None
            # A rank that has written its measurement is about to end, and works no more.
            if measured_at is None:
                hang = self._hangs.check()
            else:
                since_measured = now - measured_at
            verdict = judge(
                pods=states,
                launcher_status=status,
                signal_name=next(iter(signals), None),
                failed_sessions={pod: now - at for pod, at in self._log.failed.items()},
                since_start=now - began,
                timeout_seconds=self._supervision.timeout_seconds,
                since_measured=since_measured,
                hang=hang,
            )
            if verdict is not None:
                return verdict

    def _in_view_of(self, unanswered: Mapping[str, str], verdict: Ending) -> Ending:
        """The verdict, or another one if agents no longer answer; `unanswered` says why not, by pod
        name."""
        if not unanswered or verdict.status is not None or verdict.reason is None:
            return verdict
        # A rank that was seen to end by itself on a pod that answers ended the run, even if another
        # pod is slow to answer.
        seen_elsewhere = []
        for end_of_rank in self._ranks.ends():
            if end_of_rank.pod not in unanswered and end_of_rank.measured is None:
                seen_elsewhere.append(end_of_rank)
        if first_cause(seen_elsewhere) is not None:
            return verdict
        # The launcher ended badly and an agent is gone: its pod has ended, or was brought down.
        pod, why = next(iter(unanswered.items()))
        return Ending("pod_lost", f"{pod} has ended: its agent does not answer ({why})", pod)

    def _record(self, verdict: Ending) -> Record:
        """Write the record of the run, in view of the OOM kills that the pods have counted."""
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
    """End the ranks first; pdsh and the runner, or what stands in their place, then end by
    themselves, or are killed.

    DeepSpeed's runner never gets SIGINT or SIGTERM: it would answer with `pkill -f` on every pod,
    which ends other runs too.

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
    the beginning. It renews until it is closed. If the supervisor is killed, the agents
    (`pods/leases.py`) end the run by themselves.
    """

    def __init__(self, pods: Sequence[Pod], secret: bytes, run: str, *, forks: bool) -> None:
        """`forks`: whether each pod should have a server that forks the ranks."""
        self.pods = tuple(pods)
        self.run = run
        self.closed = threading.Event()
        """Event that stops the renewals once it is set."""
        self._forks = forks
        self._secret = secret
        self._states = {pod.name: PodState(pod, time.monotonic()) for pod in self.pods}
        self._looked_at = time.monotonic()

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
        """State of the run on each pod. Call this several times per second; otherwise silence
        counts from now on."""
        now = time.monotonic()
        if now - self._looked_at > LATE_CHECK_SECONDS:
            # This process did not run for a while, and asked no pod.
            states = self._states.items()
            self._states = {name: replace(state, answered_at=now) for name, state in states}
        self._looked_at = now
        return list(self._states.values())

    def ask(self, do: str, answer_seconds: float, **more: object) -> dict[str, str]:
        """Ask the agents; keep what they say and when. Return, by pod name, why one gave no answer,
        or its error."""
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
            most = answer.get("seen", state.most)
            absent_since = None
            if most > 0 and answer.get("processes") == 0:
                absent_since = state.absent_since or now
            kills = answer.get("oom_kills", state.oom_kills)
            self._states[pod.name] = PodState(pod, now, most, absent_since, kills)
        return errors
