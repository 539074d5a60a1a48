"""What a T5's forward pass keeps for its backward pass, counted tensor by tensor.

As transformers 5.23 runs T5 on a GPU: SDPA attention with a bias goes to the memory-efficient kernel (FlashAttention
takes none), which saves queries, keys, values, output, bias and the softmax's logarithms, not the probabilities.
Dropout saves a mask of one byte. T5's norm computes in FP32, and saves that copy where activations are BF16. Our loss
(`train.t5`) makes logits over the label positions and takes their log-softmax in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeropods.plan.term import Term, short

if TYPE_CHECKING:
    from zeropods.plan.job import Job

FLOAT = 4
MASK = 1


@dataclass(frozen=True)
class Activations:
    """Bytes saved by the parts of one forward pass, and the transient ones of its backward pass."""

    encoder_layer: int
    decoder_layer: int
    encoder_ends: int
    """Beside the layers: embedding's dropout, last norm, and the output that the decoder attends to."""
    decoder_ends: int
    head: int
    """Log-softmax over the vocabulary, FP32."""
    head_transient: int
    """Two more of its size: the gradients behind and before the log-softmax."""
    encoder_input: int
    """What a layer keeps with gradient checkpointing: its input."""
    decoder_input: int
    encoder_transient: int
    """Gradients in the backward pass of a layer: the feed-forward's input and output."""
    decoder_transient: int


def activations(job: Job) -> Activations:
    """Of one forward pass; every position of the target counts as a label."""
    n, m = job.rows * job.source_tokens, job.rows * job.target_tokens
    shape, size = job.shape, job.element_bytes
    feed_forward_gradients = 2 * size * shape.d_ff
    return Activations(
        encoder_layer=_self_attention(job, n, job.source_tokens, biased_rows=job.rows) + _feed_forward(job, n),
        # Its mask is the causal one, equal for all rows: so is its bias.
        decoder_layer=_self_attention(job, m, job.target_tokens, biased_rows=1)
        + _cross(job, n, m)
        + _feed_forward(job, m),
        encoder_ends=_ends(job, n),
        decoder_ends=_ends(job, m),
        head=FLOAT * m * shape.vocabulary,
        head_transient=2 * FLOAT * m * shape.vocabulary,
        encoder_input=size * n * shape.d_model,
        decoder_input=size * m * shape.d_model,
        encoder_transient=n * feed_forward_gradients,
        decoder_transient=m * feed_forward_gradients,
    )


def activation_terms(job: Job) -> tuple[Term, ...]:
    """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
    a, layers = activations(job), job.shape.layers
    ends = Term("ends of encoder and decoder", a.encoder_ends + a.decoder_ends, _ends_formula(job), "activations")
    head = a.head + a.head_transient
    if not job.checkpointing:
        return (
            _layers("encoder layers", layers, a.encoder_layer, job.source_tokens, job),
            _layers("decoder layers", layers, a.decoder_layer, job.target_tokens, job),
            ends,
            _head(job, head),
        )
    again = max(a.encoder_layer + a.encoder_transient, a.decoder_layer + a.decoder_transient)
    computed = Term("one layer, computed again", again, f"{short(again)}B, the larger of both kinds", "activations")
    return (
        _inputs("inputs of encoder layers", layers, job.source_tokens, job),
        _inputs("inputs of decoder layers", layers, job.target_tokens, job),
        ends,
        _head(job, head) if head >= again else computed,
    )


def _norm(job: Job, tokens: int) -> int:
    """Input, input over its deviation, and scaled output; the deviation; in BF16 an FP32 copy of the input."""
    return tokens * (job.shape.d_model * (3 * job.element_bytes + _copy(job)) + FLOAT)


def _self_attention(job: Job, tokens: int, length: int, biased_rows: int) -> int:
    inner = job.shape.heads * job.shape.d_kv
    bias = job.element_bytes * biased_rows * job.shape.heads * length * length
    saved = 4 * job.element_bytes * tokens * inner + FLOAT * tokens * job.shape.heads
    return _norm(job, tokens) + saved + bias + _mask(job, tokens * job.shape.d_model)


def _cross(job: Job, source: int, target: int) -> int:
    inner = job.shape.heads * job.shape.d_kv
    bias = job.element_bytes * job.rows * job.shape.heads * job.target_tokens * job.source_tokens
    saved = job.element_bytes * (2 * target + 2 * source) * inner + FLOAT * target * job.shape.heads
    return _norm(job, target) + saved + bias + _mask(job, target * job.shape.d_model)


def _feed_forward(job: Job, tokens: int) -> int:
    """ReLU's output, and the same after dropout, which the second matrix multiplies."""
    width = job.shape.d_ff
    copies = 2 if job.dropout else 1
    saved = copies * job.element_bytes * tokens * width + _mask(job, tokens * width)
    return _norm(job, tokens) + saved + _mask(job, tokens * job.shape.d_model)


def _ends(job: Job, tokens: int) -> int:
    """A norm whose scaled output goes into dropout and on to the next product; dropout of the embedding before."""
    return _norm(job, tokens) + 2 * _mask(job, tokens * job.shape.d_model)


def _mask(job: Job, count: int) -> int:
    return MASK * count if job.dropout else 0


def _copy(job: Job) -> int:
    return FLOAT if job.is_half else 0


def _layers(name: str, layers: int, each: int, length: int, job: Job) -> Term:
    formula = f"{layers} layers x {job.rows} rows x {length} tokens x {each / (job.rows * length) / 1e3:.4g} kB"
    return Term(name, layers * each, formula, "activations")


def _inputs(name: str, layers: int, length: int, job: Job) -> Term:
    count = layers * job.rows * length * job.shape.d_model
    formula = f"{job.element_bytes} B x {layers} layers x {job.rows} rows x {length} tokens x {job.shape.d_model}"
    return Term(name, job.element_bytes * count, formula, "activations")


def _head(job: Job, size: int) -> Term:
    formula = f"3 x 4 B x {job.rows} rows x {job.target_tokens} tokens x {job.shape.vocabulary} words"
    return Term("log-softmax over the vocabulary, with its gradients", size, formula, "activations")


def _ends_formula(job: Job) -> str:
    each = _ends(job, 1) / 1e3
    return f"{job.rows} rows x ({job.source_tokens} + {job.target_tokens}) tokens x {each:.4g} kB"
