"""One run on local pods that is broken again and again, and continues each time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random

from benchmarks.reliability.faults import Scene, may_mount
from benchmarks.reliability.seen import Log
from tests.full.faults import LIBRARY
from tests.namespaces import Namespaces, are_possible
from zeropods import pods
from zeropods.launch.command import AGENTS, PDSH
from zeropods.measure.record import read_json
from zeropods.pods.cluster import BACKENDS, Cluster
from zeropods.pods.processes import signals_deferred
from zeropods.programs import bound_argv

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "reliability"
SPARE = 4
"""Number of pods beyond those that a run trains on."""
STEPS = 300
INTERVAL = 5
"""Number of steps from one checkpoint to the next."""
STEP_TIMEOUT = 8
BUSY_STEP_TIMEOUT = 40
"""Seconds of `--step-timeout`, and beside busy processes."""
FLAGS = (
    *("--model_id", "t5-tiny"),
    *("--init", "random"),
    *("--dropout", "0"),
    *("--precision", "fp32"),
    *("--threads", "1"),
    *("--logging_steps", "1"),
    *("--eval_steps", "0"),
    *("--save_steps", str(INTERVAL)),
    *("--save_total_limit", "3"),
    *("--per_device_train_batch_size", "4"),
    *("--gradient_accumulation_steps", "1"),
)
OVER_SSH = ("deepspeed", "pdsh")
"""DeepSpeed's launcher over pdsh, as users have it, or pdsh itself in its place, which takes half
as long to start."""
LAUNCHERS = (*OVER_SSH, AGENTS)
"""The last are the pods' agents without ssh, as users have it where there is no pdsh."""
OUTPUT = "said"
"""File in the folder of a run that holds the output of its launches."""
DISK_MIB = 256
TERM_SECONDS = 40.0


@dataclass(frozen=True)
class Setting:
    """How a run is trained that is to be broken."""

    technique: str
    pods: int
    steps: int = STEPS
    step_timeout: int = STEP_TIMEOUT

    @property
    def name(self) -> str:
        """The technique and the number of pods, as in `zero2 x3`."""
        return f"{self.technique} x{self.pods}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the training script."""
        steps = ("--max_steps", str(self.steps))
        if self.technique == "ddp":
            return (*FLAGS, *steps)
        return (*FLAGS, *steps, "--deepspeed", str(ROOT / "dsconfig" / f"{self.technique}.json"))


TECHNIQUES = ("zero1", "zero2", "zero3", "ddp")
SETTINGS = tuple(Setting(technique, pods) for pods, technique in product((2, 3), TECHNIQUES))
"""The settings that are tried if none are named."""


