"""Seconds of one optimizer step: arithmetic, network, traffic to the host, the processor's own Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeropods.plan.machines import TREE_SHARE, Machines
from zeropods.plan.memory import MASTER, PlannedMemory, plan_memory
from zeropods.plan.workload import Workload, share

ADAM_BYTES = 28
"""Bytes per parameter: weight, gradient and both moments are read, all but the gradient written, each FP32."""
DDP_BUCKET_BYTES = 25 << 20
"""Bucket of PyTorch's DistributedDataParallel, by default."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step, by part. The GPU's own Adam is left out: it is some hundredths of a second a billion parameters."""

    compute_seconds: float
    communication_seconds: float
    """All of it, also what goes on behind the arithmetic."""
    exposed_communication_seconds: float
    """What the step waits for."""
    offload_seconds: float
    """Traffic between GPU and host that the step waits for."""
    processor_seconds: float
    """Adam in host memory."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_seconds + self.exposed_communication_seconds + self.offload_seconds + self.processor_seconds


def step_time(work: Workload, machines: Machines) -> StepTime:
    """Seconds of one step.

    Where communication overlaps (DDP; ZeRO with `overlap_comm`) a pass takes the longer of its arithmetic and its
    traffic; else both. The all-gather after the optimizer's step of stages 1 and 2 overlaps with nothing. While
    gradients add up, DDP and stage 1 send none until the last pass; stage 2 sends them in each, and stage 3 gathers
    parameters in each too.
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
        # Gradients go to the host and weights back: those of stage 3 for each pass, of 1 and 2 once after the step.
        own = share(work.shape.parameters, work.ranks)
        down = MASTER * own * (1 if technique.stage == 1 else passes)
        up = work.element_bytes * own * (2 * passes if technique.stage == 3 else 1)
        offload = (down + up) / machines.pcie_bandwidth
        # Adam steps there, where the slots of a pod share the processor.
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
# An all-gather or a reduce-scatter goes round a ring of R processes, R - 1 parts of R of a tensor over each link, an
# all-reduce twice (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). The ring enters and leaves a pod once: slots
# share a pod's link, and add no traffic to it, only hops within the pod. An all-reduce takes a pair of trees between
# the pods where its fewer hops outweigh the volume, which is the tensor twice (NCCL 2.7, src/graph/tuning.cc).


def traffic(work: Workload, machines: Machines) -> tuple[float, float, float]:
    """Seconds of communication in one step of one pass, by what can go on at the same time; none of one process.

    Returns:
        Gathering parameters for the forward pass; for the backward pass, with reducing gradients; after the
        optimizer's step, when nothing else goes on.
    """
    ranks, parameters, zero = work.ranks, work.shape.parameters, work.zero
    if ranks == 1:
        return 0.0, 0.0, 0.0
    size = work.element_bytes * parameters

    def around(messages: int) -> float:
        """Seconds for all parameters to pass round the ring once, cut into so many messages."""
        return (ranks - 1) / ranks * size / machines.link + messages * machines.ring_latency

    def reduced_everywhere(messages: int) -> float:
        """Seconds for all gradients to be summed on every process."""
        return min(2 * around(messages), 2 * (size / machines.link / TREE_SHARE + messages * machines.tree_latency))

    if work.technique.stage == 0:
        return 0.0, reduced_everywhere(math.ceil(size / DDP_BUCKET_BYTES)), 0.0
    buckets = math.ceil(parameters / zero.reduce_elements)
    if work.technique.stage in (1, 2):
        reduce = reduced_everywhere if zero.multi_rank_all_reduce else around
        return 0.0, reduce(buckets), around(1)
    gather = around(work.shape.matrices)
    # What the forward pass has left gathered need not be fetched again.
    again = max(0.0, 1 - zero.live_elements / parameters)
    return gather, again * gather + around(buckets), 0.0


# What a plan is made by.


class Arithmetic:
    """Memory and time of a process by arithmetic alone; of how far off they are nothing is known."""

    def memory(self, work: Workload) -> PlannedMemory:
        """Of one process."""
        return plan_memory(work)

    def time(self, work: Workload, machines: Machines) -> StepTime:
        """Of a step."""
        return step_time(work, machines)

    def interval(self, work: Workload, quantity: str, planned: float) -> tuple[float, float] | None:
        """Where runs lie of which so much `memory` or `time` is planned; None where it is not known."""
        return None
