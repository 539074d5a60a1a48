"""Strangers at a port, over real sockets: what they say, what they hear, and how many of them wait there."""

from __future__ import annotations

import random
import re
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from tests.attacks import Attack, Door

HERE = "127.0.0.1"
SECONDS = 10.0
LINGERING = 100
"""More than there are places for those who have proven nothing."""
GREETING = re.compile(rb"zeropods 1 ([0-9a-f]{32})\n")
RESET = struct.pack("ii", 1, 0)


class Strangers:
    """Carries attacks out; an `AssertionError` where one of them is answered, or not dropped in time."""

    def __init__(self, place: tuple[str, int], door: Door) -> None:
        self.count = 0
        self._place = place
        self._door = door
        self._waiting: deque[tuple[socket.socket, bytes]] = deque()

    def attack(self, attack: Attack, ending: str) -> None:
        """One conversation, begun, carried out, and ended or left open."""
        connection = visit(self._place)
        nonce = greeted(connection)
        said = attack.words(self._door, nonce)
        self.count += 1
        if ending == "drips":
            self._stay(connection, said)
            return
        say(connection, said)
        if ending == "waits":
            self._stay(connection, b"")
        elif ending == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
        else:
            with connection, suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                assert_dropped(connection)

    def drip(self) -> None:
        """Another byte from each of those who take their time."""
        for place, (connection, left) in enumerate(self._waiting):
            say(connection, left[:1])
            self._waiting[place] = connection, left[1:]

    def leave(self) -> None:
        """All of them go; none has heard anything."""
        while self._waiting:
            self._go(self._waiting.popleft()[0])

    def outstay(self, seconds: float) -> None:
        """Wait until the last of them was dropped; each must be within so long."""
        while self._waiting:
            with self._waiting.popleft()[0] as connection:
                connection.settimeout(seconds)
                assert_dropped(connection)

    def _stay(self, connection: socket.socket, left: bytes) -> None:
        self._waiting.append((connection, left))
        if len(self._waiting) > LINGERING:
            self._go(self._waiting.popleft()[0])

    def _go(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with connection, suppress(BlockingIOError, ConnectionError):
            heard = connection.recv(1_000)
            assert heard == b"", heard


def visit(place: tuple[str, int]) -> socket.socket:
    """A connection from anywhere in the loopback network: one address has too few ports for many conversations."""
    source = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}"
    return socket.create_connection(place, timeout=SECONDS, source_address=(source, 0))


def greeted(connection: socket.socket) -> bytes:
    """The listener's nonce."""
    heard = b""
    while not heard.endswith(b"\n"):
        part = connection.recv(1_000)
        assert part, f"dropped before it could say anything: {heard!r}"
        heard += part
    match = GREETING.fullmatch(heard)
    assert match, heard
    return match[1]


def say(connection: socket.socket, said: bytes) -> None:
    """As much of it as the listener lets be said."""
    with suppress(ConnectionError):
        connection.sendall(said)


def assert_dropped(connection: socket.socket) -> None:
    """The listener ends it, without another word."""
    with suppress(ConnectionError):
        heard = connection.recv(1_000)
        assert heard == b"", heard


def crowd(place: tuple[str, int], count: int) -> list[socket.socket]:
    """So many connections that say nothing, begun as fast as can be."""
    found = []
    for _ in range(count):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(place)
        found.append(connection)
    return found


def resident_bytes(pid: int) -> int:
    """The most memory that a process ever had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found, status
    return int(found[1]) * 1024


def open_files(pid: int) -> int:
    """How many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def within(seconds: float, happened: object) -> float:
    """Call `happened` until it is true; the seconds that it took."""
    began = time.monotonic()
    while not happened():  # type: ignore[operator]
        assert time.monotonic() - began < seconds, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)
    return time.monotonic() - began
