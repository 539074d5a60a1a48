"""`zeropods probe`: measure machines and their collectives, with a process on each pod or a few on this machine.

    RANK=0 WORLD_SIZE=3 MASTER_ADDR=... MASTER_PORT=... python -m zeropods.train.probe

is one of these processes. Rank 0 prints what was measured, a JSON document, as its last line.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

from zeropods.errors import UserError
from zeropods.launch.command import exported_variables
from zeropods.measure import environment
from zeropods.measure.calibration import PROBE_AGAIN, MachineProbe, read_probe
from zeropods.measure.memory import resident_bytes
from zeropods.pods.cluster import Cluster
from zeropods.pods.gpus import HIDDEN, VISIBLE, visible_gpus
from zeropods.pods.preflight import TIMED_OUT, Expectation, run_all
from zeropods.pods.ssh import ssh_argv
from zeropods.programs import free_port
from zeropods.train.arguments import PROJECT

MOST_SECONDS = 40.0
LOCAL = 2
"""Number of processes on this machine where no pods are up; with more, each has less of the machine."""
SECONDS = 0.5
"""Seconds for measuring one figure, after a warm-up round."""
PARAMETERS = 4_000_000
"""Number of parameters of the optimizer's step without a GPU: more than a core's caches hold. Fitted
factors of plans are relative to what this step shows (`plan.cpu`)."""
STATE_BYTES = 16
"""Bytes per parameter that the step works on: weight, gradient and both moments, in FP32."""
LEAST_GPU_BYTES, CACHES = 512 << 20, 4
"""Least bytes that the step works on with a GPU, and least number of its L2 caches that they would
fill: an H100 has 50 MB of L2, a B200 126 MB, in which part of a small step would stay."""
LARGE, SMALL = 1 << 24, 1
"""Numbers of FP32 elements of the all-reduces: one shows the bandwidth, one the latency."""
PINNED_BYTES = 1 << 28


def probe(cluster: Cluster | None = None) -> MachineProbe:
    """Probe the machines of a cluster's pods, with a process on each, or this machine.

    Raises:
        UserError: it took too long, a process failed, or two pods have the same GPU.
    """
    gpus = [gpu.name for gpu in visible_gpus()]
    hosts = [host.address for host in cluster.hosts] if cluster else ["127.0.0.1"] * min(LOCAL, len(gpus) or LOCAL)
    port, commands = free_port(), []
    for number, host in enumerate(hosts):
        # As in training: threads that spin would take the cores from one another.
        variables: dict[str, object] = {"OMP_WAIT_POLICY": "PASSIVE", **exported_variables((), {})}
        if cluster is None:
            # The session of a pod has the pod's own GPUs.
            variables[VISIBLE] = gpus[number] if gpus else HIDDEN
        variables |= {"RANK": number, "WORLD_SIZE": len(hosts), "MASTER_ADDR": hosts[0], "MASTER_PORT": port}
        settings = [f"{name}={value}" for name, value in variables.items()]
        # On a pod the process outlives the ssh that started it, and would wait for the other ranks.
        limit = ["timeout", "-k", "5", f"{MOST_SECONDS + 1:.0f}"]
        command = [*limit, "env", *settings, sys.executable, "-m", "zeropods.train.probe"]
        if cluster:
            there = f"cd {shlex.quote(str(PROJECT))}; exec {shlex.join(command)}"
            command = ssh_argv(cluster.ssh_config, host, ["sh", "-c", there])
        commands.append(command)
    if cluster:
        cluster.preflight(Expectation.of_this_machine(PROJECT, master_port=port)).require()
    ends = run_all(commands, MOST_SECONDS)
    bad = [number for number, end in enumerate(ends) if end.returncode != 0]
    # Processes that did not end may have been waiting for one that did.
    failed = min(bad, key=lambda number: ends[number].returncode == TIMED_OUT, default=None)
    if failed is not None:
        end, place = ends[failed], f"probe: process {failed} on {hosts[failed]}"
        if end.returncode == TIMED_OUT:
            remedy = f"{PROBE_AGAIN} when that machine is less busy"
            raise UserError(f"{place}: did not finish within {MOST_SECONDS:.0f} s; {remedy}")
        last = (end.stderr.strip() or "no error output").splitlines()[-1]
        raise UserError(f"{place}: ended with status {end.returncode}: {last:.200}; see zeropods pods check")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        path.write_text(ends[0].stdout.strip().splitlines()[-1], encoding="utf-8")
        return read_probe(path)


# What one rank does.


def measure() -> MachineProbe | None:
    """Measure as one rank; rank 0 returns what was found, the others return None."""
    import torch
    import torch.distributed as dist

    # These import transformers, so they come after `import_for_ranks`, which leaves out some of its imports.
    from zeropods.train.device import gpu_name
    from zeropods.train.processes import gathered, rank, world_size

    bare = resident_bytes()
    if not torch.cuda.is_available():
        # Ranks without a GPU are forks (`launch.forks`).
        with get_context("fork").Pool(1) as pool:
            bare = pool.apply(resident_bytes)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    alone = _alone() if rank() == 0 else {}
    dist.barrier()
    seconds = [_reduced_seconds(size) for size in (SMALL, LARGE)]
    machines, others = len(set(gathered(environment.machine()))), world_size() - 1
    gpu_sizes = [size for size in gathered(_gpu_bytes()) if size is not None]
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
        gpu_memory_bytes=min(gpu_sizes, default=None),
        **alone,  # type: ignore[arg-type]
    )


def _gpu_bytes() -> int | None:
    """Bytes of memory of this process's GPU; None without one, or where NVML does not know it."""
    from zeropods.train.device import gpu_by_nvml

    gpu = gpu_by_nvml()
    return None if gpu is None else gpu.total_bytes()


