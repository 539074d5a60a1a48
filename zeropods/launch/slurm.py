"""A training script as a SLURM job: planned, submitted, followed to its end, recorded."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeropods import files
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.launch.command import Launch
from zeropods.launch.logs import LAUNCH_LOG, RunLog, shown_progress
from zeropods.launch.lost_pods_and_hangs import Ending, HangDetector, judge
from zeropods.launch.outcome import Ranks, record_run
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.supervisor import Supervision
from zeropods.measure.exits import remove_exits
from zeropods.measure.record import LAUNCH_LOCK, Record, read_json
from zeropods.measure.run_folder import locked
from zeropods.pods.hostfile import Host
from zeropods.pods.processes import noted_signals
from zeropods.programs import child_environment
from zeropods.train.flags import PROJECT

SBATCH_FILE = PROJECT / "slurm" / "train.sbatch"
JOB = "slurm.json"
"""File in the run folder: the number of the job that was submitted last, and what `written_at`
returned for `config.json` before that."""
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_")
"""Prefixes of variables that describe the job in which this process runs, if any."""
KEPT_VARIABLES = ("SLURM_CONF",)
"""Variables with such a prefix that the new job gets nevertheless."""
STATUSES = {
    "BOOT_FAIL": "pod_lost",
    "CANCELLED": "interrupted",
    "DEADLINE": "timeout",
    "NODE_FAIL": "pod_lost",
    "OUT_OF_MEMORY": "oom",
    "PREEMPTED": "interrupted",
    "TIMEOUT": "timeout",
}
"""A run's status by the job's state, where SLURM knows better than the ranks."""
FORGOTTEN = "FORGOTTEN"
"""Our name for the state of a job that SLURM does not know, or no longer knows."""
FINAL_STATES = frozenset({"COMPLETED", "FAILED", FORGOTTEN, *STATUSES})
"""States of a job that will not run again (squeue(1)); a requeued job is PENDING."""
HOPELESS = (
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "PartitionConfig",
    "PartitionTimeLimit",
)
"""Reasons of a waiting job that will never start by itself (squeue(1))."""
SAVED = 75
"""Exit status EX_TEMPFAIL: the ranks were asked to save and did; `slurm/job.sh` has not requeued
the job."""
MISSING_VALUES = ("(null)", "None", "N/A")
"""What SLURM writes for a missing value."""
FIELD = re.compile(r"(?:^| )([A-Z][\w/:]*)=(\S*)")
"""Matches a field of a job as scontrol writes it: its name and its value."""
UNKNOWN_JOB = "Invalid job id"
"""What SLURM says about a job that ended MinJobAge (300 s) ago or earlier, or never existed."""
COMMAND_SECONDS = 60.0
"""Timeout in seconds of SLURM's commands, which wait 10 to 30 s themselves for a controller that
does not answer."""
LOG_POLL_SECONDS = 0.5
"""Seconds between looks at the log."""
LONGEST_SECONDS = 5.0
"""Most seconds between queries of SLURM, which become rarer the longer a job takes."""
PATIENCE_SECONDS = 900.0
"""Seconds that SLURM's controller may be away, as for a restart of its own; the job goes on without
it."""


@dataclass(frozen=True)
class Submission:
    """One SLURM job: a launch, and how the cluster is asked to run it."""

    launch: Launch
    """Its hosts are placeholders: SLURM chooses the nodes."""
    argv: list[str]
    """The command that submits the job; what it prints is the job's number."""
    variables: dict[str, str]
    """The parameters of `slurm/job.sh` that this launch sets."""

    @property
    def slots(self) -> int:
        """Number of processes per node."""
        return self.launch.hosts[0].slots

    def environment(self, here: Mapping[str, str]) -> dict[str, str]:
        """The environment of sbatch, which becomes the job's: this process's, without what
        describes a job in which this process itself runs, and with the launch's parameters.

        Args:
            here: this process's environment.
        """
        environment = {}
        for name, value in here.items():
            if name in KEPT_VARIABLES or not name.startswith(JOB_PREFIXES):
                environment[name] = value
        return environment | self.variables

    def to_json(self) -> dict[str, object]:
        """What `--dry-run` prints."""
        document = self.launch.to_json()
        del document["hosts"]
        del document["master_port"]
        document["pods"] = len(self.launch.hosts)
        document["slots"] = self.slots
        document["argv"] = self.argv
        document["exported"] = self.variables
        return document


