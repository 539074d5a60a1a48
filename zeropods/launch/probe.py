"""`zeropods probe`: measure machines and their collectives, with a process on each pod or a few on
this machine.

    RANK=0 WORLD_SIZE=3 MASTER_ADDR=... MASTER_PORT=... python -m zeropods.launch.probe

is one of these processes. Rank 0 prints what was measured, a JSON document, as its last line.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from zeropods.errors import UserError
from zeropods.launch.command import AGENTS, exported_variables
from zeropods.measure import environment
from zeropods.measure.machine_probe import PROBE_AGAIN, MachineProbe, read_probe
from zeropods.plan.machines import LAYER_LAUNCHES, OUTSIDE_LAUNCHES
from zeropods.pods.cluster import Cluster
from zeropods.pods.gpus import HIDDEN, VISIBLE, visible_gpus
from zeropods.pods.preflight import (
    TIMED_OUT,
    Expectation,
    absolute_python_path,
    python_path_variables,
    request_to_check,
    run_all,
    run_by_agents,
)
from zeropods.pods.ssh import ssh_argv
from zeropods.programs import free_port
from zeropods.train.flags import PROJECT

PROBE = "zeropods.launch.probe"
"""Name of this module, as which each process runs."""
MOST_SECONDS = 40.0
"""Seconds within which all processes must have ended."""
LOCAL_PROCESSES = 2
"""Number of processes on this machine where no pods are up; with more, each has less of the
machine."""
SECONDS_OF_A_FIGURE = 0.5
"""Seconds for measuring one figure, after a warm-up round."""
SMALL = 1
"""Number of FP32 elements of the all-reduce that shows the latency."""
LARGE = 1 << 24
"""Number of FP32 elements of the all-reduce that shows the bandwidth."""
PINNED_BYTES = 1 << 28
"""Bytes that are copied to the GPU from pinned memory to measure the bandwidth of PCIe."""


def probe(cluster: Cluster | None = None) -> MachineProbe:
    """Probe the machines of a cluster's pods, with a process on each, or without a cluster this
    machine, with up to `LOCAL_PROCESSES`.

    Raises:
        UserError: the probe took too long, a pod failed its checks, a process failed, or two pods
            have the same GPU.
    """
    port = free_port()
    ends: Sequence[CompletedProcess[str]]
    if cluster is None:
        gpus = [gpu.name for gpu in visible_gpus()]
        hosts = ["127.0.0.1"] * min(LOCAL_PROCESSES, len(gpus) or LOCAL_PROCESSES)
        ranks = _variables_of_ranks(hosts, port)
        for number, variables in enumerate(ranks):
            variables[VISIBLE] = gpus[number] if gpus else HIDDEN
        ends = run_all([_command_of_a_rank(variables) for variables in ranks], MOST_SECONDS)
    else:
        hosts = [host.address for host in cluster.hosts]
        expected = Expectation.of_this_machine(PROJECT, master_port=port)
        cluster.preflight(expected).require()
        ends = _run_on_pods(cluster, _variables_of_ranks(hosts, port))
    _require_that_all_ended_well(ends, hosts)
    return _printed_probe(ends[0].stdout)


def _variables_of_ranks(hosts: Sequence[str], port: int) -> list[dict[str, str]]:
    """The environment variables of each rank, in the order of ranks. There is one on each host, and
    they meet at this port of the first host."""
    ranks = []
    for number in range(len(hosts)):
        variables = {
            # As in training: threads that spin would take the cores from one another.
            "OMP_WAIT_POLICY": "PASSIVE",
            # Checked as for agents: over ssh these are quoted, and pdsh has no part in it.
            **exported_variables((), {}, AGENTS),
            **python_path_variables(absolute_python_path()),
            "RANK": str(number),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0],
            "MASTER_PORT": str(port),
        }
        ranks.append(variables)
    return ranks


def _run_on_pods(cluster: Cluster, ranks: Sequence[dict[str, str]]) -> list[CompletedProcess[str]]:
    """Run a rank with its variables on each pod, by the agents where pdsh does not reach the pods,
    otherwise over ssh; return how each ended. No variable names GPUs: a rank sees its pod's."""
    if cluster.why_not_pdsh() is not None:
        requests = []
        for variables in ranks:
            requests.append(request_to_check(PROBE, [], str(PROJECT), variables))
        return run_by_agents(cluster.agents, cluster.secret, requests, MOST_SECONDS)
    commands = []
    for host, variables in zip(cluster.hosts, ranks, strict=True):
        command = shlex.join(_command_of_a_rank(variables))
        there = f"cd {shlex.quote(str(PROJECT))}; exec {command}"
        commands.append(ssh_argv(cluster.ssh_config, host.address, ["sh", "-c", there]))
    return run_all(commands, MOST_SECONDS)


def _command_of_a_rank(variables: dict[str, str]) -> list[str]:
    """The command of one rank, with these environment variables."""
    # On a pod the process outlives the ssh that started it, and would wait for the other ranks. A
    # second more than here, so that it is known here first that the time is up.
    limit = ["timeout", "-k", "5", f"{MOST_SECONDS + 1:.0f}"]
    settings = [f"{name}={value}" for name, value in variables.items()]
    return [*limit, "env", *settings, sys.executable, "-m", PROBE]


