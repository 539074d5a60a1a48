"""What an agent starts where its master asks for it over the wire, without ssh: DeepSpeed's
launcher of a run on this pod, and the modules that check a pod.

An agent runs no command that it is sent. It makes the command itself, of this Python, of a module
that `worker_p.py` names and, for a launcher, of a script in the project folder.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zeropods.files import ROOT
from zeropods.pods.hostfile import world_info
from zeropods.pods.processes import RUN
from zeropods.pods.wire import Message

PIECE_BYTES = 32_768
"""Most bytes of output in one answer, which base64 makes a third longer."""
HOLD_SECONDS = 5.0
"""Seconds for which an answer about output waits until there is some."""
DRAIN_SECONDS = 0.5
"""Seconds to wait, after a process's end, for output that is still in its pipe: what it has left
running may keep it open."""
KEEP_SECONDS = 60.0
"""Seconds for which what a launcher has written is kept after its end, for a master that was cut
off or is late."""
MOST_OUTPUT_BYTES = 8_192
MOST_ERROR_BYTES = 2_048
"""Bytes of a check's output and of its errors that are kept, the last ones; JSON may make six times
as many of them."""
MOST_SHOWN = 200
"""Most characters of a value that a refusal shows."""
OTHER_VERSION = "is the sender's zeropods a different version?"
LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "TZ")
"""Variables of the agent's own environment that its processes get, as sshd sets them for a session;
the others stay with the agent, since secrets such as `CDSW_API_KEY` are among them."""


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Names of the modules that a pod runs as processes of their own."""

    fork_server: str
    """It forks the ranks of a run; its argument is the path of its socket."""
    launcher: tuple[str, str]
    """It runs DeepSpeed's launcher, whose own module is the second one."""
    checks: tuple[str, ...]
    """They say what a pod has."""


@dataclass(frozen=True, kw_only=True)
class LauncherOrder:
    """What a pod's launcher is told; it is the same for all pods of a run but for `node_rank`."""

    world: dict[str, list[int]]
    """Slots of each pod by its address, in the order of ranks."""
    node_rank: int
    """Number of this pod among them."""
    master_addr: str
    master_port: int
    folder: str
    """The working folder of the ranks."""
    script: str
    arguments: list[str]
    variables: dict[str, str]
    """Environment variables of the ranks, in addition to those of every session on the pod."""


class RefusedOrderError(Exception):
    """An order that an agent does not carry out; the message is one line that says why."""


class Started:
    """A process that was started for the master, and what it writes.

    Its output is handed out in pieces with numbers. A piece is kept until the next one is asked
    for, so that nothing is lost with a connection.

    Args:
        popen: the process, which writes to a pipe. Whoever reaps it calls `note_end`.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None
        self._status: int | None = None
        self._ended_at: float | None = None
        self._ended = asyncio.Event()
        self._piece = b""
        """The piece that was handed out last."""
        self._number = 0
        """The number of this piece, from 1; 0 before the first one."""
        self._turn = asyncio.Lock()
        """Lets one answer about the output be made at a time."""

    async def open(self) -> None:
        """Begin to read what the process writes."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self._popen.stdout
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._status is not None

    @property
    def seconds_since_end(self) -> float:
        """Seconds since its end; 0 while it runs."""
        if self._ended_at is None:
            return 0.0
        return time.monotonic() - self._ended_at

    def note_end(self, status: int) -> None:
        """Note that the process was reaped, with its exit status, negative for a signal."""
        self._status = status
        self._ended_at = time.monotonic()
        # Python then does not try to reap it too.
        self._popen.returncode = status
        self._ended.set()

    def kill(self) -> None:
        """Kill the process and its group unless it has ended."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Read no further."""
        if self._transport is not None:
            self._transport.close()

    async def answer(self, received: int) -> Message:
        """Hand out the next piece of output, for which this waits up to `HOLD_SECONDS`; or the last
        piece once more, where it was not received.

        Args:
            received: number of the last piece that the master has received, 0 for none.

        Returns:
            `output`, the bytes of the piece in base64, empty where there is none yet; `number`,
            that of the piece; and `status`, the exit status once everything has been handed out,
            else None.
        """
        async with self._turn:
            status = None
            # Otherwise the answer with the last piece was lost on its way: send it again.
            if received == self._number:
                self._piece = await self._read()
                if self._piece:
                    self._number += 1
                else:
                    status = self._status
            return {
                "output": base64.b64encode(self._piece).decode(),
                "number": self._number,
                "status": status,
            }

    async def _read(self) -> bytes:
        """Wait for the next piece of output and return it. None comes where there is nothing within
        `HOLD_SECONDS`, or `DRAIN_SECONDS` of a process that has ended already, and where the
        process has closed its output and ended."""
        seconds = DRAIN_SECONDS if self.has_ended else HOLD_SECONDS
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                piece = await self._reader.read(PIECE_BYTES)
                if piece:
                    return piece
                # The process has closed its output, and is about to end: the answer can then say
                # with which status.
                await self._ended.wait()
        return b""

    async def to_end(self, seconds: float) -> tuple[int, bytes]:
        """Read what the process writes until it has ended; kill it where that takes longer than
        `seconds`, or where this task is cancelled.

        Returns:
            The exit status, negative for a signal, and the last `MOST_OUTPUT_BYTES` of what it
            wrote.
        """
        output = b""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while piece := await self._reader.read(PIECE_BYTES):
                        output = (output + piece)[-MOST_OUTPUT_BYTES:]
                    await self._ended.wait()
        finally:
            self.kill()
            self.close()
        if self._status is None:
            # It was killed just now, and has not been reaped yet.
            return -signal.SIGKILL, output
        return self._status, output


