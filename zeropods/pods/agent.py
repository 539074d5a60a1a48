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
"""Environment variables in which a backend tells a worker its id; the first that is set counts."""
POD_GRACE_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL when the pod ends."""
AGENT_END_SECONDS = 10.0
"""Seconds from SIGTERM, which the warden passes on to the agent, until it kills the agent and
everything under it."""
PROGRAMS_OF_SSHD = ("sshd", "ssh-keygen")
"""Programs without which a pod has no sshd; then its agent alone starts what is run on it."""
FAILURE_SECONDS = 5.0
"""Seconds that the master has to take the reason why there is no pod."""
LONGEST_WAIT_SECONDS = 86_400.0
"""Longest single wait of the warden for a signal, since `sigtimedwait` takes no infinite time."""


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
    """Run as a pod until it ends and return the exit status.

    The process forks before it does any of a pod's work: the parent, the warden, has nothing to do
    but to outlive the agent and to end the processes that the agent had under it. Both return from
    here, each in its own process.

    Args:
        modules: what the pod runs as processes of their own.

    Raises:
        UserError: the orders are wrong, or the pod could not be registered.
    """
    is_bound_to_stdin = sys.argv[1:] == [BY_STDIN]
    if is_bound_to_stdin:
        # First, since the orders are in one of the variables that come on stdin.
        secret = _take_from_stdin()
        orders = _take_orders()
    else:
        orders = _take_orders()
        secret = read_secret(orders.secret_file)
    if orders.gpus is not None:
        os.environ[VISIBLE] = orders.gpus
    # What the agent leaves behind becomes a child of the warden, which then finds and ends it.
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
        # A fork does not inherit this: the agent finds what its own processes leave behind.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        return asyncio.run(_Agent(orders, secret, folder, modules).live())
    finally:
        # The warden does this too, for an agent that is killed.
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
    """Read a `stdin_message`: set the environment variables in it, and return the secret;
    `UserError` where stdin has no such line."""
    line = sys.stdin.buffer.readline()
    try:
        message = json.loads(line)
        os.environ.update(message["environment"])
        return bytes.fromhex(message["secret"])
    except (ValueError, TypeError, KeyError):
        raise UserError(f"worker_p.py {BY_STDIN}: no orders on stdin; {HOW_TO_START}") from None


def _take_orders() -> Orders:
    """Take the orders out of the environment, so that processes that this one starts do not inherit
    them; `UserError` where there are none, or another version's."""
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
    """The pod has to end, be it in order or after a failure."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status
        """The pod's exit status: 0 where it ends in order, else 1."""


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
        the exit status. `UserError` where the pod could not be registered."""
        loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[None] = loop.create_future()
        """Gets a `PodEndedError` once the pod has to end."""
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for signum in ENDING:
            loop.add_signal_handler(signum, self._end, f"it got {signum.name}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *ENDING})
        # A thread that nobody waits for: a file server that hangs must not keep the pod from
        # answering or ending.
        threading.Thread(target=show_life, args=(self._orders.secret_file,), daemon=True).start()
        tasks = [asyncio.create_task(work) for work in (self._register(), self._leases.watch())]
        try:
            # This never returns, since watching has no end: it raises what is put in `_ending`, or
            # the error of a task.
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
            processes.end(_living_descendants, POD_GRACE_SECONDS)
        self._say(f"ended: {reason}")
        return status

    async def _register(self) -> None:
        """Start sshd if there is one, register this pod with its master, wait until all pods of the
        cluster have registered, and begin the lease that keeps this one up; `UserError` where any
        of this fails."""
        orders = self._orders
        await self._server.open(self._sock)
        try:
            ssh_port = await self._start_sshd()
        except UserError as error:
            # The master is told why, since it cannot read every worker's log. If it cannot be told,
            # this worker's end tells it that something failed.
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
        # A pod waits no longer for a master that is gone than its lease would let it live.
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
        programs. Sets the host key and the process, which are None without sshd."""
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
        """Answer a peer that knows the cluster's secret, and count that as a use of the pod; a
        refusal is answered as `error`."""
        answer: Message
        try:
            answer = await self._do(request)
        except RefusedOrderError as error:
            answer = {"error": str(error)}
        self._leases.use()
        return answer

    async def _do(self, request: Message) -> Message:
        """Do what a request asks for, about a run where it names one in `run`, else about the pod;
        return the answer.

        `forks` in a renewal says whether the ranks of the run can be forked here.

        Raises:
            RefusedOrderError: something that it asks to start may not or cannot be started.
        """
        answer: Message
        # A run whose name is no string matches none of the cases for runs: a request to end it
        # would be taken for one to end the pod.
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
                # A run that has ended is answered with an error, and one that is new gets a lease.
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
                # This only wakes the task that closes the server; the answer is sent before that
                # task has its turn.
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
        name, value = processes.MARK_GAP
        # Where it cannot be started, ranks start as new processes instead.
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
        """Pids of the pod's sshd and of the server that forks ranks, as far as they run."""
        pids = []
        # sshd is not polled: polling could collect its exit status before `_reap` does.
        if self._sshd is not None:
            pids.append(self._sshd.pid)
        if self._fork_server is not None and self._fork_server.poll() is None:
            pids.append(self._fork_server.pid)
        return pids

    def _end(self, reason: str, status: int = 0) -> None:
        """Let the pod end, with this exit status; only the first reason counts."""
        if not self._ending.done():
            self._ending.set_exception(PodEndedError(reason, status))

    def _reap(self) -> None:
        """Reap the children that have ended and note it; let the pod end where its sshd did."""
        ended = processes.reap()
        self._started.note_ended(ended)
        if self._sshd is not None and self._sshd.pid in ended:
            status = ended[self._sshd.pid]
            self._end(f"its sshd ended with status {status}: {sshd_last_words(self._folder)}", 1)

    def _say(self, message: str) -> None:
        # The process that started this pod and reads its output may be gone.
        with suppress(OSError):
            print(f"pod {self._orders.address}: {message}", flush=True)


