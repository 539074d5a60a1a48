"""How fast this machine multiplies matrices: the peak that a CPU's manufacturer does not publish."""

from __future__ import annotations

import os
import time

import torch

from zeropods.train.device import synchronize

SECONDS = 0.06
"""Time for one size, after a multiplication that warms up."""
SIDES = {"cpu": (256, 512, 1_024), "cuda": (2_048, 4_096, 8_192)}
"""Sides of the square matrices that are tried: small ones wait for memory, large ones take long."""


def matmul_flops_per_second(precision: str) -> float:
    """The best rate of a matrix multiplication on this rank's device, with all cores that the process may use.

    2 n^3 FLOP for two n x n matrices; the number of threads and the allocator's cache are left as they were.
    A size that would take too long is not tried: some CPUs only emulate BF16.

    Args:
        precision: `fp32` (without TF32, as a run trains), `bf16` or `fp16`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    threads, best = torch.get_num_threads(), 0.0
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        for side in SIDES[device]:
            if best and 2 * side**3 / best > SECONDS:
                break
            best = max(best, 2 * side**3 / _fastest_seconds(side, dtype, device))
    finally:
        torch.set_num_threads(threads)
        if device == "cuda":
            torch.cuda.empty_cache()
    return best


@torch.no_grad()
def _fastest_seconds(side: int, dtype: torch.dtype, device: str) -> float:
    # A generator of its own: the run's random numbers are those of its seed.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    product = left @ right
    synchronize()
    fastest, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        mark = time.perf_counter()
        torch.matmul(left, right, out=product)
        synchronize()
        fastest = min(fastest, time.perf_counter() - mark)
    return fastest
