"""The supervisor of a run on several pods: it starts, watches and restarts the run, and leaves nothing of it behind."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
from zeropods.launch.logs import RunLog, following
from zeropods.launch.lost_pods_and_hangs import Ending, HangDetector, PodState, check_timeouts, judge
from zeropods.launch.outcome import Ranks, UnopenedError, record_run
from zeropods.launch.restart import JOURNAL, calls_for_another, check_restarts, journal_entry, next_attempt, told
from zeropods.launch.unopened import record_unopened
from zeropods.measure.exits import exits_noted
from zeropods.measure.record import LAUNCH_LOCK, Record
from zeropods.measure.run_folder import locked
from zeropods.pods.hostfile import write_hostfile
from zeropods.pods.leases import RUN_SECONDS
from zeropods.pods.preflight import ANEW, Expectation
from zeropods.pods.processes import RUN, descendants, end, ending_in_order, noted_signals, processes_with, start_bound
from zeropods.pods.rendezvous import Pod
from zeropods.pods.wire import WireError, ask_all
from zeropods.programs import child_environment
from zeropods.tables import progress
from zeropods.train.arguments import arguments_of
from zeropods.train.deepspeed import CPU_ADAM, operation_of, read_config

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster, PodStatus

POLL_SECONDS = 0.2
LATE_SECONDS = 3.0
"""Pause between two checks, in seconds, after which this process must have been stopped, or its machine asleep."""
GRACE_SECONDS = 8.0
"""Seconds from SIGTERM to SIGKILL for ranks that must stop, in which they can write what they measured."""
LOST_GRACE_SECONDS = 4.0
"""The same where a pod was lost: the ranks of the others wait for it and seldom react to a signal."""
LEAVE_SECONDS = 5.0
"""Seconds that pdsh may take to end after the last rank."""
RENEW_SECONDS = 1.5
ANSWER_SECONDS, OPEN_SECONDS = 3.0, 5.0
STOP_SECONDS = 15.0
"""Seconds that a pod may take to end a run, after the ranks' grace period."""


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How a launch is supervised."""

    show: Callable[[str], object] = lambda line: None
    """Function that is called with every line that the ranks write."""
    argv: Callable[[Launch, Path], list[str]] = runner_argv
    """Function that makes the launcher's command from the launch and its hostfile."""
    timeout_seconds: float | None = None
    """Seconds after which a run is ended, counted from the launcher's start and over all its attempts."""
    step_timeout: float | None = None
    """Seconds without a step, or a batch of an evaluation, after which a run is ended; derived from the pauses so far
    if not given; 0 means never."""
    restarts: int = 0
    """Number of times that a run may restart by itself, after a pod was lost or a rank was killed."""
    min_pods: int | None = None
    """Fewest pods for a restart, 1 if not given. If given, the run may also begin on so few if others are dead."""

    def __post_init__(self) -> None:
        check_timeouts(self.timeout_seconds, self.step_timeout)


def run_launch(planned: Launch, cluster: Cluster, supervision: Supervision | None = None) -> Record:
    """Run a launch; after a lost pod or a killed rank, restart it on the pods that are left. Returns the last record.

    A pod that is already dead is left out like a lost one if `min_pods` is given; otherwise `UserError` is raised.

    A run that is already finished is left as it is. The effective batch size never changes. Every attempt but the last
    has its record in `attempts/`.
    """
    supervision = supervision or Supervision()
    restarts, min_pods = supervision.restarts, supervision.min_pods
    check_restarts(planned, restarts, min_pods)
    earlier = command.finished_record(planned)
    if earlier is not None:
        return earlier
    current, left = _first_attempt(planned, cluster, min_pods)
    began, opened, seconds = time.monotonic(), False, supervision.timeout_seconds
    journal: list[dict[str, object]] = []
    with ending_in_order(), locked(planned.folder, LAUNCH_LOCK):
        while True:
            rest = seconds and max(1.0, seconds - (time.monotonic() - began))
            end, found = _attempt(current, left, replace(supervision, timeout_seconds=rest))
            opened, following_launch = opened or isinstance(end, Record), None
            if calls_for_another(end) and current.restarts < restarts:
                lost = end.pod if end.status == "pod_lost" else None
                left = _answering(left, [pod for pod in left.statuses(OPEN_SECONDS) if pod.pod != lost])
                following_launch = next_attempt(planned, left, min_pods or 1, opened=opened)
            if not isinstance(following_launch, Launch):
                if following_launch is not None:
                    print(f"{planned.folder}: not restarted: {following_launch}", file=sys.stderr)
                if isinstance(end, UnopenedError):
                    with suppress(OSError):
                        record_unopened(current, end)
                    raise end
                return end
            current = replace(following_launch, restarts=current.restarts + 1)
            ended = {"status": end.status, "pod": end.pod, "rank": end.rank, "reason": end.reason, "steps": end.steps}
            journal.append(journal_entry(planned, current, left, **ended, found_unix_seconds=found))
            files.write_json(planned.folder / JOURNAL, {"restarts": journal})
            how = f"restart {current.restarts} of {restarts}"
            print(f"{planned.folder}: {told(journal[-1], how)}", file=sys.stderr)