def _require_that_all_ended_well(
    ends: Sequence[CompletedProcess[str]], hosts: Sequence[str]
) -> None:
    """Raise `UserError` about the first rank, in the order of ranks, that failed, if one did; about
    one that took too long only if no other failed.

    Args:
        ends: how the ranks ended, in the order of ranks.
        hosts: the ranks' hosts, in the same order.
    """
    failed = [number for number, end in enumerate(ends) if end.returncode != 0]
    if not failed:
        return
    # Those that did not end may have been waiting for one that failed.
    first = min(failed, key=lambda number: ends[number].returncode == TIMED_OUT)
    end = ends[first]
    place = f"probe: process {first} on {hosts[first]}"
    if end.returncode == TIMED_OUT:
        remedy = f"{PROBE_AGAIN} when that machine is less busy"
        raise UserError(f"{place}: did not finish within {MOST_SECONDS:.0f} s; {remedy}")
    last_line = (end.stderr.strip() or "no error output").splitlines()[-1]
    reason = f"ended with status {end.returncode}: {last_line:.200}"
    raise UserError(f"{place}: {reason}; see zeropods pods check")


def _printed_probe(stdout: str) -> MachineProbe:
    """The checked probe in the last line of what rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        path.write_text(stdout.strip().splitlines()[-1], encoding="utf-8")
        return read_probe(path)


# What one rank does.


def measure() -> MachineProbe | None:
    """Measure as one rank, together with the others; rank 0 returns what was measured, the others
    return None. The process group is left open."""
    import torch
    import torch.distributed as dist

    # These import transformers, so they come after `import_for_ranks`, which leaves out some of its
    # imports.
    from zeropods.train.device import gpu_name
    from zeropods.train.processes import gathered, rank, world_size

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    figures = _figures_of_one_rank() if rank() == 0 else {}
    dist.barrier()
    latency = _all_reduce_seconds(SMALL)
    whole = _all_reduce_seconds(LARGE)
    machines = len(set(gathered(environment.machine())))
    gpu_sizes = [size for size in gathered(_gpu_bytes()) if size is not None]
    if rank() != 0:
        return None

    # In an all-reduce over a ring, each part of the tensor goes around twice: through each link in
    # 2 * others messages, each of which is one of world_size() parts.
    others = max(1, world_size() - 1)
    share_through_a_link = 2 * others / world_size()
    hardware: dict[str, Any] = environment.hardware()
    name = gpu_name()
    hardware["gpus"] = [name] if name else None
    return MachineProbe(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=hardware,
        versions=environment.versions(),
        processes=world_size(),
        machines=machines,
        # 4 bytes an element. With one process, the large all-reduce may take no longer than the
        # small one.
        bandwidth=share_through_a_link * 4 * LARGE / max(1e-9, whole - latency),
        latency_seconds=latency / (2 * others),
        gpu_memory_bytes=min(gpu_sizes, default=None),
        **figures,
    )


def _gpu_bytes() -> int | None:
    """Bytes of memory of this process's GPU; None without one, or where NVML does not know it."""
    from zeropods.train.device import gpu_by_nvml

    gpu = gpu_by_nvml()
    return None if gpu is None else gpu.total_bytes()


def _figures_of_one_rank() -> dict[str, Any]:
    """What rank 0 measures alone while the others wait: fields of a `MachineProbe` by name; those
    about copies to a GPU, and launches on it, only where there is one."""
    import torch

    from zeropods.train.device import fastest_seconds, matmul_rates, multiplies_bf16

    has_gpu = torch.cuda.is_available()
    precisions = ["fp32"]
    if multiplies_bf16():
        precisions.append("bf16")
    if has_gpu:
        precisions.append("fp16")
    rates = {}
    for precision in precisions:
        by_side = matmul_rates(precision)
        rates[precision] = {str(side): rate for side, rate in by_side.items()}

    figures: dict[str, Any] = {"matmul_flops_per_second": rates}
    if has_gpu:
        host = torch.empty(PINNED_BYTES, dtype=torch.int8, pin_memory=True)
        target = torch.empty(PINNED_BYTES, dtype=torch.int8, device="cuda")
        seconds = fastest_seconds(lambda: target.copy_(host), SECONDS_OF_A_FIGURE)
        figures["pcie_bandwidth"] = PINNED_BYTES / seconds
        figures["launch_seconds"] = launch_seconds()
    return figures


def launch_seconds() -> float:
    """Seconds in which the host launches one operation of PyTorch: those of a pass in which the GPU
    only waits for the host, divided by the operations that a plan counts in such a pass."""
    from zeropods.train.host_speed import LAYERS, host_bound_pass_seconds

    layers_of_both_stacks = 2 * LAYERS
    launches = OUTSIDE_LAUNCHES + layers_of_both_stacks * LAYER_LAUNCHES[False]
    return host_bound_pass_seconds(SECONDS_OF_A_FIGURE) / launches


def _all_reduce_seconds(elements: int) -> float:
    """Mean seconds of an all-reduce of so many FP32 elements, to be called by all ranks."""
    import torch
    import torch.distributed as dist

    from zeropods.train.device import synchronize

    tensor = torch.ones(elements, device="cuda" if torch.cuda.is_available() else "cpu")
    rounds = 4 if elements > SMALL else 200
    # The first one sets up connections, and is not timed.
    dist.all_reduce(tensor)
    synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    synchronize()
    return (time.perf_counter() - began) / rounds


def main() -> None:
    """Import what a rank imports, measure, leave the process group and, as rank 0, print what was
    measured."""
    from zeropods.launch.forks import import_for_ranks

    import_for_ranks()
    from zeropods.train.processes import leave

    measured = measure()
    leave()
    if measured is not None:
        print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
