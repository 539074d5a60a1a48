"""The pod's side of the rendezvous: report in, wait to be told, serve, say so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.rendezvous.registration import Registration, check_answer, plain_line
from zeropods.pods.wire.channel import Channel, ChannelError, connect

PURPOSE = "register"
CONNECT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0


async def register(
    master: tuple[str, int],
    secret: bytes,
    registration: Registration,
    seconds: float,
    serve: Callable[[dict[str, Any]], Awaitable[None]],
) -> dict[str, Any]:
    """Register with the master and return its answer, once `serve(answer)` is done and the master was told so.

    Args:
        master: address and port. It may come up later than this pod, or drop a connection: both are tried again.
        secret: of the cluster; proves both sides to each other and is never sent.
        seconds: until the master's answer has to be there.
        serve: starts the pod's sshd; a `UserError` of it is told to the master and raised again.

    Raises:
        UserError: no answer in time, refused, or the master gave up while the pod began to serve.
    """
    channel, answer = await _answered(master, secret, registration, seconds)
    try:
        await _serve(channel, answer, serve)
    except ChannelError as error:
        raise UserError(f"{_shown(master)}: the master gave up: {error}; start the cluster again") from None
    finally:
        await channel.close()
    return answer


async def _answered(
    master: tuple[str, int], secret: bytes, registration: Registration, seconds: float
) -> tuple[Channel, dict[str, Any]]:
    """A connection on which the master has answered; tried again until `seconds` are over."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await _ask_once(master, secret, registration, deadline)
        except ChannelError as error:
            if clock() + pause >= deadline:
                raise UserError(
                    f"{_shown(master)}: no answer of the master in {seconds:g} s ({error}); is it up and reachable, "
                    "and has this pod its cluster's secret?"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _ask_once(
    master: tuple[str, int], secret: bytes, registration: Registration, deadline: float
) -> tuple[Channel, dict[str, Any]]:
    clock = asyncio.get_running_loop().time
    channel = await connect(*master, secret, PURPOSE, min(CONNECT_SECONDS, deadline - clock()))
    try:
        answer = await channel.ask(registration.to_json(), deadline - clock())
        if "refused" in answer:
            raise UserError(f"{_shown(master)}: refused by the master: {plain_line(answer['refused'])}")
        return channel, check_answer(answer)
    except BaseException:
        await channel.close()
        raise


async def _serve(channel: Channel, answer: dict[str, Any], serve: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    try:
        await serve(answer)
    except UserError as error:
        await channel.send({"failed": plain_line(error)})
        raise
    await channel.send({"ready": True})


def _shown(master: tuple[str, int]) -> str:
    return f"{master[0]}:{master[1]}"
