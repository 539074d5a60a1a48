"""Seconds of one optimizer step: arithmetic, network, traffic to the host, the processor's own Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeropods.plan.machines import TREE_SHARE, Machines
from zeropods.plan.memory import MASTER, PlannedMemory, plan_memory
from zeropods.plan.workload import Workload, share
from zeropods.techniques import Technique, ZeroSettings

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


def step_time(
    work: Workload, technique: Technique, machines: Machines, zero: ZeroSettings, passes: int = 1
) -> StepTime:
    """Seconds of one step of so many forward and backward passes.

    Where communication overlaps (DDP; ZeRO with `overlap_comm`) a pass takes the longer of its arithmetic and its
    traffic; else both. The all-gather after the optimizer's step of stages 1 and 2 overlaps with nothing. While
    gradients add up, DDP and stage 1 send none until the last pass; stage 2 sends them in each, and stage 3 gathers
    parameters in each too.
    """
    work = work.under(technique)
    forward, backward = compute_seconds(work, machines)
    network = traffic(work, technique, machines, zero)
    hides = zero.overlap or technique.stage == 0
    waits = [
        max(0.0, sent - computed) if hides else sent
        for sent, computed in ((network.forward_seconds, forward), (network.backward_seconds, backward))
    ]
    reducing = passes if technique.stage in (2, 3) else 1
    sending = passes * network.forward_seconds + reducing * network.backward_seconds + network.step_seconds
    offload, processor = _offload_seconds(work, technique, machines, passes)
    return StepTime(
        compute_seconds=passes * (forward + backward),
        communication_seconds=sending,
        exposed_communication_seconds=passes * waits[0] + reducing * waits[1] + network.step_seconds,
        offload_seconds=offload,
        processor_seconds=processor,
    )


def compute_seconds(work: Workload, machines: Machines) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass, recomputation in the latter; padding is computed too."""
    rate = machines.achieved_flops(work.precision)
    both, again = work.flops()
    return both / 3 / rate, (2 * both / 3 + again) / rate


def _offload_seconds(work: Workload, technique: Technique, machines: Machines, passes: int) -> tuple[float, float]:
    """Gradients to the host and weights back; Adam there, where the slots of a pod share the processor.

    Stage 3 fetches its weights from the host for each pass, stages 1 and 2 once after the step.
    """
    if not technique.offloads:
        return 0.0, 0.0
    own = share(work.shape.parameters, machines.pods * machines.slots)
    down = MASTER * own * (1 if technique.stage == 1 else passes)
    up = work.element_bytes * own * (2 * passes if technique.stage == 3 else 1)
    return (down + up) / machines.pcie_bandwidth, machines.slots * ADAM_BYTES * own / machines.host_bandwidth


# Seconds on the network, by the collectives that NCCL chooses.
#
# An all-gather or a reduce-scatter goes round a ring of R processes, R - 1 parts of R of a tensor over each link, an
# all-reduce twice (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). The ring enters and leaves a pod once: slots
# share a pod's link, and add no traffic to it, only hops within the pod. An all-reduce takes a pair of trees between
# the pods where its fewer hops outweigh the volume, which is the tensor twice (NCCL 2.7, src/graph/tuning.cc).


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Seconds of communication in one step, by what can go on at the same time."""

    forward_seconds: float = 0.0
    """Gathering parameters for the forward pass."""
    backward_seconds: float = 0.0
    """Gathering them for the backward pass, and reducing gradients."""
    step_seconds: float = 0.0
    """Gathering parameters after the optimizer's step: nothing else goes on then."""


def traffic(work: Workload, technique: Technique, machines: Machines, zero: ZeroSettings) -> Traffic:
    """Seconds of one optimizer step of one pass; none where there is one process."""
    ranks, parameters = machines.pods * machines.slots, work.shape.parameters
    if technique.is_alone or ranks == 1:
        return Traffic()
    size = work.element_bytes * parameters

    def around(messages: int) -> float:
        """Seconds for all parameters to pass round the ring once, cut into so many messages."""
        return (ranks - 1) / ranks * size / machines.link + messages * machines.ring_latency

    def reduced_everywhere(messages: int) -> float:
        """Seconds for all gradients to be summed on every process."""
        return min(2 * around(messages), 2 * (size / machines.link / TREE_SHARE + messages * machines.tree_latency))

    if technique.stage == 0:
        return Traffic(backward_seconds=reduced_everywhere(math.ceil(size / DDP_BUCKET_BYTES)))
    buckets = math.ceil(parameters / zero.reduce_elements)
    if technique.stage in (1, 2):
        reduce = reduced_everywhere if zero.multi_rank_all_reduce else around
        return Traffic(backward_seconds=reduce(buckets), step_seconds=around(1))
    gather = around(work.shape.matrices)
    # What the forward pass has left gathered need not be fetched again.
    again = max(0.0, 1 - zero.live_elements / parameters)
    return Traffic(forward_seconds=gather, backward_seconds=again * gather + around(buckets))


# What a plan is made by.


class Arithmetic:
    """Memory and time of a process by arithmetic alone; of how far off they are nothing is known."""

    def memory(self, work: Workload, technique: Technique, machines: Machines, zero: ZeroSettings) -> PlannedMemory:
        """Of one process."""
        return plan_memory(work, technique, machines.pods * machines.slots, zero)

    def time(
        self, work: Workload, technique: Technique, machines: Machines, zero: ZeroSettings, passes: int
    ) -> StepTime:
        """Of a step of so many passes."""
        return step_time(work, technique, machines, zero, passes)

    def interval(
        self, work: Workload, technique: Technique, quantity: str, planned: float
    ) -> tuple[float, float] | None:
        """Where runs lie of which so much `memory` or `time` is planned; None where it is not known."""
        return None
