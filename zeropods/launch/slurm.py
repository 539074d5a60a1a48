"""A training script as a SLURM job: planned, submitted, followed to its end, recorded."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.launch.command import Launch
from zeropods.launch.logs import LOG, RunLog, following
from zeropods.launch.lost_pods_and_hangs import Ending, HangDetector, judge
from zeropods.launch.outcome import Ranks, record_run
from zeropods.launch.supervisor import Supervision
from zeropods.measure.exits import remove_exits
from zeropods.measure.record import LAUNCH_LOCK, Record, read_json
from zeropods.measure.run_folder import locked
from zeropods.pods.hostfile import Host
from zeropods.pods.processes import noted_signals
from zeropods.programs import child_environment
from zeropods.train.arguments import PROJECT

SBATCH_FILE = PROJECT / "slurm" / "train.sbatch"
JOB = "slurm.json"
"""File in the run folder: the job that was submitted last, and when `config.json` had been written before that."""
OF_A_JOB, KEPT = ("SLURM_", "SLURMD_", "SRUN_"), ("SLURM_CONF",)
"""Prefixes of variables that describe the job in which this process runs, if any, and those of them that are kept."""
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
ENDED = frozenset({"COMPLETED", "FAILED", FORGOTTEN, *STATUSES})
"""States of a job that will not run again (squeue(1)); a requeued job is PENDING."""
HOPELESS = ("BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionTimeLimit")
"""Reasons of a waiting job that will never start by itself (squeue(1))."""
SAVED = 75
"""Exit status EX_TEMPFAIL: the ranks were asked to save and did; `slurm/job.sh` has not requeued the job."""
NOTHING = ("(null)", "None", "N/A")
"""What SLURM writes for a missing value."""
FIELD = re.compile(r"(?:^| )([A-Z][\w/:]*)=(\S*)")
UNKNOWN_JOB = "Invalid job id"
"""What SLURM says about a job that ended MinJobAge (300 s) ago or earlier, or never existed."""
ANSWER_SECONDS = 60.0
"""Timeout in seconds of SLURM's commands, which wait 10 to 30 s themselves for a controller that does not answer."""
POLL_SECONDS, LONGEST_SECONDS = 0.5, 5.0
"""Seconds between looks at the log, and most between queries of SLURM, which become rarer the longer a job takes."""
PATIENCE_SECONDS = 900.0
"""Seconds that a controller may be away, for a restart; the job goes on without it."""


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
        """The environment of sbatch, which becomes the job's."""
        kept = {name: value for name, value in here.items() if name in KEPT or not name.startswith(OF_A_JOB)}
        return {**kept, **self.variables}

    def to_json(self) -> dict[str, object]:
        """What `--dry-run` prints."""
        asked = {key: value for key, value in self.launch.to_json().items() if key not in ("hosts", "master_port")}
        nodes = {"pods": len(self.launch.hosts), "slots": self.slots}
        return {**asked, **nodes, "argv": self.argv, "exported": self.variables}


def plan_slurm(
    script: str | Path,
    arguments: list[str],
    *,
    pods: int = 1,
    slots: int = 1,
    cpus_per_slot: int = 4,
    partition: str | None = None,
    options: tuple[str, ...] = (),
    needs_slurm: bool = True,
) -> Submission:
    """A job as data, with the script's arguments checked; starts nothing.

    Args:
        options: further options of sbatch, such as `--qos=high`; they come last and win.
        needs_slurm: whether it is an error if SLURM does not answer when it is asked for its nodes; if not, the job is
            written for nodes with one GPU per slot.
    """
    # `slurm/job.sh` derives rank 0's port from the job's number.
    hosts = tuple(Host(f"node{number}", slots) for number in range(pods))
    launch = command.plan_on(hosts, script, arguments, launcher="slurm")
    chosen = () if partition is None else (f"--partition={partition}",)
    try:
        nodes = _ask(["sinfo", "--noheader", "--format=%D %G", *chosen])
    except SlurmError:
        if needs_slurm:
            raise
        nodes = "0 gpu"
    there = sum(int(line.split()[0]) for line in nodes.splitlines())
    if 0 < there < pods:
        # The job would wait for ever.
        raise UserError(f"{pods} nodes: SLURM has only {there} in {partition or 'all partitions'}; ask for fewer")
    # sbatch replaces %j and the like in the path of the log.
    name, log = re.sub(r"[^A-Za-z0-9._-]", "-", launch.folder.name), str(launch.folder / LOG).replace("%", "%%")
    argv = [
        *("sbatch", "--parsable"),
        f"--job-name=zeropods-{name}",
        f"--nodes={pods}",
        f"--cpus-per-task={cpus_per_slot * slots}",
        f"--gpus-per-node={slots if 'gpu' in nodes else 0}",
        f"--output={log}",
        *chosen,
        *options,
        str(SBATCH_FILE),
        str(launch.script),
        *launch.arguments,
    ]
    variables = {"PROJECT": str(PROJECT), "PYTHON": sys.executable, "SLOTS": str(slots)}
    variables |= {"MEMORY_LOG": str(launch.folder / "nvidia-smi"), "EXITS": str(launch.folder / "ranks")}
    return Submission(launch, argv, variables)


