"""Memory of a run, in bytes. Allocated, reserved, device-used and resident memory are four kinds, never mixed."""

from __future__ import annotations

from typing import Any

from zeropods.report.figures.ranks import Record, largest, of_ranks

DEVICE_USED, ALLOCATED, RESERVED, RESIDENT = "device-used", "allocated", "reserved", "resident"
LIVE_STATES = "live states"


def peak_bytes(record: Record, kind: str) -> float | None:
    """Peak of one kind of memory, of the rank that needed most.

    Allocated and reserved are the allocator's own peaks, resident is the kernel's (VmHWM); device-used is the
    highest sample of NVML, context and other processes included.
    """
    if kind != DEVICE_USED:
        return largest(record, f"peak_{kind}_bytes")
    used = _device_used(record)
    return None if used is None else max(used)


def pod_memory_kind(record: Record) -> str | None:
    """The kind in which pods are compared: the first of device-used, allocated and resident that every rank has."""
    kinds = (DEVICE_USED, ALLOCATED, RESIDENT)
    return next((kind for kind in kinds if peak_bytes(record, kind) is not None), None)


def pod_memory_bytes(record: Record) -> list[float] | None:
    """Peak memory of each pod, in the order of the pods, in the kind of `pod_memory_kind`.

    A pod's device memory is that of its fullest GPU. Its resident memory is the sum of its ranks' peaks: no less
    than the peak of their sum, since they need not come at one time.
    """
    kind = pod_memory_kind(record)
    if kind is None:
        return None
    values = _device_used(record) if kind == DEVICE_USED else of_ranks(record, f"peak_{kind}_bytes")
    pods: dict[int, list[float]] = {}
    for rank, value in zip(record["ranks"], values or (), strict=True):
        pods.setdefault(rank["rank"] // record["slots"], []).append(value)
    return [sum(of_pod) if kind == RESIDENT else max(of_pod) for of_pod in pods.values()]


def peak_memory_bytes(record: Record) -> float | None:
    """Memory of the pod that needed most."""
    pods = pod_memory_bytes(record)
    return None if pods is None else max(pods)


def phase_kind(record: Record) -> str | None:
    """Allocated on GPUs, resident on CPUs: whose own counters are reset between phases; None without phases."""
    kinds = (ALLOCATED, RESIDENT) if any(rank["phases"] for rank in record["ranks"]) else ()
    return next((kind for kind in kinds if peak_bytes(record, kind) is not None), None)


def phase_peak_bytes(record: Record, phase: str) -> float | None:
    """Peak within a phase, of the rank that needed most, in the kind of `phase_kind`; None if a rank has none."""
    kind = phase_kind(record)
    phases = of_ranks(record, "phases")
    if kind is None or phases is None:
        return None
    peaks: list[Any] = [of_rank.get(phase, {}).get(f"peak_{kind}_bytes") for of_rank in phases]
    return None if None in peaks else max(peaks)


def planned_bytes(record: Record) -> float | None:
    """What the plan says of `measured_bytes`, for a run of this shape, batch and technique."""
    plan = _planned(record)
    if plan is None:
        return None
    return plan.device_bytes if of_ranks(record, "gpu") else plan.state_bytes


def measured_bytes(record: Record) -> float | None:
    """What is compared with the plan, of the rank that needed most.

    On GPUs the peak of device-used memory; on CPUs live parameters, gradients and optimizer states before a step.
    """
    if of_ranks(record, "gpu"):
        return peak_bytes(record, DEVICE_USED)
    live = of_ranks(record, "live_bytes")
    return None if live is None else max(sum(parts.values()) for parts in live)


def planned_kind(record: Record) -> str:
    """What `planned_bytes` and `measured_bytes` are of: `device-used` on GPUs, `live states` on CPUs."""
    return DEVICE_USED if of_ranks(record, "gpu") else LIVE_STATES


def measured_to_planned(measured: float | None, planned: float | None) -> float | None:
    """Ratio: measured bytes / planned bytes."""
    return None if measured is None or not planned else measured / planned


def _device_used(record: Record) -> list[float] | None:
    sampled = of_ranks(record, "sampled") or []
    used = [columns["device_used_bytes"]["peak"] for columns in sampled if "device_used_bytes" in columns]
    return used if used and len(used) == len(sampled) else None


def _planned(record: Record) -> Any:
    from zeropods.plan.recorded import planned

    return planned(record)
