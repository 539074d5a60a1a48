"""Authenticated, bounded requests between a master and its pods; each has a connection of its own.

Listener and connector open with `zeropods 2 NONCE`. The key of the connection is
HMAC-SHA256(secret, purpose | listener's nonce | connector's nonce). The connector sends its request
and the listener its answer, each as a line `MAC JSON`, where MAC = HMAC-SHA256(key, who says it |
JSON) as hexadecimal. The secret never crosses the wire; a replayed, reflected or altered message,
one for another purpose and one of another cluster all fail. Nothing is encrypted, and no secrets
are sent.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from zeropods.errors import UserError

DEFAULT_PORT = 6_000
"""Port of the master in the original project."""
ANY_PORT = 0
"""Stands for a free port that the kernel chooses."""
MAX_MESSAGE_BYTES = 65_536
"""Largest size of a line in bytes, proof included; a longer one is refused before it is parsed."""
SEND_SECONDS = 10.0
"""Seconds after which a peer that does not take its answer is given up."""
PROOF_SECONDS = 5.0
"""Seconds within which a peer has to prove itself to a server."""
GREETING_SECONDS = 5.0
"""Seconds within which a server has to greet, however long it may take to answer."""
CLOSE_SECONDS = 1.0
"""Seconds that a server which closes waits for connections that it has cut off."""
QUEUE = 4_096
"""Number of connections that the kernel keeps until they are accepted, as far as
`net.core.somaxconn` allows.

A further one gets no answer, and is tried again one, three and seven seconds later: too late for a
pod in a crowd.
"""
AT_ONCE = 16
"""Number of connections that are accepted before earlier ones have their turn to prove
themselves."""
UNPROVEN = 64
"""Number of connections that may be unproven at a time. A further one takes the place of the
oldest: an honest peer needs its place for milliseconds only, so that silent peers keep nobody
out."""

Message = dict[str, Any]
"""A JSON object."""
Agents = Sequence[tuple[str, int]]
"""Address and control port of each agent."""

LISTENER = b"L"
CONNECTOR = b"C"
"""Who says a message, in its proof."""
_GREETING = re.compile(rb"zeropods 2 ([0-9a-f]{32})\n")


class WireError(Exception):
    """The message is one line: the peer, and why there is no answer from it, or the error that it
    answered with."""


class RefusedError(WireError):
    """A peer's answer is an error."""


async def ask(
    address: str,
    port: int,
    secret: bytes,
    purpose: str,
    request: Message,
    seconds: float,
    greeting_seconds: float = GREETING_SECONDS,
) -> Message:
    """Send a request to a server over a new connection, and return the answer.

    Args:
        purpose: what the connection is for, as the server has it; both prove it to each other.
        seconds: time for the answer, counted from the server's greeting.
        greeting_seconds: time to connect and to be greeted, if that is less.

    Raises:
        WireError: there is no answer in time, the connection fails, or the server does not prove
            that it knows the secret.
    """
    peer = f"{address}:{port}"
    async with _bounded(peer, min(seconds, greeting_seconds)) as time_limit:
        reader, writer = await asyncio.open_connection(address, port, limit=MAX_MESSAGE_BYTES)
        connection = _Connection(peer, reader, writer)
        try:
            await connection.agree(secret, purpose, listens=False)
            time_limit.reschedule(asyncio.get_running_loop().time() + seconds)
            connection.send(request)
            return await connection.receive()
        finally:
            # The answer is here, or nobody waits for it any more: closing in order, which takes
            # time, would save nothing.
            connection.writer.transport.abort()


def control_purpose(address: str, control_port: int) -> str:
    """The purpose of a connection to one agent: a proof made for it is not valid for another, even
    if passed on."""
    return f"control {address}:{control_port}"


async def ask_agents(
    agents: Agents, secret: bytes, request: Message, seconds: float
) -> list[Message | WireError]:
    """Ask all agents the same at once; return their answers in the order of the agents, with a
    `WireError` in the place of one that gave none or answered with an error."""
    return await _ask_each(agents, secret, [request] * len(agents), seconds)


async def _ask_each(
    agents: Agents, secret: bytes, requests: Sequence[Message], seconds: float
) -> list[Message | WireError]:
    """Ask each agent something of its own, all at once; return what `ask_agents` does."""

    async def ask_one(agent: tuple[str, int], request: Message) -> Message | WireError:
        try:
            return await ask_agent(*agent, secret, request, seconds)
        except WireError as error:
            return error

    pairs = zip(agents, requests, strict=True)
    return await asyncio.gather(*(ask_one(agent, request) for agent, request in pairs))


async def ask_agent(
    address: str, port: int, secret: bytes, request: Message, seconds: float
) -> Message:
    """The answer of one agent; `WireError` where it gives none, `RefusedError` where its answer is
    an error."""
    answer = await ask(address, port, secret, control_purpose(address, port), request, seconds)
    if "error" in answer:
        raise RefusedError(f"{address}:{port}: {answer['error']}")
    return answer


def ask_all(
    agents: Agents, secret: bytes, request: Message, seconds: float
) -> list[Message | WireError]:
    """`ask_agents` in a thread with its own event loop, since in a notebook the calling thread runs
    one already."""
    return ask_each(agents, secret, [request] * len(agents), seconds)


def ask_each(
    agents: Agents, secret: bytes, requests: Sequence[Message], seconds: float
) -> list[Message | WireError]:
    """Ask each agent something of its own, all at once; else as `ask_all`."""
    with ThreadPoolExecutor(1, thread_name_prefix="ask_all") as thread:
        return thread.submit(
            lambda: asyncio.run(_ask_each(agents, secret, requests, seconds))
        ).result()