def plan_slurm(
    call: ScriptCall,
    *,
    pods: int = 1,
    slots: int = 1,
    cpus_per_slot: int = 4,
    partition: str | None = None,
    options: tuple[str, ...] = (),
    needs_slurm: bool = True,
    global_batch: int | None = None,
) -> Submission:
    """A job as data, with the script's arguments checked; starts nothing.

    Args:
        pods: number of nodes.
        slots: number of processes on each node.
        cpus_per_slot: number of processors for each process.
        partition: SLURM's default one if not given.
        options: further options of sbatch, such as `--qos=high`; they come last and win.
        needs_slurm: whether it is an error if SLURM does not answer when it is asked for its nodes;
            if not, the job is written for nodes with one GPU per slot.
        global_batch: as for `command.plan_on`.

    Raises:
        UserError: the arguments can be seen to be wrong, or the partition has too few nodes.
    """
    # `slurm/job.sh` derives rank 0's port from the job's number.
    hosts = tuple(Host(f"node{number}", slots) for number in range(pods))
    launch = command.plan_on(hosts, call, global_batch=global_batch, launcher="slurm")
    partition_options = () if partition is None else (f"--partition={partition}",)
    nodes = _sinfo(partition_options, needs_slurm=needs_slurm)
    _check_number_of_nodes(nodes, pods, partition)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", launch.folder.name)
    # sbatch replaces %j and the like in the path of the log.
    log = str(launch.folder / LAUNCH_LOG).replace("%", "%%")
    gpus_per_node = slots if "gpu" in nodes else 0
    argv = [
        *("sbatch", "--parsable"),
        f"--job-name=zeropods-{name}",
        f"--nodes={pods}",
        f"--cpus-per-task={cpus_per_slot * slots}",
        f"--gpus-per-node={gpus_per_node}",
        f"--output={log}",
        *partition_options,
        *options,
        str(SBATCH_FILE),
        str(launch.script),
        *launch.arguments,
    ]
    variables = {
        "PROJECT": str(PROJECT),
        "PYTHON": sys.executable,
        "SLOTS": str(slots),
        "MEMORY_LOG": str(launch.folder / "nvidia-smi"),
        "EXITS": str(launch.folder / "ranks"),
    }
    return Submission(launch, argv, variables)


def _sinfo(partition_options: Sequence[str], *, needs_slurm: bool) -> str:
    """The nodes of a partition, or of all of them, as text: on each line a number of nodes, and
    what each of them has besides processors, such as `gpu:2` or `(null)`."""
    try:
        return _output_of(["sinfo", "--noheader", "--format=%D %G", *partition_options])
    except SlurmError:
        if needs_slurm:
            raise
        # With GPUs, and a number of nodes that `_check_number_of_nodes` takes for unknown.
        return "0 gpu"


def _check_number_of_nodes(nodes: str, pods: int, partition: str | None) -> None:
    """Refuse more pods than there are nodes: the job would wait for ever.

    Args:
        nodes: as `_sinfo` returns them.
    """
    available = sum(int(line.split()[0]) for line in nodes.splitlines())
    if 0 < available < pods:
        place = partition or "all partitions"
        raise UserError(f"{pods} nodes: SLURM has only {available} in {place}; ask for fewer")


