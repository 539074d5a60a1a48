"""Fork processes from a server that has imported what training needs: imports take longer than a
small run trains.

    python -m zeropods.launch.forks SOCKET

Each connection to the socket stands for one process: the client sends arguments and environment,
and gets back the pid and the exit status. A pod has such a server for its ranks, and a notebook has
one for its series of runs. The server computes nothing, since OpenMP threads do not survive a fork;
nor does CUDA, so with a GPU every rank is a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from zeropods import programs
from zeropods.chatter import without_chatter
from zeropods.pods.gpus import own_gpus
from zeropods.pods.processes import MARK_GAP, RUN, make_private_folder, reap, start_bound
from zeropods.programs import EXTENSIONS, child_environment, end_with_parent
from zeropods.train import quick_imports
from zeropods.train.flags import PROJECT

EARLY = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "DNNL_",
    "ATEN_",
    "LD_",
    "MALLOC_",
    "PYTHON",
    "TORCH",
    "HF_",
    "DS_",
)
"""Prefixes of the variables that libraries read while they are imported."""
FOLDERS_VARIABLE = "PYTHONPATH"
THREADS_VARIABLE = "OMP_NUM_THREADS"
APPLIED_LATE = (FOLDERS_VARIABLE, THREADS_VARIABLE, EXTENSIONS)
"""Variables with such a prefix that a fork can still apply after the imports."""
MESSAGE_BYTES = 1 << 18
"""Most bytes of a request: the arguments and the environment of a process."""
FOLDER = "zeropods-forks-"
"""Prefix of the names of folders that hold a socket."""
FORK_POLL_SECONDS = 0.02
"""Pause between two looks whether forks have ended, or whether a server has its socket."""
REQUEST_SECONDS = 1.0
"""Seconds within which a client that has connected must send its request."""
IDLE_SECONDS = 900.0
"""Seconds without a request after which a server ends, because it holds a third of a GiB."""
PACKAGE = Path(__file__).parents[1]
IMPORTED = (
    "zeropods.train.run",
    "zeropods.train.text2sql",
    "zeropods.train.causal",
    "zeropods.train.engines.ddp",
    "zeropods.train.engines.deepspeed",
    "torch.utils.tensorboard",
    "pyarrow",
)
"""Modules that ranks of this project's scripts need."""
DATASETS = "datasets"
"""A package that accelerate imports in each of several ranks, which takes a second, to tell whether
a loader's dataset is one of that package."""


class Forked:
    """A process of a fork server, used like a `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status of the process, negative for a signal; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status and return it; `subprocess.TimeoutExpired` after `timeout`
        seconds without one."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(MESSAGE_BYTES)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0) from None
            except ConnectionError:
                answer = b""
            # No answer: the server was killed, and the process with it.
            self.returncode = int(answer or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process unless it is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork(
    server: str | Path,
    argv: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int] = (0, 1, 2),
) -> Forked | None:
    """Fork a process that runs a script; it gets SIGTERM when this process is gone.

    Args:
        server: path of the server's socket.
        argv: the script and its arguments.
        environment: all of the process's environment variables.
        streams: file descriptors that become its stdin, stdout and stderr.

    Returns:
        The process; None where no server answers, or where a fork would differ from a new process:
        the server imported libraries with other settings, or its code is older than the files.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"argv": list(argv), "environment": dict(environment), "folder": os.getcwd()}
    pid = 0
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        connection.connect(os.fspath(server))
        socket.send_fds(connection, [json.dumps(request).encode()], list(streams))
        # A server that still imports takes seconds; an interrupt closes the connection, which ends
        # what it forks later. An empty answer means that the server closed the connection.
        pid = int(connection.recv(MESSAGE_BYTES) or 0)
    except OSError:
        return None
    finally:
        if not pid:
            connection.close()
    if not pid:
        return None
    return Forked(connection, pid)


def own_server() -> Path | None:
    """Path of the socket of this process's fork server for its present environment, started if none
    runs; None with a GPU or if none starts."""
    if own_gpus():
        return None
    early = early_variables(child_environment())
    # A server may end while it is waited for; then another one is tried, once.
    for _ in range(2):
        # A server that was idle, or whose code was replaced, has ended.
        if early not in _servers or _servers[early][0].poll() is not None:
            _servers[early] = _start_server()
        server, path = _servers[early]
        while server.poll() is None and not path.exists():
            time.sleep(FORK_POLL_SECONDS)
        if server.poll() is None:
            return path
    return None


