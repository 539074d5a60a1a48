"""Clusters in a home of their own, and what must not be left of them."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.full.launches import of_processes, until
from zeropods.pods.cluster import Cluster
from zeropods.pods.ssh import make_key, ssh_argv
from zeropods.programs import find_program

SECONDS = 600.0
Wrap = Callable[[list[str]], list[str]]
SSHD_CONFIG = """
ListenAddress {address}
Port {port}
HostKey "{folder}/host_key"
AuthorizedKeysFile "{keys}"
PidFile "{folder}/pid"
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


def processes_of(home: Path) -> list[int]:
    """Processes of this machine that were started for clusters of a home."""
    mark = f"\0ZEROPODS_HOME={home}\0".encode()
    return [pid for pid, text in of_processes("environ").items() if mark in b"\0" + text]


def processes_naming(folder: Path) -> list[int]:
    """Processes of this machine that name a folder in their environment or among their arguments."""
    texts = [each for name in ("environ", "cmdline") for each in of_processes(name).items()]
    return [pid for pid, text in texts if str(folder).encode() in text]


def ssh(cluster: Cluster, address: str, *command: str) -> str:
    """What a command prints on a pod."""
    argv = ssh_argv(cluster.ssh_config, address, command)
    return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.strip()


def listens(address: str, port: int) -> bool:
    """Whether anything does."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((address, port)) == 0


def ports_of(clusters: Iterable[Cluster]) -> list[tuple[str, int]]:
    """Every address and port on which a cluster listens."""
    return [
        (pod.address, port) for cluster in clusters for pod in cluster.pods for port in (pod.ssh_port, pod.control_port)
    ]


@contextmanager
def plain_sshd(
    folder: Path, address: str, port: int, public_key: str, more: str = "", command: Wrap = list
) -> Iterator[str]:
    """A host's own sshd, which lets one key in; yields its host key.

    Args:
        folder: is made; for the daemon's files.
        more: lines of its configuration.
        command: where it is run otherwise than as it is.
    """
    folder.mkdir()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    host_key = make_key(folder / "host_key", address)
    (folder / "authorized_keys").write_text(f"{public_key}\n")
    # sshd expands %h and its like there.
    keys = str(folder / "authorized_keys").replace("%", "%%")
    config = SSHD_CONFIG.format(address=address, port=port, folder=folder, keys=keys)
    # The first value of an option counts.
    (folder / "config").write_text(f"{more}\n{config}")
    argv = [str(find_program("sshd")), "-D", "-f", str(folder / "config"), "-E", str(folder / "log")]
    # Not this process's environment: what a session there has is not what the user has here.
    with subprocess.Popen(command(argv), env={"PATH": os.environ["PATH"]}, start_new_session=True) as daemon:
        try:
            until(lambda: daemon.poll() is None and listens(address, port))
            yield host_key
        finally:
            daemon.terminate()


def command(*arguments: object) -> list[str]:
    """The words of a call of the command line."""
    return [sys.executable, "-m", "zeropods", *map(str, arguments)]


def zeropods(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What such a call came to."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=600, check=False)


def program(code: str) -> subprocess.Popen[str]:
    """A Python program that is followed through its stdout."""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
