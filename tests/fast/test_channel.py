"""Authenticated connections over real sockets: what passes, and each thing that does not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropods.pods import wire
from zeropods.pods.wire import MAX_MESSAGE_BYTES, Channel, ChannelError, Seal, SealError, accept, connect

HERE = "127.0.0.1"
SECRET = bytes(range(32))
SECONDS = 10.0
GREETING = b"zeropods 1 " + b"0" * 32 + b"\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """A listener on a free port; its handlers have ended when the block is left."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        finally:
            writer.transport.abort()
            tasks.discard(task)

    server = await asyncio.start_server(handle, HERE, 0, limit=MAX_MESSAGE_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        async with asyncio.timeout(SECONDS):
            while tasks:
                await asyncio.sleep(0.01)


def accepted(
    then: Callable[[Channel], Awaitable[object]], secret: bytes = SECRET, purpose: str = "register"
) -> tuple[Handler, list[str]]:
    """A handler that accepts a channel and goes on with it, and the list of errors that it met."""
    errors: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await then(await accept(reader, writer, secret, purpose, SECONDS))
        except ChannelError as error:
            errors.append(str(error))

    return handle, errors


async def echo(connection: Channel) -> None:
    while True:
        await connection.send(await connection.receive(SECONDS))


async def receive(connection: Channel) -> None:
    await connection.receive(SECONDS)


async def heard_after(sent: bytes, seconds: float = SECONDS, *, ends: bool = False) -> str:
    """The error of a listener that receives, to whom a stranger says `sent` and then nothing, or `ends`."""
    errors: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await (await accept(reader, writer, SECRET, "register", seconds)).receive(seconds)
        except ChannelError as error:
            errors.append(str(error))

    async with serving(handle) as port:
        reader, writer = await asyncio.open_connection(HERE, port)
        writer.write(sent)
        if ends:
            writer.write_eof()
        # A listener that does not read on resets the connection.
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        async with asyncio.timeout(SECONDS):
            while not errors:
                await asyncio.sleep(0.01)
    return errors[0]


@asynccontextmanager
async def overheard(port: int, log: list[tuple[bytes, bytes]]) -> AsyncIterator[int]:
    """A port that passes everything on to another, and keeps the lines with their direction."""

    async def pump(name: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            log.append((name, line))
            writer.write(line)
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HERE, port)
        await asyncio.gather(pump(b"C", reader, far_writer), pump(b"L", far_reader, writer))

    async with serving(handle) as own:
        yield own


def test_messages_pass_both_ways_in_order() -> None:
    async def main() -> None:
        handler, _ = accepted(echo)
        async with serving(handler) as port:
            connection = await connect(HERE, port, SECRET, "register", SECONDS)
            assert connection.peer == HERE
            for number in range(50):
                assert await connection.ask({"n": number, "text": "ä|\n"}, SECONDS) == {"n": number, "text": "ä|\n"}
            await connection.close()

    asyncio.run(main())


def test_the_secret_does_not_cross_the_wire() -> None:
    async def main() -> None:
        log: list[tuple[bytes, bytes]] = []
        handler, _ = accepted(echo)
        async with serving(handler) as port, overheard(port, log) as own:
            connection = await connect(HERE, own, SECRET, "register", SECONDS)
            assert await connection.ask({"a": 1}, SECONDS) == {"a": 1}
            await connection.close()
        said = b"".join(line for _, line in log)
        assert len(log) == 4
        assert SECRET not in said and SECRET.hex().encode() not in said

    asyncio.run(main())


@pytest.mark.parametrize(("secret", "purpose"), [(bytes(32), "register"), (SECRET, "control"), (b"", "register")])
def test_another_secret_or_another_purpose_is_a_bad_proof(secret: bytes, purpose: str) -> None:
    async def main() -> None:
        handler, errors = accepted(receive)
        async with serving(handler) as port:
            connection = await connect(HERE, port, secret, purpose, SECONDS)
            with pytest.raises(ChannelError, match="closed"):
                await connection.ask({"let": "me in"}, SECONDS)
        assert len(errors) == 1 and errors[0].startswith(f"{HERE}: bad proof")

    asyncio.run(main())


def test_a_listener_that_does_not_know_the_secret_is_found_out() -> None:
    async def main() -> None:
        async def answer(connection: Channel) -> None:
            await connection.send({"trust": "me"})
            await connection.receive(SECONDS)

        handler, _ = accepted(answer, secret=bytes(32))
        async with serving(handler) as port:
            connection = await connect(HERE, port, SECRET, "register", SECONDS)
            with pytest.raises(ChannelError, match="bad proof"):
                await connection.receive(SECONDS)

    asyncio.run(main())


def test_a_message_that_is_sent_back_to_its_sender_is_a_bad_proof() -> None:
    async def main() -> None:
        async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line)

        async with serving(reflect) as port:
            connection = await connect(HERE, port, SECRET, "register", SECONDS)
            with pytest.raises(ChannelError, match="bad proof"):
                await connection.ask({"a": 1}, SECONDS)

    asyncio.run(main())


