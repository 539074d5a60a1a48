"""A pod: the agent registers, starts the pod's sshd where there is one, and answers the master, for
which it also starts programs (`pods/started.py`); the warden outlives the agent."""

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.files import ROOT
from zeropods.pods import processes
from zeropods.pods.gpus import VISIBLE
from zeropods.pods.hostfile import own_address, own_slots
from zeropods.pods.leases import RUN_SECONDS, Leases
from zeropods.pods.machine import show_life
from zeropods.pods.processes import ENDING, Process, descendants
from zeropods.pods.rendezvous import MASTER_GONE_SECONDS, REGISTRATION, Pod, register
from zeropods.pods.ssh import (
    FORKS,
    HOST_KEY,
    make_key,
    session_variables,
    sshd_last_words,
    start_sshd,
)
from zeropods.pods.started import (
    MOST_SHOWN,
    OTHER_VERSION,
    Modules,
    RefusedOrderError,
    StartedProcesses,
)
from zeropods.pods.wire import Message, Server, WireError, ask, control_purpose, listening_socket
from zeropods.programs import (
    PR_SET_CHILD_SUBREAPER,
    child_environment,
    end_with_parent,
    find_program,
    prctl,
)

ORDERS = "ZEROPODS_ORDERS"
"""Environment variable with a worker's orders as a JSON object. It holds no secret: `/proc` shows
the environment with which a process was started, and CML keeps that of a worker in its database."""
BY_STDIN = "stdin"
"""Argument of a worker on one of the user's own hosts: the first line on stdin is a
`stdin_message`, and the worker ends when stdin does."""
HOW_TO_START = (
    "it is the program of a pod, and is not started by hand; start pods with: zeropods pods up "
    "--count N"
)
WORKER_VARIABLES = ("CDSW_ENGINE_ID", "CML_ENGINE_ID")
POD_GRACE_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL when the pod ends."""
AGENT_END_SECONDS = 10.0
"""Seconds from SIGTERM, which the warden passes on to the agent, until it kills the agent and
everything under it."""
PROGRAMS_OF_SSHD = ("sshd", "ssh-keygen")
"""Programs without which a pod has no sshd; then its agent alone starts what is run on it."""
FAILURE_SECONDS = 5.0
"""Seconds that the master has to take the reason why there is no pod."""
LONG_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Orders for a worker from the process that started it: where to report, and what to offer."""

    worker: str
    """Id of this worker with the backend that started it."""
    address: str
    master: tuple[str, int]
    secret_file: str
    """Path of a file that only its owner can read, with the cluster's secret as hexadecimal. A
    worker that shares no folder with the process that started it is sent the secret on stdin."""
    ssh_ports: tuple[int, ...]
    """Ports for sshd, in order of preference."""
    authorized_key: str | None
    """Public key that is allowed to log in; None for a pod without sshd."""
    lease: str
    """Kind of the pod's lease: `kernel`, renewed by the master, or `idle`, renewed by use."""
    lease_seconds: float
    slots: int | None
    """Number of slots; None for one per GPU, at least 1."""
    register_seconds: float
    gpus: str | None = None
    """The pod's GPUs, as a value of CUDA_VISIBLE_DEVICES; None for those that this process sees."""


def main(modules: Modules) -> int:
    """Run as a pod until it ends and return the exit status; `UserError` where its orders are
    wrong.

    The process forks before it does any of a pod's work: the parent, the warden, has nothing to do
    but to outlive the agent and to end the processes that the agent had under it.

    Args:
        modules: what the pod runs as processes of their own.
    """
    is_bound_to_stdin = sys.argv[1:] == [BY_STDIN]
    if is_bound_to_stdin:
        secret = _take_from_stdin()
        orders = _take_orders()
    else:
        orders = _take_orders()
        secret = read_secret(orders.secret_file)
    if orders.gpus is not None:
        os.environ[VISIBLE] = orders.gpus
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    folder = processes.make_private_folder(processes.POD)
    # Blocked until the warden waits for them and the agent has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *ENDING})
    warden = os.getpid()
    agent = os.fork()
    if agent:
        if is_bound_to_stdin:
            threading.Thread(target=_end_with_stdin, daemon=True).start()
        return _guard(agent, f"pod {orders.address}", folder)
    try:
        # A signal to the warden's group must not kill both: one of them has to clean up.
        os.setsid()
        end_with_parent(warden, signal.SIGTERM)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        return asyncio.run(_Agent(orders, secret, folder, modules).live())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# What a worker is told