def _not_known(request: Message) -> Message:
    """The answer to a request that no agent of this version knows."""
    shown = str(request)[:MOST_SHOWN]
    return {"error": f"{shown}: not a known request; {OTHER_VERSION}"}


def _living_descendants() -> list[Process]:
    """The processes below this one, after those of its children that have ended were reaped."""
    processes.reap()
    return descendants(os.getpid())


# The warden


def _guard(agent: int, pod: str, folder: Path) -> int:
    """Outlive the agent, and kill the processes that it has left.

    The first signal that asks this process to end is passed on to the agent as SIGTERM, and an
    agent that has not ended `AGENT_END_SECONDS` later is killed with all others.

    Args:
        agent: its pid.
        pod: how messages on stderr name the pod.
        folder: the pod's private folder, which is removed.

    Returns:
        The agent's exit status where that is 0 or 1 and no process is left, else 1.
    """
    deadline = math.inf
    status = None
    try:
        while True:
            status = processes.reap().get(agent)
            now = time.monotonic()
            if status is not None or now >= deadline:
                break
            wait_seconds = min(deadline - now, LONGEST_WAIT_SECONDS)
            received = signal.sigtimedwait({signal.SIGCHLD, *ENDING}, wait_seconds)
            is_asked_to_end = received is not None and received.si_signo in ENDING
            if is_asked_to_end and deadline == math.inf:
                deadline = time.monotonic() + AGENT_END_SECONDS
                os.kill(agent, signal.SIGTERM)
    finally:
        is_clean = processes.end(_living_descendants, 0.0) == 0
        shutil.rmtree(folder, ignore_errors=True)
    fault = None
    if status is None:
        fault = f"did not end in {AGENT_END_SECONDS:.0f} s"
    elif status < 0:
        fault = f"was killed by signal {-status}"
    if fault is not None:
        line = f"{pod}: the agent {fault}; everything under it was killed"
        print(line, file=sys.stderr, flush=True)
    if not is_clean:
        line = f"{pod}: processes hang in the kernel and did not end on SIGKILL"
        print(line, file=sys.stderr, flush=True)
    if status in (0, 1) and is_clean:
        return status
    return 1


def _end_with_stdin() -> None:
    """Read stdin to its end, and then send this process SIGTERM: the connection to the process that
    started it has ended, for whatever reason."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
