"""Authenticated connections over real sockets: what passes, each thing that does not, and crowds of strangers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropods.errors import UserError
from zeropods.pods import wire
from zeropods.pods.wire import MAX_MESSAGE_BYTES, ChannelError, Server, connected, listening_socket

HERE = "127.0.0.1"
QUIET = "127.0.61.61"
"""A loopback address where nobody else has taken the default port."""
SECRET = bytes(range(32))
SECONDS = 10.0
GREETING = b"zeropods 1 " + b"0" * 32 + b"\n"
LARGEST = {"text": "x" * (MAX_MESSAGE_BYTES - len(b'{"text":""}') - 64 - len(b" \n"))}

Line = tuple[bytes, bytes]
"""Who said it, the listener (L) or the connector (C), and what."""


async def echo(request: dict[str, Any], peer: str) -> dict[str, Any]:
    return request


@asynccontextmanager
async def listening(
    answer: Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]] = echo, unproven: int = 64
) -> AsyncIterator[int]:
    server = Server(SECRET, "register", answer, unproven=unproven)
    sock = listening_socket(HERE, 0)
    await server.open(sock)
    try:
        yield sock.getsockname()[1]
    finally:
        await server.close()


async def asked(port: int, *bodies: dict[str, Any], secret: bytes = SECRET, purpose: str = "register") -> list[Any]:
    """The answers to these requests on one connection."""
    async with connected(HERE, port, secret, purpose, SECONDS) as channel:
        return [await channel.ask(body, SECONDS) for body in bodies]


@asynccontextmanager
async def overheard(port: int, log: list[Line]) -> AsyncIterator[int]:
    """A port that passes everything on to another, and keeps the lines with their direction."""

    async def pump(name: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            log.append((name, line))
            writer.write(line)
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HERE, port)
        await asyncio.gather(pump(b"C", reader, far_writer), pump(b"L", far_reader, writer))

    server = await asyncio.start_server(handle, HERE, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def is_dropped(port: int, sent: bytes, *, ends: bool = False) -> bytes:
    """What a stranger hears who says this, after the greeting, until he is dropped."""
    reader, writer = await asyncio.open_connection(HERE, port)
    heard = b""
    # A listener that does not read on resets the connection.
    with suppress(ConnectionError):
        heard = await reader.readline()
        writer.write(sent)
        if ends:
            writer.write_eof()
        async with asyncio.timeout(SECONDS):
            heard += await reader.read()
    writer.close()
    return heard.partition(b"\n")[2]


# What passes


def test_messages_pass_both_ways_in_order_and_the_secret_stays() -> None:
    async def main() -> None:
        log: list[Line] = []
        bodies = ({"n": 1, "text": "ä|\n"}, {"n": 2}, LARGEST)
        async with listening() as port, overheard(port, log) as tapped:
            assert await asked(tapped, *bodies) == [*bodies]
        said = b"".join(line for _, line in log)
        assert len(log) == 8
        assert SECRET not in said and SECRET.hex().encode() not in said

    asyncio.run(main())


# What does not pass


@pytest.mark.parametrize(("secret", "purpose"), [(bytes(32), "register"), (SECRET, "control"), (b"", "register")])
def test_another_secret_or_another_purpose_is_not_heard(secret: bytes, purpose: str) -> None:
    async def main() -> None:
        async with listening() as port:
            with pytest.raises(ChannelError, match="closed"):
                await asked(port, {"let": "me in"}, secret=secret, purpose=purpose)

    asyncio.run(main())


@pytest.mark.parametrize("reflects", [False, True], ids=["another secret", "sends all back"])
def test_a_listener_that_does_not_know_the_secret_is_found_out(reflects: bool) -> None:
    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + b"0" * 64 + b' {"ssh_port":2222}\n')
        await reader.read()

    async def main() -> None:
        server = await asyncio.start_server(reflect if reflects else answer, HERE, 0)
        with pytest.raises(ChannelError, match="bad proof"):
            await asked(server.sockets[0].getsockname()[1], {"a": 1})
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2), (0, 2, 1)], ids=["replayed", "second first", "reordered"])
def test_recorded_lines_of_another_connection_are_not_heard(order: tuple[int, ...]) -> None:
    async def main() -> None:
        log: list[Line] = []
        async with listening() as port:
            async with overheard(port, log) as tapped:
                await asked(tapped, {"a": 1}, {"b": 1})
            recorded = [line for name, line in log if name == b"C"]
            assert await is_dropped(port, b"".join(recorded[number] for number in order)) == b""

    asyncio.run(main())


@given(place=st.integers(0, 99), bits=st.integers(1, 255), twice=st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_altered_message_is_heard(place: int, bits: int, twice: bool) -> None:
    """Somebody on the line changes a byte, or says a message twice: the peer hears nothing of it."""
    heard: list[dict[str, Any]] = []

    async def note(request: dict[str, Any], peer: str) -> dict[str, Any]:
        heard.append(request)
        return request

    async def main() -> None:
        async def alter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(HERE, port)
            writer.write(await far_reader.readline())
            far_writer.write(await reader.readline())
            line = bytearray(await reader.readline())
            if not twice:
                line[place % (len(line) - 1)] ^= bits
            far_writer.write(bytes(line) * 2)
            await far_reader.read()
            far_writer.close()
            writer.close()

        async with listening(note) as port:
            server = await asyncio.start_server(alter, HERE, 0)
            with pytest.raises(ChannelError):
                await asked(server.sockets[0].getsockname()[1], {"do": "end", "run": "r1"})
            server.close()

    with suppress(ConnectionError):
        asyncio.run(main())
    assert heard == ([{"do": "end", "run": "r1"}] if twice else [])


# Strangers


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"zeropods 1 ", b"zeropods 2 " + GREETING[11:], b"\n\n\n", bytes(range(256)),
     GREETING + b"half a mess", GREETING + b"0" * 64 + b" {}\n", b"x" * 2**20, GREETING + b"y" * 2**20],
    ids=lambda sent: f"{len(sent)} bytes: {sent[:12]!r}",
)  # fmt: skip
def test_a_stranger_is_dropped_without_an_answer(sent: bytes) -> None:
    async def main() -> None:
        async with listening() as port:
            assert await is_dropped(port, sent, ends=True) == b""

    asyncio.run(main())


@pytest.mark.parametrize("opening", [b"", b"zero", GREETING, GREETING + b"ab"])
def test_who_is_silent_or_slow_is_dropped_in_time(opening: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROOF_SECONDS", 0.3)

    async def main() -> None:
        async with listening() as port:
            assert await is_dropped(port, opening) == b""

    asyncio.run(main())


def test_a_flood_of_silent_connections_keeps_no_honest_peer_out() -> None:
    async def main() -> None:
        async with listening(unproven=20) as port:
            flood = [await asyncio.open_connection(HERE, port) for _ in range(200)]
            assert await asked(port, {"a": 1}) == [{"a": 1}]
            oldest = flood[0][0]
            with suppress(ConnectionError):
                assert len((await oldest.read()).splitlines()) == 1
        for _, writer in flood:
            writer.close()

    asyncio.run(main())


# The port


def test_nobody_there_and_nobody_who_speaks_are_told_apart() -> None:
    async def connect(seconds: float) -> None:
        async with connected(HERE, port, SECRET, "register", seconds):
            pass

    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
        with pytest.raises(ChannelError, match=f"{HERE}:{port}: closed: "):
            asyncio.run(connect(SECONDS))
        free.listen()
        with pytest.raises(ChannelError, match="timed out"):
            asyncio.run(connect(0.2))


def test_the_default_port_is_6000_and_gives_way_and_others_do_not() -> None:
    with listening_socket(QUIET, None) as first, listening_socket(QUIET, None) as second:
        assert first.getsockname()[1] == 6_000
        assert second.getsockname()[1] not in (0, 6_000)
        with pytest.raises(UserError, match=f"{QUIET}:6000: cannot listen there"):
            listening_socket(QUIET, 6_000)
    with pytest.raises(UserError, match="an address of this machine"):
        listening_socket("203.0.113.1", 0)
