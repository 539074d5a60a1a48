"""What is asked of `up`, checked before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from zeropods.errors import UserError
from zeropods.pods import this_pod
from zeropods.pods.backends.fleet import choose_backend, choose_network
from zeropods.pods.state import Settings

LEASES = {"kernel": 30.0, "idle": 7200.0}
"""`kernel`: the cluster ends so long after the process that started it; `idle`: so long after its last use."""
GPU_DEVICES = Path("/dev/nvidiactl")

Number = TypeVar("Number", int, float)


def checked_settings(
    count: int,
    *,
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
    chosen = choose_backend(backend)
    return Settings(
        count=positive("count", count),
        slots=None if slots is None else positive("slots", slots),
        backend=chosen,
        network=choose_network(network, chosen),
        lease=_lease(lease),
        lease_seconds=positive("lease_seconds", LEASES[lease] if lease_seconds is None else lease_seconds),
        cpu=positive("cpu", cpu),
        memory=positive("memory", memory),
        nvidia_gpu=_gpus() if nvidia_gpu is None else nvidia_gpu,
    )


def positive(what: str, value: Number) -> Number:
    """The value; `UserError` if it is not above zero."""
    if value <= 0:
        raise UserError(f"{what}: {value}; expected a positive number")
    return value


def _lease(lease: str) -> str:
    if lease not in LEASES:
        raise UserError(f"lease {lease!r}: expected {' or '.join(LEASES)}")
    return lease


def _gpus() -> int:
    return this_pod.slots() if GPU_DEVICES.exists() else 0
