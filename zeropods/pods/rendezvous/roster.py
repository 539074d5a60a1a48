"""Who of a cluster has registered, and what contradicts it. No sockets here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeropods.errors import UserError
from zeropods.pods.rendezvous.registration import Registration


class Stage(Enum):
    """How far a pod has come."""

    REGISTERED = 1
    TOLD = 2
    READY = 3


@dataclass(eq=False)
class Entry:
    """A pod on the roster; a pod that comes again gets a new one."""

    registration: Registration
    stage: Stage = Stage.REGISTERED


class SurplusError(Exception):
    """A pod of this cluster that came after all of its places were taken."""


class Roster:
    """The pods of one cluster that is coming up."""

    def __init__(self, count: int, ssh_ports: tuple[int, ...]) -> None:
        self._count = count
        self._ssh_ports = ssh_ports
        self._entries: dict[str, Entry] = {}
        self._workers: dict[str, str] = {}
        """Worker by address."""
        self._ready = 0

    def admit(self, registration: Registration) -> tuple[Entry, Entry | None]:
        """Enter a pod; returns its entry and the one it replaces, where it came again.

        Raises:
            UserError: it contradicts a pod that is here.
            SurplusError: all places are taken.
        """
        before = self._entries.get(registration.worker)
        if before is not None:
            _refuse_another(before, registration)
        elif len(self._entries) == self._count:
            raise SurplusError(f"{registration}: all {self._count} pods of the cluster have registered")
        self._refuse_taken_address(registration)
        if before is not None:
            self.take_out(before)
        entry = Entry(registration)
        self._entries[registration.worker] = entry
        self._workers[registration.address] = registration.worker
        return entry, before

    def take_out(self, entry: Entry) -> None:
        """Forget a pod; nothing happens where another entry has replaced this one."""
        if self._entries.get(entry.registration.worker) is entry:
            del self._entries[entry.registration.worker]
            del self._workers[entry.registration.address]

    def entries(self) -> list[Entry]:
        """All that are here, by numeric address."""
        return sorted(self._entries.values(), key=lambda entry: entry.registration.number)

    def is_full(self) -> bool:
        """Whether all pods have registered."""
        return len(self._entries) == self._count

    def make_ready(self, entry: Entry) -> bool:
        """Note that a pod which was told is ready; whether all are now."""
        entry.stage = Stage.READY
        self._ready += 1
        return self._ready == self._count

    def choose_ssh_port(self) -> int:
        """The first proposed port that is free on every pod; `UserError` where there is none."""
        free = [set(entry.registration.free_ports) for entry in self._entries.values()]
        for port in self._ssh_ports:
            if all(port in ports for ports in free):
                return port
        tried = ", ".join(map(str, self._ssh_ports))
        raise UserError(f"ssh: none of the ports {tried} is free on every pod; end what listens there and try again")

    def _refuse_taken_address(self, new: Registration) -> None:
        holder = self._workers.get(new.address)
        if holder is not None and holder != new.worker:
            raise UserError(
                f"{new.address}: two pods have this address, {holder} and {new.worker}; each needs one of its own"
            )


def _refuse_another(before: Entry, new: Registration) -> None:
    old = before.registration
    if old.host_key != new.host_key:
        raise UserError(
            f"{new.worker}: two pods call themselves so, at {old.address} and {new.address}, with different host keys; "
            "end one of them"
        )
    if before.stage is not Stage.REGISTERED:
        raise UserError(f"{new}: registered again after it was told to serve; did its agent start twice?")
