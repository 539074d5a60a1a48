"""How long 1,000 simulated workers take to register, all at once and each over a connection of its
own."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figure import Figure, median
from zeropods.pods.hostfile import Host, read_hostfile, write_hostfile
from zeropods.pods.rendezvous import Pod, Rendezvous, allow_open_files, register

WORKERS = 1_000
ROUNDS = 3
SECONDS = 60.0
FURTHER_FILES = 64
"""Files that the workers' process opens besides a connection for each of them."""
READY = "here"
"""The line by which that process says that the workers can register."""
KEY_BYTES = 32


def measure(work: Path) -> list[Figure]:
    """Seconds from the first worker's start to the hostfile, in which every worker has to be."""
    seconds = []
    for number in range(ROUNDS):
        hostfile = work / f"hostfile.{number}"
        seconds.append(_seconds_of_a_round(hostfile))
        # Reading it refuses a host that occurs twice.
        addresses = {host.address for host in read_hostfile(hostfile)}
        assert len(addresses) == WORKERS, "a worker is missing in the hostfile"
    name = f"{WORKERS:,} simulated workers registered"
    return [median(name, seconds, "at most 3", "all in the hostfile")]


def _seconds_of_a_round(hostfile: Path) -> float:
    secret = secrets.token_bytes(KEY_BYTES)
    rendezvous = Rendezvous(secret=secret, count=WORKERS, address="127.0.0.1", port=0)
    with rendezvous, _workers(rendezvous.port, secret) as start:
        began = time.perf_counter()
        start()
        pods = rendezvous.gather(SECONDS) or ()
        write_hostfile(hostfile, [Host(pod.address, pod.slots) for pod in pods])
        return time.perf_counter() - began


@contextmanager
def _workers(port: int, secret: bytes) -> Iterator[Callable[[], None]]:
    """Start a process that holds all workers back; yields a function that lets them register."""
    argv = [sys.executable, "-m", "benchmarks.rendezvous"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin = process.stdin
        assert stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == f"{READY}\n"

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
    registrations = []
    for number in range(WORKERS):
        registrations.append(register(master, secret, _worker(number), SECONDS))
    await asyncio.gather(*registrations)


def _worker(number: int) -> Pod:
    network = number // 250
    host = number % 250 + 1
    return Pod(
        worker=f"worker-{number}",
        address=f"10.0.{network}.{host}",
        hostname=f"pod-{number}",
        slots=1,
        ssh_port=2_222,
        host_key=_made_up_host_key(),
        control_port=40_000,
    )


def _made_up_host_key() -> str:
    """A public key of sshd's form: the kind and the key, each after its length."""
    kind = b"ssh-ed25519"
    key = secrets.token_bytes(KEY_BYTES)
    blob = struct.pack(">I", len(kind)) + kind + struct.pack(">I", KEY_BYTES) + key
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


def _main() -> None:
    """The process of the workers: say that it is ready, wait for port and secret, and register all
    workers."""
    allow_open_files(WORKERS + FURTHER_FILES)
    print(READY, flush=True)
    order = json.loads(sys.stdin.readline())
    asyncio.run(_register_all(order["port"], bytes.fromhex(order["secret"])))


if __name__ == "__main__":
    _main()