# The server, which runs on the pods and on their master


class Server:
    """A server that answers peers which prove that they know the secret; others are dropped after
    `PROOF_SECONDS`.

    Args:
        purpose: what its connections are for; a proof that was made for another purpose fails.
        answer: takes a request and the peer's address, and returns the answer to send.
        crowd: number of peers that may come at the same time; as many may be unproven in addition
            to `UNPROVEN`.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: str,
        answer: Callable[[Message, str], Awaitable[Message]],
        crowd: int = 0,
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self._answer = answer
        self._limit = UNPROVEN + crowd
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all connections."""
        self._unproven: list[asyncio.Task[None]] = []
        """Tasks of the connections that are unproven, oldest first."""
        self._server: asyncio.Server | None = None

    async def open(self, sock: socket.socket) -> None:
        """Serve the connections of a listening socket, which belongs to the server from now on."""
        self._server = await asyncio.start_server(
            self._serve, sock=sock, limit=MAX_MESSAGE_BYTES, backlog=AT_ONCE
        )
        # asyncio takes one number for both the kernel's queue and the connections that it accepts
        # at once; this sets the queue alone.
        sock.listen(QUEUE)

    async def close(self, seconds: float = 0.0) -> None:
        """Stop listening, and drop peers that are unproven; requests that have not been answered
        `seconds` later are cut off."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._unproven:
            task.cancel()
        if self._tasks and seconds:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: prove and be proven to, receive the request, send the answer."""
        task = asyncio.current_task()
        # asyncio runs this as a task for each connection.
        assert task is not None
        self._tasks.add(task)
        while len(self._unproven) >= self._limit:
            self._unproven.pop(0).cancel()
        self._unproven.append(task)
        peer_name = writer.get_extra_info("peername")
        peer = str(peer_name[0]) if peer_name else "a lost connection"
        connection = _Connection(peer, reader, writer)
        try:
            # A peer that fails is dropped without a word. This task is cancelled by `close`, or by
            # one connection too many; Python 3.11 would log that with a traceback.
            with suppress(WireError, asyncio.CancelledError):
                async with _bounded(peer, PROOF_SECONDS):
                    await connection.agree(self._secret, self._purpose, listens=True)
                    request = await connection.receive()
                self._unproven.remove(task)
                answer = await self._answer(request, peer)
                async with _bounded(peer, SEND_SECONDS):
                    connection.send(answer)
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._tasks.discard(task)
            if task in self._unproven:
                self._unproven.remove(task)
            writer.transport.abort()


def listening_socket(address: str, port: int | None) -> socket.socket:
    """A TCP socket that listens on an IPv4 address of this machine.

    Args:
        port: None for 6000, or any free port where that is taken; a port that is asked for is not
            replaced.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    candidates = (DEFAULT_PORT, ANY_PORT) if port is None else (port,)
    reason: object = None
    for candidate in candidates:
        try:
            # With SO_REUSEADDR: a master that ended a moment ago leaves connections in TIME_WAIT,
            # which nobody uses.
            return socket.create_server((address, candidate))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
    place = f"{address}:{port or 'any port'}"
    remedy = "name another port, or an address of this machine"
    raise UserError(f"{place}: cannot listen there ({reason}); {remedy}")


class _Connection:
    """What both sides do: exchange nonces, from which the connection's key is derived, then send
    one message each."""

    def __init__(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.peer = peer
        self.reader = reader
        self.writer = writer

    async def agree(self, secret: bytes, purpose: str, *, listens: bool) -> None:
        """Exchange greetings, and derive the key of the connection from their nonces; `WireError`
        where the peer speaks another protocol.

        Args:
            listens: whether this side is the listener, not the connector.
        """
        nonce = secrets.token_hex(16).encode()
        self.writer.write(b"zeropods 2 " + nonce + b"\n")
        greeting = _GREETING.fullmatch(await self.reader.readuntil(b"\n"))
        if greeting is None:
            raise WireError(f"{self.peer}: malformed: not a greeting in this protocol")
        other_nonce = greeting[1]
        if listens:
            nonces = (nonce, other_nonce)
            self._sender = LISTENER
            self._other_sender = CONNECTOR
        else:
            nonces = (other_nonce, nonce)
            self._sender = CONNECTOR
            self._other_sender = LISTENER
        self._key = hmac.digest(secret, b"|".join([purpose.encode(), *nonces]), "sha256")

    def send(self, body: Message) -> None:
        text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        self.writer.write(self._proof(self._sender, text) + b" " + text + b"\n")

    async def receive(self) -> Message:
        """The other side's message; `WireError` where its proof is wrong."""
        line = await self.reader.readuntil(b"\n")
        proof, _, text = line.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(self._proof(self._other_sender, text), proof):
            reason = "a message that was not made with this cluster's secret"
            raise WireError(f"{self.peer}: bad proof: {reason}")
        body: Message = json.loads(text)
        return body

    def _proof(self, sender: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, sender + text, "sha256").hex().encode()


@asynccontextmanager
async def _bounded(peer: str, seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Give the block so many seconds, and raise a timeout, a lost connection and a line that is too
    long as `WireError`; the timeout that it yields can be rescheduled."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError:
        raise WireError(f"{peer}: timed out: nothing received in time") from None
    except asyncio.IncompleteReadError:
        raise WireError(f"{peer}: closed: the peer ended the connection") from None
    except asyncio.LimitOverrunError:
        raise WireError(
            f"{peer}: too large: a line of more than {MAX_MESSAGE_BYTES} bytes"
        ) from None
    except OSError as error:
        # asyncio puts its own message in place of the system's.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else "the connection is lost"
        raise WireError(f"{peer}: closed: {reason}") from None
