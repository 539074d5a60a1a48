"""A pod: its agent registers, starts the pod's sshd and answers its master; its warden outlives the agent."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.files import ROOT
from zeropods.pods import processes
from zeropods.pods.hostfile import own_address, own_slots
from zeropods.pods.leases import Leases
from zeropods.pods.processes import ENDING, Process, descendants
from zeropods.pods.rendezvous import PURPOSE, Pod, register
from zeropods.pods.ssh import FORKS, HOST_KEY, make_key, sshd_last_words, start_sshd
from zeropods.pods.wire import Message, Server, WireError, ask, control_purpose, listening_socket
from zeropods.programs import PR_SET_CHILD_SUBREAPER, child_environment, end_with_parent, prctl

ORDERS = "ZEROPODS_ORDERS"
"""The variable by which a worker is told, as a JSON object; it is taken out at once, since it holds a secret."""
BY_STDIN = "stdin"
"""The argument of a worker on a host of the user's own: the first line on stdin has its variables as a JSON object, and
it ends with stdin."""
WORKER_VARIABLES = ("CDSW_ENGINE_ID", "CML_ENGINE_ID")
GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL, when the pod ends."""
AGENT_SECONDS = 10.0
"""From SIGTERM, which the warden passes on to the agent, until that is killed with all that is under it."""
FAILED_SECONDS = 5.0
LONG_SECONDS = 86_400.0
FORK_SERVER = "zeropods.launch.forks"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a worker is told by whoever started it: where to report, and what to offer."""

    worker: str
    """Id of this worker with the backend that started it."""
    address: str
    master: tuple[str, int]
    secret: str
    """Of the cluster, as hexadecimal."""
    ssh_ports: tuple[int, ...]
    """Ports for sshd, the one that is wanted most first."""
    authorized_key: str
    """Public key of those who may log in."""
    lease: str
    """`kernel`: renewed by the master; `idle`: renewed by use."""
    lease_seconds: float
    slots: int | None
    """None: as many as there are GPUs."""
    register_seconds: float


def main() -> int:
    """Be a pod until it ends; returns the exit status. `UserError` where its orders are wrong.

    It splits in two before anything else is done: the parent, the warden, has nothing to do but to outlive the agent
    and to end what the agent had under it.
    """
    is_told_by_stdin = sys.argv[1:] == [BY_STDIN]
    if is_told_by_stdin:
        os.environ.update(json.loads(sys.stdin.buffer.readline() or "{}"))
    worker = next(filter(None, map(os.environ.get, WORKER_VARIABLES)), f"{socket.gethostname()}-{os.getpid()}")
    try:
        # Processes that this one starts inherit the rest of its environment.
        orders = Orders(**json.loads(os.environ.pop(ORDERS, "")), worker=worker, address=own_address())
    except (ValueError, TypeError) as error:
        raise UserError(f"{ORDERS}: {error}; a worker is started by `zeropods pods up`, not by hand") from None
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    folder = processes.make_private_folder(processes.POD)
    # Blocked until whoever heeds them is there.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *ENDING})
    warden = os.getpid()
    agent = os.fork()
    if agent:
        if is_told_by_stdin:
            threading.Thread(target=_end_with_stdin, daemon=True).start()
        return _guard(agent, f"pod {orders.address}", folder)
    try:
        # A signal to the warden's group must not kill both: one of them has to clean up.
        os.setsid()
        end_with_parent(warden, signal.SIGTERM)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        return asyncio.run(_Agent(orders, folder).live())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class PodEndedError(Exception):
    """Why a pod ends, and its exit status."""


class _Agent:
    """What runs below the warden, in a folder that is private and empty: for keys, configuration and log of sshd."""

    def __init__(self, orders: Orders, folder: Path) -> None:
        self._orders, self._secret = orders, bytes.fromhex(orders.secret)
        self._host_key = make_key(folder / HOST_KEY, "")
        self._sock = listening_socket(orders.address, 0)
        self._port = self._sock.getsockname()[1]
        self._server = Server(self._secret, control_purpose(orders.address, self._port), self._answer)
        self._folder = folder
        self._sshd: subprocess.Popen[bytes] | None = None
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._leases = Leases(self._daemons, self._end)

    async def live(self) -> int:
        """From the registration to the end of all that is under this process."""
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for signum in ENDING:
            loop.add_signal_handler(signum, self._end, f"it got {signum.name}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *ENDING})
        tasks = [asyncio.create_task(work) for work in (self._register(), self._leases.watch())]
        try:
            await asyncio.gather(*tasks, self._ending)
        except PodEndedError as ended:
            reason, status = ended.args
        finally:
            for task in tasks:
                task.cancel()
            # Nothing new from now on; SIGTERM to what heeds it; SIGKILL to what is left.
            if self._sshd is not None:
                self._sshd.kill()
            await self._server.close()
            processes.end(_below, GRACE_SECONDS)
        self._say(f"ended: {reason}")
        return int(status)

    async def _register(self) -> None:
        orders = self._orders
        await self._server.open(self._sock)
        try:
            sshd = await start_sshd(self._folder, orders.address, orders.ssh_ports, orders.authorized_key)
        except UserError as error:
            # Not every worker has a log that its master can read.
            with suppress(WireError):
                await ask(*orders.master, self._secret, PURPOSE, {"failed": str(error)}, FAILED_SECONDS)
            raise
        self._sshd, ssh_port = sshd
        pod = Pod(
            worker=orders.worker,
            address=orders.address,
            hostname=socket.gethostname(),
            slots=orders.slots or own_slots(),
            ssh_port=ssh_port,
            host_key=self._host_key,
            control_port=self._port,
        )
        await register(orders.master, self._secret, pod, orders.register_seconds)
        self._leases.open(orders.lease, orders.lease_seconds)
        self._say(f"ready, ssh port {ssh_port}")

    async def _answer(self, request: Message, peer: str) -> Message:
        """Answer whoever knows the cluster's secret: about a run where the request names one, else about the pod.

        `forks` in a renewal says whether the ranks of the run can be forked here.
        """
        answer: Message
        match request:
            case {"do": "renew", "run": run}:
                if request.get("forks") and (self._fork_server is None or self._fork_server.poll() is not None):
                    place, silent = self._folder / FORKS, subprocess.DEVNULL
                    argv, variables = [sys.executable, "-m", FORK_SERVER, str(place)], dict([processes.PLACE])
                    how: Any = {"cwd": ROOT, "stdout": silent, "stderr": silent, "env": child_environment() | variables}
                    # Without it ranks start by themselves.
                    with suppress(OSError):
                        place.unlink(missing_ok=True)
                        self._fork_server = processes.start_bound(argv, **how)
                answer = self._leases.renew_run(run, request.get("seconds", 0.0))
            case {"do": "end", "run": run}:
                answer = await self._leases.end_run(run, request.get("grace_seconds", 0.0))
            case {"do": "stacks", "run": run}:
                self._leases.ask_for_stacks(run)
                answer = {}
            case {"do": "end"}:
                # The answer is sent before anybody who waits for the end has a turn.
                self._end("it was asked to")
                answer = {"ending": True}
            case {"do": "renew" | "status" as do}:
                if do == "renew":
                    self._leases.renew()
                answer = self._leases.status()
            case _:
                answer = {"error": f"{request}: no request; is its zeropods another version?"}
        self._leases.use()
        return answer

    def _daemons(self) -> list[int]:
        # sshd is not polled: that could take its end from `_reap`.
        sshd, server = [] if self._sshd is None else [self._sshd.pid], self._fork_server
        return sshd if server is None or server.poll() is not None else [*sshd, server.pid]

    def _end(self, reason: str, status: int = 0) -> None:
        """Let the pod end; the first reason counts."""
        if not self._ending.done():
            self._ending.set_exception(PodEndedError(reason, status))

    def _reap(self) -> None:
        ended = processes.reap()
        if self._sshd is not None and self._sshd.pid in ended:
            status = ended[self._sshd.pid]
            self._end(f"its sshd ended with status {status}: {sshd_last_words(self._folder)}", 1)

    def _say(self, what: str) -> None:
        # Who started this pod, and reads what it says, may be gone.
        with suppress(OSError):
            print(f"pod {self._orders.address}: {what}", flush=True)


def _below() -> list[Process]:
    """What lives below this process; what has ended is reaped."""
    processes.reap()
    return descendants(os.getpid())


# The warden


def _guard(agent: int, pod: str, folder: Path) -> int:
    """Pass on signals to the agent, outlive it, and end what it has left; returns the exit status of both."""
    deadline, status = math.inf, None
    try:
        while (status := processes.reap().get(agent)) is None and time.monotonic() < deadline:
            patience = min(max(deadline - time.monotonic(), 0.0), LONG_SECONDS)
            got = signal.sigtimedwait({signal.SIGCHLD, *ENDING}, patience)
            if got is not None and got.si_signo in ENDING and deadline == math.inf:
                deadline = time.monotonic() + AGENT_SECONDS
                os.kill(agent, signal.SIGTERM)
    finally:
        is_clean = processes.end(_below, 0.0) == 0
        shutil.rmtree(folder, ignore_errors=True)
    if status is None or status < 0:
        how = f"did not end in {AGENT_SECONDS:.0f} s" if status is None else f"was killed by signal {-status}"
        print(f"{pod}: the agent {how}; everything under it was killed", file=sys.stderr, flush=True)
    if not is_clean:
        print(f"{pod}: processes hang in the kernel and did not end on SIGKILL", file=sys.stderr, flush=True)
    return status if status in (0, 1) and is_clean else 1


def _end_with_stdin() -> None:
    """Have this process asked to end when the connection to whoever started it ends, however that came about."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
