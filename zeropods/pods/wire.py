"""Authenticated, bounded requests between a master and its pods.

Listener and connector each open with `zeropods 1 NONCE`. The session key is HMAC-SHA256(secret, purpose | listener's
nonce | connector's nonce), and every message is a line `MAC JSON`, where MAC = HMAC-SHA256(session key, direction |
64-bit sequence number | JSON) as hexadecimal. The secret never crosses the wire; a replayed, reflected, reordered or
altered message, one for another purpose and one of another cluster all fail. Nothing is encrypted: secrets are not
sent.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import resource
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from zeropods.errors import UserError

DEFAULT_PORT = 6_000
"""The port of the original's master."""
MAX_MESSAGE_BYTES = 65_536
"""A longer line, proof included, is refused before it is parsed; also the `limit` of every stream reader here."""
SEND_SECONDS = 10.0
"""A peer that does not take a message for so long is given up."""
PROOF_SECONDS = 5.0
"""A peer proves itself to a server within this time."""
CLOSE_SECONDS = 1.0
SILENT_SECONDS = 120.0
"""A connection on which nothing is asked for so long is closed."""
QUEUE = 4_096
"""Connections that the kernel keeps until they are accepted, as far as it is allowed to (`net.core.somaxconn`).

One more gets no answer, and is tried again a second, three and seven seconds later: too late for a pod among a crowd.
"""
AT_ONCE = 16
"""Connections that are accepted before those that came earlier have their turn to prove themselves."""

Message = dict[str, Any]
"""A JSON object."""

_GREETING = re.compile(rb"zeropods 1 ([0-9a-f]{32})")
_LISTENER, _CONNECTOR = b"L", b"C"


class ChannelError(Exception):
    """One line: the peer, and whether it was closed, too large, badly proven, malformed or timed out."""


class AgentError(Exception):
    """One line: the agent did not answer in time, or refused."""


# The master's questions to agents


def control_purpose(address: str, control_port: int) -> str:
    """What a connection to one agent is for: a proof made for it is none for another, whoever passes it on."""
    return f"control {address}:{control_port}"


async def ask_agents(
    agents: Sequence[tuple[str, int]], secret: bytes, request: Message, seconds: float
) -> list[Message | AgentError]:
    """Ask all agents at once; answers in their order, an `AgentError` in the place of one that gave none.

    Args:
        agents: (address, control port) of each.
    """

    async def ask(address: str, port: int) -> Message | AgentError:
        try:
            async with connected(address, port, secret, control_purpose(address, port), seconds) as channel:
                answer = await channel.ask(request, seconds)
        except ChannelError as error:
            return AgentError(f"{address}:{port}: no answer to {request.get('do')!r}: {error}")
        return AgentError(f"{address}:{port}: {answer['error']}") if "error" in answer else answer

    return await asyncio.gather(*(ask(*agent) for agent in agents))


def ask_all(
    agents: Sequence[tuple[str, int]], secret: bytes, request: Message, seconds: float
) -> list[Message | AgentError]:
    """`ask_agents` in a thread with a loop of its own, since in a notebook the calling thread runs one already."""
    with ThreadPoolExecutor(1, thread_name_prefix="ask_all") as thread:
        return thread.submit(lambda: asyncio.run(ask_agents(agents, secret, request, seconds))).result()


# One connection


class Channel:
    """A connection; after `greet` the first message received proves who the peer is. Any error is final."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, listens: bool) -> None:
        name = writer.get_extra_info("peername")
        self.peer = str(name[0]) if name else "a lost connection"
        self._reader = reader
        self._writer = writer
        self._listens = listens
        self._key = b""
        self._sends, self._receives = (_LISTENER, _CONNECTOR) if listens else (_CONNECTOR, _LISTENER)
        self._numbers = {_LISTENER: 0, _CONNECTOR: 0}
        """Number of the next message of each direction."""

    async def greet(self, secret: bytes, purpose: str, seconds: float) -> None:
        """Exchange nonces, from which the key of this connection follows."""
        own = secrets.token_hex(16).encode()
        async with _bounded(self.peer, seconds):
            self._writer.write(b"zeropods 1 " + own + b"\n")
            greeting = _GREETING.fullmatch((await self._reader.readuntil(b"\n"))[:-1])
        if greeting is None:
            raise ChannelError(f"{self.peer}: malformed: no greeting of this protocol")
        nonces = (own, greeting[1]) if self._listens else (greeting[1], own)
        self._key = hmac.digest(secret, b"|".join([purpose.encode(), *nonces]), "sha256")

    async def send(self, body: Message) -> None:
        """Send one message; `ValueError` for a number that JSON does not have."""
        text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        line = self._proof(self._sends, text) + b" " + text + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise ChannelError(f"{self.peer}: too large: a message of {len(line)} bytes to send")
        async with _bounded(self.peer, SEND_SECONDS):
            self._writer.write(line)
            await self._writer.drain()

    async def receive(self, seconds: float) -> Message:
        """The next message of the peer, proven and parsed."""
        async with _bounded(self.peer, seconds):
            line = await self._reader.readuntil(b"\n")
        proof, _, text = line[:-1].partition(b" ")
        if not hmac.compare_digest(self._proof(self._receives, text), proof):
            raise ChannelError(f"{self.peer}: bad proof: a message that was not made with this cluster's secret")
        with suppress(ValueError):
            body = json.loads(text)
            if isinstance(body, dict):
                return body
        raise ChannelError(f"{self.peer}: malformed: a message that is no JSON object")

    async def ask(self, body: Message, seconds: float) -> Message:
        """Send a message and receive the next one."""
        await self.send(body)
        return await self.receive(seconds)

    async def close(self) -> None:
        """Send what is left and close; cut where the peer does not take it."""
        self._writer.close()
        with suppress(OSError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._writer.wait_closed()
        self.cut()

    def cut(self) -> None:
        """Close without sending what is left."""
        self._writer.transport.abort()

    def _proof(self, direction: bytes, text: bytes) -> bytes:
        sealed = direction + struct.pack(">Q", self._numbers[direction]) + text
        self._numbers[direction] += 1
        return hmac.digest(self._key, sealed, "sha256").hex().encode()


@asynccontextmanager
async def connected(address: str, port: int, secret: bytes, purpose: str, seconds: float) -> AsyncIterator[Channel]:
    """A connection to a server, which has been greeted within `seconds`; `ChannelError` where it is not there."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    async with _bounded(f"{address}:{port}", seconds):
        streams = await asyncio.open_connection(address, port, limit=MAX_MESSAGE_BYTES)
    channel = Channel(*streams, listens=False)
    try:
        await channel.greet(secret, purpose, deadline - clock())
        yield channel
    finally:
        await channel.close()


