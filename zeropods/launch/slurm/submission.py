"""A launch as a SLURM job: sbatch's command and its environment, as data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeropods.launch.alone import LOG
from zeropods.launch.command import Launch
from zeropods.launch.planning import PROJECT

SBATCH_FILE = PROJECT / "slurm" / "train.sbatch"
OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_")
"""Beginnings of names that describe the job in which this process itself runs, if it does: not the new one's."""
KEPT = ("SLURM_CONF",)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job of SLURM: a launch, and what it asks the cluster for."""

    launch: Launch
    """Its hosts are placeholders: SLURM chooses the nodes."""
    partition: str | None = None
    time_limit: str | None = None
    """As sbatch takes it: minutes, `hours:minutes:seconds`, `days-hours`."""
    account: str | None = None
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as `--qos=high`; they come last and win."""
    cpus_per_slot: int = 4
    has_gpus: bool = True
    """Whether the cluster's nodes have GPUs, of which each slot gets one."""

    @property
    def slots(self) -> int:
        """Processes a node."""
        return self.launch.hosts[0].slots

    def to_json(self) -> dict[str, Any]:
        """What `--dry-run` prints."""
        of_launch = {
            name: value for name, value in self.launch.to_json().items() if name not in ("hosts", "master_port")
        }
        nodes = {"pods": len(self.launch.hosts), "slots": self.slots}
        return {**of_launch, **nodes, "argv": sbatch_argv(self), "exported": job_variables(self)}


def sbatch_argv(submission: Submission) -> list[str]:
    """The command that submits the job; what it prints is the job's number."""
    launch = submission.launch
    named = {"partition": submission.partition, "time": submission.time_limit, "account": submission.account}
    return [
        *("sbatch", "--parsable"),
        f"--job-name=zeropods-{_plain(launch.folder.name)}",
        f"--nodes={len(launch.hosts)}",
        f"--cpus-per-task={submission.cpus_per_slot * submission.slots}",
        f"--gpus-per-node={submission.slots if submission.has_gpus else 0}",
        f"--output={_literal(str(launch.folder / LOG))}",
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        *submission.options,
        str(SBATCH_FILE),
        str(launch.script),
        *launch.arguments,
    ]


def job_variables(submission: Submission) -> dict[str, str]:
    """The parameters of `slurm/job.sh` that this launch sets."""
    return {
        "PROJECT": str(PROJECT),
        "PYTHON": sys.executable,
        "SLOTS": str(submission.slots),
        "MEMORY_LOG": str(submission.launch.folder / "nvidia-smi"),
    }


def job_environment(submission: Submission, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of sbatch, which becomes the job's."""
    here = {name: value for name, value in environment.items() if name in KEPT or not name.startswith(OF_A_JOB)}
    return {**here, **job_variables(submission)}


def _plain(name: str) -> str:
    return "".join(c if (c.isascii() and c.isalnum()) or c in "._-" else "-" for c in name)


def _literal(path: str) -> str:
    """A path in which sbatch replaces nothing."""
    return path.replace("%", "%%")