@dataclass
class Chain:
    """A run, its pods, and the process that launches it."""

    area: Path
    """Folder that holds `disk/run` and the output of the launches."""
    data: Path
    setting: Setting
    launcher: str
    random: Random
    log: Log = field(init=False)
    used: tuple[str, ...] = ()
    """Names of the pods of the current attempt, in the order of ranks."""
    lost: set[str] = field(default_factory=set)
    faults: int = 0
    """Number of faults that the run has been through."""
    launch: subprocess.Popen[bytes] | None = None
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        self.log = Log(self.folder)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.area / "disk" / "run"

    @property
    def has_spare(self) -> bool:
        """Whether a pod may be lost because a spare one can take its place."""
        return len(self.lost) < SPARE

    def begin(self) -> None:
        """Launch the run, or call the same command again."""
        assert self.cluster is not None
        self.used = tuple(pod.name for pod in self.cluster.pods[: self.setting.pods])
        argv = bound_argv([sys.executable, "-m", *self._call(self.cluster.name)])
        # A library of the ranks that does what a fault asks for; `PYTHONPATH` reaches the ranks
        # through both launchers.
        places = [str(LIBRARY), str(ROOT)]
        if os.environ.get("PYTHONPATH"):
            places.append(os.environ["PYTHONPATH"])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        with open(self.area / OUTPUT, "ab") as output:
            self.launch = subprocess.Popen(
                argv, cwd=ROOT, env=environment, stdout=output, stderr=output
            )

    def renew(self) -> None:
        """Start all pods if none are up, or anew if some were lost."""
        if self.cluster is not None and self.lost:
            self.cluster.down()
            self.cluster = None
        if self.cluster is None:
            # A backend of the tests, in which each pod has a network of its own.
            BACKENDS["namespaces"] = Namespaces
            backend = "namespaces" if are_possible() else "local"
            count = self.setting.pods + SPARE
            self.cluster = pods.up(count, name="broken", backend=backend)
            self.lost = set()

    def is_over(self) -> bool:
        """Whether the launch has ended."""
        assert self.launch is not None
        return self.launch.poll() is not None

    def is_finished(self) -> bool:
        """Whether the run has ended well."""
        record = self.folder / "record.json"
        return record.is_file() and read_json(record)["status"] == "ok"

    def scene(self) -> Scene:
        """What a fault needs to know about the run."""
        assert self.cluster is not None
        assert self.launch is not None
        return Scene(
            cluster=self.cluster,
            used=self.used,
            folder=self.folder,
            launch=self.launch.pid,
            random=self.random,
        )

    def close(self) -> None:
        """End the launch, then the pods."""
        if self.launch is not None and self.launch.poll() is None:
            self.launch.terminate()
            try:
                self.launch.wait(TERM_SECONDS)
            except subprocess.TimeoutExpired:
                self.launch.kill()
                self.launch.wait()
        if self.cluster is not None:
            self.cluster.down()

    def _call(self, name: str) -> list[str]:
        """The words that launch the run on the pods of a cluster, after `python -m`."""
        count = str(self.setting.pods)
        timeout = str(self.setting.step_timeout)
        # A restart takes as many pods as before: a spare one in place of one that is lost.
        restarts = ["--restarts", "1000", "--min-pods", count, "--step-timeout", timeout]
        if self.launcher in ("deepspeed", AGENTS):
            over = PDSH
            if self.launcher == AGENTS:
                over = AGENTS
            where = ["--name", name, "--num-pods", count, "--launcher", over]
            launch = ["zeropods", "launch", *where, *restarts, "--"]
        else:
            launch = ["tests.full.over_pdsh", name, "--pods", count, "--watched", *restarts]
        script = str(ROOT / "textsql_train.py")
        folders = ["--dataset_path", str(self.data), "--outputdir", str(self.folder)]
        return [*launch, script, *self.setting.flags, *folders]


@contextmanager
def chain(data: Path, setting: Setting, launcher: str, random: Random) -> Iterator[Chain]:
    """Begin a run in a folder that is removed at the end, on a disk of its own where this process
    may mount one."""
    area = Path(tempfile.mkdtemp(prefix="reliability-"))
    (area / "disk").mkdir()
    os.environ["ZEROPODS_HOME"] = str(area / "home")
    has_own_disk = may_mount()
    if has_own_disk:
        # Mounted before the pods start: each has its own view of the file systems.
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(area / "disk")],
            check=True,
        )
    run = Chain(area, data, setting, launcher, random)
    try:
        run.renew()
        run.begin()
        yield run
    finally:
        # An interrupt waits until nothing is left.
        with signals_deferred():
            run.close()
            _keep_words(run)
            if has_own_disk:
                subprocess.run(["umount", "--lazy", str(area / "disk")], check=True)
            shutil.rmtree(area, ignore_errors=True)


def _keep_words(chain: Chain) -> None:
    """Keep the log of the last run and the output of its launches, to investigate a trial that went
    wrong."""
    WORK.mkdir(parents=True, exist_ok=True)
    for path in (chain.area / OUTPUT, chain.folder / "train.log"):
        if path.is_file():
            shutil.copy(path, WORK / f"{chain.area.name}.{path.name}")
