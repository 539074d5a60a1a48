"""Seconds of one optimizer step: arithmetic, network, traffic to the host, the processor's own Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeropods.plan.machines import Machines
from zeropods.plan.memory import MASTER
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


# Seconds on the network, by the volume of ring collectives.
#
# A ring of R processes passes R - 1 parts of R of a tensor over each link for an all-gather or a reduce, twice that for
# an all-reduce (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). Neighbours in the ring are neighbours in rank,
# so that the ring enters and leaves a pod once: slots share a pod's link, and add no traffic to it.


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
    ranks, parameters = 1 if technique.is_alone else machines.pods * machines.slots, work.shape.parameters
    size = work.element_bytes * parameters

    def around(messages: int) -> float:
        """Seconds for all parameters to pass round the ring once, cut into so many messages."""
        hops = ranks - 1
        return hops / ranks * size / machines.link + hops * messages * machines.latency_seconds

    if technique.stage == 0:
        return Traffic(backward_seconds=2 * around(math.ceil(size / DDP_BUCKET_BYTES)))
    reduce = around(math.ceil(parameters / zero.reduce_elements))
    if technique.stage in (1, 2):
        passes = 2 if zero.multi_rank_all_reduce else 1
        return Traffic(backward_seconds=passes * reduce, step_seconds=around(1))
    gather = around(work.shape.matrices)
    # What the forward pass has left gathered need not be fetched again.
    again = max(0.0, 1 - zero.live_elements / parameters)
    return Traffic(forward_seconds=gather, backward_seconds=again * gather + reduce)


# How often to save a checkpoint on machines that fail now and then.


@dataclass(frozen=True, kw_only=True)
class SavingPlan:
    """The time between two checkpoints that leaves most of the wall time for steps that count."""

    interval_seconds: float
    """Training between the end of one save and the begin of the next."""
    goodput: float
    """Share of the wall time that is left: without saves, and without what is lost to failures and done again."""


def saving_plan(mtbf_seconds: float, save_seconds: float) -> SavingPlan:
    """Daly's interval: sqrt(2 S M) x (1 + sqrt(S / 2M) / 3 + S / 18M) - S, for saves of S seconds and failures that are
    M seconds apart in the mean; M itself where S is at least 2M.

    Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37; its first term is Young's, doi:10.1145/361147.361115. Each
    interval loses its save, each failure half an interval; the time of a restart is not counted.
    """
    part = save_seconds / (2 * mtbf_seconds)
    interval = mtbf_seconds
    if part < 1:
        interval = math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9) - save_seconds
    whole = interval + save_seconds
    return SavingPlan(interval_seconds=interval, goodput=max(0.0, interval / whole * (1 - whole / 2 / mtbf_seconds)))