def test_recorded_bytes_of_another_connection_are_a_bad_proof() -> None:
    async def main() -> None:
        log: list[tuple[bytes, bytes]] = []
        handler, errors = accepted(receive)
        async with serving(handler) as port, overheard(port, log) as own:
            connection = await connect(HERE, own, SECRET, "register", SECONDS)
            await connection.send({"a": 1})
            await connection.close()
            async with asyncio.timeout(SECONDS):
                while len(log) < 3:
                    await asyncio.sleep(0.01)
            assert errors == []
            reader, writer = await asyncio.open_connection(HERE, port)
            writer.write(b"".join(line for name, line in log if name == b"C"))
            await reader.read()
            writer.close()
        assert len(errors) == 1 and "bad proof" in errors[0]

    asyncio.run(main())


def test_garbage_is_malformed() -> None:
    assert asyncio.run(heard_after(b"GET / HTTP/1.1\r\n\r\n")) == f"{HERE}: malformed: no greeting of this protocol"


@pytest.mark.parametrize("sent", [b"zerop", GREETING + b"0123"])
def test_half_a_message_is_closed_in_the_middle(sent: bytes) -> None:
    heard = asyncio.run(heard_after(sent, ends=True))
    assert heard == f"{HERE}: closed: the peer ended the connection in the middle of a message"


@pytest.mark.parametrize("opening", [b"", GREETING])
def test_a_megabyte_without_a_newline_is_too_large(opening: bytes) -> None:
    heard = asyncio.run(heard_after(opening + b"x" * 2**20))
    assert heard == f"{HERE}: too large: a line of more than 65536 bytes"


@pytest.mark.parametrize("opening", [b"", b"zero", GREETING, GREETING + b"ab"])
def test_silence_is_timed_out(opening: bytes) -> None:
    assert asyncio.run(heard_after(opening, seconds=0.2)) == f"{HERE}: timed out: nothing in 0.2 s"


def test_a_message_that_is_too_large_is_not_sent() -> None:
    async def main() -> None:
        handler, _ = accepted(receive)
        async with serving(handler) as port:
            connection = await connect(HERE, port, SECRET, "register", SECONDS)
            with pytest.raises(ChannelError, match="too large"):
                await connection.send({"text": "x" * MAX_MESSAGE_BYTES})

    asyncio.run(main())


def test_the_largest_message_passes() -> None:
    async def main() -> None:
        body = {"text": "x" * (MAX_MESSAGE_BYTES - len(b'{"text":""}') - 64 - len(b" \n"))}
        handler, _ = accepted(echo)
        async with serving(handler) as port:
            connection = await connect(HERE, port, SECRET, "register", SECONDS)
            assert await connection.ask(body, SECONDS) == body
            await connection.close()

    asyncio.run(main())


def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SEND_SECONDS", 0.3)

    async def main() -> None:
        over = asyncio.Event()

        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(GREETING)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await over.wait()

        async with serving(deaf) as port:
            connection = await connect(HERE, port, SECRET, "register", SECONDS)
            with pytest.raises(ChannelError, match="timed out"):
                for _ in range(2_000):
                    await connection.send({"text": "x" * 60_000})
            over.set()

    asyncio.run(main())


def test_nobody_there_is_closed_and_says_where() -> None:
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
        with pytest.raises(ChannelError, match=f"{HERE}:{port}: closed: "):
            asyncio.run(connect(HERE, port, SECRET, "register", SECONDS))


def test_a_listener_that_accepts_and_says_nothing_is_timed_out() -> None:
    with socket.create_server((HERE, 0)) as silent, pytest.raises(ChannelError, match="timed out"):
        asyncio.run(connect(HERE, silent.getsockname()[1], SECRET, "register", 0.2))


TEXTS = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


@given(body=st.dictionaries(TEXTS, VALUES, max_size=6))
def test_every_json_object_passes_unchanged(body: dict[str, object]) -> None:
    line = Seal(SECRET, b"L").line(body)
    assert b"\n" not in line
    assert Seal(SECRET, b"L").open(line) == body


@given(data=st.data())
@settings(max_examples=50)
def test_no_altered_byte_passes(data: st.DataObject) -> None:
    line = bytearray(Seal(SECRET, b"L").line({"do": "stop_run", "run": "r1"}))
    place = data.draw(st.integers(0, len(line) - 1))
    line[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SealError):
        Seal(SECRET, b"L").open(bytes(line))


def test_reordered_and_repeated_messages_do_not_pass() -> None:
    sender = Seal(SECRET, b"L")
    first, second = sender.line({"n": 1}), sender.line({"n": 2})
    with pytest.raises(SealError, match="bad proof"):
        Seal(SECRET, b"L").open(second)
    receiver = Seal(SECRET, b"L")
    receiver.open(first)
    with pytest.raises(SealError, match="bad proof"):
        receiver.open(first)


def test_a_message_of_the_other_direction_does_not_pass() -> None:
    with pytest.raises(SealError, match="bad proof"):
        Seal(SECRET, b"C").open(Seal(SECRET, b"L").line({"n": 1}))


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"1", b'"a"', b"null", b"{", b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}', b"\xff{}",
     b'{"a":' * 20_000, "{}".encode("utf-16")],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_a_proven_message_that_is_no_json_object_is_malformed(text: bytes) -> None:
    proof = Seal(SECRET, b"L")._proof(text)
    with pytest.raises(SealError, match="malformed"):
        Seal(SECRET, b"L").open(proof + b" " + text)


def test_a_number_that_json_does_not_have_is_not_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Seal(SECRET, b"L").line({"a": float("nan")})