def run_slurm(submission: Submission, supervision: Supervision | None = None) -> Record:
    """Submit the job, follow it to its end, and return the run's record.

    A job of this launch that still waits or runs, because its follower was killed, is followed instead. The job's log
    and its states are shown; a job that runs for longer than its timeout is cancelled; waiting does not count.
    """
    supervision = supervision or Supervision()
    launch, path = submission.launch, submission.launch.folder / JOB
    earlier = command.finished_record(launch)
    if earlier is not None:
        return earlier
    with locked(launch.folder, LAUNCH_LOCK), noted_signals() as signals:
        ranks = Ranks(launch.folder, [None] * launch.world_size)
        log = RunLog(launch.folder, supervision.show)
        submitted = read_json(path) if path.is_file() else None
        if submitted and look(submitted["job"])["JobState"] not in ENDED:
            number = submitted["job"]
            if command.remembered(launch.folder) != command.identity(launch):
                remedy = f"scancel {number}, or choose another --outputdir"
                raise SlurmError(f"{launch.folder}: job {number} uses this folder with other arguments; {remedy}")
            ranks.before = submitted["config_before"]
        else:
            # The answer is NUMBER, or NUMBER;CLUSTER.
            said = _ask(submission.argv, submission.environment(child_environment()))
            if not (head := said.partition(";")[0].strip()).isdigit():
                raise SlurmError(f"sbatch: {said!r:.100}; expected the number of a job")
            number = int(head)
            command.remember(launch)
            files.write_json(path, {"job": number, "config_before": ranks.before})
            supervision.show(f"job {number}: submitted; its log: {log.path}")
        hangs = HangDetector(launch.folder, supervision.step_timeout, ranks.have_opened_the_run)
        with following(launch.folder) as tick:
            verdict = _followed(number, log, supervision, hangs, signals, tick)
        nodes = log.names.values() or (None,) * len(launch.hosts)
        ranks.pods = tuple(node for node in nodes for _ in range(submission.slots))
        # What SLURM says about the job's end counts: ranks fail because of it, unless all of them were done before.
        ranks.note_exits()
        try:
            return record_run(ranks, verdict, log, uncounted=ranks.pods, is_certain=True)
        finally:
            remove_exits(launch.folder)


