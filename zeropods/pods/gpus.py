"""The GPUs that a process may use, and how the pods of one machine share them.

A process may use the GPUs that CUDA_VISIBLE_DEVICES names, or all where it is not set. NVML knows
all of a machine, whatever the variable says. Source: CUDA C++ Programming Guide, "CUDA Environment
Variables".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from zeropods.errors import UserError
from zeropods.tables import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
POD_GPUS = "ZEROPODS_GPUS"
"""Environment variable of a pod's sessions that keeps the value which `VISIBLE` has there, since
DeepSpeed's own launcher overwrites `VISIBLE` with the numbers of the slots."""
HIDDEN = "-1"
"""Value of `VISIBLE` that hides every GPU; an empty one does so too, but is easily overlooked in a
log."""
BY_DEEPSPEED = "CROSS_RANK"
"""Environment variable that DeepSpeed's launcher sets for its ranks
(deepspeed/launcher/launch.py)."""


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that CUDA shows this process."""

    name: str
    """Its number, or its UUID or the beginning of it, as CUDA_VISIBLE_DEVICES has it."""
    uuid: str
    """Its whole UUID, which begins with `GPU-`; with `MIG-` for a part of a GPU that is named by
    its own UUID."""


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """The GPUs that CUDA shows this process, in CUDA's order; none where there is no NVIDIA driver.

    NVML is asked and CUDA is not, since a process that has used CUDA cannot be forked any more.

    Raises:
        UserError: there is an NVIDIA driver, but it does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        uuids = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            uuids.append(str(pynvml.nvmlDeviceGetUUID(handle)))
    except pynvml.NVMLError as error:
        remedy = "say how many there are with --slots"
        raise UserError(f"counting GPUs failed: {error}; {remedy}") from None
    finally:
        pynvml.nvmlShutdown()

    value = os.environ.get(VISIBLE)
    if value is None:
        return tuple(VisibleGpu(str(number), uuid) for number, uuid in enumerate(uuids))
    gpus = []
    for name in _names(value):
        uuid = _uuid_of(name, uuids)
        # CUDA does not read on after a name that it does not know.
        if uuid is None:
            break
        gpus.append(VisibleGpu(name, uuid))
    return tuple(gpus)


def own_gpus() -> int:
    """Number of GPUs that this process may use."""
    return len(visible_gpus())


def _names(value: str) -> list[str]:
    """The names in a value of CUDA_VISIBLE_DEVICES; none in one that hides all GPUs."""
    names = [name.strip() for name in value.split(",")]
    if names[0] in ("", HIDDEN):
        return []
    return names


def _uuid_of(name: str, uuids: Sequence[str]) -> str | None:
    """UUID of the GPU with this number, or of the only one whose UUID begins so; None where there
    is no such GPU.

    Args:
        uuids: UUIDs of all GPUs, in the order of their numbers.
    """
    if name.isdecimal():
        number = int(name)
        return uuids[number] if number < len(uuids) else None
    if name.startswith("MIG-"):
        # A part of a GPU is not among the UUIDs, which are of whole GPUs; it is taken at its word.
        return name if uuids else None
    if not name.startswith("GPU-"):
        return None
    matching = [uuid for uuid in uuids if uuid.startswith(name)]
    return matching[0] if len(matching) == 1 else None


# Pods of this machine: each gets GPUs of its own, or none of them gets any.


def shared_gpus(pods: int, slots: int | None) -> tuple[str, ...]:
    """The GPUs of each of several pods of this machine, as values of CUDA_VISIBLE_DEVICES; () where
    there is no GPU.

    No two pods share a GPU: NCCL refuses two processes on one. Where there are too few, all pods
    get `HIDDEN`: those with a GPU could not train together with those without.

    Args:
        slots: GPUs of each pod; if not given, they are divided among the pods, and what is left
            over is not used.
    """
    names = [gpu.name for gpu in visible_gpus()]
    if not names:
        return ()
    gpus_per_pod = slots or len(names) // pods
    gpus_in_use = pods * gpus_per_pod
    if gpus_per_pod == 0 or gpus_in_use > len(names):
        return (HIDDEN,) * pods
    shares = []
    for first in range(0, gpus_in_use, gpus_per_pod):
        shares.append(",".join(names[first : first + gpus_per_pod]))
    return tuple(shares)


def too_few_message(pods: int, slots: int | None) -> str:
    """What to say to people where `shared_gpus` hides the GPUs from these pods: why, and how some
    could be used."""
    gpus_per_pod = slots or 1
    gpu_count = own_gpus()
    fitting_pods = gpu_count // gpus_per_pod
    if fitting_pods:
        remedy = f"start {counted(fitting_pods, 'pod')}"
    else:
        remedy = f"start 1 pod with {counted(gpu_count, 'slot')}"
    processes = counted(pods * gpus_per_pod, "process")
    place = f"{counted(pods, 'pod')} with {processes} for {counted(gpu_count, 'visible GPU')}"
    return f"{place}: they train without GPUs; to use GPUs, {remedy}"


# Processes of this machine without pods.


def has_too_few(processes: int) -> bool:
    """Whether this process sees GPUs, but fewer than one for each of so many processes."""
    return 0 < own_gpus() < processes


def check_gpus_for(processes: int) -> None:
    """Raise `UserError` where `has_too_few` GPUs are seen for so many processes on this machine."""
    if has_too_few(processes):
        gpus = counted(own_gpus(), "visible GPU")
        reason = f"there are {processes} processes for {gpus}"
        remedy = f"ask for fewer, or hide GPUs with {VISIBLE}={HIDDEN} in the environment"
        raise UserError(f"--slots {processes}: {reason}; {remedy}")


# The ranks of a pod: each slot stands for one of the GPUs that the pod's sessions see.


def gpus_of_slots(value: str | None, slots: Sequence[int]) -> str:
    """Value of CUDA_VISIBLE_DEVICES for the ranks of these slots, numbered from 0; slots beyond the
    visible GPUs get none, and where no GPU is left, the value hides all.

    Args:
        value: that of the process that starts the ranks; None where it is not set, and all GPUs are
            visible.
    """
    if value is None:
        return ",".join(map(str, slots))
    names = _names(value)
    names_of_slots = [names[slot] for slot in slots if slot < len(names)]
    return ",".join(names_of_slots) or HIDDEN


def take_pods_gpus() -> None:
    """Set this process's `VISIBLE` to the GPUs of its slots on its pod, where DeepSpeed's own
    launcher has started it; call it before CUDA is used. `POD_GPUS` is removed.

    Ranks that `launch/light.py` starts have them already.
    """
    gpus_of_pod = os.environ.pop(POD_GPUS, None)
    if gpus_of_pod is not None and BY_DEEPSPEED in os.environ:
        # The launcher has put the numbers of the slots there.
        slots = [int(name) for name in _names(os.environ.get(VISIBLE, ""))]
        os.environ[VISIBLE] = gpus_of_slots(gpus_of_pod, slots)