def run_slurm(submission: Submission, supervision: Supervision | None = None) -> Record:
    """Submit the job, follow it to its end, and return the run's record.

    The record of a run that is already finished is returned at once. A job of this launch that
    still waits or runs, because its follower was killed, is followed instead. The job's log and its
    states are shown. A job that hangs, or that runs for longer than its timeout, its wait in the
    queue left out, is cancelled.

    Raises:
        UnopenedError: the job ended before its ranks had opened the run.
        UserError: another run is finished in this folder, or SLURM refused the job or no longer
            answers.
    """
    supervision = supervision or Supervision()
    launch = submission.launch
    earlier = command.finished_record(launch)
    if earlier is not None:
        return earlier
    with locked(launch.folder, LAUNCH_LOCK), noted_signals() as signals:
        ranks = Ranks(launch.folder, [None] * launch.world_size)
        log = RunLog(launch.folder, supervision.show)
        number = _job_to_follow(submission, supervision, ranks, log)
        hangs = HangDetector(launch.folder, supervision.step_timeout, ranks.have_opened_the_run)
        with shown_progress(launch.folder) as update:
            follower = _JobFollower(number, log, supervision, hangs, signals)
            verdict = follower.follow(update)
        # The log has no names where the job was never seen on its nodes.
        nodes = log.names.values() or (None,) * len(launch.hosts)
        ranks.pods = tuple(node for node in nodes for _ in range(submission.slots))
        ranks.note_exits()
        try:
            # What SLURM says about the job's end is certain: ranks fail because of it, unless all
            # of them were done before. Nobody counts the kernel's kills on the job's nodes, so all
            # of these are uncounted.
            return record_run(ranks, verdict, log, uncounted=ranks.pods, is_certain=True)
        finally:
            remove_exits(launch.folder)


def _job_to_follow(
    submission: Submission, supervision: Supervision, ranks: Ranks, log: RunLog
) -> int:
    """The number of this launch's job: of one that still waits or runs, else of a new one, which is
    submitted.

    Args:
        ranks: for a job that was submitted earlier, its `config_before` becomes that of then, so
            that a run that the job has opened since counts as opened.
    """
    launch = submission.launch
    path = launch.folder / JOB
    submitted = read_json(path) if path.is_file() else None
    if not submitted or job_now(submitted["job"])["JobState"] in FINAL_STATES:
        return _submit(submission, supervision, ranks, log)
    number: int = submitted["job"]
    if command.remembered(launch.folder) != command.identity(launch):
        raise SlurmError(
            f"{launch.folder}: job {number} uses this folder with other arguments; "
            f"scancel {number}, or choose another --outputdir"
        )
    ranks.config_before = submitted["config_before"]
    return number


def _submit(submission: Submission, supervision: Supervision, ranks: Ranks, log: RunLog) -> int:
    """Submit a new job, note in the run folder that it is this launch's, and return its number."""
    launch = submission.launch
    answer = _output_of(submission.argv, submission.environment(child_environment()))
    # The answer is NUMBER, or NUMBER;CLUSTER.
    digits = answer.partition(";")[0].strip()
    if not digits.isdigit():
        raise SlurmError(f"sbatch: {answer!r:.100}; expected the number of a job")
    number = int(digits)
    command.remember(launch)
    files.write_json(launch.folder / JOB, {"job": number, "config_before": ranks.config_before})
    supervision.show(f"job {number}: submitted; its log: {log.path}")
    return number