def _start_server() -> tuple[subprocess.Popen[bytes], Path]:
    """Start a fork server, which ends with this process; returns it and the path of its socket."""
    folder = make_private_folder(FOLDER)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "forks"
    argv = [sys.executable, "-m", __spec__.name, str(path)]
    return start_bound(argv, cwd=PROJECT, stdout=subprocess.DEVNULL), path


_servers: dict[frozenset[tuple[str, str]], tuple[subprocess.Popen[bytes], Path]] = {}
"""Fork servers of this process and their sockets, by the variables that libraries read while they
were imported."""


def early_variables(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The variables, with their values, that libraries read only while they are imported."""
    early = set()
    for name, value in environment.items():
        if name.startswith(EARLY) and name not in APPLIED_LATE:
            early.add((name, value))
    return frozenset(early)


def serve(listener: socket.socket, newest: int) -> None:
    """Fork on request, and return when no requests are taken any more and all forks have ended.

    None are taken once none has come for `IDLE_SECONDS` while no fork ran, or once one comes after
    files of the imported code have changed. A client that is gone before its fork has ended makes
    the fork end. Anyone who may open the socket's folder may send requests.

    Args:
        newest: when the files of the imported code were last changed, in nanoseconds.
    """
    takes_requests = True
    clients: dict[int, socket.socket | None] = {}
    """Connection of the client that asked for a fork, by the pid of the fork; None where the client
    is gone."""
    while takes_requests or clients:
        connections = [listener, *filter(None, clients.values())]
        seconds = FORK_POLL_SECONDS if clients else IDLE_SECONDS
        ready, _, _ = select.select(connections, [], [], seconds)
        if listener in ready:
            connection, _ = listener.accept()
            takes_requests = takes_requests and newest_source() == newest
            # 0 where none was forked: requests are not taken any more, and the client sees a closed
            # connection as if there were no server; or this one cannot be served. A fork itself
            # never comes back here.
            pid = fork_as_requested(connection) if takes_requests else 0
            if pid:
                clients[pid] = connection
            else:
                connection.close()
        elif not clients:
            # Nothing came within the time for which an idle server waits.
            takes_requests = False
        for pid, client in clients.items():
            # A client sends nothing more; the connection is readable only once it is closed.
            if client is not None and client in ready:
                client.close()
                clients[pid] = None
                os.kill(pid, signal.SIGTERM)
        for pid, status in reap().items():
            client = clients.pop(pid, None)
            if client is not None:
                with client, contextlib.suppress(OSError):
                    client.send(str(status).encode())


def fork_as_requested(connection: socket.socket) -> int:
    """Fork the requested process, send its pid to the client and return it; 0 where none was
    forked, which the client is told too. In the fork this does not return."""
    server = os.getpid()
    streams: list[int] = []
    pid = 0
    try:
        # A client that sends nothing, or nonsense, must neither keep others waiting nor end their
        # forks.
        connection.settimeout(REQUEST_SECONDS)
        message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        request = json.loads(message)
        if _can_be_forked(request["environment"]):
            pid = os.fork()
            if pid == 0:
                run_as_new_process(request, streams, server)
        connection.send(str(pid).encode())
        connection.settimeout(None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # The client is gone or its request is nonsense. A fork that was made is ended by `serve`,
        # which finds the connection closed.
        pass
    finally:
        for stream in streams:
            os.close(stream)
    return pid


def _can_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether a fork behaves as a new process with this environment would: the mark of a run fits
    into its place, and libraries were imported with the same settings."""
    place = os.environ.get(MARK_GAP[0])
    can_be_marked = place is None or len(environment.get(RUN, place)) == len(place)
    return can_be_marked and early_variables(environment) <= early_variables(os.environ)


def newest_source() -> int:
    """When a file of this package was last changed, in nanoseconds since 1970."""
    return max(path.stat().st_mtime_ns for path in PACKAGE.rglob("*.py"))


def run_as_new_process(request: Mapping[str, Any], streams: Sequence[int], parent: int) -> NoReturn:
    """Run a script in this fork as in a new process, and end the fork.

    Args:
        request: the script with its arguments, the environment and the working folder.
        streams: file descriptors that become stdin, stdout and stderr.
        parent: pid of the server, with which the fork ends.
    """
    status = 1
    try:
        end_with_parent(parent, signal.SIGTERM)
        os.setsid()
        # This comes before stdout is a pipe: Python took it for seekable, and asks for its position
        # here.
        sys.stdout.reconfigure(  # type: ignore[union-attr]
            write_through=True, errors="backslashreplace"
        )
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open as long as the process lives)
        argv = request["argv"]
        environment = request["environment"]
        if RUN in environment and MARK_GAP[0] in os.environ:
            _show_run(environment[RUN])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(environment)
        folders = filter(None, environment.get(FOLDERS_VARIABLE, "").split(os.pathsep))
        sys.argv = argv
        # The script's folder, and then those of the variable, in the place of the server's folder.
        sys.path[:1] = [str(Path(argv[0]).resolve().parent), *folders]
        if THREADS_VARIABLE in environment:
            import_module("torch").set_num_threads(int(environment[THREADS_VARIABLE]))
        runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = 1
        if isinstance(error.code, int):
            status = error.code
        elif error.code is None:
            status = 0
    except BaseException:  # noqa: BLE001 (shown like any error that ends a process)
        traceback.print_exc()
    finally:
        for output in (sys.stdout, sys.stderr):
            # Nobody reads it any more, or the script has closed it.
            with contextlib.suppress(OSError, ValueError):
                output.flush()
        # Without the clean-up of the interpreter, which is the server's.
        os._exit(status)


