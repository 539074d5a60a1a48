"""Ask the agents of pods: their status, renewals of leases, the end of a run, the end of a pod."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from zeropods.pods.wire import Channel, ChannelError, Message, connect


def purpose(address: str, control_port: int) -> str:
    """What a connection to one agent is for: a proof made for it is none for another, whoever passes it on."""
    return f"control {address}:{control_port}"


class AgentError(Exception):
    """One line: the agent did not answer in time, or refused."""


class AgentClient:
    """One agent on one connection, which is made when it is first asked, and again after an error.

    Only one task at a time may ask. What takes its time, such as the end of a run, goes through a client of its own.
    """

    def __init__(self, address: str, control_port: int, secret: bytes) -> None:
        self._address = address
        self._port = control_port
        self._secret = secret
        self._channel: Channel | None = None

    async def ask(self, request: Message, seconds: float) -> Message:
        """The agent's answer; `AgentError` where none came within `seconds`, or it is an `{"error"}`."""
        place = f"{self._address}:{self._port}"
        try:
            async with asyncio.timeout(seconds):
                answer = await self._asked(request, seconds)
        except TimeoutError:
            raise AgentError(f"{place}: no answer to {request.get('do')!r} in {seconds:g} s") from None
        except ChannelError as error:
            raise AgentError(f"{place}: no answer to {request.get('do')!r}: {error}") from None
        if "error" in answer:
            raise AgentError(f"{place}: {answer['error']}")
        return answer

    async def close(self) -> None:
        """End the connection; a later question makes a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _asked(self, request: Message, seconds: float) -> Message:
        # Taken out while it is in use: after an interruption its next message would be the answer to another question.
        channel, self._channel = self._channel, None
        answer = None
        if channel is not None:
            # The agent closes connections that are silent for long; every request may be made twice.
            with suppress(ChannelError):
                answer = await channel.ask(request, seconds)
        if channel is None or answer is None:
            this = purpose(self._address, self._port)
            channel = await connect(self._address, self._port, self._secret, this, seconds)
            answer = await channel.ask(request, seconds)
        self._channel = channel
        return answer


def ask_all(
    agents: Sequence[tuple[str, int]], secret: bytes, request: Message, seconds: float
) -> list[Message | AgentError]:
    """Ask all agents at once; answers in their order, an `AgentError` in the place of one that gave none.

    It has a thread with a loop of its own, since in a notebook the calling thread runs one already.

    Args:
        agents: (address, control port) of each.
    """

    async def ask(address: str, port: int) -> Message | AgentError:
        client = AgentClient(address, port, secret)
        try:
            return await client.ask(request, seconds)
        except AgentError as error:
            return error
        finally:
            await client.close()

    async def gathered() -> list[Message | AgentError]:
        return await asyncio.gather(*(ask(*agent) for agent in agents))

    with ThreadPoolExecutor(1, thread_name_prefix="ask_all") as thread:
        return thread.submit(lambda: asyncio.run(gathered())).result()
