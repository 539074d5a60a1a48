"""A run's lease on every pod, renewed by its supervisor; and how long each pod has been silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch.outcome import PodState
from zeropods.pods.leases import HAS_ENDED
from zeropods.pods.wire import AgentError, ask_all

if TYPE_CHECKING:
    from zeropods.pods.rendezvous import Pod

LEASE_SECONDS = 10.0
"""A pod ends the run's processes when its supervisor was silent for so long."""
RENEW_SECONDS = 1.5
ANSWER_SECONDS, OPEN_SECONDS = 3.0, 5.0
STOP_SECONDS = 15.0
"""How long a pod may take to end a run, after the ranks' grace."""


class RunLease:
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
        self._closed = threading.Event()

    def __enter__(self) -> RunLease:
        self._renew(OPEN_SECONDS)
        dumb = [pod for pod in self.pods if pod.name not in self._answers]
        if dumb:
            told = "; ".join(f"{pod.name} ({pod.address}): {self._errors[pod.name]}" for pod in dumb)
            raise UserError(f"{told}: no agent answers; bring the pods down and up again")
        threading.Thread(target=self._keep, name="run lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def states(self) -> list[PodState]:
        """How the run stands on each pod."""
        now = time.monotonic()
        return [self._state(pod, now) for pod in self.pods]

    def forgive(self) -> None:
        """Count silence from now on: this process did not run for a while, and asked nobody."""
        now = time.monotonic()
        self._answers = {name: (now, answer) for name, (_, answer) in self._answers.items()}

    def stop_run(self, grace_seconds: float) -> dict[str, str]:
        """End the run on every pod; returns why by the name of each pod that did not say it is done."""
        self._closed.set()
        request = {"do": "end", "run": self.run, "grace_seconds": grace_seconds}
        answering = self._answering()
        silent = [pod for pod in self.pods if pod not in answering]
        with ThreadPoolExecutor(2) as threads:
            long = threads.submit(self._ask, answering, request, grace_seconds + STOP_SECONDS)
            told = {**self._ask(silent, request, ANSWER_SECONDS), **long.result()}
        self._note_oom_kills(told)
        return {name: str(answer) for name, answer in told.items() if isinstance(answer, AgentError)}

    def ask_for_stacks(self) -> None:
        """Let every rank that answers write its stacks."""
        self._ask(self._answering(), {"do": "stacks", "run": self.run}, ANSWER_SECONDS)

    def pods_out_of_memory(self) -> frozenset[str]:
        """Names of the pods where the kernel has ended a process for want of memory; known once the run is stopped."""
        return frozenset(name for name, (first, last) in self._oom_kills.items() if last > first)

    def _keep(self) -> None:
        while not self._closed.wait(RENEW_SECONDS):
            self._renew(ANSWER_SECONDS)

    def _renew(self, seconds: float) -> None:
        request = {"do": "renew", "run": self.run, "seconds": LEASE_SECONDS}
        told = self._ask(self.pods, request, seconds)
        self._note_oom_kills(told)
        for name, answer in told.items():
            if isinstance(answer, AgentError):
                self._errors[name] = str(answer)
            else:
                self._answers[name] = time.monotonic(), answer
                self._errors.pop(name, None)

    def _note_oom_kills(self, told: dict[str, dict[str, Any] | AgentError]) -> None:
        for name, answer in told.items():
            if not isinstance(answer, AgentError) and answer["oom_kills"] is not None:
                first, _ = self._oom_kills.get(name, (answer["oom_kills"], 0))
                self._oom_kills[name] = first, answer["oom_kills"]

    def _ask(
        self, pods: Sequence[Pod], request: dict[str, Any], seconds: float
    ) -> dict[str, dict[str, Any] | AgentError]:
        answers = ask_all([(pod.address, pod.control_port) for pod in pods], self._secret, request, seconds)
        return {pod.name: answer for pod, answer in zip(pods, answers, strict=True)}

    def _answering(self) -> list[Pod]:
        """Pods that answered when they were last asked."""
        return [pod for pod in self.pods if pod.name not in self._errors]

    def _state(self, pod: Pod, now: float) -> PodState:
        at, answer = self._answers[pod.name]
        last, error = answer.get("last_seen_seconds"), self._errors.get(pod.name)
        return PodState(
            pod=pod,
            processes=answer["processes"],
            most=answer["seen"],
            absent_seconds=None if last is None else last + (now - at),
            silent_seconds=now - at,
            error=error,
            refused=error is not None and HAS_ENDED in error,
        )
