"""What is asked of `up`, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from zeropods.errors import UserError
from zeropods.pods import this_pod
from zeropods.pods.backends.fleet import BACKENDS, NETWORKS, choose_backend, choose_network
from zeropods.pods.hostfile import Host, read_hostfile
from zeropods.pods.state import Settings

LEASES = {"kernel": 25.0, "idle": 7200.0}
"""`kernel`: the cluster ends so long after the process that started it, and is gone 30 seconds after; `idle`: so long
after its last use."""
GPU_DEVICES = Path("/dev/nvidiactl")

Number = TypeVar("Number", int, float)


def checked_settings(
    count: int | None,
    *,
    hostfile: Path | None,
    ssh_config: Path | None,
    slots: int | None,
    backend: str | None,
    network: str,
    lease: str,
    lease_seconds: float | None,
    cpu: float,
    memory: float,
    nvidia_gpu: int | None,
) -> Settings:
    """The settings with their defaults, as `up` documents them; `UserError` names the one that cannot be."""
    hosts: Sequence[Host] = ()
    if hostfile is not None:
        _refuse_beside_hostfile(slots, backend, network)
        hosts = _first(read_hostfile(hostfile), count, hostfile)
        count, chosen, network = len(hosts), "hosts", "hosts"
    elif ssh_config is not None:
        raise UserError(f"ssh configuration {ssh_config}: is for hosts of your own; give their hostfile too")
    else:
        chosen = choose_backend(backend)
        network = choose_network(network, chosen)
    if count is None:
        raise UserError("count: not given; say how many pods, or name a hostfile")
    return Settings(
        count=positive("count", count),
        slots=None if slots is None else positive("slots", slots),
        backend=chosen,
        network=network,
        lease=_lease(lease),
        lease_seconds=positive("lease_seconds", LEASES[lease] if lease_seconds is None else lease_seconds),
        cpu=positive("cpu", cpu),
        memory=positive("memory", memory),
        nvidia_gpu=_gpus() if nvidia_gpu is None else nvidia_gpu,
        hosts=tuple(host.line() for host in hosts),
        ssh_config=None if ssh_config is None else str(_readable(ssh_config)),
    )


def positive(what: str, value: Number) -> Number:
    """The value; `UserError` if it is not above zero."""
    if value <= 0:
        raise UserError(f"{what}: {value}; expected a positive number")
    return value


def _refuse_beside_hostfile(slots: int | None, backend: str | None, network: str) -> None:
    if slots is not None:
        raise UserError(f"slots {slots}: the hostfile says how many each host has; leave slots out")
    if backend is not None:
        raise UserError(f"backend {backend!r}: expected {' or '.join(BACKENDS)} without a hostfile, or none with one")
    if network != NETWORKS[0]:
        raise UserError(f"network {network!r}: hosts of your own have one; leave network out")


def _first(hosts: Sequence[Host], count: int | None, hostfile: Path) -> Sequence[Host]:
    if count is not None and positive("count", count) > len(hosts):
        raise UserError(f"count {count}: {hostfile} has {len(hosts)} hosts; add some, or ask for fewer pods")
    return hosts[:count]


def _readable(ssh_config: Path) -> Path:
    if not ssh_config.is_file():
        raise UserError(f"{ssh_config}: no such ssh configuration; name one, or leave it out for your usual one")
    return ssh_config.absolute()


def _lease(lease: str) -> str:
    if lease not in LEASES:
        raise UserError(f"lease {lease!r}: expected {' or '.join(LEASES)}")
    return lease


def _gpus() -> int:
    return this_pod.slots() if GPU_DEVICES.exists() else 0
