"""The most that a GPU's tensors take at one time, over the moments of a step.

Gradients appear as activations go: while the loss is computed there are none, at the end of the backward pass all.
Both change in a straight line over like layers, so the most is at an end of them, in the loss, or in the optimizer's
step.
"""

from __future__ import annotations

from zeropods.plan.buffers import backward_buffers, step_temporaries
from zeropods.plan.states import gradients_are_whole, states
from zeropods.plan.technique import Technique
from zeropods.plan.term import total
from zeropods.plan.workload import Workload
from zeropods.plan.zero_settings import ZeroSettings


def peak_allocated(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> int:
    """Bytes of tensors at the worst moment, on the worst-off rank."""
    held = states(job, technique, ranks, zero).device
    lasting = total(held) - total(held, "gradients")
    gradients = total(held, "gradients")
    buffers = total(backward_buffers(job, technique, ranks, zero))
    # Buckets of stages 1 and 2 are made when the first gradient is there, and given back before the step.
    early = 0 if technique.stage in (1, 2) else buffers
    before = gradients if job.accumulates or technique.stage == 3 else 0
    step = early + gradients + step_temporaries(job, technique, ranks).bytes
    moments, grows = job.moments(), _grows(job, technique, zero)
    backward = [buffers + saved + (made if grows else gradients) for saved, made in moments.backward]
    return lasting + max(early + before + moments.loss, step, *backward)


def _grows(job: Workload, technique: Technique, zero: ZeroSettings) -> bool:
    """Whether gradients are made as the backward pass comes to them; a partition is there from the first one on."""
    return gradients_are_whole(job, technique, zero) and not job.accumulates
