"""What NVIDIA's management library says of a GPU: the figures of `nvidia-smi`, all processes together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Gpu:
    """One GPU, read through NVML; what a driver or a GPU does not tell is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml`: the module `pynvml`, initialised; `handle`: the device's."""
        self._nvml = nvml
        self._handle = handle

    def read(self) -> dict[str, float | None]:
        """Used memory (bytes), utilisation (percent of the driver's last period) and power (watts) now."""
        nvml, handle = self._nvml, self._handle
        return {
            # Version 2 leaves out what the driver keeps for itself, as `nvidia-smi` does.
            "device_used_bytes": self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used),
            "utilization_percent": self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "power_watts": self._told(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1_000),
        }

    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded, by the GPU's own counter (Volta and later)."""
        return self._told(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1_000)

    def _told(self, ask: Callable[[], float]) -> float | None:
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


def find_gpu(names: Iterable[str]) -> Gpu | None:
    """The GPU of the first UUID (`GPU-...`) or PCI bus id (`00000000:3B:00.0`) that NVML knows.

    CUDA numbers devices in its own order, and `CUDA_VISIBLE_DEVICES` hides some: a number would name another one.

    Returns:
        None where there is no NVML, or none of the names is known to it.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    for name in names:
        by_uuid = name.startswith(("GPU-", "MIG-"))
        find = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByPciBusId
        try:
            return Gpu(pynvml, find(name))
        except pynvml.NVMLError:
            continue
    return None
