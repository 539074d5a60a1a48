"""The agent of a pod: it registers, starts its sshd, and sleeps; whatever ran under it ends with it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zeropods.errors import UserError
from zeropods.files import POD, make_private_folder
from zeropods.pods import this_pod
from zeropods.pods.control import ControlServer
from zeropods.pods.leases import IDLE, KERNEL, ClusterLease, Ending, Lifetime, send_all, takes_sigterm
from zeropods.pods.processes import Tree, become_subreaper, end_descendants, end_with_parent, is_there, reap
from zeropods.pods.registration import Registration, register
from zeropods.pods.sshd import HOST_KEY, Sshd, find_sshd, make_key
from zeropods.programs import is_free

# What a worker is told through its environment by whoever started it.

T = TypeVar("T")
SECRET_VARIABLE = "ZEROPODS_SECRET"
SECRET_BYTES = 32
WORKER_VARIABLES = ("CDSW_ENGINE_ID", "CML_ENGINE_ID")


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Where to report, as whom, and what to offer."""

    worker: str
    """Id of this worker with the backend that started it."""
    address: str
    master: tuple[str, int]
    secret: bytes
    ssh_ports: tuple[int, ...]
    """Ports for sshd, the one that is wanted most first."""
    slots: int | None
    """None: as many as there are GPUs."""
    register_seconds: float


def take_orders() -> Orders:
    """Read this process's environment, and take the secret out of it; `UserError` names a variable that is wrong."""
    return Orders(
        secret=_value(SECRET_VARIABLE, _secret, f"{2 * SECRET_BYTES} hexadecimal digits", take_variable),
        worker=next(filter(None, map(os.environ.get, WORKER_VARIABLES)), f"{socket.gethostname()}-{os.getpid()}"),
        address=this_pod.address(),
        master=_value("ZEROPODS_MASTER", _place, "ADDRESS:PORT"),
        ssh_ports=_value("ZEROPODS_SSH_PORTS", _ports, "ports, like 2222,40123"),
        slots=_value("ZEROPODS_SLOTS", _positive, "a number from 1") if os.environ.get("ZEROPODS_SLOTS") else None,
        register_seconds=_value("ZEROPODS_REGISTER_SECONDS", _seconds, "seconds"),
    )


def take_variable(name: str) -> str | None:
    """A variable's value, which is then gone: for children, and for readers of /proc/PID/environ."""
    value = os.environ.get(name)
    if value is None:
        return None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(os.fsencode(name))
    if place:
        # /proc shows the memory in which the process was handed its environment; unsetting leaves that as it is.
        ctypes.memset(place, ord("-"), len(os.fsencode(value)))
    del os.environ[name]
    return value


def _value(
    name: str, parse: Callable[[str], T], expected: str, read: Callable[[str], str | None] = os.environ.get
) -> T:
    text = read(name)
    if not text:
        raise UserError(f"{name}: not set; a worker is started by `zeropods pods up`, not by hand")
    try:
        return parse(text)
    except ValueError:
        shown = "a value that is not shown" if name == SECRET_VARIABLE else repr(text)
        raise UserError(f"{name}: {shown}; expected {expected}") from None


def _secret(text: str) -> bytes:
    secret = bytes.fromhex(text)
    if len(secret) != SECRET_BYTES:
        raise ValueError(text)
    return secret


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    if not address:
        raise ValueError(text)
    return address, _port(port)


def _ports(text: str) -> tuple[int, ...]:
    return tuple(map(_port, text.split(",")))


def _port(text: str) -> int:
    port = _positive(text)
    if port > 65_535:
        raise ValueError(text)
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError(text)
    return seconds


# The agent of a pod: it registers, starts its sshd, and sleeps; whatever ran under it ends with it.

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
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
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


# The warden of a pod: the agent's parent. Where the agent is killed, it ends what the agent had under it.

AGENT_SECONDS = 10.0
"""From SIGTERM, which is passed on to the agent, until it is killed with all that is under it."""
WARDEN_KILL_SECONDS = 30.0
FOREVER_SECONDS = 86_400.0
ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def main() -> int:
    """Be a pod until it ends; returns the exit status.

    It splits in two before anything heavy is loaded: this process stays small, and has nothing to do
    but to outlive the other.
    """
    orders = take_orders()
    become_subreaper()
    folder = make_private_folder(POD)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *ENDING})
    warden = os.getpid()
    agent = os.fork()
    if agent == 0:
        return run_agent(orders, folder, warden)
    return _guard(agent, orders, folder)


def _guard(agent: int, orders: Orders, folder: Path) -> int:
    status = None
    try:
        status = _await_agent(agent)
    finally:
        is_clean = end_descendants(WARDEN_KILL_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    if status is None or status < 0:
        how = f"did not end in {AGENT_SECONDS:.0f} s" if status is None else f"was killed by signal {-status}"
        _say(f"pod {orders.address}: the agent {how}; everything under it was killed")
    if not is_clean:
        _say(f"pod {orders.address}: processes hang in the kernel and did not end on SIGKILL")
    return status if status in (0, 1) and is_clean else 1


def _await_agent(agent: int) -> int | None:
    """The agent's exit code, negative for a signal; None if it did not heed a signal that was passed on."""
    deadline = None
    while True:
        ended, _ = reap()
        if agent in ended:
            return ended[agent]
        patience = FOREVER_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
        got = signal.sigtimedwait({signal.SIGCHLD, *ENDING}, patience)
        if got is None and deadline is not None:
            return None
        if got is not None and got.si_signo in ENDING and deadline is None:
            deadline = time.monotonic() + AGENT_SECONDS
            os.kill(agent, signal.SIGTERM)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
