"""One rank of `zeropods probe`: what its machine reaches, measured alone, and its collectives with the others.

    RANK=0 WORLD_SIZE=3 MASTER_ADDR=... MASTER_PORT=... python -m zeropods.train.probe

Rank 0 prints what was measured, as a JSON document, last.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from zeropods.launch.forks import import_for_ranks
from zeropods.measure import environment
from zeropods.measure.calibration import MachineProbe
from zeropods.measure.memory import resident_bytes
from zeropods.train.device import fastest_seconds, gpu_name, matmul_rates, multiplies_bf16, python_seconds, synchronize

SECONDS = 0.5
"""Time for one figure, after a round that warms up."""
PARAMETERS = 4_000_000
"""Of the optimizer's step: more than caches hold."""
LARGE, SMALL = 1 << 24, 1
"""Elements of the all-reduces, FP32: one that shows the bandwidth, one that shows the latency."""
PINNED_BYTES = 1 << 28


def measure() -> MachineProbe | None:
    """What rank 0 found out; None on the others."""
    # What imports transformers comes after a rank's own imports, which leave out a part of it.
    from zeropods.train.processes import gathered, rank, world_size

    bare = _of_a_fork(resident_bytes)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    alone = _alone() if rank() == 0 else {}
    dist.barrier()
    seconds = [_reduced_seconds(size) for size in (SMALL, LARGE)]
    machines = len(set(gathered(environment.machine())))
    others = world_size() - 1
    if rank():
        return None
    around = 2 * max(1, others)
    return MachineProbe(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=environment.hardware() | {"gpus": [name] if (name := gpu_name()) else None},  # type: ignore[arg-type]
        versions=environment.versions(),
        processes=world_size(),
        machines=machines,
        bandwidth=around / world_size() * 4 * LARGE / max(1e-9, seconds[1] - seconds[0]),
        latency_seconds=seconds[0] / around,
        process_bytes=bare,
        **alone,  # type: ignore[arg-type]
    )


def _alone() -> dict[str, object]:
    """What rank 0 measures while the others wait."""
    from zeropods.plan.machines import ADAM_BYTES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    precisions = ["fp32", *(["bf16"] if multiplies_bf16() else []), *(["fp16"] if device == "cuda" else [])]
    one_core = {each: max(matmul_rates(each, 1).values()) for each in precisions}
    rates = {each: {str(side): rate for side, rate in matmul_rates(each).items()} for each in precisions}
    weights = torch.nn.Parameter(torch.ones(PARAMETERS, device=device))
    weights.grad = torch.ones_like(weights)
    step = torch.optim.AdamW([weights], fused=True).step
    found: dict[str, object] = {
        "matmul_flops_per_second": rates,
        "one_core_flops_per_second": one_core,
        "memory_bandwidth": ADAM_BYTES * PARAMETERS / fastest_seconds(step, SECONDS),
        "python_seconds": python_seconds(SECONDS),
    }
    torch.set_num_threads(1)
    found["one_core_bandwidth"] = ADAM_BYTES * PARAMETERS / fastest_seconds(step, SECONDS)
    found["new_memory_bandwidth"] = 4 * LARGE / fastest_seconds(lambda: torch.empty(LARGE).zero_(), SECONDS)
    if device == "cuda":
        host = torch.empty(PINNED_BYTES, dtype=torch.int8, pin_memory=True)
        target = torch.empty(PINNED_BYTES, dtype=torch.int8, device=device)
        found["pcie_bandwidth"] = PINNED_BYTES / fastest_seconds(lambda: target.copy_(host), SECONDS)
    return found


def _reduced_seconds(size: int) -> float:
    """Seconds of an all-reduce; every rank makes as many."""
    tensor = torch.ones(size, device="cuda" if torch.cuda.is_available() else "cpu")
    rounds = 4 if size > SMALL else 200
    dist.all_reduce(tensor)
    synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    synchronize()
    return (time.perf_counter() - began) / rounds


def _of_a_fork(read: Callable[[], int]) -> int:
    """What a fork of this process reads of itself: ranks without a GPU are forks (`launch.forks`)."""
    if torch.cuda.is_available():
        return read()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(read()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reading, 64))


def main() -> None:
    """Import what a rank imports; measure, print, leave."""
    import_for_ranks()
    from zeropods.train.processes import leave

    found = measure()
    leave()
    if found is not None:
        print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
