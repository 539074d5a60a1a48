"""A port under attack: how an honest peer is heard there meanwhile, and what must not happen."""

from __future__ import annotations

import asyncio
import base64
import os
import selectors
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.attacks import Door
from tests.besieged import SSH_PORTS, Besieged, besieged
from tests.strangers import HERE, assert_dropped, greeted, visit
from zeropods.pods.control import purpose
from zeropods.pods.registration import PURPOSE, Registration, register

SECRET = bytes(range(32))
SOAK = os.environ.get("ZEROPODS_SOAK") == "1"
HONEST_SECONDS = 5.0
"""Whoever has the secret is heard within so long, whatever else goes on."""
GROWN_BYTES = 32 * 2**20
"""More memory than any attack takes: 68 strangers who have each said 128 KiB of a line too long are 9 MiB."""
MORE_FILES = 80
"""64 strangers and two for each of two pods, the honest ones, and a connection that is just being cut."""


@dataclass
class Port:
    """A listener and the way in."""

    kind: str
    listener: Besieged
    door: Door
    """With a lure that does harm: the end of a pod, or a pod too many."""
    registered: list[socket.socket] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int]:
        """Where it listens."""
        return HERE, self.listener.port

    def honest(self) -> None:
        """Be heard as one who has the secret: asked for a status, or a pod that reports in again."""
        if self.kind == "agent":
            assert b'"runs":{}' in self.told({"do": "status"})
            return
        connection = visit(self.place)
        try:
            connection.sendall(replace(self.door, lure=a_pod(1).to_json()).words(greeted(connection)))
            if self.registered:
                self._await_the_end_of_the_former(connection)
        except BaseException:
            connection.close()
            raise
        for former in self.registered:
            former.close()
        self.registered = [connection]

    def _await_the_end_of_the_former(self, connection: socket.socket) -> None:
        """Since the newer one has its place, which was not pushed out itself."""
        (former,) = self.registered
        with selectors.DefaultSelector() as both:
            both.register(former, selectors.EVENT_READ)
            both.register(connection, selectors.EVENT_READ)
            ended = [key.fileobj for key, _ in both.select(HONEST_SECONDS)]
        assert ended == [former], ended
        assert_dropped(former)

    def told(self, request: dict[str, Any]) -> bytes:
        """What an agent answers to the right words."""
        with visit(self.place) as connection:
            connection.settimeout(HONEST_SECONDS)
            connection.sendall(replace(self.door, lure=request).words(greeted(connection)))
            return connection.recv(1_000)

    def assert_nobody_got_in(self, strangers: int) -> None:
        """Let it end as honest peers want it to, and hear what it has seen."""
        if self.kind == "agent":
            assert b'{"ending":true}' in self.told({"do": "end"})
            assert self.listener.said() == {"ended": "it was asked to"}
        else:
            register_both(self.place)
            said = self.listener.said()
            assert said["pods"] == ["w1", "w2"]
            # One that was broken off before it was accepted was never there.
            assert said["rejected"] <= strangers
        assert self.listener.complaints() == ""


@contextmanager
def attacked(kind: str, folder: Path) -> Iterator[Port]:
    """A `rendezvous` that waits for two pods, or the control port of an `agent`, to which harm is meant."""
    with besieged(kind, SECRET, folder) as listener:
        if kind == "agent":
            door = Door(SECRET, purpose(HERE, listener.port), {"do": "end"})
        else:
            door = Door(SECRET, PURPOSE, a_pod(2, worker="intruder").to_json())
        port = Port(kind, listener, door)
        yield port
        for connection in port.registered:
            connection.close()


def a_pod(number: int, **changes: Any) -> Registration:
    """What a pod says of itself."""
    kind = b"ssh-ed25519"
    key = struct.pack(">I", len(kind)) + kind + struct.pack(">I", 32) + number.to_bytes(32, "big")
    values: dict[str, Any] = {
        "worker": f"w{number}",
        "address": f"127.0.1.{number}",
        "hostname": f"host-{number}",
        "slots": 1,
        "host_key": f"ssh-ed25519 {base64.b64encode(key).decode()}",
        "control_port": 30_000 + number,
        "free_ports": SSH_PORTS,
    }
    return Registration(**{**values, **changes})


def register_both(place: tuple[str, int]) -> None:
    """Two real pods report in."""

    async def serve_nothing(answer: dict[str, Any]) -> None:
        pass

    async def main() -> None:
        async with asyncio.timeout(HONEST_SECONDS):
            pods = [register(place, SECRET, a_pod(number), HONEST_SECONDS, serve_nothing) for number in (1, 2)]
            await asyncio.gather(*pods)

    asyncio.run(main())
