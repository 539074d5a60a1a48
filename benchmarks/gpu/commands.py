"""What people type on a machine with one GPU: commands from a probe to a summary, how each ended,
and what it said.

Cells measure; these show that the commands work there at all: pods by agents without ssh, a killed
rank, a GPU that another program has nearly filled, `zeropods plan --tune`, notebooks.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import HOME
from zeropods.measure.heartbeat import read_beats
from zeropods.pods.processes import start_bound
from zeropods.programs import child_environment

COMMANDS = "commands.json"
LOGS = "commands"
LAST_CHARACTERS = 2_000
PAUSE_SECONDS = 0.2
ENDING_SECONDS = 10.0
"""Seconds from SIGTERM to SIGKILL of a command that takes too long."""
HOLDING_SECONDS = 60.0
"""Most seconds until another program holds the GPU's memory."""
HOLDER = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.int8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
"""A program that leaves so many bytes of the GPU free, until its input is closed."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command as a user types it."""

    name: str
    words: tuple[str, ...]
    """What stands after `python`; `{data}`, `{runs}` and `{model}` are filled in."""
    status: int = 0
    """The status with which it should end."""
    kills_rank_at: int | None = None
    """The step at which rank 0 of its run gets SIGKILL, once; its run folder is `{runs}/NAME`."""
    leaves_bytes: int | None = None
    """Bytes of the GPU that another program leaves free meanwhile."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it gets beside this process's own, filled in like its words."""


def zeropods(name: str, *words: str, **settings: Any) -> Command:
    """A command of the package."""
    return Command(name=name, words=("-m", "zeropods", *words), **settings)


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Where commands are typed: their folders and, by their names, what stands for the machine's
    data and model."""

    out: Path
    """Folder of runs, logs and `commands.json`."""
    places: dict[str, str]

    def type(self, command: Command, seconds: float) -> dict[str, Any]:
        """Run a command, end it after so many seconds, and keep how it ended."""
        log = self.out / LOGS / f"{command.name.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [word.format(**self.places) for word in command.words]
        variables = {name: text.format(**self.places) for name, text in command.variables.items()}
        began = time.monotonic()
        began_unix_seconds = time.time()
        with open(log, "wb") as output, _neighbour(command.leaves_bytes):
            process = start_bound(
                [sys.executable, *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**child_environment(), **variables},
            )
            # A command that does not end by itself takes some seconds more.
            ends = began + max(1.0, seconds - ENDING_SECONDS)
            killed_step = self._watch(command, process, ends, began_unix_seconds)
        text = log.read_bytes().decode("utf-8", "replace").strip()
        ended = {
            "name": command.name,
            "command": " ".join(words),
            "status": process.returncode,
            "expected_status": command.status,
            "seconds": round(time.monotonic() - began, 1),
            "kills_rank_at": command.kills_rank_at,
            "killed_at_step": killed_step,
            "output": text[-LAST_CHARACTERS:],
        }
        self._keep(ended)
        return ended

    def _watch(
        self,
        command: Command,
        process: subprocess.Popen[bytes],
        ends: float,
        began_unix_seconds: float,
    ) -> int | None:
        """Wait for a command, end it when its time is over, and kill its rank if that is asked for;
        returns the step at which the rank was killed."""
        killed_step = None
        folder = Path(self.places["runs"]) / command.name
        while process.poll() is None:
            if time.monotonic() > ends:
                _end(process)
                break
            if command.kills_rank_at is not None and killed_step is None:
                killed_step = _kill_rank(folder, command.kills_rank_at, began_unix_seconds)
            time.sleep(PAUSE_SECONDS)
        return killed_step

    def _keep(self, ended: dict[str, Any]) -> None:
        """Add a command to those that were typed here."""
        others = [earlier for earlier in typed(self.out) if earlier["name"] != ended["name"]]
        files.write_json(self.out / COMMANDS, {"commands": [*others, ended]})


def typed(out: Path) -> list[dict[str, Any]]:
    """The commands that were typed into this folder so far, in their order."""
    path = out / COMMANDS
    if not path.is_file():
        return []
    commands: list[dict[str, Any]] = files.read_object(path, "remove it")["commands"]
    return commands


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end, and kill its group where it does not."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill_rank(folder: Path, step: int, began_unix_seconds: float) -> int | None:
    """Kill rank 0 of a run that has come to this step; returns the step that it was at, and None
    where it has not come there, or has ended.

    Args:
        began_unix_seconds: when the command began; heartbeats of earlier runs do not count.
    """
    beat = read_beats(folder).get(0)
    if beat is None or beat.step < step or beat.began_unix_seconds < began_unix_seconds:
        return None
    try:
        os.kill(beat.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return beat.step


@contextmanager
def _neighbour(leaves_bytes: int | None) -> Iterator[None]:
    """Within this block another program holds all of the GPU but so many bytes; none if not
    given."""
    if leaves_bytes is None:
        yield
        return
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(leaves_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        select.select([holder.stdout], [], [], HOLDING_SECONDS)
        if holder.poll() is not None:
            raise UserError("the program that was to fill the GPU has ended; see its error above")
        yield
    finally:
        if holder.stdin is not None:
            holder.stdin.close()
        try:
            holder.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()


def left_over(out: Path) -> list[str]:
    """Processes that commands have left running, also written down: all that know this home of
    clusters, but for what this process began beside the commands."""
    home = os.environ.get(HOME)
    left = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        environment = process.info["environ"] or {}
        is_of_commands = home is not None and environment.get(HOME) == home
        if is_of_commands and process.info["pid"] not in _own_processes():
            left.append(" ".join(process.info["cmdline"] or []))
    files.write_json(out / "left_over.json", {"processes": left})
    return left


def _own_processes() -> set[int]:
    """This process, what started it and what it has started beside the commands."""
    this = psutil.Process()
    relatives = [this, *this.parents(), *this.children(recursive=True)]
    return {process.pid for process in relatives}


def ended_in_words(ended: dict[str, Any]) -> str:
    """How a command ended, in a few words."""
    text = f"{ended['name']} ended with {ended['status']}"
    if ended["status"] != ended["expected_status"]:
        text = f"{text}, not {ended['expected_status']}"
    if _was_spared(ended):
        text = f"{text}, and its rank was not killed"
    return text


def ended_as_expected(ended: dict[str, Any]) -> bool:
    """Whether a command ended with the status that it should, and its rank was killed where that
    was asked for."""
    return ended["status"] == ended["expected_status"] and not _was_spared(ended)


def _was_spared(ended: dict[str, Any]) -> bool:
    """Whether a rank that was to be killed was not."""
    return ended["kills_rank_at"] is not None and ended["killed_at_step"] is None