class StartedProcesses:
    """The processes that an agent has started for its master.

    Args:
        modules: what may be run.
        variables: environment variables of every session on this pod.
    """

    def __init__(self, modules: Modules, variables: Mapping[str, str]) -> None:
        self._modules = modules
        self._variables = {
            **{name: os.environ[name] for name in LOGIN_VARIABLES if name in os.environ},
            **variables,
        }
        self._running: dict[int, Started] = {}
        """All processes that have not ended, by pid."""
        self._launchers: dict[str, Started] = {}
        """The launchers by the names of their runs."""

    def note_ended(self, statuses: Mapping[int, int]) -> None:
        """Note which processes have ended: `statuses` has the exit statuses of all that the agent
        has reaped, by pid."""
        for pid, status in statuses.items():
            started = self._running.pop(pid, None)
            # The agent reaps others too, such as sshd.
            if started is not None:
                started.note_end(status)

    async def launch(self, run: str, fields: Mapping[str, Any]) -> None:
        """Start DeepSpeed's launcher of a run on this pod, and forget those that ended long ago.

        Args:
            run: name of the run, by which `output` is asked for later.
            fields: those of a `LauncherOrder`.

        Raises:
            RefusedOrderError: the run had a launcher before, the order is not one of this version,
                its script is not in the project folder, or the process cannot be started.
        """
        order = _launcher_order(fields)
        if run in self._launchers:
            raise RefusedOrderError(f"run {run}: its launcher was started before")
        script = Path(order.script)
        is_in_project = script.resolve().is_relative_to(ROOT)
        if not is_in_project or not script.is_file():
            reason = f"agents start scripts of the project folder only, which is {ROOT} here"
            remedy = "copy the script there, or launch it over pdsh"
            raise RefusedOrderError(f"{script}: {reason}; {remedy}")
        self._forget_old_launchers()
        argv = [sys.executable, "-u", "-m", *self._modules.launcher]
        argv += [
            f"--world_info={world_info(order.world)}",
            f"--node_rank={order.node_rank}",
            f"--master_addr={order.master_addr}",
            f"--master_port={order.master_port}",
            order.script,
            *order.arguments,
        ]
        # This marks the launcher as the run's: the agent ends it with the run.
        variables = {**order.variables, RUN: run}
        started = self._start(argv, order.folder, variables, subprocess.STDOUT)
        self._launchers[run] = started
        await started.open()

    async def output(self, run: str, received: int) -> Message:
        """The next piece of what a run's launcher has written, as `Started.answer` hands it out;
        `RefusedOrderError` where the run has no launcher here, or it was forgotten."""
        launcher = self._launchers.get(run)
        if launcher is None:
            raise RefusedOrderError(f"run {run}: has no launcher here")
        return await launcher.answer(received)

    async def check(
        self,
        module: str,
        arguments: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        seconds: float,
    ) -> Message:
        """Run a module that checks this pod; kill it where it takes longer than `seconds`.

        Args:
            folder: its working folder; `/` is taken where this one cannot be read.
            variables: environment variables, in addition to those of every session on the pod.

        Returns:
            `status`, the exit status, negative for a signal; `output` and `errors`, the last
            characters that it wrote to stdout and to stderr.

        Raises:
            RefusedOrderError: the module is none that checks a pod, a value is not of its kind, or
                the process cannot be started.
        """
        if module not in self._modules.checks:
            known = ", ".join(self._modules.checks)
            raise RefusedOrderError(
                f"module {module:.{MOST_SHOWN}}: is none that checks a pod; expected {known}"
            )
        values = {
            "arguments": arguments,
            "folder": folder,
            "variables": variables,
            "seconds": seconds,
        }
        _check_values(values, CHECK_VALUES)
        if not os.access(folder, os.R_OK | os.X_OK):
            folder = "/"
        argv = [sys.executable, "-m", module, *arguments]
        with tempfile.TemporaryFile() as errors:
            started = self._start(argv, folder, variables, errors)
            await started.open()
            status, output = await started.to_end(seconds)
            error_bytes = errors.seek(0, os.SEEK_END)
            errors.seek(max(0, error_bytes - MOST_ERROR_BYTES))
            last_errors = errors.read(MOST_ERROR_BYTES)
        return {
            "status": status,
            "output": output.decode(errors="replace"),
            "errors": last_errors.decode(errors="replace"),
        }

    def _forget_old_launchers(self) -> None:
        """Forget the launchers that ended more than `KEEP_SECONDS` ago, and what they wrote."""
        for run, launcher in list(self._launchers.items()):
            if launcher.seconds_since_end > KEEP_SECONDS:
                launcher.close()
                del self._launchers[run]

    def _start(
        self,
        argv: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        errors: int | IO[bytes],
    ) -> Started:
        """Start a command in a session of its own, with a pipe for its output, and note it in
        `_running`; `RefusedOrderError` where it cannot be started.

        Args:
            variables: environment variables, in addition to those of every session on the pod.
            errors: where its stderr goes, as `Popen` takes it.
        """
        try:
            popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env={**self._variables, **variables},
                start_new_session=True,
            )
        except OSError as error:
            # The error names no file where the system has no room for another process.
            place = error.filename or argv[0]
            reason = error.strerror or "cannot be started"
            raise RefusedOrderError(f"{place}: {reason} on this pod") from None
        except (TypeError, ValueError) as error:
            raise RefusedOrderError(f"{argv[-1]!r}: {error}; give another argument") from None
        # Noted before any other task has its turn: the one that reaps children asks for it.
        self._running[popen.pid] = Started(popen)
        return self._running[popen.pid]


