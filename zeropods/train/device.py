"""What torch says of the device that this process trains on."""

from __future__ import annotations

from typing import Any

import torch

from zeropods.measure.nvml import Gpu, find_gpu
from zeropods.measure.phases import Counters, Peaks
from zeropods.measure.resident import resident_bytes


class CudaCounters(Counters):
    """Peaks of the process, and of torch's allocator on its GPU."""

    def peaks(self) -> Peaks:
        """The peaks since the last reset."""
        return Peaks(super().peaks().resident, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def reset(self) -> bool:
        """Begin all of them anew."""
        torch.cuda.reset_peak_memory_stats()
        return super().reset()


class MemoryReader:
    """The present memory of a rank; what its device does not have is left out."""

    def __init__(self, gpu: Gpu | None) -> None:
        """`gpu`: as NVML knows it; None where there is none, or no NVML."""
        self.gpu = gpu

    def __call__(self) -> dict[str, float | None]:
        """Values of columns of `memory/N.csv`."""
        values: dict[str, float | None] = {"resident_bytes": resident_bytes()}
        if torch.cuda.is_initialized():
            values["allocated_bytes"] = torch.cuda.memory_allocated()
            values["reserved_bytes"] = torch.cuda.memory_reserved()
        return values | (self.gpu.read() if self.gpu else {})


def counters() -> Counters:
    """The peak counters of this process and, on a GPU, of its allocator, which begins anew."""
    if not torch.cuda.is_available():
        return Counters()
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    return CudaCounters()


def gpu_name() -> str | None:
    """Name of this process's GPU; None on a CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def gpu_by_nvml() -> Gpu | None:
    """This process's GPU as NVML knows it."""
    if not torch.cuda.is_available():
        return None
    device: Any = torch.cuda.get_device_properties()
    bus = f"{device.pci_domain_id:08X}:{device.pci_bus_id:02X}:{device.pci_device_id:02X}.0"
    return find_gpu([f"GPU-{device.uuid}", f"MIG-{device.uuid}", bus])


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
