"""What is asked of SLURM, through its own commands."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from zeropods.errors import UserError
from zeropods.launch.slurm.job import Job, read_job

ANSWER_SECONDS = 60.0
"""SLURM's own commands wait some 10 to 30 s for a controller that does not answer."""
UNKNOWN_JOB = "Invalid job id"
"""What SLURM says of a job that ended MinJobAge (300 s) ago, or never was."""
NO_CLUSTER = "Could not establish a configuration source"
"""What SLURM's commands say where nobody has configured it."""


class SlurmError(UserError):
    """SLURM refused, or did not answer."""


def submit(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Submit a job and return its number; `SlurmError` with sbatch's own words where it is rejected."""
    said = _ask(argv, environment)
    # NUMBER, or NUMBER;CLUSTER.
    number = said.strip().partition(";")[0]
    if not number.isdigit():
        raise SlurmError(f"sbatch: {said!r}; expected the number of a job")
    return int(number)


def look(number: int) -> Job | None:
    """A job as it is now; None for one that SLURM does not know, or not any more."""
    try:
        return read_job(_ask(["scontrol", "--oneliner", "show", "job", str(number)]))
    except SlurmError as error:
        if UNKNOWN_JOB in str(error):
            return None
        raise


def cancel(number: int) -> None:
    """End a job: SIGTERM to its ranks, SIGKILL after SLURM's KillWait."""
    _ask(["scancel", str(number)])


def node_names(nodes: str) -> list[str]:
    """The names in a list as SLURM writes it, in the order of a job's tasks."""
    return _ask(["scontrol", "show", "hostnames", nodes]).split()


def offer(partition: str | None) -> tuple[int, bool]:
    """How many nodes a partition has, or all of them, and whether any has GPUs that jobs can ask for."""
    chosen = [] if partition is None else [f"--partition={partition}"]
    lines = _ask(["sinfo", "--noheader", "--format=%D %G", *chosen]).splitlines()
    return sum(int(line.split()[0]) for line in lines), any("gpu" in line for line in lines)


def _ask(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    program = argv[0]
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS, check=False,
            # A terminal's Ctrl-C is this process's own affair.
            start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        remedy = "run this where SLURM's commands are, or take --launcher pdsh"
        raise SlurmError(f"{program}: not on PATH; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{program}: no answer within {ANSWER_SECONDS:.0f} s; see scontrol ping") from None
    if done.returncode != 0:
        words = _words(program, done.stderr or done.stdout) or f"{program}: status {done.returncode}"
        remedy = "; run this where SLURM is configured (slurm.conf), or take --launcher pdsh"
        raise SlurmError(words + (remedy if NO_CLUSTER in words else ""))
    return done.stdout


def _words(program: str, said: str) -> str:
    """A command's complaint on one line; it puts its own name before each of its lines."""
    lines = [line.removeprefix(f"{program}: ").removeprefix("error: ") for line in said.splitlines() if line.strip()]
    return f"{program}: {'; '.join(lines)}" if lines else ""
