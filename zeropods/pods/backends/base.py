"""What a backend is: it starts a cluster's workers, tells how they are, and ends them.

A worker is a process that runs a pod's agent, on this machine or on another one. A new backend is a
module with a subclass of `Backend`, an entry in `BACKENDS` (`pods/cluster.py`), and, where a user
may choose it by its name, a name in `BACKEND_NAMES` (`pods/backends/__init__.py`). Everything else
asks the class.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from zeropods.errors import UserError
from zeropods.pods.hostfile import is_loopback, own_slots
from zeropods.pods.machine import this_machine
from zeropods.pods.processes import Process, find_process, is_alive

RECORDS = "workers"
"""Folder in a cluster's folder with a `WorkerProcess` for each worker that has a process here."""
CLOCK_SHIFT_SECONDS = 10.0
"""Largest shift, in seconds, of a process's start time when the clock is set."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for: two calls of `up` with different settings mean two clusters."""

    count: int
    slots: int | None
    backend: str
    lease: str
    lease_seconds: float
    cpu: float
    memory: float
    nvidia_gpu: int
    hosts: tuple[str, ...] = ()
    """Lines of the user's hostfile, where the hosts are the user's own."""
    ssh_config: str | None = None
    """Path of the ssh configuration with which they are reached; None for the user's usual one."""
    gpus: tuple[str, ...] = ()
    """GPUs of each pod, as values of CUDA_VISIBLE_DEVICES; () where each sees the GPUs that there
    are."""
    accelerator_label: int | None = None
    """CML's id of the kind of GPU that each worker gets; None for any."""
    resource_profile: int | None = None
    """CML's id of the size that each worker has; None for `cpu` and `memory`."""


@dataclass(frozen=True)
class Worker:
    """A worker as its backend describes it now."""

    id: str
    has_ended: bool
    description: str
    """For messages: which worker it is, what it does or how it ended, and what it wrote last or
    where to read that."""
    status: str = ""
    """What its backend says of it as long as it is not a pod yet, in a few words; empty for a
    process of this machine, which starts at once."""


@dataclass(frozen=True)
class WorkerProcess:
    """A worker's record on disk, by which any process of this user on its machine can find its
    process again later."""

    id: str
    address: str
    pid: int
    started: float
    """Start time of the process, in seconds since 1970."""
    machine: str
    """Id of the machine on which it runs."""

    def find(self) -> Process | None:
        """The process; None where it has ended, and on any other machine than its own."""
        if self.machine != this_machine().id:
            # A process of this machine may have the same id, and sessions that start together the
            # same start time.
            return None
        process = find_process(self.pid)
        if process is None or not is_alive(process):
            return None
        if abs(process.create_time() - self.started) > CLOCK_SHIFT_SECONDS:
            # The worker has ended, and another process has got its pid.
            return None
        return process


class Backend(ABC):
    """The workers of one cluster.

    Args:
        folder: the cluster's folder.
        settings: what was asked for.
    """

    has_processes_here: ClassVar[bool]
    """Whether every worker has a process of this machine, which is the agent or stands in for it:
    then the end of that process is the end of the worker."""
    shares_folder: ClassVar[bool]
    """Whether the agents have the cluster's folder, in which they show that they live."""
    can_be_killed: ClassVar[bool] = False
    """Whether the whole pod, with its ranks, is below its worker's process on this machine, so that
    killing that tree is like a power cut."""
    can_replace: ClassVar[bool] = False
    """Whether a worker that is lost can be replaced by a new one."""
    ready_seconds: ClassVar[float] = 120.0
    """Seconds within which all pods have to be ready where nobody says otherwise."""
    network: ClassVar[str | None] = None
    """What the network between the pods is called; None for the name of the backend."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.failure: str | None = None
        """Why `start` or `replace` could not create a worker; None where all were created."""

    # What is known before there are any workers

    @classmethod
    def is_for_here(cls) -> bool:
        """Whether pods come from this backend where none is named: whether this process runs where
        the backend has its workers."""
        return False

    @classmethod
    def check_request(cls, nvidia_gpu: int | None, **of_cml: int | None) -> None:
        """Raise `UserError` where something is asked for that this backend cannot give here.

        Args:
            nvidia_gpu: number of GPUs of each worker; None where no number was given.
            of_cml: the settings that are CML's ids, by their names; None where none was given.
        """
        for setting, value in of_cml.items():
            if value is not None:
                flag = setting.replace("_", "-")
                raise UserError(f"--{flag} {value}: is for CML workers; leave it out")
        if nvidia_gpu:
            raise UserError(
                f"--nvidia-gpu {nvidia_gpu}: is for CML workers; leave it out, or give 0 to train "
                "without GPUs"
            )

    @classmethod
    def gpus_of_pods(cls, count: int, slots: int | None) -> tuple[str, ...]:
        """The GPUs that each of `count` pods gets, as `Settings.gpus`.

        Args:
            slots: processes per pod; None for one per GPU.
        """
        # Each pod has a machine of its own, and sees the GPUs there. Whether that is true, the
        # preflight looks.
        return ()

    @classmethod
    def slots_of_pods(cls, count: int) -> int:
        """Number of slots of each of `count` pods where none is asked for: its GPUs, at least 1."""
        # Each pod has a machine of its own, with as many GPUs as this one.
        return own_slots()

    @classmethod
    def shares_this_machine(cls, addresses: Iterable[str]) -> bool:
        """Whether all pods at these addresses are processes of this machine."""
        return cls.has_processes_here and all(map(is_loopback, addresses))

    # The workers, from their start to their end

    @abstractmethod
    def master_address(self) -> str:
        """Address at which pods reach the process that starts them."""

    @abstractmethod
    def accounts(self) -> Mapping[str, str]:
        """The accounts under which pods run, by the pods' addresses; a pod without one runs under
        this user's."""

    @abstractmethod
    def start(self, orders: Mapping[str, object]) -> tuple[str, ...]:
        """Start an agent on each worker, and return the workers' ids.

        Where a worker could not be created, `failure` is set to the reason, and the ids are those
        of the others.

        Args:
            orders: the fields of an agent's `Orders` that are the same for all.
        """

    def may_replace(self, worker: str) -> bool:
        """Whether the worker with this id could be replaced if it were lost."""
        return False

    def replace(self, worker: str, orders: Mapping[str, object]) -> tuple[str, ...]:
        """End a worker that is lost and may be replaced, and start a new one in its place.

        Args:
            worker: id of the lost worker.
            orders: as in `start`.

        Returns:
            The id of the new worker alone; nothing where it could not be created, and `failure`
            then is the reason, where that is known.
        """
        # No worker may be replaced, unless a subclass says so by `may_replace`.
        return ()

    def withdraw(self, workers: Sequence[str]) -> None:
        """End the workers with these ids, which have taken the place of lost ones, and no other."""
        return

    @abstractmethod
    def list(self) -> Sequence[Worker]:
        """All workers of the cluster, as they are now."""

    @abstractmethod
    def stop(self, ids: Sequence[str]) -> None:
        """End the workers with these ids, and all workers that are processes of this machine, and
        wait until these processes are gone."""

    def processes(self) -> Sequence[WorkerProcess]:
        """The workers that were started as processes of this machine, whether they run or not."""
        paths = sorted((self.folder / RECORDS).glob("*.json"))
        return [WorkerProcess(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
