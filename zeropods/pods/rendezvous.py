"""The rendezvous of a new cluster: pods register, and are told together to serve. Both sides of it."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.wire import ChannelError, Message, Server, allow_open_files, connected, listening_socket

PURPOSE = "register"
CONNECT_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 1.0
READY_SECONDS = 10.0
WATCH_SECONDS = 0.5
FAREWELL_SECONDS = 2.0
STRANGERS = 64
"""Connections without proof at once, beside two for each pod."""
OTHER_FILES = 512
"""Descriptors left to the rest of the process."""
SHOWN_CHARACTERS = 400
SAME_VERSION = "is one version of zeropods on master and pods?"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod, as it describes itself when it registers."""

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
    name: str = ""
    """`pod1` and so on in the hostfile's order; given by the master when all are ready."""

    def __str__(self) -> str:
        return f"{self.worker} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What every pod is told once all have registered."""

    authorized_key: str
    """Public key of those who may log in."""
    lease: str
    """`kernel`: renewed by the master; `idle`: renewed by use."""
    lease_seconds: float
    ssh_port: int = 0
    """The port of every pod's sshd."""


# The pod's side


async def register(
    master: tuple[str, int],
    secret: bytes,
    pod: Pod,
    free_ports: tuple[int, ...],
    seconds: float,
    serve: Callable[[Answer], Awaitable[None]],
) -> Answer:
    """Register with the master and return its answer, once `serve(answer)` is done and the master was told so.

    Args:
        master: address and port. It may come up later than this pod, or drop a connection: both are tried again.
        secret: of the cluster; proves both sides to each other and is never sent.
        free_ports: those of the ports that were proposed for sshd which the pod can listen on.
        seconds: until the master's answer has to be there.
        serve: starts the pod's sshd; a `UserError` of it is told to the master and raised again.

    Raises:
        UserError: no answer in time, refused, or the master gave up while the pod began to serve.
    """
    place = f"{master[0]}:{master[1]}"
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    pause = FIRST_PAUSE_SECONDS
    request = {"do": "register", "pod": asdict(pod), "free_ports": free_ports}
    while True:
        answer = None
        try:
            async with connected(*master, secret, PURPOSE, min(CONNECT_SECONDS, deadline - clock())) as channel:
                answer = _read_answer(place, await channel.ask(request, deadline - clock()))
                try:
                    await serve(answer)
                except UserError as error:
                    await channel.send({"do": "failed", "worker": pod.worker, "why": plain_line(error)})
                    raise
                await channel.ask({"do": "ready", "worker": pod.worker}, READY_SECONDS)
                return answer
        except ChannelError as error:
            if answer is not None:
                raise UserError(f"{place}: the master gave up: {error}; start the cluster again") from None
            if clock() + pause >= deadline:
                raise UserError(
                    f"{place}: no answer of the master in {seconds:g} s ({error}); is it up and reachable, "
                    "and has this pod its cluster's secret?"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _read_answer(place: str, told: Message) -> Answer:
    if "refused" in told:
        raise UserError(f"{place}: refused by the master: {plain_line(told['refused'])}")
    try:
        return Answer(**told)
    except TypeError as error:
        raise UserError(f"{place}: the master's answer: {plain_line(error)}; {SAME_VERSION}") from None


# The master's side


class Rendezvous:
    """Listens from `__enter__` to `__exit__`; `gather` waits for the pods.

    It has a thread with a loop of its own, since in a notebook the main thread runs one already. What is written
    below is written in that loop; the caller's thread only reads it.

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
        self.answer = answer
        """With the port of every pod's sshd when `gather` has returned."""
        self._place = address, port
        self._ssh_ports = ssh_ports
        self._pods: dict[str, Pod] = {}
        """Pods that have registered, by worker."""
        self._free: dict[str, set[int]] = {}
        self._ready: set[str] = set()
        self._failure: str | None = None
        """Why the cluster does not come up."""
        self._told = asyncio.Event()
        """Set when the pods that wait can be answered."""
        self._settled = threading.Event()
        """Set once, when all pods are ready or the cluster does not come up."""
        self._unproven = STRANGERS + 2 * count
        self._server = Server(secret, PURPOSE, self._attend, unproven=self._unproven)

    def __enter__(self) -> Rendezvous:
        # Those that are being accepted come on top of those that are being proven.
        allow_open_files(2 * self._unproven + self._count + OTHER_FILES)
        sock = listening_socket(*self._place)
        self.port: int = sock.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zeropods-rendezvous", daemon=True)
        self._thread.start()
        self._run(self._server.open(sock))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def there(self) -> frozenset[str]:
        """The workers that have done all that was asked of them until now."""
        return frozenset(self._ready.copy() if len(self._pods) == self._count else self._pods.copy())

    def gather(self, seconds: float, watch: Callable[[frozenset[str]], object]) -> tuple[Pod, ...]:
        """Wait until all pods have registered and are ready; returns them by numeric address.

        Args:
            seconds: until then; counted from now.
            watch: called some twice a second and at the end with the ids of the workers that have registered;
                what it raises ends the wait.

        Raises:
            TimeoutError: not all of them are ready in time; `there` tells which.
            UserError: a pod failed, pods contradict each other, or no port for sshd is free on all.
        """
        deadline = time.monotonic() + seconds
        while not self._settled.wait(max(0.0, min(WATCH_SECONDS, deadline - time.monotonic()))):
            watch(frozenset(self._pods.copy()))
            if time.monotonic() >= deadline and not self._settled.is_set():
                raise TimeoutError(f"{len(self.there)} of {self._count} pods in {seconds:g} s")
        if self._failure is not None:
            raise UserError(self._failure)
        watch(frozenset(self._pods.copy()))
        return tuple(sorted(self._pods.values(), key=lambda pod: ipaddress.IPv4Address(pod.address)))

    # From here on everything runs in the loop, so that nothing needs a lock.

    async def _attend(self, request: Message, peer: str) -> Message:
        """Answer a pod: once all are there, or at once."""
        match request:
            case {"do": "register"}:
                return await self._register(request, peer)
            case {"do": "ready", "worker": worker} if worker in self._pods:
                self._ready.add(worker)
                if len(self._ready) == self._count:
                    self._settle(None)
            case {"do": "failed", "worker": worker, "why": why} if worker in self._pods:
                self._settle(f"{self._pods[worker]}: {plain_line(why)}")
            case _:
                self._settle(f"pod at {peer}: said {plain_line(request)}; {SAME_VERSION}")
        return {}

    async def _register(self, request: Message, peer: str) -> Message:
        """Admit a pod, tell all if it was the last one; what it is told."""
        try:
            pod, free = Pod(**request["pod"]), set(request["free_ports"])
        except (KeyError, TypeError) as error:
            return self._refused(f"pod at {peer}: a registration: {plain_line(error)}; {SAME_VERSION}")
        if pod.worker not in self._pods and len(self._pods) == self._count:
            # A pod too many harms nobody.
            return {"refused": f"{pod}: all {self._count} pods of the cluster have registered"}
        contradiction = self._contradiction(pod)
        if contradiction:
            return self._refused(contradiction)
        self._pods[pod.worker], self._free[pod.worker] = pod, free
        if len(self._pods) == self._count and not self._told.is_set():
            self._choose_port()
        await self._told.wait()
        return asdict(self.answer) if self._failure is None else {"refused": self._failure}

    def _refused(self, why: str) -> Message:
        self._settle(why)
        return {"refused": why}

    def _contradiction(self, new: Pod) -> str | None:
        """In what a pod contradicts another one, or another one of the same name; a pod may register twice."""
        same = self._pods.get(new.worker)
        if same is not None and same.host_key != new.host_key:
            where = f"at {same.address} and {new.address}, with different host keys"
            return f"{new.worker}: two pods have this name, {where}; end one of them"
        for other in self._pods.values():
            if other.address == new.address and other is not same:
                workers = f"{other.worker} and {new.worker}"
                return f"{new.address}: two pods have this address, {workers}; each needs one of its own"
        return None

    def _choose_port(self) -> None:
        """All pods are there: let them be told on which port to serve."""
        common = set.intersection(*self._free.values())
        port = next((port for port in self._ssh_ports if port in common), None)
        if port is None:
            tried = ", ".join(map(str, self._ssh_ports))
            self._settle(f"ssh: none of the ports {tried} is free on every pod; end what listens there and try again")
        else:
            self.answer = replace(self.answer, ssh_port=port)
            self._told.set()

    def _settle(self, failure: str | None) -> None:
        """The first word counts: a failure after success, or after another one, changes nothing."""
        if not self._settled.is_set():
            self._failure = failure
            self._settled.set()
            self._told.set()

    async def _close(self) -> None:
        """Tell the pods that still wait, and end all connections and the server."""
        self._settle("the cluster did not come up")
        await self._server.close(FAREWELL_SECONDS)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def plain_line(text: object) -> str:
    """What another machine said, as one line of printable characters of bounded length."""
    line = " ".join(str(text).split())[:SHOWN_CHARACTERS]
    return "".join(character if character.isprintable() else "?" for character in line)
