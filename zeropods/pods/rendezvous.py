"""The master's side of the rendezvous: where the pods of a new cluster report in."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, TypeVar

from zeropods.errors import UserError
from zeropods.pods.registration import PURPOSE, Answer, Registration, plain_line
from zeropods.pods.wire import (
    DEFAULT_PORT,
    Channel,
    ChannelError,
    Unproven,
    accept,
    allow_open_files,
    listening_socket,
    serve,
)

# Who of a cluster has registered, and what contradicts it. No sockets here.


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


# The master's side of registrations, on an event loop: prove, admit, tell all, hear that they are ready.

FAREWELL_SECONDS = 2.0
CUT_SECONDS = 0.05


class Reception:
    """Serves all who connect; `settled` is called once, when all pods are ready or one error has ended it.

    Everything here runs on one event loop, so that nothing needs a lock; the loop is the reception's own.
    """

    def __init__(
        self,
        secret: bytes,
        answer: Answer,
        roster: Roster,
        *,
        strangers: int,
        handshake_seconds: float,
        settled: Callable[[], object],
    ) -> None:
        self.roster = roster
        self.rejected = 0
        """Connections that proved nothing."""
        self.failure: UserError | None = None
        self.ssh_port: int | None = None
        self._secret = secret
        self._answer = answer
        self._handshake_seconds = handshake_seconds
        self._settled = settled
        self._server: asyncio.Server | None = None
        self._is_settled = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._strangers = Unproven(strangers)
        self._channels: dict[Entry, Channel] = {}

    async def open(self, listener: socket.socket) -> None:
        """Serve the connections of a listening socket, which is the reception's from now on."""
        self._server = await serve(listener, self._attend)

    async def close(self) -> None:
        """Stop accepting, tell the pods that still wait, end all connections and the listener."""
        if self._server is None:
            return
        # A server that closes at once forgets, open, the connections that it has just accepted (Python 3.11.7).
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        self._is_settled = True
        waiting = [entry for entry in self.roster.entries() if entry.stage is not Stage.READY]
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._tell(waiting, {"refused": "the cluster did not come up"})
        # Cut, not cancelled: asyncio logs a traceback for a connection whose task was cancelled (Python 3.11.7).
        # Again and again, since connections that were just accepted get their task only now.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.wait(others, timeout=CUT_SECONDS)
        self._server.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._serve(*await self._prove(reader, writer))
        except ChannelError:
            self.rejected += 1
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Channel, dict[str, Any]]:
        """A connection and its first message, which proves that it knows the secret."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._handshake_seconds
        with self._strangers.place(writer):
            channel = await accept(reader, writer, self._secret, PURPOSE, deadline - clock())
            return channel, await channel.receive(deadline - clock())

    async def _serve(self, channel: Channel, body: dict[str, Any]) -> None:
        """Admit a pod, tell all if it was the last one, and hear what it says."""
        try:
            entry = await self._admit(channel, body)
        except (UserError, SurplusError) as error:
            if isinstance(error, UserError):
                self._settle(error)
            await self._tell_one(channel, {"refused": str(error)})
            await channel.close()
            return
        if self.roster.is_full() and self.ssh_port is None and not self._is_settled:
            await self._tell_all()
        try:
            # gather's deadline bounds this wait, and close() ends it.
            self._heard(entry, await channel.receive(math.inf))
        except ChannelError as error:
            self._lost(entry, error)
        finally:
            del self._channels[entry]
            await channel.close()

    async def _admit(self, channel: Channel, body: dict[str, Any]) -> Entry:
        try:
            registration = Registration.from_json(body)
        except UserError as error:
            raise UserError(f"pod at {channel.peer}: {error}") from None
        entry, before = self.roster.admit(registration)
        self._channels[entry] = channel
        if before in self._channels:
            await self._channels[before].close()
        return entry

    async def _tell_all(self) -> None:
        try:
            self.ssh_port = self.roster.choose_ssh_port()
        except UserError as error:
            self._settle(error)
            return
        entries = self.roster.entries()
        for entry in entries:
            entry.stage = Stage.TOLD
        await self._tell(entries, self._answer.to_json(self.ssh_port))

    async def _tell(self, entries: list[Entry], body: dict[str, Any]) -> None:
        channels = [self._channels[entry] for entry in entries if entry in self._channels]
        await asyncio.gather(*(self._tell_one(channel, body) for channel in channels))

    async def _tell_one(self, channel: Channel, body: dict[str, Any]) -> None:
        """A pod that is gone is found by the task that receives from it."""
        with suppress(ChannelError):
            await channel.send(body)

    def _lost(self, entry: Entry, error: ChannelError) -> None:
        if entry.stage is Stage.REGISTERED:
            self.roster.take_out(entry)
        else:
            self._settle(UserError(f"{entry.registration}: lost before its sshd was up ({error}); see the pod's log"))

    def _heard(self, entry: Entry, said: dict[str, Any]) -> None:
        if "failed" in said:
            self._settle(UserError(f"{entry.registration}: {plain_line(said['failed'])}"))
        elif said != {"ready": True} or entry.stage is not Stage.TOLD:
            self._settle(UserError(f"{entry.registration}: said {plain_line(said)}; is its zeropods another version?"))
        elif self.roster.make_ready(entry):
            self._settle(None)

    def _settle(self, failure: UserError | None) -> None:
        """The first word counts: a failure after success, or after another one, changes nothing."""
        if not self._is_settled:
            self._is_settled = True
            self.failure = failure
            self._settled()


# Where the pods of a new cluster report in: the master's listener, in a thread with an event loop of its own.
#
# A notebook's main thread runs a loop already, so the listener cannot use that one.

__all__ = ["DEFAULT_PORT", "Answer", "MissingPods", "Registration", "Rendezvous"]

HANDSHAKE_SECONDS = 5.0
WATCH_SECONDS = 0.5
STRANGERS = 64
"""Connections without proof at once, beside two for each pod."""
OTHER_FILES = 512
"""Descriptors left to the rest of the process."""

T = TypeVar("T")


class MissingPods(Exception):  # noqa: N818 - what is missing, not what went wrong
    """The deadline passed before all pods were ready."""

    def __init__(self, message: str, registered: tuple[Registration, ...]) -> None:
        super().__init__(message)
        self.registered = registered
        """Those that had done all that was asked of them until then."""


class Rendezvous:
    """Listens from `__enter__` to `__exit__`; `gather` waits for the pods.

    Args:
        secret: of the cluster; a connection that does not prove it is dropped and counted in `rejected`.
        count: pods to wait for.
        answer: what each of them is told once all have registered.
        address: of this machine, to listen on.
        port: None for 6000, or a free one where that is taken.
        ssh_ports: proposed to the pods for their sshd; the first that is free on all of them is taken.
        handshake_seconds: from a connection's begin to its proven registration.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        count: int,
        answer: Answer,
        address: str,
        port: int | None,
        ssh_ports: tuple[int, ...],
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        if count < 1:
            raise UserError(f"count: {count}; a cluster has at least one pod")
        self._count = count
        self._address = address
        self._wanted_port = port
        self._settled = threading.Event()
        self._strangers = STRANGERS + 2 * count
        self._reception = Reception(
            secret,
            answer,
            Roster(count, ssh_ports),
            strangers=self._strangers,
            handshake_seconds=handshake_seconds,
            settled=self._settled.set,
        )

    def __enter__(self) -> Rendezvous:
        # Those that are being accepted come on top of those that are being proven.
        allow_open_files(2 * self._strangers + self._count + OTHER_FILES)
        listener = listening_socket(self._address, self._wanted_port)
        self.port: int = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zeropods-rendezvous", daemon=True)
        self._thread.start()
        try:
            self._run(self._reception.open(listener))
        except BaseException:
            listener.close()
            self._end_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._reception.close())
        finally:
            self._end_loop()

    @property
    def rejected(self) -> int:
        """Connections that were dropped because they proved nothing."""
        return self._reception.rejected

    @property
    def ssh_port(self) -> int:
        """The port of every pod's sshd; known when `gather` has returned."""
        port = self._reception.ssh_port
        if port is None:
            raise RuntimeError("ssh_port is chosen when all pods have registered; call gather first")
        return port

    def gather(self, seconds: float, watch: Callable[[frozenset[str]], object]) -> tuple[Registration, ...]:
        """Wait until all pods have registered and are ready; returns them by numeric address.

        Args:
            seconds: until then; counted from now.
            watch: called some twice a second and at the end with the ids of the workers that have registered;
                what it raises ends the wait.

        Raises:
            MissingPods: not all of them in time; the message counts and names them.
            UserError: a pod failed, pods contradict each other, or no port for sshd is free on all.
        """
        deadline = time.monotonic() + seconds
        while not self._settled.wait(max(0.0, min(WATCH_SECONDS, deadline - time.monotonic()))):
            entries = self._run(self._entries())
            watch(frozenset(entry.registration.worker for entry in entries))
            if time.monotonic() >= deadline and not self._settled.is_set():
                raise _missing(entries, self._count, seconds)
        if self._reception.failure is not None:
            raise self._reception.failure
        pods = tuple(entry.registration for entry in self._run(self._entries()))
        watch(frozenset(pod.worker for pod in pods))
        return pods

    async def _entries(self) -> list[Entry]:
        return self._reception.roster.entries()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the listener's loop, to which all of its state belongs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _missing(entries: list[Entry], count: int, seconds: float) -> MissingPods:
    """Names the pods that are late; those that never came have no name here."""
    here = tuple(entry.registration for entry in entries)
    if len(here) < count:
        names = ", ".join(map(str, here[:8])) + (", ..." if len(here) > 8 else "")
        shown = f": {names}" if here else ""
        return MissingPods(f"{len(here)} of {count} pods have registered in {seconds:g} s{shown}", here)
    late = [str(entry.registration) for entry in entries if entry.stage is not Stage.READY]
    names = ", ".join(late[:8]) + (", ..." if len(late) > 8 else "")
    ready = tuple(entry.registration for entry in entries if entry.stage is Stage.READY)
    return MissingPods(f"{len(late)} of {count} pods have no sshd in {seconds:g} s: {names}", ready)
