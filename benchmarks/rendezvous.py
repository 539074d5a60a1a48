"""How long 1,000 simulated workers take to register, all at once and each over a connection of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, median
from zeropods.pods.hostfile import Host, read_hostfile, write_hostfile
from zeropods.pods.rendezvous import Pod, Rendezvous, allow_open_files, register

WORKERS, ROUNDS = 1_000, 3
SECONDS = 60.0


def measure(work: Path) -> list[Figure]:
    """Seconds from the first worker's start to the hostfile, in which every worker has to be."""
    rounds = [_round(work / f"hostfile.{number}") for number in range(ROUNDS)]
    seconds = [taken for taken, _ in rounds]
    assert {found for _, found in rounds} == {WORKERS}, "a worker is missing in the hostfile"
    return [median(f"{WORKERS:,} simulated workers registered", seconds, "at most 3", "all in the hostfile")]


def _round(hostfile: Path) -> tuple[float, int]:
    """Seconds, and the number of different hosts in the hostfile; reading it refuses a host that occurs twice."""
    secret = secrets.token_bytes(32)
    rendezvous = Rendezvous(secret=secret, count=WORKERS, address="127.0.0.1", port=0)
    with rendezvous, _workers(rendezvous.port, secret) as start:
        began = time.perf_counter()
        start()
        pods = rendezvous.gather(SECONDS) or ()
        write_hostfile(hostfile, [Host(pod.address, pod.slots) for pod in pods])
        seconds = time.perf_counter() - began
    return seconds, len({host.address for host in read_hostfile(hostfile)})


@contextmanager
def _workers(port: int, secret: bytes) -> Iterator[Any]:
    """Start a process that holds all workers back; yields a function that lets them register."""
    argv = [sys.executable, "-m", "benchmarks.rendezvous"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin = process.stdin
        assert process.stdout.readline() == "here\n"

        def start() -> None:
            stdin.write(json.dumps({"port": port, "secret": secret.hex()}) + "\n")
            stdin.flush()

        try:
            yield start
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


async def _register_all(port: int, secret: bytes) -> None:
    master = ("127.0.0.1", port)
    await asyncio.gather(*(register(master, secret, _worker(number), SECONDS) for number in range(WORKERS)))


def _worker(number: int) -> Pod:
    kind = b"ssh-ed25519"
    blob = struct.pack(">I", len(kind)) + kind + struct.pack(">I", 32) + secrets.token_bytes(32)
    return Pod(
        worker=f"worker-{number}",
        address=f"10.0.{number // 250}.{number % 250 + 1}",
        hostname=f"pod-{number}",
        slots=1,
        ssh_port=2_222,
        host_key=f"ssh-ed25519 {base64.b64encode(blob).decode()}",
        control_port=40_000,
    )


def _main() -> None:
    """The process of the workers: say that it is ready, wait for port and secret, and register all workers."""
    allow_open_files(WORKERS + 64)
    print("here", flush=True)
    told = json.loads(sys.stdin.readline())
    asyncio.run(_register_all(told["port"], bytes.fromhex(told["secret"])))


if __name__ == "__main__":
    _main()
