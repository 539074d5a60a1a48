"""The machine: its GPU, as torch sees it. Run as a program it prints them as JSON, and no CUDA context stays."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from zeropods.plan.machines import published_flops

BANDWIDTHS = (("h200", 4.8e12), ("gh200", 4.0e12), ("h100 pcie", 2.0e12), ("h100", 3.35e12), ("a100 40gb", 1.555e12))
OTHER_BANDWIDTH = 2.0e12
"""Bytes per second between a GPU and its memory, as published, by words of its name; and of one that is not there."""
CPU_FLOPS, GPU_FLOPS = 1e11, 3e14
"""Of a CPU, and of a GPU that is not known here: a batch is chosen by them; nothing is predicted."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the cells run on."""

    device: str
    """`cuda` or `cpu`."""
    gpu: str | None
    memory_bytes: int
    """That tensors and CUDA may take."""

    def peak(self, precision: str) -> float | None:
        """Published FLOP/s, dense; None where none is known."""
        return None if self.gpu is None else published_flops(self.gpu, precision)

    @property
    def unknown_flops(self) -> float:
        """FLOP/s where no published peak is known."""
        return CPU_FLOPS if self.device == "cpu" else GPU_FLOPS

    @property
    def bandwidth(self) -> float:
        """Bytes per second between the GPU and its memory."""
        words = set((self.gpu or "").lower().replace("-", " ").split())
        return next((rate for name, rate in BANDWIDTHS if words.issuperset(name.split())), OTHER_BANDWIDTH)


def said_of_gpu(said: str) -> dict[str, Any] | None:
    """What this module printed as a program, among whatever else was said there; None without a GPU."""
    for line in reversed(said.splitlines()):
        if line.startswith('{"gpu"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def see_one_gpu() -> None:
    """Hide all GPUs but the first one from this process's children: the control's trainer would take them all."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if seen is None else seen.split(",")[0]


def main() -> None:
    """Print name, memory in bytes and CUDA version; `null` without a GPU."""
    import torch

    found = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found = {"gpu": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
