"""The pod's control port, and what its master asks there."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from zeropods.pods.leases import HAS_ENDED, Lifetime, RunEndedError
from zeropods.pods.processes import oom_kills
from zeropods.pods.wire import Channel, ChannelError, Unproven, accept, connect, listening_socket, serve

# Ask the agents of pods: status, renewals, the end of a run, the end of a pod.

Answer = dict[str, Any]


def purpose(address: str, control_port: int) -> str:
    """What a connection to one agent is for: a proof made for it is none for another, whoever passes it on."""
    return f"control {address}:{control_port}"


class AgentError(Exception):
    """One line: the agent did not answer in time, or refused."""


class AgentClient:
    """One agent; connects when it is first asked, and again after an error.

    Requests of several tasks go one after the other on one connection: ask for the end of a run, which
    takes its time, through a client of its own.
    """

    def __init__(self, address: str, control_port: int, secret: bytes) -> None:
        self._address = address
        self._port = control_port
        self._secret = secret
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()

    async def ask(self, request: Answer, seconds: float) -> Answer:
        """The agent's answer; `AgentError` where none came within `seconds`, or it is an `{"error"}`."""
        try:
            async with asyncio.timeout(seconds), self._turn:
                answer = await self._asked(request, seconds)
        except TimeoutError:
            raise AgentError(f"{self._place}: no answer to {request.get('do')!r} in {seconds:g} s") from None
        except (ChannelError, OSError) as error:
            raise AgentError(f"{self._place}: no answer to {request.get('do')!r}: {error}") from None
        if "error" in answer:
            raise AgentError(f"{self._place}: {answer['error']}")
        return answer

    async def close(self) -> None:
        """End the connection; a later question makes a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    @property
    def _place(self) -> str:
        return f"{self._address}:{self._port}"

    async def _asked(self, request: Answer, seconds: float) -> Answer:
        # Taken out while it is in use: after an interruption its next message would be the answer to another question.
        channel, self._channel = self._channel, None
        if channel is not None:
            try:
                return await self._asked_on(channel, request, seconds)
            except ChannelError:
                pass  # The agent closes connections that are silent for long; every request may be made twice.
        channel = await connect(self._address, self._port, self._secret, purpose(self._address, self._port), seconds)
        return await self._asked_on(channel, request, seconds)

    async def _asked_on(self, channel: Channel, request: Answer, seconds: float) -> Answer:
        try:
            answer = await channel.ask(request, seconds)
        except BaseException:
            await channel.close()
            raise
        self._channel = channel
        return answer


def ask_all(
    agents: Sequence[tuple[str, int]], secret: bytes, request: Answer, seconds: float
) -> list[Answer | AgentError]:
    """Ask all agents at once; answers in their order, an `AgentError` in the place of one that gave none.

    It has a thread with a loop of its own, since in a notebook the calling thread runs one already.

    Args:
        agents: (address, control port) of each.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ask_all") as thread:
        return thread.submit(lambda: asyncio.run(_ask_all(agents, secret, request, seconds))).result()


async def _ask_all(
    agents: Sequence[tuple[str, int]], secret: bytes, request: Answer, seconds: float
) -> list[Answer | AgentError]:
    return list(await asyncio.gather(*(_ask_once(agent, secret, request, seconds) for agent in agents)))


async def _ask_once(agent: tuple[str, int], secret: bytes, request: Answer, seconds: float) -> Answer | AgentError:
    client = AgentClient(*agent, secret)
    try:
        return await client.ask(request, seconds)
    except AgentError as error:
        return error
    finally:
        await client.close()


# The pod's control port: whoever has proven the cluster's secret asks, one object answers.

