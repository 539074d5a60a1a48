"""Seconds of one optimizer step: arithmetic, network, traffic to the host, the processor's own Adam."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.communication import traffic
from zeropods.plan.flops import recomputed_flops, training_flops
from zeropods.plan.job import Job
from zeropods.plan.machines import Machines
from zeropods.plan.states import MASTER
from zeropods.plan.technique import Technique
from zeropods.plan.term import share
from zeropods.plan.zero_settings import ZeroSettings

ADAM_BYTES = 28
"""A parameter: weight, gradient and both moments are read, all but the gradient written, each FP32."""


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


def step_time(job: Job, technique: Technique, machines: Machines, zero: ZeroSettings) -> StepTime:
    """Of one step of one forward and backward pass.

    Where communication overlaps (DDP; ZeRO with `overlap_comm`) a pass takes the longer of its arithmetic and its
    traffic; else both. The all-gather after the optimizer's step of stages 1 and 2 overlaps with nothing.
    """
    forward, backward = compute_seconds(job, machines)
    network = traffic(job, technique, machines, zero)
    hides = zero.overlap or technique.stage == 0
    exposed = (
        _beyond(network.forward_seconds, forward, hides)
        + _beyond(network.backward_seconds, backward, hides)
        + network.step_seconds
    )
    offload, processor = _offload_seconds(job, technique, machines)
    return StepTime(
        compute_seconds=forward + backward,
        communication_seconds=network.seconds,
        exposed_communication_seconds=exposed,
        offload_seconds=offload,
        processor_seconds=processor,
    )


def compute_seconds(job: Job, machines: Machines) -> tuple[float, float]:
    """Of the forward and of the backward pass, recomputation in the latter; padding is computed too."""
    source, target = job.rows * job.source_tokens, job.rows * job.target_tokens
    rate = machines.achieved_flops(job.precision)
    both = training_flops(job.shape, source, target)
    again = recomputed_flops(job.shape, source, target) if job.checkpointing else 0.0
    return both / 3 / rate, (2 * both / 3 + again) / rate


def _beyond(traffic_seconds: float, arithmetic_seconds: float, hides: bool) -> float:
    return max(0.0, traffic_seconds - arithmetic_seconds) if hides else traffic_seconds


def _offload_seconds(job: Job, technique: Technique, machines: Machines) -> tuple[float, float]:
    """Gradients to the host and weights back; Adam there, where the slots of a pod share the processor."""
    if not technique.offloads:
        return 0.0, 0.0
    own = share(job.parameters, machines.pods * machines.slots)
    # Stage 3 fetches its weights from the host for each pass, stages 1 and 2 once after the step.
    down, up = MASTER * own, job.element_bytes * own * (2 if technique.stage == 3 else 1)
    return (down + up) / machines.pcie_bandwidth, machines.slots * ADAM_BYTES * own / machines.host_bandwidth