def _first_attempt(planned: Launch, cluster: Cluster, min_pods: int | None) -> tuple[Launch, Cluster]:
    """How a run begins: as planned if all of its pods answer, otherwise on those that do, if that was allowed."""
    statuses = cluster.statuses(OPEN_SECONDS)
    if busy := [pod.pod for pod in statuses[: len(planned.hosts)] if pod.runs]:
        print(f"{', '.join(busy)}: already busy with another run; both will be slower", file=sys.stderr, flush=True)
    dead = "; ".join(f"{pod.pod}: {pod.status}" for pod in statuses[: len(planned.hosts)] if not pod.is_ready)
    if not dead:
        return planned, cluster
    left, remedy = _answering(cluster, statuses), f"see 'zeropods pods check', then {ANEW}"
    if min_pods is None:
        raise UserError(f"{dead}; {remedy}, or begin on those that answer: --min-pods N")
    first = next_attempt(planned, left, min_pods, opened=False)
    if not isinstance(first, Launch):
        raise UserError(f"{dead}; {first}; {remedy}")
    entry = journal_entry(planned, first, left, status="pod_lost", pod=None, reason=dead)
    print(f"{planned.folder}: {told(entry, 'begins')}", file=sys.stderr)
    return first, left


def _answering(cluster: Cluster, statuses: Sequence[PodStatus]) -> Cluster:
    """The cluster with only those of its pods that are ready according to their statuses."""
    ready = {pod.pod for pod in statuses if pod.is_ready}
    return replace(cluster, pods=tuple(pod for pod in cluster.pods if pod.name in ready))


def _attempt(planned: Launch, cluster: Cluster, supervision: Supervision) -> tuple[Record | UnopenedError, float]:
    """Check the pods, take a lease for this attempt, and run it.

    Returns:
        The record, or why there is none; and when the verdict was reached, in seconds since 1970.
    """
    try:
        # An optimizer in main memory is stepped by CPU Adam, which has to be compiled.
        config = command.flag_values(planned.arguments).get("deepspeed")
        offload = config is not None and operation_of(read_config(Path(config))) == CPU_ADAM
        needed, port = (str(planned.script), *filter(None, [config])), planned.master_port
        expected = Expectation.of_this_machine(Path.cwd(), needed, master_port=port, offload=offload)
        with progress("check", "pods", len(planned.hosts)) as bar:
            bar.leave = False
            checks = cluster.preflight(expected, len(planned.hosts))
        checks.require()
    except UserError as error:
        dead = [pod.pod for pod in cluster.statuses()[: len(planned.hosts)] if not pod.is_ready]
        if not dead:
            raise
        # The pod was there a moment ago, so it counts as lost, like one that dies during the run.
        return UnopenedError(planned.folder, Ending("pod_lost", str(error), dead[0]), ()), time.time()
    run = secrets.token_hex(8)
    marked = replace(planned, exported={**planned.exported, RUN: run})
    pods = cluster.pods[: len(planned.hosts)]
    # The ranks of a script that is not ours are not forked, so no pod has to import torch for them.
    forks = arguments_of(planned.script) is not None
    with exits_noted(planned.folder), RunLease(pods, cluster.secret, run, forks=forks) as lease:
        command.remember(planned)
        return _run_leased(marked, supervision, lease)


