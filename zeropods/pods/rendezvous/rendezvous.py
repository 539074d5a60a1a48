"""Where the pods of a new cluster report in: the master's listener, in a thread with an event loop of its own.

A notebook's main thread runs a loop already, so the listener cannot use that one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from zeropods.errors import UserError
from zeropods.pods.rendezvous.listener import DEFAULT_PORT, allow_open_files, listening_socket
from zeropods.pods.rendezvous.reception import Reception
from zeropods.pods.rendezvous.registration import Answer, Registration
from zeropods.pods.rendezvous.roster import Entry, Roster, Stage

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