# What an order may hold


def _launcher_order(fields: Mapping[str, Any]) -> LauncherOrder:
    """The order that has these fields; `RefusedOrderError` where it is not one of this version."""
    try:
        order = LauncherOrder(**fields)
    except TypeError as error:
        raise RefusedOrderError(f"not a known order: {error}; {OTHER_VERSION}") from None
    _check_values(fields, LAUNCHER_VALUES)
    return order


def _is_text(value: object) -> bool:
    """Whether a value is a text that a program can be given."""
    return isinstance(value, str) and "\0" not in value


def _is_number(value: object) -> bool:
    return isinstance(value, int)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_variables(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_world(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(slots, list) for slots in value.values())


@dataclass(frozen=True)
class _Kind:
    """What a value of an order has to be."""

    words: str
    """What is expected, as a refusal says it."""
    includes: Callable[[object], bool]
    """Whether a value is of this kind."""


_TEXT = _Kind("a text without NUL", _is_text)
_TEXTS = _Kind("a list of texts without NUL", _is_texts)
_NUMBER = _Kind("a whole number", _is_number)
_VARIABLES = _Kind("texts without NUL, by names", _is_variables)
LAUNCHER_VALUES = {
    "world": _Kind("lists of slots, by addresses", _is_world),
    "node_rank": _NUMBER,
    "master_addr": _TEXT,
    "master_port": _NUMBER,
    "folder": _TEXT,
    "script": _TEXT,
    "arguments": _TEXTS,
    "variables": _VARIABLES,
}
"""What each field of a `LauncherOrder` has to be. Pydantic, which would tell, may not be on a
pod."""
CHECK_VALUES = {
    "arguments": _TEXTS,
    "folder": _TEXT,
    "variables": _VARIABLES,
    "seconds": _Kind("a number of seconds", _is_seconds),
}
"""The same for a check."""


def _check_values(values: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    """Raise `RefusedOrderError` about the first value that is not of its kind."""
    for name, kind in kinds.items():
        if not kind.includes(values[name]):
            shown = repr(values[name])[:MOST_SHOWN]
            raise RefusedOrderError(
                f"order: {name} is {shown}, expected {kind.words}; {OTHER_VERSION}"
            )
