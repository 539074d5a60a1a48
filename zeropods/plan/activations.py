"""What a forward pass keeps for its backward pass, counted tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeropods.plan.parameters import (
    causal_embedding,
    decoder_parameters,
    embedding,
    encoder_parameters,
    layer_parameters,
    matmul_of_layers,
)
from zeropods.plan.workload import (
    EAGER,
    FLOAT,
    FUSED,
    MASK,
    MASKED,
    PLAIN,
    Moments,
    Term,
    attention_bytes,
    short,
    softmax_bytes,
    total,
)

if TYPE_CHECKING:
    from zeropods.plan.jobs import CausalJob, Job


# What a T5's forward pass keeps for its backward pass, counted tensor by tensor.
#
# As transformers 5.23 runs T5 on a GPU: SDPA attention with a bias goes to the memory-efficient kernel
# (FlashAttention
# takes none), which saves queries, keys, values, output, bias and the softmax's logarithms, not the probabilities.
# Dropout saves a mask of one byte. T5's norm computes in FP32, and saves that copy where activations are BF16. Our
# loss
# (`train.t5`) makes logits over the label positions and takes their log-softmax in FP32.


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


# What a causal model's forward pass keeps for its backward pass, counted tensor by tensor.
#
# As transformers 5.23 runs the families of `CausalShape`, with this project's loss (`train.causal_loss`): logits
# where
# there is a label, their log-softmax in FP32. Rows carry no mask in training: they are padded on the right, where
# nothing
# that has a loss looks.

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
        layer=_attention(job) + _feed_forward_activations(job),
        ends=_ends_activations(job),
        mask=_mask_element(job) * _masks(job) * job.tokens**2,
        head=FLOAT * logits,
        head_transient=2 * FLOAT * logits,
        copies=size * (matmul_of_layers(shape) + causal_embedding(shape)) if job.autocast else 0,
        layer_input=(FLOAT if job.autocast else size) * tokens * shape.hidden,
        layer_transient=max(GRADIENTS * size * tokens * shape.ffn, of_scores),
    )


def _attention(job: CausalJob) -> int:
    """Norm, queries, keys and values with their rotation, scores, output, dropout of the result."""
    shape, size, tokens = job.shape, job.activation_bytes, job.rows * job.tokens
    saved = attention_bytes(shape, job.kernel, size, job.dropout, job.rows, job.tokens)
    output = size * tokens * shape.heads * shape.head_size
    return _norm_activations(job, tokens, shape.hidden) + _norms_of_heads(job) + saved + output + _residual_mask(job)


def _feed_forward_activations(job: CausalJob) -> int:
    family, tokens = job.shape.family, job.rows * job.tokens
    of_gpt2 = AUTOCAST_GPT2_COPIES if job.autocast else GPT2_COPIES
    copies = {"gpt2": of_gpt2, "bloom": BLOOM_COPIES}.get(family, GATED_COPIES)
    saved = copies * job.activation_bytes * tokens * job.shape.ffn
    return _norm_activations(job, tokens, job.shape.hidden) + saved + _residual_mask(job)


def _norm_activations(job: CausalJob, tokens: int, width: int, *, output: bool = True) -> int:
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
    return _norm_activations(job, heads, job.shape.head_size, output=False)


def _ends_activations(job: CausalJob) -> int:
    shape, size, tokens = job.shape, job.activation_bytes, job.rows * job.tokens
    last = _norm_activations(job, tokens, shape.hidden, output=False) + size * job.rows * job.labels * shape.hidden
    if shape.family == "bloom":
        return last + _norm_activations(job, tokens, shape.hidden, output=False)
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


# Activations of a causal model as a plan's terms, and over the moments of a pass.


def causal_activation_terms(job: CausalJob) -> tuple[Term, ...]:
    """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
    terms = _within_layers_and_head(job)
    beyond = _tied(job) - total(terms)
    if beyond <= 0:
        return terms
    name = "gradients of the embedding, as head and as table, where activations were"
    return *terms, Term(name, beyond, f"{short(_tied(job))}B, less those", "activations")


def _within_layers_and_head(job: CausalJob) -> tuple[Term, ...]:
    a, layers = causal_activations(job), job.shape.layers
    head = a.head + a.head_transient
    formula = " + ".join(f"{short(part)}B" for part in (a.ends, a.mask, a.copies) if part)
    ends = Term("ends, mask, copies of weights", a.ends + a.mask + a.copies, formula, "activations")
    if not job.checkpointing:
        saved = Term("layers", layers * a.layer, f"{_each(job, a.layer)}, {job.kernel} attention", "activations")
        most = _head_terms(job, head) if head - a.head >= a.layer_transient else _both(a.head, a.layer_transient)
        return saved, ends, most
    again = a.layer + a.layer_transient
    inputs = Term("inputs of layers", layers * a.layer_input, _each(job, a.layer_input), "activations")
    computed = Term("one layer, computed again", again, f"{short(again)}B, {job.kernel} attention", "activations")
    return inputs, ends, _head_terms(job, head) if head >= again else computed


def causal_moments(job: CausalJob) -> Moments:
    """Activations and gradients in the loss, and at the last layer, the first layer and the embedding."""
    a, size, layers = causal_activations(job), job.element_bytes, job.shape.layers
    kept = a.layer_input if job.checkpointing else a.layer
    working, ends = a.layer_transient + (a.layer if job.checkpointing else 0), a.ends + a.mask + a.copies
    table, width = size * causal_embedding(job.shape), size * job.shape.hidden * job.shape.ffn
    # Of the layer at work only the feed-forward part's last matrix has its gradient while the most is saved.
    others = (layers - 1) * size * layer_parameters(job.shape) + width
    backward = (
        (layers * kept + working + ends, table),
        (kept + working + a.mask + a.copies, table + others),
        (_tied(job), size * job.parameters),
    )
    return Moments(layers * kept + ends + a.head + a.head_transient, backward)


def _tied(job: CausalJob) -> int:
    """A tied embedding has a gradient as the head and another as the table; both are there while they are added."""
    return 2 * job.element_bytes * causal_embedding(job.shape) if job.shape.tied else 0


def _each(job: CausalJob, of_layer: int) -> str:
    a_token = of_layer / (job.rows * job.tokens) / 1e3
    return f"{job.shape.layers} layers x {job.rows} rows x {job.tokens} tokens x {a_token:.4g} kB"


def _head_terms(job: CausalJob, size: int) -> Term:
    formula = f"3 x 4 B x {job.rows} rows x {job.labels} labels x {job.shape.vocabulary} words"
    return Term("log-softmax over the vocabulary, with its gradients", size, formula, "activations")


def _both(head: int, transient: int) -> Term:
    formula = f"{short(head)}B + {short(transient)}B"
    return Term("log-softmax, and gradients within a layer", head + transient, formula, "activations")


# What a T5 holds of activations and gradients over the moments of a pass.
#
# Within encoder and within decoder both change in a straight line, so the most is at an end of one of them.


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
