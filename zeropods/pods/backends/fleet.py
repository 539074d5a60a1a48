"""All workers of a cluster: local ones, hosts of the user's own, or a CML session with its CML workers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods import this_pod
from zeropods.pods.backends.cml import CmlWorkers, is_session
from zeropods.pods.backends.hosts import OwnHosts
from zeropods.pods.backends.local import LocalWorkers, Loopback, Network, OwnAddress
from zeropods.pods.backends.namespaces import Namespaces
from zeropods.pods.backends.workers import Worker, Workers, has_ended
from zeropods.pods.hostfile import parse_hostfile
from zeropods.pods.state import ROOT, Settings, home, names

WORKER_SCRIPT = ROOT / "worker_p.py"
BACKENDS = ("local", "cml")
"""Those that can be chosen; a hostfile makes it `hosts`."""
NETWORKS = ("loopback", "namespaces")
"""Of the local backend; CML has its own."""


class Fleet:
    """Starts, lists and stops the workers of one cluster."""

    def __init__(self, network: Network, here: LocalWorkers, elsewhere: Workers | None = None) -> None:
        self.network = network
        self._here = here
        self._elsewhere = elsewhere

    def start(self, settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
        """Start an agent on each of `settings.count` workers; returns their ids."""
        size = (settings.cpu, settings.memory, settings.nvidia_gpu)
        # As a command, and this very Python: a CML worker's own kernel may not have our packages.
        code = f"!{shlex.join([sys.executable, str(WORKER_SCRIPT)])}"
        here = 1 if self._elsewhere else settings.count
        started = self._here.launch_workers(here, *size, code=code, env=env)
        if self._elsewhere and settings.count > here:
            started += self._elsewhere.launch_workers(settings.count - here, *size, code=code, env=env)
        return tuple(str(worker["id"]) for worker in started)

    def listed(self, ids: tuple[str, ...]) -> list[Worker]:
        """The workers with these ids, as their backends describe them."""
        found = self._here.list_workers() + (self._elsewhere.list_workers() if self._elsewhere else [])
        return [worker for worker in found if str(worker["id"]) in ids]

    def stop(self, ids: tuple[str, ...]) -> None:
        """End the workers with these ids, and all local ones."""
        self._here.stop_workers()
        if self._elsewhere:
            theirs = [worker for worker in self._elsewhere.list_workers() if str(worker["id"]) in ids]
            self._elsewhere.stop_workers(*(worker["id"] for worker in theirs if not has_ended(worker)))

    def is_running_here(self) -> bool:
        """Whether any local worker runs."""
        return bool(self._here.addresses())

    def last_line(self, worker: str) -> str:
        """The last line of a worker's log; empty where there is none that could be read from here."""
        return self._here.last_line(worker)


def fleet_of(folder: Path, settings: Settings) -> Fleet:
    """The workers whose state lies in a cluster's folder."""
    if settings.network == "cml":
        own = OwnAddress(this_pod.address())
        return Fleet(own, LocalWorkers(folder, own), CmlWorkers())
    if settings.network == "hosts":
        hosts = parse_hostfile("\n".join(settings.hosts), "hostfile")
        own_hosts = OwnHosts(hosts, Path(settings.ssh_config) if settings.ssh_config else None)
        return Fleet(own_hosts, LocalWorkers(folder, own_hosts))
    network = Namespaces(folder) if settings.network == "namespaces" else Loopback(_taken)
    return Fleet(network, LocalWorkers(folder, network))


def choose_backend(backend: str | None) -> str:
    """The backend that was asked for, else CML inside a CML session; `UserError` where it is not to be had."""
    if backend is None:
        return "cml" if is_session() else "local"
    if backend not in BACKENDS:
        raise UserError(f"backend {backend!r}: expected {' or '.join(BACKENDS)}")
    if backend == "cml":
        CmlWorkers()
    return backend


def choose_network(network: str, backend: str) -> str:
    """The network of a backend; `UserError` for one that it does not have."""
    if network not in NETWORKS:
        raise UserError(f"network {network!r}: expected {' or '.join(NETWORKS)}")
    if backend == "cml" and network != NETWORKS[0]:
        raise UserError(f"network {network!r}: is for --backend local; CML gives its pods a network")
    return "cml" if backend == "cml" else network


def differences(old: Settings, new: Settings) -> str:
    """What was asked for differently, `count 3 -> 2`; empty for the same."""
    before, after = asdict(old), asdict(new)
    return ", ".join(f"{name} {before[name]} -> {after[name]}" for name in after if before[name] != after[name])


def _taken() -> set[str]:
    """Addresses of all local workers of this home."""
    return {address for name in names() for address in LocalWorkers(home() / name, OwnAddress("")).addresses()}
