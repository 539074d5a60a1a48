"""The master's side of registrations, on an event loop: prove, admit, tell all, hear that they are ready."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.rendezvous.listener import serve
from zeropods.pods.rendezvous.register import PURPOSE
from zeropods.pods.rendezvous.registration import Answer, Registration, plain_line
from zeropods.pods.rendezvous.roster import Entry, Roster, Stage, SurplusError
from zeropods.pods.wire.channel import Channel, ChannelError, accept
from zeropods.pods.wire.unproven import Unproven

FAREWELL_SECONDS = 2.0
CUT_SECONDS = 0.05


class Reception:
    """Serves all who connect; `settled` is called once, when all pods are ready or one error has ended it.

    Everything here runs on one event loop, so that nothing needs a lock; the loop is the reception's own.
    """

    def __init__(
        self,
        secret: bytes,
        answer: Answer,
        roster: Roster,
        *,
        strangers: int,
        handshake_seconds: float,
        settled: Callable[[], object],
    ) -> None:
        self.roster = roster
        self.rejected = 0
        """Connections that proved nothing."""
        self.failure: UserError | None = None
        self.ssh_port: int | None = None
        self._secret = secret
        self._answer = answer
        self._handshake_seconds = handshake_seconds
        self._settled = settled
        self._server: asyncio.Server | None = None
        self._is_settled = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._strangers = Unproven(strangers)
        self._channels: dict[Entry, Channel] = {}

    async def open(self, listener: socket.socket) -> None:
        """Serve the connections of a listening socket, which is the reception's from now on."""
        self._server = await serve(listener, self._attend)

    async def close(self) -> None:
        """Stop accepting, tell the pods that still wait, end all connections and the listener."""
        if self._server is None:
            return
        # A server that closes at once forgets, open, the connections that it has just accepted (Python 3.11.7).
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        self._is_settled = True
        waiting = [entry for entry in self.roster.entries() if entry.stage is not Stage.READY]
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._tell(waiting, {"refused": "the cluster did not come up"})
        # Cut, not cancelled: asyncio logs a traceback for a connection whose task was cancelled (Python 3.11.7).
        # Again and again, since connections that were just accepted get their task only now.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.wait(others, timeout=CUT_SECONDS)
        self._server.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._serve(*await self._prove(reader, writer))
        except ChannelError:
            self.rejected += 1
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Channel, dict[str, Any]]:
        """A connection and its first message, which proves that it knows the secret."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._handshake_seconds
        with self._strangers.place(writer):
            channel = await accept(reader, writer, self._secret, PURPOSE, deadline - clock())
            return channel, await channel.receive(deadline - clock())

    async def _serve(self, channel: Channel, body: dict[str, Any]) -> None:
        """Admit a pod, tell all if it was the last one, and hear what it says."""
        try:
            entry = await self._admit(channel, body)
        except (UserError, SurplusError) as error:
            if isinstance(error, UserError):
                self._settle(error)
            await self._tell_one(channel, {"refused": str(error)})
            await channel.close()
            return
        if self.roster.is_full() and self.ssh_port is None and not self._is_settled:
            await self._tell_all()
        try:
            # gather's deadline bounds this wait, and close() ends it.
            self._heard(entry, await channel.receive(math.inf))
        except ChannelError as error:
            self._lost(entry, error)
        finally:
            del self._channels[entry]
            await channel.close()

    async def _admit(self, channel: Channel, body: dict[str, Any]) -> Entry:
        try:
            registration = Registration.from_json(body)
        except UserError as error:
            raise UserError(f"pod at {channel.peer}: {error}") from None
        entry, before = self.roster.admit(registration)
        self._channels[entry] = channel
        if before in self._channels:
            await self._channels[before].close()
        return entry

    async def _tell_all(self) -> None:
        try:
            self.ssh_port = self.roster.choose_ssh_port()
        except UserError as error:
            self._settle(error)
            return
        entries = self.roster.entries()
        for entry in entries:
            entry.stage = Stage.TOLD
        await self._tell(entries, self._answer.to_json(self.ssh_port))

    async def _tell(self, entries: list[Entry], body: dict[str, Any]) -> None:
        channels = [self._channels[entry] for entry in entries if entry in self._channels]
        await asyncio.gather(*(self._tell_one(channel, body) for channel in channels))

    async def _tell_one(self, channel: Channel, body: dict[str, Any]) -> None:
        """A pod that is gone is found by the task that receives from it."""
        with suppress(ChannelError):
            await channel.send(body)

    def _lost(self, entry: Entry, error: ChannelError) -> None:
        if entry.stage is Stage.REGISTERED:
            self.roster.take_out(entry)
        else:
            self._settle(UserError(f"{entry.registration}: lost before its sshd was up ({error}); see the pod's log"))

    def _heard(self, entry: Entry, said: dict[str, Any]) -> None:
        if "failed" in said:
            self._settle(UserError(f"{entry.registration}: {plain_line(said['failed'])}"))
        elif said != {"ready": True} or entry.stage is not Stage.TOLD:
            self._settle(UserError(f"{entry.registration}: said {plain_line(said)}; is its zeropods another version?"))
        elif self.roster.make_ready(entry):
            self._settle(None)

    def _settle(self, failure: UserError | None) -> None:
        """The first word counts: a failure after success, or after another one, changes nothing."""
        if not self._is_settled:
            self._is_settled = True
            self.failure = failure
            self._settled()
