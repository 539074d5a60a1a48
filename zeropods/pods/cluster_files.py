"""The files of a cluster's folder: key, secret, and what ssh, pdsh and DeepSpeed read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from zeropods import atomic
from zeropods.pods.cluster import ENVIRONMENT, HOSTFILE, KEY, KNOWN_HOSTS, SECRET, SSH_CONFIG, Cluster
from zeropods.pods.hostfile import write_hostfile
from zeropods.pods.ssh import known_hosts_text, ssh_config_text


def write_files(cluster: Cluster, user: Callable[[str], str]) -> None:
    """Write what lets others reach the pods of a cluster, with their host keys pinned.

    Args:
        user: tells the account at an address.
    """
    folder, port = cluster.folder, cluster.ssh_port
    known = known_hosts_text((pod.address, port, pod.host_key) for pod in cluster.pods)
    addresses: dict[str, list[str]] = {}
    for pod in cluster.pods:
        addresses.setdefault(user(pod.address), []).append(pod.address)
    config = "".join(
        ssh_config_text(theirs, port, folder / KEY, folder / KNOWN_HOSTS, name) for name, theirs in addresses.items()
    )
    variables = "".join(f"{name}={value}\n" for name, value in cluster.environment.items())
    atomic.write_text(folder / KNOWN_HOSTS, known)
    atomic.write_text(folder / SSH_CONFIG, config)
    atomic.write_text(folder / ENVIRONMENT, variables)
    write_hostfile(folder / HOSTFILE, cluster.hosts)


def make_secret(folder: Path) -> bytes:
    """A new secret of 32 random bytes, kept in a file that only its owner can read."""
    path = folder / SECRET
    secret = secrets.token_bytes(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(f"{secret.hex()}\n")
    return secret