def stdin_message(environment: Mapping[str, str], secret: bytes) -> bytes:
    """The line that a worker with the argument `stdin` reads first: its environment variables and
    the secret."""
    message = {"environment": dict(environment), "secret": secret.hex()}
    return json.dumps(message).encode() + b"\n"


def read_secret(path: str | Path) -> bytes:
    """The secret of a cluster from its file; `UserError` where it cannot be read."""
    try:
        return bytes.fromhex(Path(path).read_text(encoding="ascii"))
    except OSError as error:
        remedy = (
            "has its cluster ended? Pods of CML read it in the project folder, which all of them "
            "share"
        )
        raise UserError(f"{path}: {error.strerror}; {remedy}") from None
    except ValueError:
        remedy = "zeropods pods down, and start the pods again"
        raise UserError(f"{path}: is not a cluster's secret; {remedy}") from None


def _take_from_stdin() -> bytes:
    """Read a `stdin_message`: set the environment variables in it, and return the secret."""
    line = sys.stdin.buffer.readline()
    try:
        message = json.loads(line)
        os.environ.update(message["environment"])
        return bytes.fromhex(message["secret"])
    except (ValueError, TypeError, KeyError):
        raise UserError(f"worker_p.py {BY_STDIN}: no orders on stdin; {HOW_TO_START}") from None


def _take_orders() -> Orders:
    """Take the orders out of the environment, so that processes that this one starts do not inherit
    them."""
    text = os.environ.pop(ORDERS, "")
    if not text:
        raise UserError(f"worker_p.py: no orders; {HOW_TO_START}")
    try:
        return Orders(**json.loads(text), worker=_worker_id(), address=own_address())
    except (ValueError, TypeError) as error:
        remedy = "do master and pods run the same zeropods version?"
        raise UserError(f"{ORDERS}: {error}; {remedy}") from None


def _worker_id() -> str:
    """The id that the backend has given this worker, else one that no other worker has."""
    for name in WORKER_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    return f"{socket.gethostname()}-{os.getpid()}"


