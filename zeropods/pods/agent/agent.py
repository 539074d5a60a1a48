"""The agent of a pod: it registers, starts its sshd, and sleeps; whatever ran under it ends with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.agent.census import takes_sigterm
from zeropods.pods.agent.control_server import ControlServer
from zeropods.pods.agent.descendants import Tree
from zeropods.pods.agent.leases import IDLE, KERNEL, ClusterLease
from zeropods.pods.agent.lifetime import Ending, Lifetime
from zeropods.pods.agent.orders import Orders
from zeropods.pods.agent.runs import send_all
from zeropods.pods.agent.sshd import Sshd, find_sshd
from zeropods.pods.agent.sshd_config import HOST_KEY
from zeropods.pods.agent.subreaper import become_subreaper, end_descendants, end_with_parent, reap
from zeropods.pods.keys import make_key
from zeropods.pods.processes import is_there
from zeropods.pods.rendezvous.register import register
from zeropods.pods.rendezvous.registration import Registration
from zeropods.ports import is_free

GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL, when the pod ends."""
KILL_SECONDS = 5.0
PAUSE_SECONDS = 0.1
COUNT_SECONDS = 30.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_agent(orders: Orders, folder: Path, warden: int) -> int:
    """Be the agent until the pod ends; returns the exit status.

    Signals are blocked when this is called, and handled from when the agent can heed them.

    Args:
        folder: private and empty; for keys, configuration and log of sshd.
        warden: the parent. Its end ends this process, as SIGTERM does.

    Raises:
        UserError: no registration, or no sshd; nothing is left running then.
    """
    try:
        # A signal to the warden's group must not kill both: one of them has to clean up.
        os.setsid()
        end_with_parent(warden, signal.SIGTERM)
        become_subreaper()
        find_sshd()
        host_key = make_key(folder / HOST_KEY, "")
        slots = orders.slots or _count_slots()
        return asyncio.run(_Agent(orders, folder, host_key, slots).live())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Agent:
    def __init__(self, orders: Orders, folder: Path, host_key: str, slots: int) -> None:
        self._orders = orders
        self._host_key = host_key
        self._slots = slots
        self._sshd = Sshd(folder, orders.address)
        self._lifetime = Lifetime(lambda: self._sshd.pid)
        self._about: dict[str, str | None] = {"worker": orders.worker, "cluster": None}
        self._control = ControlServer(self._lifetime, orders.secret, self._about)

    async def live(self) -> int:
        self._heed_signals()
        watching = asyncio.create_task(self._lifetime.run())
        try:
            ending = await self._serve(watching)
        finally:
            watching.cancel()
            await self._end_everything()
        self._say(f"ended: {ending.reason}")
        return ending.status

    async def _serve(self, watching: asyncio.Task[Ending]) -> Ending:
        registering = asyncio.create_task(self._register())
        try:
            await asyncio.wait({registering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                answer = await registering
                self._say(f"ready, ssh port {answer['ssh_port']}")
        finally:
            registering.cancel()
        return await watching

    async def _register(self) -> dict[str, Any]:
        orders = self._orders
        registration = Registration(
            worker=orders.worker,
            address=orders.address,
            hostname=socket.gethostname(),
            slots=self._slots,
            host_key=self._host_key,
            control_port=await self._control.start(orders.address),
            free_ports=tuple(port for port in orders.ssh_ports if is_free(orders.address, port)),
        )
        return await register(orders.master, orders.secret, registration, orders.register_seconds, self._obey)

    async def _obey(self, answer: dict[str, Any]) -> None:
        kind, seconds = answer["lease"], answer["lease_seconds"]
        if kind not in (KERNEL, IDLE) or not isinstance(seconds, int | float) or not seconds > 0:
            raise UserError(f"lease: {kind!r} of {seconds!r} s; expected {KERNEL} or {IDLE}, of some seconds")
        if answer["ssh_port"] not in self._orders.ssh_ports:
            raise UserError(f"ssh_port: {answer['ssh_port']}; was not proposed to this pod")
        self._about["cluster"] = answer["cluster"]
        await self._sshd.start(answer["ssh_port"], answer["authorized_key"])
        self._lifetime.lease = ClusterLease(kind, seconds, time.monotonic())
        self._lifetime.notice()

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for signum in SIGNALS:
            loop.add_signal_handler(signum, self._lifetime.end, f"it got {signum.name}", 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *SIGNALS})

    def _reap(self) -> None:
        ended, _ = reap()
        if self._sshd.pid in ended:
            status = ended[self._sshd.pid]
            self._lifetime.end(f"its sshd ended with status {status}: {self._sshd.last_words()}", 1)

    async def _end_everything(self) -> None:
        """Nothing new from now on; SIGTERM to what heeds it; SIGKILL to what is left."""
        self._sshd.kill()
        await self._control.close()
        waiting = [process for process in Tree.read().below(os.getpid()) if takes_sigterm(process)]
        send_all(waiting, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while waiting and time.monotonic() < deadline:
            await asyncio.sleep(PAUSE_SECONDS)
            waiting = [process for process in waiting if is_there(process)]
        end_descendants(KILL_SECONDS)

    def _say(self, what: str) -> None:
        # Who started this pod, and reads what it says, may be gone.
        with suppress(OSError):
            print(f"pod {self._orders.address}: {what}", flush=True)


def _count_slots() -> int:
    """GPUs, counted by another process: NVML stays in memory, and may hang where a driver is broken."""
    code = "from zeropods.pods.this_pod import slots; print(slots())"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    try:
        counted = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=COUNT_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise UserError(f"slots: counting GPUs failed ({error}); say how many with --slots") from None
    return int(counted.stdout)
