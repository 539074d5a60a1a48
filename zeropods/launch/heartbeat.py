"""A run's lease on every pod, renewed by its supervisor; and how long each pod has been silent."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.pods.leases import HAS_ENDED

if TYPE_CHECKING:
    from zeropods.pods.control import AgentClient
    from zeropods.pods.state import Pod


LEASE_SECONDS = 10.0
"""A pod ends the run's processes when its supervisor was silent for so long."""
BEAT_SECONDS = 1.5
ANSWER_SECONDS = 3.0
SILENT_SECONDS = 8.0
"""A pod that has not answered for so long counts as lost."""
OPEN_SECONDS = 5.0
STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Pulse:
    """What is known of a run on one pod."""

    pod: Pod
    processes: int
    """Processes of the run at the last answer."""
    most: int
    """Most processes of the run that any answer told of."""
    absent_seconds: float | None
    """Since the pod last had a process of the run; None where it had none yet."""
    silent_seconds: float
    """Since the last answer."""
    error: str | None = None
    """Why the last question got no answer."""
    refused: bool = False
    """Whether the pod answers that it has ended the run."""


class Heartbeat:
    """Renews the lease of a run on its pods until it is closed. A context manager.

    Entering opens the run on every pod, and raises `UserError` naming the pods that do not answer.
    A supervisor that is killed renews nothing: the agents then end the run by themselves.
    """

    def __init__(self, pods: Sequence[Pod], secret: bytes, run: str) -> None:
        self.pods = tuple(pods)
        self.run = run
        self._secret = secret
        self._answers: dict[str, tuple[float, dict[str, Any]]] = {}
        self._errors: dict[str, str] = {}
        self._oom_kills: dict[str, tuple[int, int]] = {}
        """First and last count of each pod."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        dumb = [pod for pod in self.pods if pod.name not in self._answers]
        if dumb:
            self.__exit__()
            told = "; ".join(f"{pod.name} ({pod.address}): {self._errors[pod.name]}" for pod in dumb)
            raise UserError(f"{told}: no agent answers; bring the pods down and up again")
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(ANSWER_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def pulses(self) -> list[Pulse]:
        """How the run stands on each pod."""
        now = time.monotonic()
        return [self._pulse(pod, now) for pod in self.pods]

    def forgive(self) -> None:
        """Count silence from now on: this process did not run for a while, and asked nobody."""
        now = time.monotonic()
        self._answers = {name: (now, answer) for name, (_, answer) in self._answers.items()}

    def stop_run(self, grace_seconds: float) -> dict[str, str]:
        """End the run on every pod; returns why by the name of each pod that did not say it is done."""
        return asyncio.run_coroutine_threadsafe(self._stop_run(grace_seconds), self._loop).result()

    def ask_for_stacks(self) -> None:
        """Let every rank that answers write its stacks."""
        asyncio.run_coroutine_threadsafe(self._ask_all({"do": "stacks", "run": self.run}), self._loop).result()

    def pods_out_of_memory(self) -> frozenset[str]:
        """Names of the pods where the kernel has ended a process for want of memory; known once the run is stopped."""
        return frozenset(name for name, (first, last) in self._oom_kills.items() if last > first)

    def _pulse(self, pod: Pod, now: float) -> Pulse:
        at, answer = self._answers[pod.name]
        last = answer.get("last_seen_seconds")
        return Pulse(
            pod=pod,
            processes=answer["processes"],
            most=answer["seen"],
            absent_seconds=None if last is None else last + (now - at),
            silent_seconds=now - at,
            error=self._errors.get(pod.name),
            refused=HAS_ENDED in self._errors.get(pod.name, ""),
        )

    async def _open(self) -> None:
        clients = {pod.name: self._client(pod) for pod in self.pods}
        await asyncio.gather(*(self._renew(name, client, OPEN_SECONDS) for name, client in clients.items()))
        self._tasks = [self._loop.create_task(self._beat(name, client)) for name, client in clients.items()]

    async def _beat(self, name: str, client: AgentClient) -> None:
        try:
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                await self._renew(name, client, ANSWER_SECONDS)
        finally:
            await client.close()

    async def _renew(self, name: str, client: AgentClient, seconds: float) -> None:
        from zeropods.pods.control import AgentError

        try:
            request = {"do": "renew", "run": self.run, "seconds": LEASE_SECONDS}
            answer = await client.ask(request, seconds)
            self._answers[name] = time.monotonic(), answer
            self._note_oom_kills(name, answer)
            self._errors.pop(name, None)
        except AgentError as error:
            self._errors[name] = str(error)

    async def _stop_run(self, grace_seconds: float) -> dict[str, str]:
        await self._end_tasks()
        request = {"do": "end", "run": self.run, "grace_seconds": grace_seconds}
        reasons = await asyncio.gather(*(self._stop_on(pod, request, grace_seconds) for pod in self.pods))
        return {pod.name: why for pod, why in zip(self.pods, reasons, strict=True) if why is not None}

    def _note_oom_kills(self, name: str, answer: dict[str, Any]) -> None:
        count = answer["oom_kills"]
        if count is not None:
            first, _ = self._oom_kills.get(name, (count, count))
            self._oom_kills[name] = first, count

    async def _ask_all(self, request: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The answers of the pods that give one in time."""
        pods = [pod for pod in self.pods if not self._is_silent(pod)]
        answers = await asyncio.gather(*(self._asked(pod, request) for pod in pods))
        return {pod.name: answer for pod, answer in zip(pods, answers, strict=True) if answer is not None}

    async def _asked(self, pod: Pod, request: dict[str, Any]) -> dict[str, Any] | None:
        from zeropods.pods.control import AgentError

        client = self._client(pod)
        try:
            return await client.ask(request, ANSWER_SECONDS)
        except AgentError:
            return None
        finally:
            await client.close()

    def _is_silent(self, pod: Pod) -> bool:
        return pod.name not in self._answers or self._pulse(pod, time.monotonic()).silent_seconds > ANSWER_SECONDS

    async def _stop_on(self, pod: Pod, request: dict[str, Any], grace_seconds: float) -> str | None:
        from zeropods.pods.control import AgentError

        client = self._client(pod)
        try:
            seconds = ANSWER_SECONDS if self._is_silent(pod) else grace_seconds + STOP_SECONDS
            self._note_oom_kills(pod.name, await client.ask(request, seconds))
        except AgentError as error:
            return str(error)
        finally:
            await client.close()
        return None

    async def _close(self) -> None:
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def _client(self, pod: Pod) -> AgentClient:
        from zeropods.pods.control import AgentClient

        return AgentClient(pod.address, pod.control_port, self._secret)