class _JobFollower:
    """Follows one job until it is over for good: shows its log, reports its states, and cancels it
    when it must end."""

    def __init__(
        self,
        number: int,
        log: RunLog,
        supervision: Supervision,
        hangs: HangDetector,
        signals: Sequence[str],
    ) -> None:
        """`signals`: grows by the name of each signal that comes; the first one cancels the job."""
        self._number = number
        self._log = log
        self._supervision = supervision
        self._hangs = hangs
        self._signals = signals
        self._began = time.monotonic()
        self._queried_at = 0.0
        """When SLURM was last asked about the job, by the monotonic clock; 0 before that, so that
        it is asked at once."""
        self._answered_at = self._began
        """When SLURM last answered, by the same clock; the beginning before that."""
        self._running_since: float | None = None
        """When the job was first seen to run, by the same clock."""
        self._job: dict[str, str] = {"JobState": ""}
        """What SLURM said about the job last."""
        self._shown_state = ""
        """The last line that was shown about the job's state."""
        self._verdict_of_cancel: Ending | None = None
        """Why the job was cancelled, once it was."""

    def follow(self, update: Callable[[], object]) -> Ending:
        """Follow the job to its end, and return why its run ended. `UserError` where SLURM has been
        silent for too long.

        Args:
            update: is called about twice per second to show progress.
        """
        while not self._has_ended():
            update()
            time.sleep(LOG_POLL_SECONDS)
            # The lines of a job wait until its nodes are known, since each line gets the name of
            # its node.
            if self._log.names:
                self._log.read()
            now = time.monotonic()
            verdict = self._verdict(now)
            if verdict is None and not self._is_query_due(now):
                continue
            has_answered = self._query(now, must_end=verdict is not None)
            if has_answered:
                self._note_state(now)
                verdict = verdict or self._verdict_if_hopeless()
            # SLURM's answer may be that the job has ended by itself.
            if verdict is not None and not self._has_ended():
                self._cancel(verdict)
        self._log.read(ended=True)
        # If SLURM has forgotten the job, what the ranks measured counts.
        return self._verdict_of_cancel or verdict_of(self._job)

    def _has_ended(self) -> bool:
        return self._job["JobState"] in FINAL_STATES

    def _verdict(self, now: float) -> Ending | None:
        """Why the job must be cancelled; None while it may go on, and once it was cancelled."""
        if self._verdict_of_cancel is not None:
            return None
        since_start = 0.0
        hang = None
        if self._running_since is not None:
            since_start = now - self._running_since
            hang = self._hangs.check()
        return judge(
            signal_name=next(iter(self._signals), None),
            since_start=since_start,
            timeout_seconds=self._supervision.timeout_seconds,
            hang=hang,
        )

    def _is_query_due(self, now: float) -> bool:
        # At first a short job is seen to end at once; later the controller is spared.
        pause = min(LONGEST_SECONDS, (now - self._began) / 20)
        return now - self._queried_at >= pause

    def _query(self, now: float, *, must_end: bool) -> bool:
        """Ask SLURM about the job, and keep what it says; returns whether it has answered.

        Args:
            must_end: whether the job is about to be cancelled, which is tried even if SLURM has
                been silent for too long.

        Raises:
            UserError: SLURM has been silent for more than `PATIENCE_SECONDS`.
        """
        self._queried_at = now
        try:
            self._job = job_now(self._number)
        except SlurmError as error:
            silent_seconds = now - self._answered_at
            if silent_seconds > PATIENCE_SECONDS and not must_end:
                raise UserError(
                    f"SLURM has not answered for {silent_seconds:.0f} s ({error}); the job may "
                    f"still be running: squeue --jobs {self._number}; repeat the launch to follow "
                    "it"
                ) from None
            return False
        self._answered_at = now
        return True

    def _note_state(self, now: float) -> None:
        """Note on which nodes the job runs, whose names the log then gets, and since when; show the
        job's state if it has changed."""
        state = self._job["JobState"]
        nodes = self._job["NodeList"]
        names = self._log.names
        if state == "PENDING":
            # The next attempt may be on other nodes.
            names.clear()
        elif nodes and not names:
            # The hosts are in the order of the job's tasks.
            hosts = _output_of(["scontrol", "show", "hostnames", nodes]).split()
            names.update({str(task): host for task, host in enumerate(hosts)})
        if state == "RUNNING" and self._running_since is None:
            self._running_since = now
        line = self._state_line()
        if line != self._shown_state and state != FORGOTTEN:
            self._supervision.show(line)
            self._shown_state = line

    def _state_line(self) -> str:
        """The job's state as a line for a person."""
        job = self._job
        line = f"job {self._number}: {job['JobState']}"
        if job["JobState"] == "RUNNING" and job["NodeList"]:
            line += f" on {job['NodeList']}"
        if job["Reason"]:
            line += f" ({job['Reason']})"
        if int(job["Restarts"] or 0):
            line += ", again"
        return line

    def _verdict_if_hopeless(self) -> Ending | None:
        """The verdict on a job that will never start; None for every other one, and once it was
        cancelled."""
        reason = self._job["Reason"]
        is_hopeless = self._job["JobState"] == "PENDING" and reason in HOPELESS
        if self._verdict_of_cancel is not None or not is_hopeless:
            return None
        return Ending("failed", f"job {self._number} cannot start as requested: {reason}")

    def _cancel(self, verdict: Ending) -> None:
        """Cancel the job because of this verdict; if the job hangs, save its ranks' stacks."""
        if verdict is self._hangs.verdict:
            # Nobody here can signal the ranks, so the stacks of their last heartbeats are saved.
            self._hangs.save_stacks(lambda: None)
        self._supervision.show(f"job {self._number}: cancelled: {verdict.reason}")
        # The job's ranks get SIGTERM, and SIGKILL after SLURM's KillWait.
        _output_of(["scancel", str(self._number)])
        self._verdict_of_cancel = verdict


