"""The machines that a plan is for: pods, GPUs, links, and the seconds of a step on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeropods.errors import UserError
from zeropods.plan.gpus import GIGA, known_gpus, names_near, published_flops
from zeropods.plan.workload import MASTER, Workload, share

ACHIEVED = {"fp32": 10.35 / 19.5, "bf16": 0.4, "fp16": 0.4}
"""Share of a published peak that training reaches. FP32: the share of an A100's 19.5 TFLOP/s that, with `BANDWIDTH`,
keeps the largest of the four errors of the published step times (`report.plan`) at 8 %; those times include evaluation
and saving. BF16 and FP16: published trainings of such sizes report 0.3 to 0.5."""
BANDWIDTH = 0.86 * GIGA
"""Bytes per second through a pod's link, each way, fitted with `ACHIEVED`: collectives' part of a 10 Gbit/s network."""
TREE_SHARE = 0.9
"""Share of a link's bandwidth that NCCL assumes for a tree (2.7, src/graph/tuning.cc)."""
PCIE_LATENCY, NVLINK_LATENCY = 5.7e-6, 3.4e-6
"""Seconds per hop within a pod, by PCIe and by NVLink, from the same source."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Pods that are all alike; each process has a GPU of its own, or shares the cores of its machine."""

    pods: int = 3
    slots: int = 1
    """Processes per pod."""
    device: str = "gpu"
    """`gpu`, or `cpu`: processes that share the cores of their machine."""
    hosts: int = 1
    """CPU: number of machines that the pods are spread over."""
    threads: int | None = None
    """CPU: threads of each process; as many as the machine has cores if not given."""
    machine_bytes: int | None = None
    """CPU: bytes of a machine's memory, which its processes share; None where the memory of a process is given."""
    gpu: str = "A100-40GB"
    flops: float | None = None
    """FLOP/s that a process reaches; a share of the GPU's published peak if not given."""
    bandwidth: float = BANDWIDTH
    """Bytes per second through a pod's link, each way, as collectives reach it."""
    latency_seconds: float = 50e-6
    """Seconds of one message between two pods."""
    pcie_bandwidth: float = 12 * GIGA
    """Bytes per second between a GPU and its host, each way: PCIe 3.0 x16 as copies reach it."""
    peer_bandwidth: float | None = None
    """Bytes per second between a pod's GPUs, each way, as collectives reach it (NVLink); that of PCIe if not given."""
    host_bandwidth: float = 50 * GIGA
    """Bytes per second between a pod's processor and its memory: a few channels of DDR4."""

    def achieved_flops(self, precision: str) -> float:
        """FLOP/s of one process.

        Raises:
            UserError: no peak is known for this GPU at this precision, and none was given.
        """
        if self.flops is not None:
            return self.flops
        peak = published_flops(self.gpu, precision)
        if peak is None:
            others = ", ".join(names_near(self.gpu)) or known_gpus(precision)
            raise UserError(f"GPU {self.gpu!r}: its {precision} peak is unknown; give --flops, or one of {others}")
        return ACHIEVED[precision] * peak


# Seconds of one optimizer step: arithmetic, network, traffic to the host, the processor's own Adam.

