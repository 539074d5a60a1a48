"""A rendezvous or the control port of a pod in a process of its own, where strangers come; seen from outside.

    python -m tests.besieged rendezvous|agent   (the secret on stdin; the port on stdout)

What escapes is in its stderr; memory and open files are those of nothing else.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.strangers import HERE
from zeropods.pods.control import ControlServer
from zeropods.pods.leases import Lifetime
from zeropods.pods.registration import Answer
from zeropods.pods.rendezvous import Rendezvous

ROOT = Path(__file__).resolve().parents[1]
SSH_PORTS = (2_222,)
HANDSHAKE_SECONDS = 2.0
SECONDS = 1_200.0


@dataclass
class Besieged:
    """The process, where it listens, and what it has said."""

    process: subprocess.Popen[str]
    port: int
    errors: Path

    def said(self) -> dict[str, Any]:
        """Its last word."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def complaints(self) -> str:
        """Tracebacks and warnings; there should be none."""
        return self.errors.read_text()


@contextmanager
def besieged(kind: str, secret: bytes, folder: Path) -> Iterator[Besieged]:
    """Start one, and end it."""
    errors = folder / "stderr"
    command = [sys.executable, "-m", "tests.besieged", kind]
    with (
        open(errors, "w") as file,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{secret.hex()}\n")
            process.stdin.flush()
            yield Besieged(process, int(process.stdout.readline()), errors)
        finally:
            process.kill()


def rendezvous(secret: bytes) -> dict[str, Any]:
    """Wait for two pods."""
    answer = Answer(cluster="c", authorized_key="ssh-ed25519 AAAA", lease="kernel", lease_seconds=30.0)
    with Rendezvous(
        secret=secret, count=2, answer=answer, address=HERE, port=0, ssh_ports=SSH_PORTS,
        handshake_seconds=HANDSHAKE_SECONDS,
    ) as listening:  # fmt: skip
        print(listening.port, flush=True)
        pods = listening.gather(SECONDS, lambda ids: None)
        return {"pods": [pod.worker for pod in pods], "rejected": listening.rejected}


async def agent(secret: bytes) -> dict[str, Any]:
    """Answer until it is asked to end."""
    lifetime = Lifetime(lambda: None)
    control = ControlServer(lifetime, secret, {"worker": "w1", "cluster": "c"})
    print(await control.start(HERE), flush=True)
    ending = await lifetime.run()
    await control.close()
    return {"ended": ending.reason}


def main() -> None:
    secret = bytes.fromhex(sys.stdin.readline())
    said = rendezvous(secret) if sys.argv[1] == "rendezvous" else asyncio.run(agent(secret))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
