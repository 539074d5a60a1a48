"""Authenticated requests over real sockets: what passes, each thing that does not, and crowds of strangers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.pods import wire
from zeropods.pods.wire import MAX_MESSAGE_BYTES, Server, WireError, ask, listening_socket

HERE = "127.0.0.1"
QUIET = "127.0.61.61"
"""A loopback address where nobody else has taken the default port."""
SECRET = bytes(range(32))
SECONDS = 10.0
GREETING = b"zeropods 2 " + b"0" * 32 + b"\n"
LARGEST = {"text": "x" * (MAX_MESSAGE_BYTES - len(b'{"text":""}') - 64 - len(b" \n"))}


@asynccontextmanager
async def listening(heard: list[dict[str, Any]] | None = None) -> AsyncIterator[int]:
    """The port of a server that answers with the request, and notes it."""

    async def echo(request: dict[str, Any], peer: str) -> dict[str, Any]:
        if heard is not None:
            heard.append(request)
        return request

    server = Server(SECRET, "register", echo)
    sock = listening_socket(HERE, 0)
    await server.open(sock)
    try:
        yield sock.getsockname()[1]
    finally:
        await server.close()


async def asked(port: int, request: dict[str, Any], secret: bytes = SECRET, purpose: str = "register") -> Any:
    return await ask(HERE, port, secret, purpose, request, SECONDS)


@asynccontextmanager
async def between(port: int, log: list[bytes], place: int | None = None, times: int = 1) -> AsyncIterator[int]:
    """A port that passes everything on to another and keeps it; it may alter a byte of the request, or repeat it."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while line := bytearray(await reader.readline()):
            log.append(bytes(line))
            number += 1
            if number == 2 and place is not None:
                line[place % (len(line) - 1)] ^= 1
            writer.write(bytes(line) * (times if number == 2 else 1))
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HERE, port)
        with suppress(ConnectionError):
            await asyncio.gather(pump(reader, far_writer, 0), pump(far_reader, writer, 10))

    server = await asyncio.start_server(handle, HERE, 0, limit=2 * MAX_MESSAGE_BYTES)
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


def test_requests_are_answered_and_neither_the_secret_nor_a_recorded_line_is_of_use_to_others() -> None:
    async def main() -> None:
        for request in ({"n": 1, "text": "ä|\n"}, LARGEST):
            log: list[bytes] = []
            async with listening() as port:
                async with between(port, log) as tapped:
                    assert await asked(tapped, request) == request
                assert len(log) == 4
                assert SECRET not in b"".join(log) and SECRET.hex().encode() not in b"".join(log)
                greeting, sealed = next(line for line in log if line.startswith(b"zeropods")), max(log, key=len)
                assert await is_dropped(port, greeting + sealed) == b""

    asyncio.run(main())


@pytest.mark.parametrize(("secret", "purpose"), [(bytes(32), "register"), (SECRET, "control"), (b"", "register")])
def test_another_secret_or_another_purpose_is_not_heard(secret: bytes, purpose: str) -> None:
    async def main() -> None:
        async with listening(heard) as port:
            with pytest.raises(WireError, match="closed"):
                await asked(port, {"let": "me in"}, secret, purpose)

    heard: list[dict[str, Any]] = []
    asyncio.run(main())
    assert heard == []


@pytest.mark.parametrize("reflects", [False, True], ids=["another secret", "sends all back"])
def test_a_listener_that_does_not_know_the_secret_is_found_out(reflects: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not reflects:
            writer.write(GREETING + b"0" * 64 + b' {"ssh_port":2222}\n')
        while line := await reader.readline():
            writer.write(line)

    async def main() -> None:
        server = await asyncio.start_server(answer, HERE, 0)
        with pytest.raises(WireError, match="bad proof"):
            await asked(server.sockets[0].getsockname()[1], {"a": 1})
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize(("place", "times"), [(0, 1), (63, 1), (64, 1), (70, 1), (None, 2)])
def test_no_altered_request_is_heard_and_none_twice(place: int | None, times: int) -> None:
    """Somebody on the line changes a bit, or says a request twice."""
    heard: list[dict[str, Any]] = []

    async def main() -> None:
        async with listening(heard) as port, between(port, [], place, times) as tapped:
            with suppress(WireError):
                await asked(tapped, {"do": "end", "run": "r1"})

    asyncio.run(main())
    assert heard == ([] if times == 1 else [{"do": "end", "run": "r1"}])


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"zeropods 2 ", b"\n\n\n", bytes(range(256)), GREETING + b"half a mess",
     GREETING + b"0" * 64 + b" {}\n", b"x" * 2**20, GREETING + b"y" * 2**20],
    ids=lambda sent: f"{len(sent)} bytes: {sent[:12]!r}",
)  # fmt: skip
def test_a_stranger_is_dropped_without_an_answer(sent: bytes) -> None:
    async def main() -> None:
        async with listening() as port:
            assert await is_dropped(port, sent, ends=True) == b""

    asyncio.run(main())


@pytest.mark.parametrize("opening", [b"", GREETING + b"ab"])
def test_who_is_silent_or_slow_is_dropped_in_time(opening: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROOF_SECONDS", 0.3)

    async def main() -> None:
        async with listening() as port:
            assert await is_dropped(port, opening) == b""

    asyncio.run(main())


def test_a_flood_of_silent_connections_keeps_no_honest_peer_out() -> None:
    async def main() -> None:
        async with listening() as port:
            flood = [await asyncio.open_connection(HERE, port) for _ in range(200)]
            assert await asked(port, {"a": 1}) == {"a": 1}
            # All but the youngest have been dropped, long before their time is up.
            ends = [asyncio.wait_for(reader.read(), 3) for reader, _ in flood[:130]]
            assert all(end.startswith(b"zeropods") or not end for end in await asyncio.gather(*ends))
        for _, writer in flood:
            writer.close()

    asyncio.run(main())


def test_nobody_there_and_nobody_who_speaks_are_told_apart() -> None:
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
        with pytest.raises(WireError, match=f"^{HERE}:{port}: closed: Connection refused$"):
            asyncio.run(asked(port, {}))
        free.listen()
        with pytest.raises(WireError, match="timed out"):
            asyncio.run(ask(HERE, port, SECRET, "register", {}, 0.2))


def test_the_default_port_is_6000_and_gives_way_and_others_do_not() -> None:
    with listening_socket(QUIET, None) as first, listening_socket(QUIET, None) as second:
        assert first.getsockname()[1] == 6_000
        assert second.getsockname()[1] not in (0, 6_000)
        with pytest.raises(UserError, match=f"{QUIET}:6000: cannot listen there"):
            listening_socket(QUIET, 6_000)
    with pytest.raises(UserError, match="an address of this machine"):
        listening_socket("203.0.113.1", 0)