def step_parameters(cache_bytes: int | None) -> int:
    """Number of parameters of the optimizer's step by which memory bandwidth is measured.

    Args:
        cache_bytes: bytes of the GPU's L2 cache; None without a GPU.
    """
    if cache_bytes is None:
        return PARAMETERS
    return max(LEAST_GPU_BYTES, CACHES * cache_bytes) // STATE_BYTES


def _alone() -> dict[str, object]:
    """What rank 0 measures while the others wait."""
    import torch

    from zeropods.plan.machines import ADAM_BYTES
    from zeropods.train.device import fastest_seconds, matmul_rates, multiplies_bf16, python_seconds

    device = "cuda" if torch.cuda.is_available() else "cpu"
    precisions = ["fp32", *(["bf16"] if multiplies_bf16() else []), *(["fp16"] if device == "cuda" else [])]
    one_core = {each: max(matmul_rates(each, 1).values()) for each in precisions}
    rates = {each: {str(side): rate for side, rate in matmul_rates(each).items()} for each in precisions}
    cache_bytes = None
    if device == "cuda":
        cache_bytes = int(torch.cuda.get_device_properties().L2_cache_size)
    parameters = step_parameters(cache_bytes)
    weights = torch.nn.Parameter(torch.ones(parameters, device=device))
    weights.grad = torch.ones_like(weights)
    step = torch.optim.AdamW([weights], fused=True).step
    found: dict[str, object] = {
        "matmul_flops_per_second": rates,
        "one_core_flops_per_second": one_core,
        "memory_bandwidth": ADAM_BYTES * parameters / fastest_seconds(step, SECONDS),
        "python_seconds": python_seconds(SECONDS),
    }
    torch.set_num_threads(1)
    found["one_core_bandwidth"] = ADAM_BYTES * parameters / fastest_seconds(step, SECONDS)
    found["new_memory_bandwidth"] = 4 * LARGE / fastest_seconds(lambda: torch.empty(LARGE).zero_(), SECONDS)
    if device == "cuda":
        host = torch.empty(PINNED_BYTES, dtype=torch.int8, pin_memory=True)
        target = torch.empty(PINNED_BYTES, dtype=torch.int8, device=device)
        found["pcie_bandwidth"] = PINNED_BYTES / fastest_seconds(lambda: target.copy_(host), SECONDS)
    return found


def _reduced_seconds(size: int) -> float:
    """Mean seconds of an all-reduce; every rank makes the same number of them."""
    import torch
    import torch.distributed as dist

    from zeropods.train.device import synchronize

    tensor = torch.ones(size, device="cuda" if torch.cuda.is_available() else "cpu")
    rounds = 4 if size > SMALL else 200
    dist.all_reduce(tensor)
    synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    synchronize()
    return (time.perf_counter() - began) / rounds


def main() -> None:
    """Import what a rank imports, measure, leave the process group and print."""
    from zeropods.launch.forks import import_for_ranks

    import_for_ranks()
    from zeropods.train.processes import leave

    found = measure()
    leave()
    if found is not None:
        print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