def verdict_of(job: Mapping[str, str]) -> Ending:
    """The verdict on the run of a job that has ended, by what SLURM says about the job. It has no
    status where the ranks know better."""
    state = job["JobState"]
    reason = job["Reason"]
    whose = f"SLURM's job {job['JobId']}"
    exit_status = int(job["ExitCode"].partition(":")[0] or 0)
    if state == "COMPLETED":
        return Ending()
    if state == FORGOTTEN:
        return Ending(None, f"SLURM has forgotten job {job['JobId']}")
    if state == "TIMEOUT":
        return Ending("timeout", f"{whose}: TIMEOUT: its time limit was {job['TimeLimit']}")
    if state in STATUSES:
        why = f" ({reason})" if reason else ""
        return Ending(STATUSES[state], f"{whose}: {state}{why}")
    if exit_status == SAVED:
        return Ending("interrupted", f"{whose}: saved when it was asked to, and was not requeued")
    return Ending(None, f"{whose}: {state} with status {exit_status}")


# Requests to SLURM, through its own commands


class SlurmError(UserError):
    """SLURM refused, or did not answer."""


def job_now(number: int) -> dict[str, str]:
    """What SLURM knows about a job now, by its field names (scontrol(1)); a value is empty where
    SLURM has none. The state is `FORGOTTEN` where SLURM does not know the job; `SlurmError` where
    it does not answer."""
    try:
        fields = FIELD.findall(_output_of(["scontrol", "--oneliner", "show", "job", str(number)]))
    except SlurmError as error:
        if UNKNOWN_JOB not in str(error):
            raise
        fields = [("JobId", str(number)), ("JobState", FORGOTTEN)]
    job = dict.fromkeys(("Reason", "ExitCode", "Restarts", "NodeList", "TimeLimit"), "")
    # Of several fields with the same name the first counts, so it is written last.
    for name, value in reversed(fields):
        job[name] = "" if value in MISSING_VALUES else value
    if "JobState" not in job:
        raise SlurmError(f"scontrol show job {number}: its answer contains no job")
    return job


def _output_of(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What one of SLURM's commands writes to stdout; `SlurmError` where it is missing, fails, or
    takes longer than `COMMAND_SECONDS`.

    Args:
        environment: the command's; this process's if not given.
    """
    program = argv[0]
    try:
        completed = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            check=False,
            # Ctrl-C in a terminal is for this process alone.
            start_new_session=True,
        )
    except FileNotFoundError:
        remedy = "run this where SLURM's commands are, or use --launcher pdsh"
        raise SlurmError(f"{program}: not on PATH; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{program}: no answer within {COMMAND_SECONDS:.0f} s; see scontrol ping"
        ) from None
    if completed.returncode != 0:
        text = completed.stderr or completed.stdout or f"status {completed.returncode}"
        raise SlurmError(f"{program}: {_on_one_line(text, program)}")
    return completed.stdout


def _on_one_line(text: str, program: str) -> str:
    """What a command says on several lines as one, without the command's own name before each."""
    lines = []
    for line in text.splitlines():
        if line:
            lines.append(line.removeprefix(f"{program}: ").removeprefix("error: "))
    return "; ".join(lines)
