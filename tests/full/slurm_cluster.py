"""A real SLURM for tests: munged, slurmctld and three slurmd on this machine, in a folder and on ports of their own."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from getpass import getuser
from pathlib import Path

from tests.full.launches import of_processes
from zeropods.programs import free_port, is_free

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SBIN = "/usr/sbin"
"""Not on everybody's PATH."""
NODES = ("pod1", "pod2", "pod3")
START_SECONDS, JOB_SECONDS, END_SECONDS = 20.0, 120.0, 10.0
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=8
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
KillWait=4
GresTypes=gpu
NodeName=pod[1-3] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports}] CPUs=8 RealMemory=65536 Gres=gpu:2
PartitionName=main Nodes=pod[1-3] Default=YES MaxTime=INFINITE State=UP
"""
"""CPUs, memory and GPUs are what the job files ask for, not what is here: nothing of it is used."""
GRES = "NodeName=pod[1-3] Name=gpu File=/dev/null,/dev/zero\n"


def missing() -> str | None:
    """Why there can be no SLURM here; None where there can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge" if lacking else None


class SlurmCluster:
    """A SLURM that answers when this is made, and of which nothing is left after `stop`."""

    def __init__(self) -> None:
        # A path of a Unix socket may have 107 characters, fewer than pytest's folders.
        self.folder = Path(tempfile.mkdtemp(prefix="zeropods-slurm-", dir="/tmp"))
        self.configuration = self.folder / "slurm.conf"
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.configuration)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._configure()
            self._start()
        except BaseException:
            self.stop()
            raise

    def ask(self, *command: object) -> str:
        """What one of SLURM's commands prints."""
        done = subprocess.run(
            [*map(str, command)], env=self.environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def state(self, number: int) -> str:
        """A job's state: PENDING, RUNNING, COMPLETED..."""
        return self.ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")

    def wait_for(self, number: int, *states: str) -> str:
        """Wait until a job is in one of some states, or over for good; returns the state that it is in."""
        over = (*states, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._until(lambda: self.state(number) in over, JOB_SECONDS)
        return self.state(number)

    def stop(self) -> None:
        """End all jobs, then the daemons, then whatever was started below them."""
        if self._daemons:
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self.ask("scancel", f"--user={getuser()}")
                self._until(lambda: not self.ask("squeue", "--noheader"), END_SECONDS)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(END_SECONDS)
        for pid in self._ours():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.wait(END_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        first = free_port("127.0.0.1")
        while not all(is_free("127.0.0.1", first + offset) for offset in range(4)):
            first = free_port("127.0.0.1")
        self.configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0], port=first, ports=f"{first + 1}-{first + 3}",
                user=getuser(), folder=self.folder,
            )
        )  # fmt: skip
        (self.folder / "gres.conf").write_text(GRES)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _start(self) -> None:
        place = self.folder
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={place}/munge.key", f"--socket={place}/munge.sock",
            f"--pid-file={place}/munged.pid", f"--seed-file={place}/munge.seed",
        )  # fmt: skip
        self._until((place / "munge.sock").exists, START_SECONDS)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self._until(lambda: self._states() == ["idle"] * 3, START_SECONDS)

    def _states(self) -> list[str]:
        try:
            return self.ask("sinfo", "--noheader", "--Node", "--format=%t").split()
        except AssertionError:
            return []

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.{len(self._daemons)}.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _until(self, happened: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"ended: {ended}\n{self._said()}"
            time.sleep(0.1)

    def _said(self) -> str:
        """The last lines of every daemon's log."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs)

    def _ours(self) -> list[int]:
        """Processes whose environment names this configuration, but for this one."""
        mark, texts = f"\0SLURM_CONF={self.configuration}\0".encode(), of_processes("environ").items()
        return [pid for pid, text in texts if mark in b"\0" + text and pid != os.getpid()]


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"