def _followed(
    number: int,
    log: RunLog,
    supervision: Supervision,
    hangs: HangDetector,
    signals: Sequence[str],
    tick: Callable[[], object],
) -> Ending:
    """Follow one job until it is over for good: show its log, report its states, and cancel it when it must end.

    Args:
        signals: names of signals that came; the first one cancels the job.
        tick: is called about twice per second.
    """
    heard = began = time.monotonic()
    asked, told = 0.0, ""
    running_since: float | None = None
    cancelled: Ending | None = None
    job: dict[str, str] = {"JobState": ""}
    while job["JobState"] not in ENDED:
        tick()
        time.sleep(POLL_SECONDS)
        # The lines of a job wait until its nodes are known, since each line gets the name of its node.
        if log.names:
            log.read()
        now, verdict = time.monotonic(), None
        if cancelled is None:
            verdict = judge(
                signal_name=next(iter(signals), None),
                since_start=0.0 if running_since is None else now - running_since,
                timeout_seconds=supervision.timeout_seconds,
                hang=None if running_since is None else hangs.look(),
            )
        if verdict is None and now - asked < min(LONGEST_SECONDS, (now - began) / 20):
            continue
        asked = now
        try:
            job = look(number)
        except SlurmError as error:
            if verdict is None and now - heard > PATIENCE_SECONDS:
                remedy = f"the job may still be running: squeue --jobs {number}; repeat the launch to follow it"
                raise UserError(f"SLURM has not answered for {now - heard:.0f} s ({error}); {remedy}") from None
        else:
            heard, state, reason, nodes = now, job["JobState"], job["Reason"], job["NodeList"]
            if state == "PENDING":
                # The next attempt may be on other nodes.
                log.names.clear()
                if reason in HOPELESS and cancelled is None and verdict is None:
                    verdict = Ending("failed", f"job {number} cannot start as requested: {reason}")
            elif nodes and not log.names:
                # The hosts are in the order of the job's tasks.
                hosts = _ask(["scontrol", "show", "hostnames", nodes]).split()
                log.names |= {str(task): host for task, host in enumerate(hosts)}
            running_since = running_since or (now if state == "RUNNING" else None)
            where = f" on {nodes}" if nodes and state == "RUNNING" else ""
            again = ", again" if int(job["Restarts"] or 0) else ""
            line = f"job {number}: {state}{where}{f' ({reason})' if reason else ''}{again}"
            if line != told and state != FORGOTTEN:
                supervision.show(line)
                told = line
        if verdict is not None and job["JobState"] not in ENDED:
            if verdict is hangs.found:
                hangs.save_stacks(lambda: None)
            # Its ranks get SIGTERM, and SIGKILL after SLURM's KillWait.
            supervision.show(f"job {number}: cancelled: {verdict.reason}")
            _ask(["scancel", str(number)])
            cancelled = verdict
    log.read(ended=True)
    # If SLURM has forgotten the job, what the ranks measured counts.
    return cancelled or verdict_of(job)


def verdict_of(job: Mapping[str, str]) -> Ending:
    """Why the run of an ended job ended. Without a status, the ranks know better."""
    state, reason, of_job = job["JobState"], job["Reason"], f"SLURM's job {job['JobId']}"
    exit_status = int(job["ExitCode"].partition(":")[0] or 0)
    if state == "COMPLETED":
        return Ending()
    if state == FORGOTTEN:
        return Ending(None, f"SLURM has forgotten job {job['JobId']}")
    if state == "TIMEOUT":
        return Ending("timeout", f"{of_job}: TIMEOUT: its time limit was {job['TimeLimit']}")
    if state in STATUSES:
        return Ending(STATUSES[state], f"{of_job}: {state}{f' ({reason})' if reason else ''}")
    if exit_status == SAVED:
        return Ending("interrupted", f"{of_job}: saved when it was asked to, and was not requeued")
    return Ending(None, f"{of_job}: {state} with status {exit_status}")


# Requests to SLURM, through its own commands


class SlurmError(UserError):
    """SLURM refused, or did not answer."""


def look(number: int) -> dict[str, str]:
    """What SLURM knows about a job now, by its field names (scontrol(1)); a value is empty where SLURM has none."""
    try:
        found = FIELD.findall(_ask(["scontrol", "--oneliner", "show", "job", str(number)]))
    except SlurmError as error:
        if UNKNOWN_JOB not in str(error):
            raise
        found = [("JobId", str(number)), ("JobState", FORGOTTEN)]
    # The first of several fields with the same name counts.
    given = {name: "" if value in NOTHING else value for name, value in reversed(found)}
    if "JobState" not in given:
        raise SlurmError(f"scontrol show job {number}: its answer contains no job")
    return {**dict.fromkeys(("Reason", "ExitCode", "Restarts", "NodeList", "TimeLimit"), ""), **given}


def _ask(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    program = argv[0]
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS, check=False,
            # Ctrl-C in a terminal is for this process alone.
            start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        remedy = "run this where SLURM's commands are, or use --launcher pdsh"
        raise SlurmError(f"{program}: not on PATH; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{program}: no answer within {ANSWER_SECONDS:.0f} s; see scontrol ping") from None
    if done.returncode != 0:
        # Put its lines on one line, without the command's own name before each.
        lines = filter(None, (done.stderr or done.stdout or f"status {done.returncode}").splitlines())
        words = "; ".join(line.removeprefix(f"{program}: ").removeprefix("error: ") for line in lines)
        raise SlurmError(f"{program}: {words}")
    return done.stdout
