"""Ask the agents of pods: status, renewals, the end of a run, the end of a pod."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zeropods.pods.wire.channel import Channel, ChannelError, connect

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