@asynccontextmanager
async def _bounded(peer: str, seconds: float) -> AsyncIterator[None]:
    """A deadline, and errors as `ChannelError`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ChannelError(f"{peer}: timed out: nothing in {seconds:g} s") from None
    except asyncio.IncompleteReadError as error:
        cut = " in the middle of a message" if error.partial else ""
        raise ChannelError(f"{peer}: closed: the peer ended the connection{cut}") from None
    except asyncio.LimitOverrunError:
        raise ChannelError(f"{peer}: too large: a line of more than {MAX_MESSAGE_BYTES} bytes") from None
    except OSError as error:
        raise ChannelError(f"{peer}: closed: {error.strerror or 'the connection is lost'}") from None


# The server, which pods and their master both are


class Server:
    """Answers the requests of peers that have proven with their first message that they know the secret.

    Args:
        answer: takes a request and the peer's address; what it returns is sent.
        unproven: number of connections that may be unproven at a time. One more costs the oldest its place, not
            itself: an honest peer needs it for milliseconds, so that those who sit there silently keep nobody out.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: str,
        answer: Callable[[Message, str], Awaitable[Message]],
        *,
        unproven: int = 64,
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self._answer = answer
        self._limit = unproven
        self._unproven: list[Channel] = []
        """Oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, sock: socket.socket) -> None:
        """Serve the connections of a listening socket, which is the server's from now on."""
        self._server = await asyncio.start_server(self._serve, sock=sock, limit=MAX_MESSAGE_BYTES, backlog=AT_ONCE)
        # asyncio takes one number for both of them.
        sock.listen(QUEUE)

    async def close(self, seconds: float = 0.0) -> None:
        """Stop listening; connections are cut which their peers have not closed `seconds` later."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for channel in self._unproven:
            channel.cut()
        if self._tasks and seconds:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        channel = Channel(reader, writer, listens=True)
        try:
            # One that was accepted while the server was closed is nobody's.
            if self._server is not None:
                request = await self._first_message(channel)
                while True:
                    await channel.send(await self._answer(request, channel.peer))
                    request = await channel.receive(SILENT_SECONDS)
        except (ChannelError, asyncio.CancelledError):
            pass  # Cancelled by `close`: asyncio would log it with a traceback (Python 3.11).
        finally:
            self._tasks.discard(task)
            channel.cut()

    async def _first_message(self, channel: Channel) -> Message:
        """The message by which a peer proves that it knows the secret."""
        while len(self._unproven) >= self._limit:
            self._unproven.pop(0).cut()
        self._unproven.append(channel)
        clock = asyncio.get_running_loop().time
        deadline = clock() + PROOF_SECONDS
        try:
            await channel.greet(self._secret, self._purpose, PROOF_SECONDS)
            return await channel.receive(deadline - clock())
        finally:
            if channel in self._unproven:
                self._unproven.remove(channel)


def listening_socket(address: str, port: int | None) -> socket.socket:
    """A TCP socket that listens on an IPv4 address of this machine.

    Args:
        port: None for 6000, which gives way to any free port; one that is asked for does not.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    reason: object = None
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            # With SO_REUSEADDR: a master that ended a moment ago leaves connections in TIME_WAIT, which are nobody's.
            return socket.create_server((address, candidate))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
    place = f"{address}:{port or 'any port'}"
    raise UserError(f"{place}: cannot listen there ({reason}); name another port, or an address of this machine")


def allow_open_files(needed: int) -> None:
    """Raise this process's soft limit of open files to `needed`, or as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
