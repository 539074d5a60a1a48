"""What a causal model's forward pass keeps for its backward pass, counted tensor by tensor.

As transformers 5.23 runs the families of `CausalShape`, with this project's loss (`train.causal_loss`): logits where
there is a label, their log-softmax in FP32. Rows carry no mask in training: they are padded on the right, where nothing
that has a loss looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeropods.plan.attention import EAGER, FLOAT, FUSED, MASK, MASKED, PLAIN, attention_bytes, softmax_bytes
from zeropods.plan.causal_parameters import embedding, matmul_of_layers

if TYPE_CHECKING:
    from zeropods.plan.causal_job import CausalJob

GATED_COPIES, GPT2_COPIES, BLOOM_COPIES = 4, 5, 2
"""Tensors of the feed-forward's width that a layer saves: gate, its SiLU, up and their product; GPT-2's GELU is made of
plain operations and saves four steps and its result; BLOOM's saves its input and its result."""
AUTOCAST_GPT2_COPIES = 8
"""In FP16: three of the four are FP32 then, since autocast raises to a power in FP32."""
GRADIENTS = 3
"""Of the feed-forward's width, at one time in a layer's backward pass."""


@dataclass(frozen=True)
class CausalActivations:
    """Bytes saved by the parts of one forward pass, and the transient ones of its backward pass."""

    layer: int
    ends: int
    """Beside the layers: the embedding's dropout or norm, rotations, the last norm, the head's input."""
    mask: int
    """Of causality, where no kernel makes it itself: added to the scores, or a byte each."""
    head: int
    """Log-softmax over the vocabulary, FP32, of each label."""
    head_transient: int
    """Two more of its size: the gradients behind and before the log-softmax."""
    copies: int
    """Of weights in FP16, which autocast makes and its products save."""
    layer_input: int
    """What a layer keeps with gradient checkpointing."""
    layer_transient: int
    """Gradients in the backward pass of a layer: of its feed-forward part, or of its scores."""


def causal_activations(job: CausalJob) -> CausalActivations:
    """Of one forward pass."""
    shape, size, tokens = job.shape, job.activation_bytes, job.rows * job.tokens
    scores, logits = job.rows * shape.heads * job.tokens**2, job.rows * job.labels * shape.vocabulary
    of_scores = 2 * softmax_bytes(shape, job.kernel, size) * scores
    return CausalActivations(
        layer=_attention(job) + _feed_forward(job),
        ends=_ends(job),
        mask=_mask_element(job) * _masks(job) * job.tokens**2,
        head=FLOAT * logits,
        head_transient=2 * FLOAT * logits,
        copies=size * (matmul_of_layers(shape) + embedding(shape)) if job.autocast else 0,
        layer_input=(FLOAT if job.autocast else size) * tokens * shape.hidden,
        layer_transient=max(GRADIENTS * size * tokens * shape.ffn, of_scores),
    )


def _attention(job: CausalJob) -> int:
    """Norm, queries, keys and values with their rotation, scores, output, dropout of the result."""
    shape, size, tokens = job.shape, job.activation_bytes, job.rows * job.tokens
    saved = attention_bytes(shape, job.kernel, size, job.dropout, job.rows, job.tokens)
    output = size * tokens * shape.heads * shape.head_size
    return _norm(job, tokens, shape.hidden) + _norms_of_heads(job) + saved + output + _residual_mask(job)


def _feed_forward(job: CausalJob) -> int:
    family, tokens = job.shape.family, job.rows * job.tokens
    of_gpt2 = AUTOCAST_GPT2_COPIES if job.autocast else GPT2_COPIES
    copies = {"gpt2": of_gpt2, "bloom": BLOOM_COPIES}.get(family, GATED_COPIES)
    saved = copies * job.activation_bytes * tokens * job.shape.ffn
    return _norm(job, tokens, job.shape.hidden) + saved + _residual_mask(job)


def _norm(job: CausalJob, tokens: int, width: int, *, output: bool = True) -> int:
    """LayerNorm: input, mean and deviation. RMS norm: an FP32 copy of its input, that over the deviation, and this.

    Args:
        output: whether what comes after it saves its result.
    """
    result = job.activation_bytes if output else 0
    # Autocast leaves the residual, and what is computed of it, FP32.
    size = FLOAT if job.autocast else job.activation_bytes
    if job.shape.family in ("gpt2", "bloom"):
        return tokens * ((size + result) * width + 2 * FLOAT)
    return tokens * ((FLOAT + size + result) * width + FLOAT)


def _norms_of_heads(job: CausalJob) -> int:
    """Qwen3's, of queries and of keys; rotation after them saves nothing of its input."""
    if job.shape.family != "qwen3":
        return 0
    heads = job.rows * job.tokens * (job.shape.heads + job.shape.kv_heads)
    return _norm(job, heads, job.shape.head_size, output=False)


def _ends(job: CausalJob) -> int:
    shape, size, tokens = job.shape, job.activation_bytes, job.rows * job.tokens
    last = _norm(job, tokens, shape.hidden, output=False) + size * job.rows * job.labels * shape.hidden
    if shape.family == "bloom":
        return last + _norm(job, tokens, shape.hidden, output=False)
    rotations = 0 if shape.family == "gpt2" else 2 * size * job.tokens * shape.head_size
    return last + rotations + _residual_mask(job)


def _residual_mask(job: CausalJob) -> int:
    """GPT-2 and BLOOM drop out of what is added to the residual."""
    drops = job.dropout and job.shape.family in ("gpt2", "bloom")
    return MASK * job.rows * job.tokens * job.shape.hidden if drops else 0


def _masks(job: CausalJob) -> int:
    return 1 if job.kernel == PLAIN else job.rows


def _mask_element(job: CausalJob) -> int:
    return {FUSED: 0, MASKED: MASK, PLAIN: FLOAT, EAGER: job.activation_bytes}[job.kernel]