def _run_leased(planned: Launch, supervision: Supervision, lease: RunLease) -> tuple[Record | UnopenedError, float]:
    """Start the launcher, watch it until there is a verdict, end everything, and record the run.

    However it ends, no process of the run is left on any pod that answers, nor here; a pod that does not answer ends
    its processes by itself when its lease runs out.
    """
    folder = planned.folder
    names = [pod.name for pod in lease.pods for _ in range(pod.slots)]
    ranks = Ranks(folder, names)
    hangs = HangDetector(folder, supervision.step_timeout, ranks.have_opened_the_run, names)
    log = RunLog(folder, supervision.show, {pod.address: pod.name for pod in lease.pods})
    hostfile, variables = folder / "launch.hostfile", folder / "launch.environment"
    verdict, measured_at = None, None
    with noted_signals() as signals, following(folder) as tick:
        write_hostfile(hostfile, planned.hosts)
        # DeepSpeed's environment file must have no blank line and no comment: DeepSpeed would raise on them.
        files.write_text(variables, "".join(f"{name}={value}\n" for name, value in planned.exported.items()))
        environment = runner_environment(planned, variables, child_environment())
        with open(log.path, "ab") as output:
            argv, output_of = supervision.argv(planned, hostfile), {"stdout": output, "stderr": subprocess.STDOUT}
            # The launcher dies with this process.
            process = start_bound(argv, signal.SIGKILL, env=environment, **output_of)
        began = time.monotonic()
        try:
            while verdict is None:
                # A terminal that is gone does not end a run by itself; SIGHUP does.
                with suppress(OSError):
                    tick()
                time.sleep(POLL_SECONDS)
                log.read()
                now = time.monotonic()
                if measured_at is None and len(ranks.files()) == len(names):
                    measured_at = now
                verdict = judge(
                    pods=lease.states(),
                    launcher_status=process.poll(),
                    signal_name=next(iter(signals), None),
                    failed_sessions={pod: now - at for pod, at in log.failed.items()},
                    since_start=now - began,
                    timeout_seconds=supervision.timeout_seconds,
                    since_measured=0.0 if measured_at is None else now - measured_at,
                    hang=hangs.look() if measured_at is None else None,
                )
            found = time.time()
            ranks.note_exits()
            if verdict is hangs.found:
                hangs.save_stacks(lambda: lease.ask("stacks", ANSWER_SECONDS))
        finally:
            unanswered = _stop(process, lease, is_lost=verdict is not None and verdict.status == "pod_lost")
            log.read(ended=True)
    # A rank that was seen to end by itself on a pod that answers ended the run, even if another pod is slow to answer.
    seen_elsewhere = [end for end in ranks.ends() if end.pod not in unanswered and end.measured is None]
    is_of_a_rank = first_cause(seen_elsewhere) is not None
    if unanswered and not is_of_a_rank and verdict.status is None and verdict.reason is not None:
        # The launcher ended badly and an agent is gone: its pod has ended, or was brought down.
        pod, why = next(iter(unanswered.items()))
        verdict = Ending("pod_lost", f"{pod} has ended: its agent does not answer ({why})", pod)
    kills = {state.pod.name: state.oom_kills for state in lease.states()}
    out_of_memory = [pod for pod, count in kills.items() if count]
    uncounted = [pod for pod, count in kills.items() if count is None]
    try:
        record = record_run(
            ranks, verdict, log, out_of_memory=out_of_memory, uncounted=uncounted, restarts=planned.restarts
        )
        return record, found
    except UnopenedError as error:
        return error, found


def _stop(process: subprocess.Popen[bytes], lease: RunLease, *, is_lost: bool) -> dict[str, str]:
    """End the ranks first; pdsh and the runner then end by themselves, or are killed.

    DeepSpeed's runner never gets SIGINT or SIGTERM: it would answer with `pkill -f` on every pod, which ends other runs
    too.

    Returns:
        Why an agent gave no answer, or the error that it answered with, by pod name.
    """
    try:
        lease.closed.set()
        grace = LOST_GRACE_SECONDS if is_lost else GRACE_SECONDS
        unanswered = lease.ask("end", grace + STOP_SECONDS, grace_seconds=grace)
        if not is_lost:
            # The launcher's last lines are still on their way.
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
    finally:
        if process.poll() is None:
            # pdsh puts each ssh into a session of its own, so a signal to the process group would miss them.
            root = Process(process.pid)
            end(lambda: [root, *descendants(root.pid)], 0.0)
            process.wait()
    # Where a pod of this machine was frozen, or its agent and warden were both killed, nobody else ends its ranks.
    end(lambda: processes_with(RUN, lease.run), 0.0)
    return unanswered


class RunLease:
    """A context manager that renews the lease of a run on its pods, and knows how long each of them has been silent.

    Entering it opens the run on every pod; a pod that does not answer then counts as silent from the beginning. It
    renews until it is closed. If the supervisor is killed, the agents (`pods/leases.py`) end the run by themselves.
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
        self._looked = time.monotonic()

    def __enter__(self) -> RunLease:
        self.ask("renew", OPEN_SECONDS, seconds=RUN_SECONDS, forks=self._forks)

        def keep() -> None:
            while not self.closed.wait(RENEW_SECONDS):
                self.ask("renew", ANSWER_SECONDS, seconds=RUN_SECONDS)

        threading.Thread(target=keep, name="run lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()

    def states(self) -> list[PodState]:
        """State of the run on each pod. Call this several times per second; otherwise silence counts from now on."""
        now = time.monotonic()
        if now - self._looked > LATE_SECONDS:
            # This process did not run for a while, and asked no pod.
            self._states = {name: replace(state, answered_at=now) for name, state in self._states.items()}
        self._looked = now
        return list(self._states.values())

    def ask(self, do: str, answer_seconds: float, **more: object) -> dict[str, str]:
        """Ask the agents; keep what they say and when. Return, by pod name, why one gave no answer, or its error."""
        errors = {}
        agents, request = [(pod.address, pod.control_port) for pod in self.pods], {"do": do, "run": self.run, **more}
        for pod, answer in zip(self.pods, ask_all(agents, self._secret, request, answer_seconds), strict=True):
            state = self._states[pod.name]
            if isinstance(answer, WireError):
                errors[pod.name] = str(answer)
                self._states[pod.name] = replace(state, error=errors[pod.name])
            else:
                most, kills = answer.get("seen", state.most), answer.get("oom_kills", state.oom_kills)
                now = time.monotonic()
                is_absent = most > 0 and answer.get("processes") == 0
                absent_since = (state.absent_since or now) if is_absent else None
                self._states[pod.name] = PodState(pod, now, most, absent_since, kills)
        return errors
