"""Both sides of a new cluster's rendezvous: pods that are ready register, and are told when all
pods have."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import threading
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass

from zeropods.errors import UserError
from zeropods.pods.wire import Message, Server, WireError, ask, listening_socket

REGISTRATION = "register"
NO_FAILURE = ""
"""The outcome once all pods are there; another text says why they never will be."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
"""Seconds from a pod's failed try to register to its next one, which double with each try."""
ASK_SECONDS = 60.0
"""Seconds to wait for the master's answer: a connection that dies while all wait would not be
noticed otherwise."""
LASTING_SECONDS = 5.0
"""Seconds that a connection without an answer has lasted if there is a master, which waits for
other pods or is busy; that to a port where nobody listens fails at once."""
MASTER_GONE_SECONDS = 30.0
"""Seconds without a master, which fails every connection at once, until a pod gives up: a pod may
start long after the process that has asked for it is gone."""
FAREWELL_SECONDS = 2.0
"""Seconds that pods have to take the master's last answer when it leaves."""
OTHER_FILES = 1_024
"""File descriptors left for strangers and the rest of the process."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod, as it describes itself when it registers."""

    worker: str
    """Id of its worker with the backend that started it."""
    address: str
    """IPv4 address at which the master and the other pods reach it."""
    hostname: str
    slots: int
    """Number of processes that it takes, one for each GPU, at least 1."""
    ssh_port: int | None
    """Port of its sshd; None where it has none."""
    host_key: str | None
    """Public key of its sshd, `ssh-ed25519 AAAA...`, without a comment; None where it has none."""
    control_port: int
    name: str = ""
    """`pod1` and so on, in the hostfile's order; assigned by the master when all pods are ready."""


async def register(
    master: tuple[str, int],
    secret: bytes,
    pod: Pod,
    seconds: float,
    gone_seconds: float = MASTER_GONE_SECONDS,
) -> None:
    """Register a pod that is ready to serve, and return when all pods of its cluster have
    registered.

    Args:
        master: address and port. The master may come up later than this pod or drop a connection:
            the pod tries again.
        secret: the cluster's secret; it proves both sides to each other and is never sent.
        seconds: time within which the master's answer has to arrive.
        gone_seconds: time for which every connection may fail at once; then the master is gone.

    Raises:
        UserError: the master does not answer in time, is gone, or refuses the pod.
    """
    place = f"{master[0]}:{master[1]}"
    clock = asyncio.get_running_loop().time
    began = clock()
    deadline = began + seconds
    master_alive_at = began
    pause = FIRST_PAUSE_SECONDS
    while True:
        asked_at = clock()
        ask_seconds = min(ASK_SECONDS, deadline - asked_at)
        try:
            # A master that starts many pods may greet late: the greeting may take all of the time.
            answer = await ask(
                *master,
                secret,
                REGISTRATION,
                asdict(pod),
                ask_seconds,
                greeting_seconds=ask_seconds,
            )
            break
        except WireError as error:
            now = clock()
            # A connection that lasted was to a master that waits for other pods.
            if now - asked_at > LASTING_SECONDS:
                master_alive_at = now
            give_up_at = min(deadline, master_alive_at + gone_seconds)
            if now + pause >= give_up_at:
                waited = seconds if give_up_at == deadline else now - began
                reason = f"no answer from the master in {round(waited, 1):g} s ({error})"
                remedy = "is it up and reachable, and does this pod have its cluster's secret?"
                raise UserError(f"{place}: {reason}; {remedy}") from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    if "refused" in answer:
        raise UserError(f"{place}: refused by the master: {answer['refused']}")


class Rendezvous:
    """The master's side, which listens from `__enter__` to `__exit__`; `gather` waits for the pods.

    It has a thread with an event loop of its own, since in a notebook the main thread runs one
    already. Pods and failure are written in that loop; the caller's thread only reads them, and
    takes out a pod that has ended.

    Args:
        secret: the cluster's secret; a connection that does not prove it is dropped.
        count: number of pods to wait for.
        address: address of this machine to listen on.
        port: port to listen on; None for 6000, or a free one where that is taken.
    """

    def __init__(self, *, secret: bytes, count: int, address: str, port: int | None) -> None:
        self._count = count
        self._address = address
        self._port = port
        self._pods: dict[str, Pod] = {}
        """Pods that have registered, by the id of their worker."""
        self._outcome = Future[str]()
        """Why the cluster does not come up, or `NO_FAILURE` where all pods are there; it has no
        result as long as pods are waited for."""
        self._caller_left = threading.Event()
        """Set once the caller leaves the `with` block."""
        self._server = Server(secret, REGISTRATION, self._attend, crowd=2 * count)

    def __enter__(self) -> Rendezvous:
        # A pod that reconnects has two connections, and as many may come that are unproven.
        allow_open_files(4 * self._count + OTHER_FILES)
        sock = listening_socket(self._address, self._port)
        self.port: int = sock.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(sock)), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._caller_left.set()
        self._thread.join()

    @property
    def registered(self) -> frozenset[str]:
        """Ids of the workers that have registered so far."""
        return frozenset(self._pods.copy())

    def forget(self, worker: str) -> None:
        """Forget the pod of this worker, which has ended, so that another one is waited for in its
        place."""
        # Taking out one entry is a single step: the loop sees the pod or does not.
        self._pods.pop(worker, None)

    def gather(self, seconds: float) -> tuple[Pod, ...] | None:
        """The pods, sorted by numeric address, once all have registered; None where that takes
        longer than `seconds`.

        `UserError` where a pod cannot serve or has another version of zeropods.
        """
        if not wait([self._outcome], max(0.0, seconds)).done:
            return None
        failure = self._outcome.result()
        if failure:
            raise UserError(failure)
        pods = sorted(self._pods.values(), key=lambda pod: ipaddress.IPv4Address(pod.address))
        return tuple(pods)

    # From here on everything runs in the event loop, so that nothing needs a lock.

    async def _attend(self, request: Message, peer: str) -> Message:
        """Admit a pod, or note why a worker cannot be one, and answer once the outcome is settled:
        with nothing, or with `refused` and the reason.

        A pod that lost its connection registers again, and takes its own place.
        """
        if "failed" in request:
            self._settle(f"pod at {peer}: {request['failed']}")
            return {}
        try:
            pod = Pod(**request)
        except TypeError as error:
            remedy = "do master and pods run the same zeropods version?"
            self._settle(f"pod at {peer}: bad registration: {error}; {remedy}")
        else:
            self._pods[pod.worker] = pod
            if len(self._pods) >= self._count:
                self._settle(NO_FAILURE)
        # Shielded: a connection that is cut must not cancel the future for which all of them wait.
        failure = await asyncio.shield(asyncio.wrap_future(self._outcome))
        return {"refused": failure} if failure else {}

    def _settle(self, failure: str) -> None:
        """Settle the outcome once: a failure after success, or after another failure, changes
        nothing."""
        if not self._outcome.done():
            self._outcome.set_result(failure)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve until the caller leaves; then tell the pods that still wait, and end all
        connections and the server."""
        await self._server.open(sock)
        await asyncio.to_thread(self._caller_left.wait)
        self._settle("it waits for no more pods")
        await self._server.close(FAREWELL_SECONDS)


def allow_open_files(needed: int) -> None:
    """Raise this process's soft limit on open files to `needed`, or as far as the hard limit
    allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
