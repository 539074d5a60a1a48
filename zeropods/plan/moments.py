"""What a T5 holds of activations and gradients over the moments of a pass.

Within encoder and within decoder both change in a straight line, so the most is at an end of one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropods.plan.activations import activations
from zeropods.plan.parameters import decoder_parameters, embedding, encoder_parameters
from zeropods.plan.workload import Moments

if TYPE_CHECKING:
    from zeropods.plan.job import Job


def moments(job: Job) -> Moments:
    """Activations and gradients in the loss, and at the last and the first layer of decoder and encoder."""
    a, size, layers = activations(job), job.element_bytes, job.shape.layers
    table = size * embedding(job.shape)
    of_decoder, of_encoder = size * decoder_parameters(job.shape), size * encoder_parameters(job.shape)
    of_both = _kept(job, "encoder", layers) + _kept(job, "decoder", layers)
    encoder = _kept(job, "encoder", layers) + a.encoder_ends
    backward = (
        (encoder + _kept(job, "decoder", layers) + _working(job, "decoder"), table),
        (encoder + _kept(job, "decoder", 1) + _working(job, "decoder") + table, table + of_decoder),
        (_kept(job, "encoder", layers) + _working(job, "encoder"), table + of_decoder),
        (_kept(job, "encoder", 1) + _working(job, "encoder") + table, table + of_decoder + of_encoder),
    )
    return Moments(of_both + a.encoder_ends + a.decoder_ends + a.head + a.head_transient, backward)


def _kept(job: Job, side: str, layers: int) -> int:
    kind = "input" if job.checkpointing else "layer"
    return layers * getattr(activations(job), f"{side}_{kind}")


def _working(job: Job, side: str) -> int:
    """What the layer at work adds: its gradients, and with checkpointing its own activations."""
    a = activations(job)
    again = getattr(a, f"{side}_layer") if job.checkpointing else 0
    return again + getattr(a, f"{side}_transient")
