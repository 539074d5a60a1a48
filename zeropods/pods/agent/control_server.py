"""The pod's control port: whoever has proven the cluster's secret asks, one object answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from zeropods.pods.agent.control import purpose
from zeropods.pods.agent.leases import HAS_ENDED, RunEndedError
from zeropods.pods.agent.lifetime import Lifetime
from zeropods.pods.oom_kills import oom_kills
from zeropods.pods.rendezvous.listener import listening_socket, serve
from zeropods.pods.wire.channel import Channel, ChannelError, accept
from zeropods.pods.wire.unproven import Unproven

PROOF_SECONDS = 5.0
SILENT_SECONDS = 120.0
"""A connection on which nothing was asked for so long is closed; clients connect again."""
MAX_STRANGERS = 64
"""Connections that have proven nothing yet; one more costs the oldest its place."""
MAX_PROVEN = 512
"""Connections of the master; one more is dropped."""
MAX_SECONDS = 3_600.0
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Answer = dict[str, Any]


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
