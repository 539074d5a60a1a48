"""What a machine with a GPU is, before anything trains on it: versions, NVML, rates of products,
links.

    python -m benchmarks.gpu.facts FILE

writes one JSON document. Without a GPU, the figures of the GPU are null.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zeropods import files
from zeropods.measure import environment
from zeropods.measure.sampling import Gpu
from zeropods.pods.gpus import own_gpus

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "deepspeed",
    "tokenizers",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "safetensors",
    "nvidia-ml-py",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
COPIED_BYTES = 1 << 28
"""Bytes of a copy between host and GPU."""
MOVED_BYTES = 1 << 32
"""Bytes of a copy within the GPU's memory: far more than any L2 holds."""
SECONDS = 0.3
"""Seconds of measurement for one figure."""
SMI_FIGURES = "name,driver_version,memory.total,memory.used,clocks.sm,power.limit"
SMI = ("nvidia-smi", f"--query-gpu={SMI_FIGURES}", "--format=csv")


def facts() -> dict[str, Any]:
    """All facts; figures of the GPU are None where there is none."""
    import torch

    from zeropods.launch.probe import launch_seconds
    from zeropods.train import device

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        versions[name] = None
        # The first one on the path is the one that is imported: a pack's packages lie before the
        # machine's own.
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    known: dict[str, Any] = {
        "hardware": environment.hardware(),
        "python": environment.versions()["python"],
        "versions": versions,
        "gpus_by_nvml": own_gpus(),
        "nvidia_smi": _nvidia_smi(),
        "bf16": device.multiplies_bf16(),
        "precision_auto_t5_small": device.resolve_precision("auto", "t5-small"),
        "matmul_flops_per_second": _products(device),
        "operation_seconds": _operation_seconds(device),
        "launch_seconds": launch_seconds(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        known["gpu"] = _gpu_facts(device)
    return known


def _products(device: Any) -> dict[str, dict[str, float]]:
    """FLOP/s of matrix products by precision and side."""
    precisions = ["fp32"]
    if device.multiplies_bf16():
        precisions.append("bf16")
    rates = {}
    for precision in precisions:
        by_side = device.matmul_rates(precision)
        rates[precision] = {str(side): rate for side, rate in by_side.items()}
    return rates


OPERATIONS = 500
"""Number of small operations in a row, followed by their gradients."""


def _operation_seconds(device: Any) -> float:
    """Seconds that one small operation and its gradient cost besides arithmetic: a step of a small
    model consists mostly of this."""
    import torch

    small = torch.ones(16, device=device.device_type(), requires_grad=True)

    def operations() -> None:
        value = small
        for _ in range(OPERATIONS):
            value = value * small
        value.sum().backward()

    return device.fastest_seconds(operations, device.MEASURING_SECONDS) / OPERATIONS


def _gpu_facts(device: Any) -> dict[str, Any]:
    import torch

    properties: Any = torch.cuda.get_device_properties()
    free, total = torch.cuda.mem_get_info()
    by_nvml = device.gpu_by_nvml()
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "free_bytes": free,
        "total_bytes": total,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(torch.cuda.nccl.version()),
        "tf32_by_default": torch.backends.cuda.matmul.allow_tf32,
        "nvml": _read(by_nvml),
        "energy_joules": _energy_joules(by_nvml),
        "context_bytes": _context_bytes(by_nvml),
        **_links(device),
    }


def _read(gpu: Gpu | None) -> dict[str, float | None] | None:
    return None if gpu is None else gpu.read()


def _energy_joules(gpu: Gpu | None) -> float | None:
    return None if gpu is None else gpu.energy_joules()


def _context_bytes(gpu: Gpu | None) -> float | None:
    """Bytes that this process's context and libraries take of the GPU, as NVML shows them, tensors
    left out."""
    import torch

    torch.cuda.empty_cache()
    values = _read(gpu)
    if values is None or values["device_used_bytes"] is None:
        return None
    return values["device_used_bytes"] - torch.cuda.memory_reserved()


def _links(device: Any) -> dict[str, float]:
    """Bytes per second between host and GPU, pinned, each way, and within the GPU (bytes read and
    written)."""
    import torch

    pinned = torch.empty(COPIED_BYTES, dtype=torch.int8, pin_memory=True)
    there = torch.empty(COPIED_BYTES, dtype=torch.int8, device="cuda")
    to_gpu = device.fastest_seconds(lambda: there.copy_(pinned), SECONDS)
    to_host = device.fastest_seconds(lambda: pinned.copy_(there), SECONDS)
    source = torch.empty(MOVED_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    within = device.fastest_seconds(lambda: target.copy_(source), SECONDS)
    return {
        "to_gpu_bytes_per_second": COPIED_BYTES / to_gpu,
        "to_host_bytes_per_second": COPIED_BYTES / to_host,
        "memory_bytes_per_second": 2 * MOVED_BYTES / within,
    }


def _nvidia_smi() -> list[str]:
    """The lines of nvidia-smi; empty where there is none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.splitlines()
    return []


def main() -> int:
    """Write the facts into the file that the call names."""
    files.write_json(Path(sys.argv[1]), facts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
