"""The rendezvous of a new cluster: pods report in, and are told together to serve. Both sides of it."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.wire import Channel, ChannelError, Listener, Message, allow_open_files, connect, listening_socket

PURPOSE = "register"
CONNECT_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 1.0
HANDSHAKE_SECONDS = 5.0
WATCH_SECONDS = 0.5
FAREWELL_SECONDS = 2.0
STRANGERS = 64
"""Connections without proof at once, beside two for each pod."""
OTHER_FILES = 512
"""Descriptors left to the rest of the process."""
SHOWN_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a pod says of itself."""

    worker: str
    """Its id with the backend that started it."""
    address: str
    """IPv4, under which master and pods reach it."""
    hostname: str
    slots: int
    """Processes that it takes, one for each GPU, at least 1."""
    host_key: str
    """Public key of its sshd, `ssh-ed25519 AAAA...`, without a comment."""
    control_port: int
    free_ports: tuple[int, ...]
    """Those of the ports that were proposed for sshd which it can listen on."""

    def __str__(self) -> str:
        return f"{self.worker} ({self.address})"

    @classmethod
    def from_json(cls, body: Message) -> Registration:
        """The inverse of `asdict`; `UserError` where a field is missing or unknown."""
        _check_fields(body, {field.name for field in fields(cls)}, "a registration")
        return cls(**{**body, "free_ports": tuple(body["free_ports"])})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What every pod is told, beside the port of its sshd."""

    cluster: str
    authorized_key: str
    """Public key of those who may log in."""
    lease: str
    """`kernel`: renewed by the master; `idle`: renewed by use."""
    lease_seconds: float


class MissingPods(Exception):  # noqa: N818 - what is missing, not what went wrong
    """The deadline passed before all pods were ready."""

    def __init__(self, message: str, registered: tuple[Registration, ...]) -> None:
        super().__init__(message)
        self.registered = registered
        """Those that had done all that was asked of them until then."""


# The pod's side.


async def register(
    master: tuple[str, int],
    secret: bytes,
    registration: Registration,
    seconds: float,
    serve: Callable[[Message], Awaitable[None]],
) -> Message:
    """Register with the master and return its answer, once `serve(answer)` is done and the master was told so.

    Args:
        master: address and port. It may come up later than this pod, or drop a connection: both are tried again.
        secret: of the cluster; proves both sides to each other and is never sent.
        seconds: until the master's answer has to be there.
        serve: starts the pod's sshd; a `UserError` of it is told to the master and raised again.

    Raises:
        UserError: no answer in time, refused, or the master gave up while the pod began to serve.
    """
    place = f"{master[0]}:{master[1]}"
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            channel = await connect(*master, secret, PURPOSE, min(CONNECT_SECONDS, deadline - clock()))
            answer = await channel.ask(asdict(registration), deadline - clock())
            break
        except ChannelError as error:
            if clock() + pause >= deadline:
                raise UserError(
                    f"{place}: no answer of the master in {seconds:g} s ({error}); is it up and reachable, "
                    "and has this pod its cluster's secret?"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    try:
        await _begin_to_serve(channel, answer, place, serve)
    except ChannelError as error:
        raise UserError(f"{place}: the master gave up: {error}; start the cluster again") from None
    finally:
        await channel.close()
    return answer


async def _begin_to_serve(
    channel: Channel, answer: Message, place: str, serve: Callable[[Message], Awaitable[None]]
) -> None:
    if "refused" in answer:
        raise UserError(f"{place}: refused by the master: {plain_line(answer['refused'])}")
    _check_fields(answer, {"ssh_port", *(field.name for field in fields(Answer))}, "the master's answer")
    try:
        await serve(answer)
    except UserError as error:
        await channel.send({"failed": plain_line(error)})
        raise
    await channel.send({"ready": True})


# The master's side.


@dataclass(eq=False)
class _Entry:
    """A pod that has registered; one that comes again gets a new entry."""

    pod: Registration
    channel: Channel
    is_ready: bool = False


class Rendezvous:
    """Listens from `__enter__` to `__exit__`; `gather` waits for the pods.

    It has a thread with a loop of its own, since in a notebook the main thread runs one already. Entries belong to
    that loop; the caller's thread only reads them.

    Args:
        secret: of the cluster; a connection that does not prove it is dropped.
        count: pods to wait for.
        answer: what each of them is told once all have registered.
        address: of this machine, to listen on.
        port: None for 6000, or a free one where that is taken.
        ssh_ports: proposed to the pods for their sshd; the first that is free on all of them is taken.
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
    ) -> None:
        self._count = count
        self._answer = answer
        self._place = address, port
        self._ssh_ports = ssh_ports
        self._ssh_port: int | None = None
        """Chosen when all pods are told, which is when the last one has registered."""
        self._entries: dict[str, _Entry] = {}
        """By worker."""
        self._settled = threading.Event()
        """Set once, when all pods are ready or one error has ended it."""
        self._failure: UserError | None = None
        self._unproven = STRANGERS + 2 * count
        self._listener = Listener(secret, PURPOSE, self._attend, unproven=self._unproven, seconds=HANDSHAKE_SECONDS)

    def __enter__(self) -> Rendezvous:
        # Those that are being accepted come on top of those that are being proven.
        allow_open_files(2 * self._unproven + self._count + OTHER_FILES)
        sock = listening_socket(*self._place)
        self.port: int = sock.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zeropods-rendezvous", daemon=True)
        self._thread.start()
        self._run(self._listener.open(sock))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def ssh_port(self) -> int:
        """The port of every pod's sshd; known when `gather` has returned."""
        if self._ssh_port is None:
            raise RuntimeError("ssh_port is chosen when all pods have registered; call gather first")
        return self._ssh_port

    def gather(self, seconds: float, watch: Callable[[frozenset[str]], object]) -> tuple[Registration, ...]:
        """Wait until all pods have registered and are ready; returns them by numeric address.

        Args:
            seconds: until then; counted from now.
            watch: called some twice a second and at the end with the ids of the workers that have registered;
                what it raises ends the wait.

        Raises:
            MissingPods: not all of them in time; it counts and holds those that are there.
            UserError: a pod failed, pods contradict each other, or no port for sshd is free on all.
        """
        deadline = time.monotonic() + seconds
        while not self._settled.wait(max(0.0, min(WATCH_SECONDS, deadline - time.monotonic()))):
            watch(frozenset(self._entries.copy()))
            if time.monotonic() >= deadline and not self._settled.is_set():
                raise self._missing(seconds)
        if self._failure is not None:
            raise self._failure
        watch(frozenset(self._entries.copy()))
        return tuple(entry.pod for entry in self._by_address())

    def _by_address(self) -> list[_Entry]:
        return sorted(self._entries.copy().values(), key=lambda entry: ipaddress.IPv4Address(entry.pod.address))

    def _missing(self, seconds: float) -> MissingPods:
        entries = self._by_address()
        is_full = len(entries) == self._count
        done = tuple(entry.pod for entry in entries if entry.is_ready or not is_full)
        what = "are ready" if is_full else "have registered"
        return MissingPods(f"{len(done)} of {self._count} pods {what} in {seconds:g} s", done)

    # From here on everything runs on the loop, so that nothing needs a lock.

    async def _attend(self, channel: Channel, body: Message) -> None:
        """Admit a pod, tell all if it was the last one, and hear what it says."""
        try:
            try:
                pod = Registration.from_json(body)
            except UserError as error:
                raise UserError(f"pod at {channel.peer}: {error}") from None
            before = self._entries.get(pod.worker)
            if before is None and len(self._entries) == self._count:
                # A pod too many harms nobody.
                await self._refuse(channel, f"{pod}: all {self._count} pods of the cluster have registered")
                return
            self._check_admission(pod, before)
        except UserError as error:
            self._settle(error)
            await self._refuse(channel, str(error))
            return
        self._entries[pod.worker] = entry = _Entry(pod, channel)
        if before is not None:
            await before.channel.close()
        try:
            if len(self._entries) == self._count and self._ssh_port is None and not self._settled.is_set():
                await self._tell_all()
            # gather's deadline bounds this wait, and the listener's end ends it.
            self._heard(entry, await channel.receive(math.inf))
        except ChannelError as error:
            self._lost(entry, error)
        finally:
            await channel.close()

    async def _refuse(self, channel: Channel, why: str) -> None:
        await channel.send({"refused": why})
        await channel.close()

    def _check_admission(self, new: Registration, before: _Entry | None) -> None:
        """Refuse a pod that contradicts another, or another one of the same name, `before`."""
        if before is not None and before.pod.host_key != new.host_key:
            raise UserError(
                f"{new.worker}: two pods call themselves so, at {before.pod.address} and {new.address}, "
                "with different host keys; end one of them"
            )
        if before is not None and self._ssh_port is not None:
            raise UserError(f"{new}: registered again after it was told to serve; did its agent start twice?")
        for other in self._entries.values():
            if other.pod.address == new.address and other is not before:
                workers = f"{other.pod.worker} and {new.worker}"
                raise UserError(f"{new.address}: two pods have this address, {workers}; each needs one of its own")

    async def _tell_all(self) -> None:
        free = [set(entry.pod.free_ports) for entry in self._entries.values()]
        self._ssh_port = next((port for port in self._ssh_ports if all(port in ports for ports in free)), None)
        if self._ssh_port is None:
            tried = ", ".join(map(str, self._ssh_ports))
            ports = f"ssh: none of the ports {tried} is free on every pod"
            self._settle(UserError(f"{ports}; end what listens there and try again"))
            return
        await self._tell({"ssh_port": self._ssh_port, **asdict(self._answer)})

    def _heard(self, entry: _Entry, said: Message) -> None:
        if "failed" in said:
            self._settle(UserError(f"{entry.pod}: {plain_line(said['failed'])}"))
        elif said != {"ready": True} or self._ssh_port is None:
            self._settle(UserError(f"{entry.pod}: said {plain_line(said)}; is its zeropods another version?"))
        else:
            entry.is_ready = True
            if all(other.is_ready for other in self._entries.values()):
                self._settle(None)

    def _lost(self, entry: _Entry, error: ChannelError) -> None:
        if self._ssh_port is not None:
            self._settle(UserError(f"{entry.pod}: lost before its sshd was up ({error}); see the pod's log"))
        elif self._entries.get(entry.pod.worker) is entry:
            del self._entries[entry.pod.worker]

    def _settle(self, failure: UserError | None) -> None:
        """The first word counts: a failure after success, or after another one, changes nothing."""
        if not self._settled.is_set():
            self._failure = failure
            self._settled.set()

    async def _close(self) -> None:
        """Tell the pods that still wait, and end all connections and the listener."""
        self._settled.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._tell({"refused": "the cluster did not come up"})
        await self._listener.close()

    async def _tell(self, body: Message) -> None:
        """Tell it to all pods that are not ready."""

        async def tell(entry: _Entry) -> None:
            # A pod that is gone is found by the task that receives from it.
            with suppress(ChannelError):
                await entry.channel.send(body)

        await asyncio.gather(*(tell(entry) for entry in self._entries.values() if not entry.is_ready))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def plain_line(text: object) -> str:
    """What another machine said, as one line of printable characters of bounded length."""
    line = " ".join(str(text).split())[:SHOWN_CHARACTERS]
    return "".join(character if character.isprintable() else "?" for character in line)


def _check_fields(body: Message, expected: set[str], what: str) -> None:
    wrong = sorted(expected.symmetric_difference(body))
    if wrong:
        shown = plain_line(", ".join(wrong))
        raise UserError(f"{what}: {shown}: missing or unknown; is one version of zeropods on master and pods?")