class PodEndedError(Exception):
    """The pod has to end."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status
        """The exit status."""


class _Agent:
    """The process below the warden. Its folder is private and empty, for the keys, configuration
    and log of sshd."""

    def __init__(self, orders: Orders, secret: bytes, folder: Path, modules: Modules) -> None:
        self._orders = orders
        self._secret = secret
        self._host_key: str | None = None
        self._sock = listening_socket(orders.address, 0)
        self._port = self._sock.getsockname()[1]
        purpose = control_purpose(orders.address, self._port)
        self._server = Server(self._secret, purpose, self._answer)
        self._folder = folder
        self._sshd: subprocess.Popen[bytes] | None = None
        self._modules = modules
        self._started = StartedProcesses(modules, session_variables(folder, orders.address))
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._leases = Leases(self._daemons, self._end)

    async def live(self) -> int:
        """Run the pod, from its registration to the end of everything under this process; return
        the exit status."""
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for signum in ENDING:
            loop.add_signal_handler(signum, self._end, f"it got {signum.name}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *ENDING})
        # A thread that nobody waits for: a file server that hangs must not keep the pod from
        # answering or ending.
        threading.Thread(target=show_life, args=(self._orders.secret_file,), daemon=True).start()
        tasks = [asyncio.create_task(work) for work in (self._register(), self._leases.watch())]
        try:
            await asyncio.gather(*tasks, self._ending)
        except PodEndedError as ended:
            reason = ended.reason
            status = ended.status
        finally:
            for task in tasks:
                task.cancel()
            # Let nothing new begin; then SIGTERM to the processes that heed it, and SIGKILL to
            # those that are left.
            if self._sshd is not None:
                self._sshd.kill()
            await self._server.close()
            processes.end(_below, POD_GRACE_SECONDS)
        self._say(f"ended: {reason}")
        return status

    async def _register(self) -> None:
        """Start sshd if there is one, register this pod with its master, and begin the lease that
        keeps it up."""
        orders = self._orders
        await self._server.open(self._sock)
        try:
            ssh_port = await self._start_sshd()
        except UserError as error:
            # The master is told why, since it cannot read every worker's log.
            failure = {"failed": str(error)}
            with suppress(WireError):
                await ask(*orders.master, self._secret, REGISTRATION, failure, FAILURE_SECONDS)
            raise
        pod = Pod(
            worker=orders.worker,
            address=orders.address,
            hostname=socket.gethostname(),
            slots=orders.slots or own_slots(),
            ssh_port=ssh_port,
            host_key=self._host_key,
            control_port=self._port,
        )
        gone_seconds = min(MASTER_GONE_SECONDS, orders.lease_seconds)
        await register(
            orders.master, self._secret, pod, orders.register_seconds, gone_seconds=gone_seconds
        )
        self._leases.open(orders.lease, orders.lease_seconds)
        if ssh_port is None:
            self._say("ready, without sshd")
        else:
            self._say(f"ready, ssh port {ssh_port}")

    async def _start_sshd(self) -> int | None:
        """Start sshd and return its port; None where the orders have no key, or this pod lacks the
        programs."""
        orders = self._orders
        has_programs = all(map(find_program, PROGRAMS_OF_SSHD))
        if orders.authorized_key is None or not has_programs:
            return None
        self._host_key = make_key(self._folder / HOST_KEY, "")
        self._sshd, ssh_port = await start_sshd(
            self._folder, orders.address, orders.ssh_ports, orders.authorized_key
        )
        return ssh_port

    async def _answer(self, request: Message, peer: str) -> Message:
        """Answer a peer that knows the cluster's secret: about a run where the request names one,
        else about the pod.

        `forks` in a renewal says whether the ranks of the run can be forked here.
        """
        answer: Message
        try:
            answer = await self._answer_of(request)
        except RefusedOrderError as error:
            answer = {"error": str(error)}
        self._leases.use()
        return answer

    async def _answer_of(self, request: Message) -> Message:
        answer: Message
        # Without this, a request about a run that has no name would be one about the pod.
        if not isinstance(request.get("run", ""), str):
            return _not_known(request)
        match request:
            case {"do": "renew", "run": run}:
                if request.get("forks"):
                    self._start_fork_server()
                answer = self._leases.renew_run(run, request.get("seconds", 0.0))
            case {"do": "end", "run": run}:
                grace_seconds = request.get("grace_seconds", 0.0)
                answer = await self._leases.end_run(run, grace_seconds)
            case {"do": "stacks", "run": run}:
                self._leases.ask_for_stacks(run)
                answer = {}
            case {"do": "launch", "run": run, "launcher": dict(fields)}:
                # A run that has ended is refused, and one that is new gets the usual lease.
                answer = self._leases.renew_run(run, RUN_SECONDS)
                if "error" not in answer:
                    await self._started.launch(run, fields)
            case {"do": "output", "run": run, "received": int(received)}:
                answer = await self._started.output(run, received)
            case {
                "do": "check",
                "module": str(module),
                "arguments": list(arguments),
                "folder": folder,
            }:
                variables = request.get("variables", {})
                seconds = request.get("seconds", 0.0)
                answer = await self._started.check(module, arguments, folder, variables, seconds)
            case {"do": "end"}:
                # The answer is sent before the tasks that wait for the end have their turn.
                self._end("it was asked to")
                answer = {"ending": True}
            case {"do": "renew"}:
                self._leases.renew()
                answer = self._leases.status()
            case {"do": "status"}:
                answer = self._leases.status()
            case _:
                answer = _not_known(request)
        return answer

    def _start_fork_server(self) -> None:
        """Start the server that forks ranks, unless it runs already."""
        is_running = self._fork_server is not None and self._fork_server.poll() is None
        if is_running:
            return
        socket_path = self._folder / FORKS
        name, value = processes.PLACE
        # Without this server, ranks start as new processes.
        with suppress(OSError):
            socket_path.unlink(missing_ok=True)
            self._fork_server = processes.start_bound(
                [sys.executable, "-m", self._modules.fork_server, str(socket_path)],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**child_environment(), name: value},
            )

    def _daemons(self) -> list[int]:
        pids = []
        # sshd is not polled: polling could collect its exit status before `_reap` does.
        if self._sshd is not None:
            pids.append(self._sshd.pid)
        if self._fork_server is not None and self._fork_server.poll() is None:
            pids.append(self._fork_server.pid)
        return pids

    def _end(self, reason: str, status: int = 0) -> None:
        """Let the pod end; only the first reason counts."""
        if not self._ending.done():
            self._ending.set_exception(PodEndedError(reason, status))

    def _reap(self) -> None:
        ended = processes.reap()
        self._started.note_ended(ended)
        if self._sshd is not None and self._sshd.pid in ended:
            status = ended[self._sshd.pid]
            self._end(f"its sshd ended with status {status}: {sshd_last_words(self._folder)}", 1)

    def _say(self, what: str) -> None:
        # The process that started this pod and reads its output may be gone.
        with suppress(OSError):
            print(f"pod {self._orders.address}: {what}", flush=True)


def _not_known(request: Message) -> Message:
    """The answer to a request that no agent of this version knows."""
    shown = str(request)[:MOST_SHOWN]
    return {"error": f"{shown}: not a known request; {OTHER_VERSION}"}


def _below() -> list[Process]:
    """The processes that live below this one; those that have ended are reaped."""
    processes.reap()
    return descendants(os.getpid())


# The warden


def _guard(agent: int, pod: str, folder: Path) -> int:
    """Pass signals on to the agent, outlive it, and end the processes that it left; return the exit
    status of both."""
    deadline = math.inf
    status = None
    try:
        while True:
            status = processes.reap().get(agent)
            now = time.monotonic()
            if status is not None or now >= deadline:
                break
            patience = min(deadline - now, LONG_SECONDS)
            received = signal.sigtimedwait({signal.SIGCHLD, *ENDING}, patience)
            is_asked_to_end = received is not None and received.si_signo in ENDING
            if is_asked_to_end and deadline == math.inf:
                deadline = time.monotonic() + AGENT_END_SECONDS
                os.kill(agent, signal.SIGTERM)
    finally:
        is_clean = processes.end(_below, 0.0) == 0
        shutil.rmtree(folder, ignore_errors=True)
    how = None
    if status is None:
        how = f"did not end in {AGENT_END_SECONDS:.0f} s"
    elif status < 0:
        how = f"was killed by signal {-status}"
    if how is not None:
        line = f"{pod}: the agent {how}; everything under it was killed"
        print(line, file=sys.stderr, flush=True)
    if not is_clean:
        line = f"{pod}: processes hang in the kernel and did not end on SIGKILL"
        print(line, file=sys.stderr, flush=True)
    if status in (0, 1) and is_clean:
        return status
    return 1


def _end_with_stdin() -> None:
    """Ask this process to end when the connection to the process that started it ends, for whatever
    reason."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
