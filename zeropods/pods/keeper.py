"""Keeps the kernel leases of the clusters that this process started: when it is gone, nobody renews them."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from zeropods.pods.agent.control import AgentClient, AgentError

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster
    from zeropods.pods.state import Pod

RENEW_SECONDS = 5.0
RENEWALS_PER_LEASE = 5
"""At least: a few may be lost before the lease is."""

_keepers: dict[str, Keeper] = {}
"""By the name of the cluster."""


class Keeper:
    """A thread that renews the lease of one cluster on all of its pods.

    It has a loop of its own, since a notebook's cell may keep the kernel's loop for hours.
    """

    def __init__(self, cluster: Cluster, *, end_at_exit: bool) -> None:
        self.cluster = cluster
        self.end_at_exit = end_at_exit
        self._pause = min(RENEW_SECONDS, cluster.settings.lease_seconds / RENEWALS_PER_LEASE)
        self._secret = cluster.secret
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="zeropods-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no longer."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(2 * RENEW_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._renew_all())
        finally:
            self._loop.close()

    async def _renew_all(self) -> None:
        # Each at its own pace: one that does not answer must not cost the others their lease.
        tasks = [asyncio.create_task(self._renew(*agent)) for agent in self.cluster.agents]
        await self._stopped.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew(self, address: str, control_port: int) -> None:
        client = AgentClient(address, control_port, self._secret)
        try:
            while True:
                # Who uses a pod that is lost finds that out; this only has to go on asking.
                with suppress(AgentError):
                    await client.ask({"do": "renew"}, RENEW_SECONDS)
                await asyncio.sleep(self._pause)
        finally:
            await client.close()


def hold(cluster: Cluster, *, end_at_exit: bool) -> None:
    """Renew a cluster's lease until it is released or this process ends.

    Args:
        end_at_exit: take it down when this process ends in order.
    """
    known = _keepers.get(cluster.name)
    if known and known.cluster.pods == cluster.pods:
        return
    if known:
        known.stop()
    _keepers[cluster.name] = Keeper(cluster, end_at_exit=end_at_exit)
    atexit.unregister(_end_all)
    atexit.register(_end_all, os.getpid())


def release(name: str, pods: tuple[Pod, ...] | None = None) -> None:
    """Renew a cluster's lease no longer; only if it has these pods, where they are given."""
    known = _keepers.get(name)
    if known and (pods is None or known.cluster.pods == pods):
        _keepers.pop(name).stop()


def _end_all(owner: int) -> None:
    # A forked child has the list, but not the clusters.
    if os.getpid() != owner:
        return
    from zeropods.pods.removal import take_down

    for keeper in list(_keepers.values()):
        if keeper.end_at_exit:
            take_down(keeper.cluster.name, keeper.cluster.pods, ask=False)