PROOF_SECONDS = 5.0
SILENT_SECONDS = 120.0
"""A connection on which nothing was asked for so long is closed; clients connect again."""
MAX_STRANGERS = 64
"""Connections that have proven nothing yet; one more costs the oldest its place."""
MAX_PROVEN = 512
"""Connections of the master; one more is dropped."""
MAX_SECONDS = 3_600.0
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ControlServer:
    """Answers for one pod.

    Args:
        about: `worker` and, once it is known, `cluster`: the head of each status.
    """

    def __init__(self, lifetime: Lifetime, secret: bytes, about: dict[str, str | None]) -> None:
        self._lifetime = lifetime
        self._secret = secret
        self._about = about
        self._server: asyncio.Server | None = None
        self._purpose = ""
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers = Unproven(MAX_STRANGERS)
        self._proven = 0
        self._requests: dict[str, Callable[[Answer], Awaitable[Answer]]] = {
            "status": self._status,
            "renew": self._renew,
            "renew_run": self._renew_run,
            "stop_run": self._stop_run,
            "stacks": self._stacks,
            "oom_kills": self._oom_kills,
            "end": self._end,
        }

    async def start(self, address: str) -> int:
        """Listen on a free port of this address; returns it."""
        listener = listening_socket(address, 0)
        port = int(listener.getsockname()[1])
        self._purpose = purpose(address, port)
        self._server = await serve(listener, self._serve)
        return port

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(ChannelError, asyncio.CancelledError):
                await self._converse(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._strangers.place(writer):
            channel = await accept(reader, writer, self._secret, self._purpose, PROOF_SECONDS)
            request = await channel.receive(PROOF_SECONDS)
        if self._proven >= MAX_PROVEN:
            return
        self._proven += 1
        try:
            while True:
                await self._answer(channel, request)
                request = await channel.receive(SILENT_SECONDS)
        finally:
            self._proven -= 1

    async def _answer(self, channel: Channel, request: Answer) -> None:
        try:
            asked = self._requests.get(_text(request, "do"))
            if asked is None:
                raise _RefusalError(f"do: {str(request['do'])[:40]!r}; expected one of {', '.join(self._requests)}")
            answer = await asked(request)
        except _RefusalError as refusal:
            answer = {"error": str(refusal)}
        if self._lifetime.lease is not None:
            # Afterwards, since a status says how long the pod was idle until it was asked.
            self._lifetime.lease.use(time.monotonic())
        await channel.send(answer)
        if request.get("do") == "end":
            self._lifetime.end("it was asked to", 0)

    async def _status(self, request: Answer) -> Answer:
        return {**self._about, **self._lifetime.status()}

    async def _renew(self, request: Answer) -> Answer:
        if self._lifetime.lease is not None:
            self._lifetime.lease.renew(time.monotonic())
        return await self._status(request)

    async def _renew_run(self, request: Answer) -> Answer:
        run = _run(request)
        try:
            answer = self._lifetime.runs.renew(run, _seconds(request, "seconds", least=0.1))
        except RunEndedError:
            raise _RefusalError(f"run {run} {HAS_ENDED}") from None
        self._lifetime.notice()
        return answer

    async def _stop_run(self, request: Answer) -> Answer:
        stopping = self._lifetime.runs.stop(_run(request), _seconds(request, "grace_seconds", least=0.0))
        self._lifetime.notice()
        return {"left": await stopping}

    async def _stacks(self, request: Answer) -> Answer:
        return {"asked": self._lifetime.runs.ask_for_stacks(_run(request))}

    async def _oom_kills(self, request: Answer) -> Answer:
        return {"oom_kills": oom_kills()}

    async def _end(self, request: Answer) -> Answer:
        return {"ending": True}


class _RefusalError(Exception):
    """What was wrong with a request."""


def _text(request: Answer, key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str):
        raise _RefusalError(f"{key}: missing, or no text")
    return value


def _run(request: Answer) -> str:
    run = _text(request, "run")
    if RUN_NAME.fullmatch(run) is None:
        raise _RefusalError(f"run: {run[:40]!r}; expected at most 100 letters, digits, '.', '_' and '-'")
    return run


def _seconds(request: Answer, key: str, least: float) -> float:
    value = request.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MAX_SECONDS:
        raise _RefusalError(f"{key}: {str(value)[:40]}; expected a number from {least:g} to {MAX_SECONDS:g}")
    return float(value)
