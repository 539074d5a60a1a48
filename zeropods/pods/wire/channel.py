"""One authenticated, bounded connection between a master and a pod.

Listener and connector each open with `zeropods 1 NONCE`. The session key is HMAC-SHA256(secret, purpose | listener's
nonce | connector's nonce), and every message is a line `MAC JSON`, where MAC = HMAC-SHA256(session key, direction |
sequence number | JSON). The secret never crosses the wire; a replayed, reflected, reordered or altered message, one
for another purpose and one of another cluster all fail. Nothing is encrypted: secrets are not sent.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

from zeropods.pods.wire.sealed import Seal, SealError

MAX_MESSAGE_BYTES = 65_536
"""A longer line, proof included, is refused before it is parsed; also the `limit` of every stream reader here."""
SEND_SECONDS = 10.0
"""A peer that does not take a message for so long is given up."""
CLOSE_SECONDS = 1.0

_GREETING = re.compile(rb"zeropods 1 ([0-9a-f]{32})")
_LISTENER, _CONNECTOR = b"L", b"C"


class ChannelError(Exception):
    """One line: the peer, and whether it was closed, too large, badly proven, malformed or timed out."""


class Channel:
    """A connection after both nonces were exchanged; the first message received proves who the peer is.

    Any error is final and closes the connection. Only one task at a time may `ask`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, sends: bytes, receives: bytes
    ) -> None:
        self.peer = _peer(writer)
        self._reader = reader
        self._writer = writer
        self._outgoing = Seal(key, sends)
        self._incoming = Seal(key, receives)

    async def send(self, body: dict[str, Any]) -> None:
        """Send one message; `ValueError` for a number that JSON does not have."""
        line = self._outgoing.line(body) + b"\n"
        async with _bounded(self._writer, self.peer, SEND_SECONDS):
            if len(line) > MAX_MESSAGE_BYTES:
                raise ChannelError(f"{self.peer}: too large: a message of {len(line)} bytes to send")
            self._writer.write(line)
            await self._writer.drain()

    async def receive(self, seconds: float) -> dict[str, Any]:
        """The next message of the peer, proven and parsed."""
        async with _bounded(self._writer, self.peer, seconds):
            line = await _line(self._reader, self.peer)
            try:
                return self._incoming.open(line)
            except SealError as error:
                raise ChannelError(f"{self.peer}: {error}") from None

    async def ask(self, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and receive the next one."""
        await self.send(body)
        return await self.receive(seconds)

    async def close(self) -> None:
        """Send what is left and close; cut where the peer does not take it."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                with suppress(ConnectionError):
                    await self._writer.wait_closed()
        except OSError:
            self._writer.transport.abort()


async def connect(address: str, port: int, secret: bytes, purpose: str, seconds: float) -> Channel:
    """Connect to a listener and exchange nonces within `seconds`; `ChannelError` where it is not there."""
    place = f"{address}:{port}"
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(address, port, limit=MAX_MESSAGE_BYTES)
    except TimeoutError:
        raise ChannelError(f"{place}: timed out: no connection in {seconds:g} s") from None
    except OSError as error:
        raise ChannelError(f"{place}: closed: {error.strerror or error}") from None
    own, theirs = await _exchange_nonces(reader, writer, deadline - clock())
    key = _session_key(secret, purpose, listener=theirs, connector=own)
    return Channel(reader, writer, key, sends=_CONNECTOR, receives=_LISTENER)


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, purpose: str, seconds: float
) -> Channel:
    """Exchange nonces with someone who connected, within `seconds`; he has proven nothing yet.

    The reader is one of `asyncio.start_server(..., limit=MAX_MESSAGE_BYTES)`.
    """
    own, theirs = await _exchange_nonces(reader, writer, seconds)
    key = _session_key(secret, purpose, listener=own, connector=theirs)
    return Channel(reader, writer, key, sends=_LISTENER, receives=_CONNECTOR)


async def _exchange_nonces(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float
) -> tuple[bytes, bytes]:
    """The own nonce and the peer's."""
    own = secrets.token_hex(16).encode()
    peer = _peer(writer)
    async with _bounded(writer, peer, seconds):
        writer.write(b"zeropods 1 " + own + b"\n")
        greeting = _GREETING.fullmatch(await _line(reader, peer))
        if greeting is None:
            raise ChannelError(f"{peer}: malformed: no greeting of this protocol")
        return own, greeting[1]


def _session_key(secret: bytes, purpose: str, *, listener: bytes, connector: bytes) -> bytes:
    return hmac.digest(secret, b"|".join([purpose.encode(), listener, connector]), "sha256")


@asynccontextmanager
async def _bounded(writer: asyncio.StreamWriter, peer: str, seconds: float) -> AsyncIterator[None]:
    """A deadline, errors as `ChannelError`, and a connection that is cut where the block does not end well."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, OSError):
            _raise_plain(error, peer, seconds)
        raise


def _raise_plain(error: OSError, peer: str, seconds: float) -> NoReturn:
    if isinstance(error, TimeoutError):
        raise ChannelError(f"{peer}: timed out: nothing in {seconds:g} s") from None
    raise ChannelError(f"{peer}: closed: {error.strerror or 'the connection is lost'}") from None


async def _line(reader: asyncio.StreamReader, peer: str) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        cut = " in the middle of a message" if error.partial else ""
        raise ChannelError(f"{peer}: closed: the peer ended the connection{cut}") from None
    except asyncio.LimitOverrunError:
        line = bytes(MAX_MESSAGE_BYTES + 1)
    if len(line) > MAX_MESSAGE_BYTES:
        raise ChannelError(f"{peer}: too large: a line of more than {MAX_MESSAGE_BYTES} bytes")
    return line[:-1]


def _peer(writer: asyncio.StreamWriter) -> str:
    """The peer's IP address; a connection that is lost already has none."""
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else "a lost connection"
