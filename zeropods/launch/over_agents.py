"""Let the agents of pods start the ranks of a run, in the place of pdsh, and write what these say.

    python -m zeropods.launch.over_agents --hostfile F --control_ports P1,P2 --secret_file S \\
        --master_port P SCRIPT [ARGUMENT ...]

Each agent starts DeepSpeed's launcher for its pod, whose output comes over the agents' own wire:
neither ssh nor a shell is between. As under pdsh, each line has the address of its pod before it,
and a line tells of a pod whose launcher has failed; the exit status is the largest of theirs. As
for DeepSpeed's runner, the file that `DS_ENV_FILE` names has the variables of the ranks. One of
them names the run, which a supervisor has opened on the pods, and which it ends there too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeropods.errors import UserError, guarded
from zeropods.pods.agent import read_secret
from zeropods.pods.hostfile import read_hostfile
from zeropods.pods.processes import RUN
from zeropods.pods.started import HOLD_SECONDS, LauncherOrder
from zeropods.pods.wire import RefusedError, WireError, ask_agent

VARIABLES_FILE = "DS_ENV_FILE"
"""DeepSpeed's name of the variable that names its file of environment variables."""
START_SECONDS = 20.0
"""Seconds that an agent may take to start a launcher."""
ANSWER_SECONDS = HOLD_SECONDS + 5.0
"""Seconds that an agent may take to answer about output."""
AGENT_GONE_SECONDS = 3.0
"""Seconds for which an agent is asked again, counted from the first of its answers that failed to
come; then the pod's launcher counts as lost, and its supervisor waits less long for the pod
itself."""
PAUSE_SECONDS = 0.5
"""Pause before an agent that did not answer is asked again."""
MOST_LINE_BYTES = 65_536
"""Bytes of a line that are kept until its end comes; what has more is written in several lines, so
that a rank that never ends its line takes no memory here."""
LOST = 255
"""Exit status that stands for a lost launcher, as it does for ssh."""


class _Session:
    """The launcher of one pod: started, followed to its end."""

    def __init__(self, address: str, port: int, secret: bytes, run: str) -> None:
        self._address = address
        self._port = port
        self._secret = secret
        self._run = run
        self._unfinished = b""

    async def follow(self, order: LauncherOrder) -> int:
        """Start the launcher, write what it writes, and return its exit status as a shell tells it:
        for a signal 128 plus the signal's number. Where its agent does not answer, the launcher
        counts as lost, and its status is `LOST`."""
        try:
            await self._ask({"do": "launch", "launcher": asdict(order)}, START_SECONDS)
            status = await self._pass_on()
        except WireError as error:
            self._write([f"zeropods: {error}".encode()])
            status = LOST
        if self._unfinished:
            self._write([self._unfinished])
        if status < 0:
            _say(f"agents: {self._address}: killed by signal {-status}")
            return 128 - status
        if status > 0:
            _say(f"agents: {self._address}: launcher exited with exit code {status}")
        return status

    async def _pass_on(self) -> int:
        """Write the launcher's lines as they come; returns its exit status, negative for a signal.

        `WireError` where its agent does not answer for `AGENT_GONE_SECONDS`, or refuses, since it
        has no such launcher.
        """
        # Number of the last piece of output that came.
        received = 0
        failing_since: float | None = None
        while True:
            try:
                request = {"do": "output", "received": received}
                answer = await self._ask(request, ANSWER_SECONDS)
            except RefusedError:
                # This agent answers, and would refuse again.
                raise
            except WireError:
                now = time.monotonic()
                # Not counted from the last answer: where nothing is written, an answer is held for
                # longer than an agent is asked again.
                if failing_since is None:
                    failing_since = now
                if now - failing_since > AGENT_GONE_SECONDS:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            failing_since = None
            if answer["number"] > received:
                received = answer["number"]
                self._take(base64.b64decode(answer["output"]))
            status: int | None = answer["status"]
            if status is not None:
                return status

    async def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        about_run = {**request, "run": self._run}
        return await ask_agent(self._address, self._port, self._secret, about_run, seconds)

    def _take(self, output: bytes) -> None:
        """Write the lines that this piece of output completes, and keep the rest of it."""
        *lines, self._unfinished = (self._unfinished + output).split(b"\n")
        if len(self._unfinished) >= MOST_LINE_BYTES:
            lines.append(self._unfinished)
            self._unfinished = b""
        self._write(lines)

    def _write(self, lines: Sequence[bytes]) -> None:
        """Write lines to stdout, each with the pod's address before it."""
        prefix = self._address.encode() + b": "
        for line in lines:
            sys.stdout.buffer.write(prefix + line + b"\n")
        sys.stdout.buffer.flush()


def _say(line: str) -> None:
    print(line, flush=True)


async def follow_all(orders: Sequence[LauncherOrder], sessions: Sequence[_Session]) -> int:
    """Start the launchers of all pods at once, each with its order, and return the largest exit
    status when all have ended."""
    pairs = zip(sessions, orders, strict=True)
    statuses = await asyncio.gather(*(session.follow(order) for session, order in pairs))
    return max(statuses)


def _variables_of_ranks(path: Path) -> dict[str, str]:
    """The variables in the launcher's environment file: a line `NAME=VALUE` for each."""
    variables = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        name, is_set, value = line.partition("=")
        if is_set:
            variables[name] = value
    return variables


def main() -> int:
    """Start the ranks of a run, follow them to their end, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--control_ports", required=True)
    parser.add_argument("--secret_file", required=True)
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    variables = _variables_of_ranks(Path(os.environ[VARIABLES_FILE]))
    if RUN not in variables:
        reason = f"{RUN} is not in the file that {VARIABLES_FILE} names"
        raise UserError(f"{reason}; start ranks with: zeropods launch --launcher agents")
    secret = read_secret(flags.secret_file)
    hosts = read_hostfile(flags.hostfile)
    ports = [int(port) for port in flags.control_ports.split(",")]
    world = {host.address: list(range(host.slots)) for host in hosts}
    orders = []
    sessions = []
    for node_rank, (host, port) in enumerate(zip(hosts, ports, strict=True)):
        order = LauncherOrder(
            world=world,
            node_rank=node_rank,
            master_addr=hosts[0].address,
            master_port=flags.master_port,
            folder=os.getcwd(),
            script=flags.script,
            arguments=flags.arguments,
            variables=variables,
        )
        orders.append(order)
        sessions.append(_Session(host.address, port, secret, variables[RUN]))
    return asyncio.run(follow_all(orders, sessions))


if __name__ == "__main__":
    sys.exit(guarded(main))
