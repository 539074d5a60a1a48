"""The most that a GPU's tensors take at one time, over the moments of a step.

Gradients appear as activations go: while the loss is computed there are none, at the end of the backward pass all.
Within encoder and within decoder both change in a straight line, so the most is at an end of one of them, in the loss,
or in the optimizer's step.
"""

from __future__ import annotations

from zeropods.plan.activations import activations
from zeropods.plan.buffers import backward_buffers, step_temporaries
from zeropods.plan.job import Job
from zeropods.plan.parameters import decoder_parameters, embedding, encoder_parameters
from zeropods.plan.states import gradients_are_whole, states
from zeropods.plan.technique import Technique
from zeropods.plan.term import total
from zeropods.plan.zero_settings import ZeroSettings


def peak_allocated(job: Job, technique: Technique, ranks: int, zero: ZeroSettings) -> int:
    """Bytes of tensors at the worst moment, on the worst-off rank."""
    held = states(job, technique, ranks, zero).device
    lasting = total(held) - total(held, "gradients")
    gradients = total(held, "gradients")
    buffers = total(backward_buffers(job, technique, ranks, zero))
    # Buckets of stages 1 and 2 are made when the first gradient is there, and given back before the step.
    early = 0 if technique.stage in (1, 2) else buffers
    before = gradients if job.accumulates or technique.stage == 3 else 0
    step = early + gradients + step_temporaries(job, technique, ranks).bytes
    backward = [buffers + moment for moment in _backward(job, gradients, _grows(job, technique, zero))]
    return lasting + max(early + before + _loss(job), step, *backward)


def _grows(job: Job, technique: Technique, zero: ZeroSettings) -> bool:
    """Whether gradients are made as the backward pass comes to them; a partition is there from the first one on."""
    return gradients_are_whole(job, technique, zero) and not job.accumulates


def _loss(job: Job) -> int:
    """All that was saved, and the head's own gradients."""
    a = activations(job)
    kept = _kept(job, "encoder", job.shape.layers) + _kept(job, "decoder", job.shape.layers)
    return kept + a.encoder_ends + a.decoder_ends + a.head + a.head_transient


def _backward(job: Job, gradients: int, grows: bool) -> list[int]:
    """Activations and gradients at the last and the first layer of decoder and encoder, in the order of the pass."""
    a, size, layers = activations(job), job.element_bytes, job.shape.layers
    table = size * embedding(job.shape)
    of_decoder, of_encoder = size * decoder_parameters(job.shape), size * encoder_parameters(job.shape)
    encoder = _kept(job, "encoder", layers) + a.encoder_ends
    moments = (
        (encoder + _kept(job, "decoder", layers) + _working(job, "decoder"), table),
        (encoder + _kept(job, "decoder", 1) + _working(job, "decoder") + table, table + of_decoder),
        (_kept(job, "encoder", layers) + _working(job, "encoder"), table + of_decoder),
        (_kept(job, "encoder", 1) + _working(job, "encoder") + table, table + of_decoder + of_encoder),
    )
    return [saved + (made if grows else gradients) for saved, made in moments]


def _kept(job: Job, side: str, layers: int) -> int:
    kind = "input" if job.checkpointing else "layer"
    return layers * getattr(activations(job), f"{side}_{kind}")


def _working(job: Job, side: str) -> int:
    """What the layer at work adds: its gradients, and with checkpointing its own activations."""
    a = activations(job)
    again = getattr(a, f"{side}_layer") if job.checkpointing else 0
    return again + getattr(a, f"{side}_transient")
