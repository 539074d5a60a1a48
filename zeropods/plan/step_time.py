"""Seconds of one optimizer step: arithmetic, network, traffic to the host, the processor's own Adam."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.communication import traffic
from zeropods.plan.machines import Machines
from zeropods.plan.states import MASTER
from zeropods.plan.technique import Technique
from zeropods.plan.term import share
from zeropods.plan.workload import Workload
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


def step_time(job: Workload, technique: Technique, machines: Machines, zero: ZeroSettings, passes: int = 1) -> StepTime:
    """Of one step of so many forward and backward passes.

    Where communication overlaps (DDP; ZeRO with `overlap_comm`) a pass takes the longer of its arithmetic and its
    traffic; else both. The all-gather after the optimizer's step of stages 1 and 2 overlaps with nothing. While
    gradients add up, DDP and stage 1 send none until the last pass; stage 2 sends them in each, and stage 3 gathers
    parameters in each too.
    """
    job = job.under(technique)
    forward, backward = compute_seconds(job, machines)
    network = traffic(job, technique, machines, zero)
    hides = zero.overlap or technique.stage == 0
    waits = _beyond(network.forward_seconds, forward, hides), _beyond(network.backward_seconds, backward, hides)
    reducing = passes if technique.stage in (2, 3) else 1
    offload, processor = _offload_seconds(job, technique, machines, passes)
    return StepTime(
        compute_seconds=passes * (forward + backward),
        communication_seconds=passes * network.forward_seconds
        + reducing * network.backward_seconds
        + network.step_seconds,
        exposed_communication_seconds=passes * waits[0] + reducing * waits[1] + network.step_seconds,
        offload_seconds=offload,
        processor_seconds=processor,
    )


def compute_seconds(job: Workload, machines: Machines) -> tuple[float, float]:
    """Of the forward and of the backward pass, recomputation in the latter; padding is computed too."""
    rate = machines.achieved_flops(job.precision)
    both, again = job.flops()
    return both / 3 / rate, (2 * both / 3 + again) / rate


def _beyond(traffic_seconds: float, arithmetic_seconds: float, hides: bool) -> float:
    return max(0.0, traffic_seconds - arithmetic_seconds) if hides else traffic_seconds


def _offload_seconds(job: Workload, technique: Technique, machines: Machines, passes: int) -> tuple[float, float]:
    """Gradients to the host and weights back; Adam there, where the slots of a pod share the processor.

    Stage 3 fetches its weights from the host for each pass, stages 1 and 2 once after the step.
    """
    if not technique.offloads:
        return 0.0, 0.0
    own = share(job.parameters, machines.pods * machines.slots)
    down = MASTER * own * (1 if technique.stage == 1 else passes)
    up = job.element_bytes * own * (2 * passes if technique.stage == 3 else 1)
    return (down + up) / machines.pcie_bandwidth, machines.slots * ADAM_BYTES * own / machines.host_bandwidth