def _show_run(run: str) -> None:
    """Let /proc/PID/environ show this process's run, as if it had been started with the variable.

    The kernel shows the memory that held a program's environment when it began (`env_start`,
    proc(5)).
    """
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    # The program's name stands in parentheses, and may contain blanks and more of them. The first
    # field after it is the third of the manual's, which counts `env_start` as 50 and `env_end` as
    # 51.
    fields = text.rpartition(")")[2].split()
    start = int(fields[47])
    end = int(fields[48])
    offset = ctypes.string_at(start, end - start).index("=".join(MARK_GAP).encode())
    variable = f"{RUN}={run}".encode()
    ctypes.memmove(start + offset, variable, len(variable))


def import_for_ranks() -> None:
    """Import what ranks of this project's scripts need."""
    with quick_imports():
        for name in IMPORTED:
            import_module(name)
    # Only now: within the block above, transformers is not to find it.
    import_module(DATASETS)
    # Garbage collection in the ranks then leaves alone, and uncopied, what they share with this
    # process.
    gc.freeze()
    # transformers builds this table when it loads its first model, which takes a second.
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("t5")


def main() -> None:
    """Open the socket, import what ranks need, and serve until `serve` returns; do nothing where
    there is a GPU, since CUDA does not survive a fork."""
    if own_gpus():
        return
    programs.wait_passively()
    without_chatter()
    programs.prepare_compiling()
    socket_path = Path(sys.argv[1])
    # Before the imports: a file that changes while they go on counts as newer.
    newest = newest_source()
    unready = socket_path.with_name(f"{socket_path.name}.new")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # The socket gets its name once it listens. A client that asks too early waits, and imports
        # nothing itself.
        unready.unlink(missing_ok=True)
        listener.bind(str(unready))
        listener.listen()
        unready.rename(socket_path)
        import_for_ranks()
        load_compiled_optimizer()
        serve(listener, newest)
        # Python takes a second to end, during which no client should wait for an answer.
        socket_path.unlink(missing_ok=True)


def load_compiled_optimizer() -> None:
    """Load offload's optimizer, CPU Adam, if it is compiled already, for the packages of this
    environment.

    A rank would check whether it must be compiled, which takes longer than loading it. While it is
    being compiled, which takes minutes, forks need not wait for it.
    """
    recipe = programs.extension_cache() / "cpu_adam" / "build.ninja"
    is_compiled = recipe.with_name("cpu_adam.so").is_file() and recipe.is_file()
    if is_compiled and sysconfig.get_path("purelib") in recipe.read_text(encoding="utf-8"):
        programs.compile_in_turns()
        # cpuinfo starts processes to describe the processor, which takes a second. DeepSpeed asks
        # it here, and again for each optimizer in a rank, which then gets the same answer.
        cpuinfo = import_module("cpuinfo")
        vars(cpuinfo)["get_cpu_info"] = functools.cache(cpuinfo.get_cpu_info)
        import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
