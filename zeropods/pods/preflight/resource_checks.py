"""Has a pod what a run needs: room, GPUs, a port, the right time? Each check judges the facts in one function."""

from __future__ import annotations

from zeropods.pods.preflight.check import Check
from zeropods.pods.preflight.expectation import GIB, Expectation
from zeropods.pods.preflight.probe import Facts

ROOMY_DISK_BYTES = 10 * GIB
"""A checkpoint of t5-large with its optimizer takes 9 GiB."""
TEMPORARY_BYTES = 256 * 2**20
MEMORY_BYTES = 2 * GIB
CLOCK_WARNING_SECONDS = 5.0
CLOCK_FAILED_SECONDS = 60.0


def disk(facts: Facts, expected: Expectation) -> Check:
    """Room for checkpoints in the project folder, for compilers in /tmp, for shared tensors in /dev/shm."""
    free = facts.free_bytes
    room = free["project"]
    if room is None:
        return Check("disk", "failed", "unknown", f"{expected.project} cannot be read on the pod")
    if room < expected.disk_bytes:
        return Check("disk", "failed", _gib(room), f"make {_gib(expected.disk_bytes)} free below {expected.project}")
    for place in ("/tmp", "/dev/shm"):
        if (free[place] or 0) < TEMPORARY_BYTES:
            value = f"{place} {_gib(free[place] or 0)}"
            return Check("disk", "warning", value, f"make {_gib(TEMPORARY_BYTES)} free in {place} of the pod")
    if room < ROOMY_DISK_BYTES:
        return Check("disk", "warning", _gib(room), f"a large model's checkpoint may not fit below {expected.project}")
    return Check("disk", "ok", _gib(room))


def memory(facts: Facts) -> Check:
    """Main memory that could be used at once."""
    free = facts.memory_available_bytes
    if free is not None and free < MEMORY_BYTES:
        return Check("memory", "warning", _gib(free), "end other programs on the pod, or give it more memory")
    return Check("memory", "ok", "unknown" if free is None else _gib(free))


def gpu_memory(facts: Facts, expected: Expectation) -> Check:
    """Nobody else uses the GPUs."""
    if not facts.gpus:
        return Check("GPU memory", "ok", "no GPU")
    shares = [gpu["free_bytes"] / gpu["total_bytes"] for gpu in facts.gpus]
    least = min(range(len(shares)), key=shares.__getitem__)
    value = f"{_gib(facts.gpus[least]['free_bytes'])} of {_gib(facts.gpus[least]['total_bytes'])}"
    if shares[least] < expected.gpu_free_fraction:
        return Check("GPU memory", "warning", value, f"see 'nvidia-smi' on the pod: GPU {least} is in use")
    return Check("GPU memory", "ok", value)


def slots(facts: Facts, wanted: int) -> Check:
    """A process has a GPU of its own; without GPUs, a core."""
    gpus = len(facts.gpus or ())
    if gpus:
        value = f"{wanted} of {gpus} GPU"
        if wanted > gpus:
            return Check("slots", "failed", value, f"say slots={gpus} in the hostfile, or fewer")
        return Check("slots", "ok", value)
    value = f"{wanted} on {facts.cores} cores"
    if wanted > facts.cores:
        return Check("slots", "warning", value, f"no GPU there; processes will share cores: say slots={facts.cores}")
    return Check("slots", "ok", value)


def port(facts: Facts, wanted: int) -> Check:
    """The run's port, on the pod where its first rank listens."""
    if facts.ports.get(str(wanted)):
        return Check("port", "ok", f"{wanted} free")
    return Check("port", "failed", f"{wanted} taken", "choose another --master_port, or end what listens there")


def clock(facts: Facts, asked_seconds: float, answered_seconds: float) -> Check:
    """The pod's clock agrees with the master's.

    Args:
        asked_seconds: the master's clock before the pod looked at its own; `answered_seconds` after it.
    """
    ahead = max(facts.time_seconds - answered_seconds, 0.0)
    behind = max(asked_seconds - facts.time_seconds, 0.0)
    if max(ahead, behind) <= CLOCK_WARNING_SECONDS:
        return Check("clock", "ok", "same")
    value = f"{ahead:.0f} s ahead" if ahead else f"{behind:.0f} s behind"
    failed = max(ahead, behind) > CLOCK_FAILED_SECONDS
    return Check("clock", "failed" if failed else "warning", value, "set the pod's clock by NTP")


def _gib(value: int) -> str:
    return f"{value / GIB:.1f} GiB"