ADAM_BYTES = 28
"""Bytes per parameter: Adam reads weight, gradient and both moments, and writes all but the gradient, each in FP32."""
DDP_BUCKET_BYTES = 25 << 20
"""Default size of a bucket of PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of a step, by part, without the GPU's own Adam (some hundredths of a second per billion parameters)."""

    compute_seconds: float
    communication_seconds: float
    """All communication, including what is hidden behind the arithmetic."""
    exposed_communication_seconds: float
    """Communication that the step waits for."""
    offload_seconds: float
    """Traffic between GPU and host that the step waits for."""
    processor_seconds: float
    """Adam in host memory, on the processor."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute_seconds + self.exposed_communication_seconds + self.offload_seconds + self.processor_seconds


def step_time(work: Workload, machines: Machines) -> StepTime:
    """Seconds of one step.

    Where communication overlaps (DDP; ZeRO with `overlap_comm`) a pass takes the longer of its arithmetic and its
    traffic; otherwise it takes their sum. The all-gather after the optimizer's step of stages 1 and 2 overlaps with
    nothing. While gradients accumulate, DDP and stage 1 send none until the last pass; stage 2 sends them in each pass,
    and stage 3 also gathers parameters in each.
    """
    technique, passes = work.technique, work.passes
    rate = machines.achieved_flops(work.precision)
    both, again = work.flops()
    computed = both / 3 / rate, (2 * both / 3 + again) / rate
    *sent, after = traffic(work, machines)
    hides = work.zero.overlap or technique.stage == 0
    waits = [max(0.0, each - behind) if hides else each for each, behind in zip(sent, computed, strict=True)]
    reducing = passes if technique.stage in (2, 3) else 1
    offload = processor = 0.0
    if technique.offloads:
        # Gradients go to the host; weights come back, those of stage 3 in each pass, of 1 and 2 once, after the step.
        own = share(work.shape.parameters, work.ranks)
        down = MASTER * own * (1 if technique.stage == 1 else passes)
        up = work.element_bytes * own * (2 * passes if technique.stage == 3 else 1)
        offload = (down + up) / machines.pcie_bandwidth
        # Adam runs on the host, where the slots of a pod share the processor.
        processor = machines.slots * ADAM_BYTES * own / machines.host_bandwidth
    return StepTime(
        compute_seconds=passes * sum(computed),
        communication_seconds=passes * sent[0] + reducing * sent[1] + after,
        exposed_communication_seconds=passes * waits[0] + reducing * waits[1] + after,
        offload_seconds=offload,
        processor_seconds=processor,
    )


# Seconds on the network, by the collectives that NCCL chooses.
#
# An all-gather or a reduce-scatter sends (R - 1) / R of a tensor over each link of a ring of R processes, an all-reduce
# twice as much (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). The ring enters and leaves a pod once: slots
# share a pod's link, and add no traffic to it, only hops within the pod. An all-reduce takes a pair of trees between
# the pods where their fewer hops outweigh the volume, which is twice the tensor (NCCL 2.7, src/graph/tuning.cc).


def traffic(work: Workload, machines: Machines) -> tuple[float, float, float]:
    """Seconds of communication in a step of one pass, by what can run at the same time; zero for one process.

    Returns:
        Seconds of gathering parameters for the forward pass; of gathering them for the backward pass and reducing
        gradients; of what follows the optimizer's step, when nothing else runs.
    """
    ranks, parameters, zero = work.ranks, work.shape.parameters, work.zero
    if ranks == 1:
        return 0.0, 0.0, 0.0
    size, pods, latency = work.element_bytes * parameters, machines.pods, machines.latency_seconds
    # The slowest link of a ring over all processes.
    link = machines.bandwidth if pods > 1 else machines.peer_bandwidth or machines.pcie_bandwidth
    hops, hop = machines.slots - 1, PCIE_LATENCY if machines.peer_bandwidth is None else NVLINK_LATENCY
    # Latency of a message round the ring, within pods and from pod to pod; and up a tree of pods, or down again.
    ring, tree = pods * hops * hop + (pods - 1) * latency, hops * hop + int(math.log2(pods)) * latency

    def around(messages: int) -> float:
        """Seconds for all parameters to pass round the ring once, cut into this many messages."""
        return (ranks - 1) / ranks * size / link + messages * ring

    def reduced_everywhere(messages: int) -> float:
        """Seconds for all gradients to be summed on every process."""
        return min(2 * around(messages), 2 * (size / link / TREE_SHARE + messages * tree))

    if work.technique.stage == 0:
        return 0.0, reduced_everywhere(math.ceil(size / DDP_BUCKET_BYTES)), 0.0
    buckets = math.ceil(parameters / zero.reduce_elements)
    if work.technique.stage in (1, 2):
        reduce = reduced_everywhere if zero.multi_rank_all_reduce else around
        return 0.0, reduce(buckets), around(1)
    gather = around(sum(weight.is_matrix for weight in work.shape.weights))
    # Parameters that the forward pass has left gathered need not be fetched again.
    again = max(0.0, 1 - zero.live_elements / parameters)
    return gather, again * gather + around(buckets), 0.0
