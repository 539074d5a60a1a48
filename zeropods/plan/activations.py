"""What a forward pass keeps for its backward pass, counted tensor by tensor.

The counts are those of transformers 5.23 on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zeropods.plan.methods import CHUNKED, FUSED_LOSS, OF_LABELS, OF_TRANSFORMERS
from zeropods.plan.terms import Term, short, total
from zeropods.plan.workload import EAGER, ELEMENT_BYTES, PLAIN, Workload, value_at

GRADIENTS_OF_FEED_FORWARD = {True: 3, False: 2}
"""Gradients of the feed-forward's width that a layer's backward pass holds at one time, by whether
the model is causal."""
LOSS_COPIES = 3
"""The log-softmax over the vocabulary, and the gradients of its output and of its input."""
HALF_COPIES = {OF_TRANSFORMERS: 14 / 4, FUSED_LOSS: 8 / 4}
"""The same of other losses over BF16 logits, in units of the FP32 log-softmax. Of transformers:
logits, their FP32 copy, log-softmax and gradient, 2 + 4 + 4 + 4 bytes an element. Of a kernel that
works in place: logits, their FP32 copy and the logits' gradient, 2 + 4 + 2 bytes."""
KEPT_BY_ADAPTERS_UNDER_FSDP = 2
"""Hidden states that each layer keeps where it has adapters, is checkpointed and divided by FSDP;
elsewhere it keeps one. Fitted: five pairs of published runs with 4 and with 16 rows (Mistral-7B and
Llama-3-8B on two and four A100, fms-acceleration) take 30 hidden states of a row more than on one
GPU for their 32 layers. Why is not known."""


@dataclass(frozen=True)
class Stack:
    """Layers of one kind: the encoder's, the decoder's, or all of a causal model.

    Bytes are those of one pass.
    """

    prefix: str
    """`encoder `, `decoder `, or empty."""
    tokens: int
    """Tokens per row."""
    layers: int
    parameters: int
    """Number of parameters of all layers."""
    kept: int
    """Bytes that each layer keeps until its backward pass: all that it saves, or with gradient
    checkpointing its input."""
    working: int
    """Bytes that the layer at work adds: gradients of its feed-forward part or of its scores, and
    what is computed again."""

    @property
    def all_kept(self) -> int:
        """Bytes that all of its layers keep."""
        return self.layers * self.kept


class BackwardMoment(NamedTuple):
    """Bytes at one moment of the backward pass."""

    saved_and_working: int
    """What the forward pass saved and is not freed yet, and what the layer at work adds."""
    gradients_made: int
    """The parameters' gradients that exist by then, where none is divided."""


class Activations:
    """Bytes saved by one forward pass with this project's loss, and what its backward pass adds.

    The loss computes logits over the label positions and their log-softmax in FP32. Rows are padded
    on the right; those of a causal model have no mask in training, since no position with a loss
    looks at the padding.
    """

    def __init__(self, work: Workload) -> None:
        shape = work.shape
        sizes = (work.batch_size, work.tokens, work.labels)
        saved = work.saved()
        self.work = work
        self.head = ELEMENT_BYTES["fp32"] * work.logit_rows * shape.vocabulary
        """Bytes of the labels' FP32 log-softmax over the vocabulary."""
        self.loss = self._loss_bytes()
        """Most bytes of the loss: logits, log-softmax and their gradients."""
        trains_embedding = work.method.adapter is None
        self.tied_gradients = 0
        if shape.tied and trains_embedding:
            self.tied_gradients = 2 * work.element_bytes * shape.embedding
        """Bytes of a tied embedding's gradients, as the head and as the table: both exist while
        they are added."""
        beside_layers = value_at(saved.ends, *sizes)
        if work.checkpointing:
            beside_layers += value_at(saved.held, *sizes)
        self.ends = round(beside_layers)
        """Bytes saved beside the layers: they are kept until the backward pass has come through all
        of them."""
        self.copies = 0
        """With checkpointing, bytes of FP16 copies of weights, which autocast keeps until the loss
        is computed. Without it they are among the bytes of the layers, and this is 0."""
        if work.autocast and work.checkpointing:
            # The copies are what grows with no size: the coefficient of exponents 0, 0 and 0.
            self.copies = round(sum(layers.get("000", 0) for layers in saved.layers))
        if shape.is_decoder_only:
            self.stacks = [self._stack(0, "", work.tokens)]
        else:
            self.stacks = [
                self._stack(0, "encoder ", work.tokens),
                self._stack(1, "decoder ", work.labels),
            ]

    def _loss_bytes(self) -> int:
        """Most bytes that the loss takes beside what the pass has saved."""
        work = self.work
        loss = work.method.loss
        if loss == CHUNKED:
            # About as many logits at a time as the hidden states have elements, and the gradient of
            # these (Liger-Kernel, ops/fused_linear_cross_entropy.py).
            return 2 * work.element_bytes * work.logit_rows * work.shape.width
        copies: float = LOSS_COPIES
        if work.is_half:
            copies = HALF_COPIES.get(loss, LOSS_COPIES)
        return round(copies * self.head)

    def _stack(self, side: int, prefix: str, tokens: int) -> Stack:
        """The layers of one side.

        Args:
            side: 0 for the encoder or the only stack, 1 for the decoder.
            tokens: tokens per row on this side.
        """
        work = self.work
        shape = work.shape
        saved = work.saved()
        sizes = (work.batch_size, work.tokens, work.labels)

        element = ELEMENT_BYTES[work.precision]
        width = GRADIENTS_OF_FEED_FORWARD[shape.is_decoder_only] * shape.inner
        gradients = element * work.batch_size * tokens * width
        if work.kernel in (EAGER, PLAIN):
            # A decoder's scores are over its own tokens and, beside an encoder, over the source's.
            keys = tokens if side == 0 else max(tokens, work.tokens)
            gradients = max(gradients, 2 * saved.scores * work.batch_size * tokens * keys)

        layer = round(value_at(saved.layers[side], *sizes) / shape.layers[side])
        kept = layer
        computed_again = 0
        if work.checkpointing:
            kept = round(value_at(saved.inputs[side], *sizes))
            computed_again = layer
            if work.is_fsdp and work.method.adapter is not None:
                kept *= KEPT_BY_ADAPTERS_UNDER_FSDP
        return Stack(
            prefix=prefix,
            tokens=tokens,
            layers=shape.layers[side],
            parameters=shape.layer_parameters[side],
            kept=kept,
            working=gradients + computed_again,
        )

    def in_loss(self) -> int:
        """Bytes while the loss is computed, its gradients included; no parameter has one yet."""
        in_stacks = sum(stack.all_kept for stack in self.stacks)
        return in_stacks + self.ends + self.copies + self.loss

    def in_layers(self) -> int:
        """Bytes of all that belongs to neither the loss nor an embedding: what layers keep, and the
        layer at work."""
        return self.in_loss() - self.loss + self.most_working

    @property
    def most_working(self) -> int:
        """Bytes that the layer at work adds, in the stack where they are most."""
        return max(stack.working for stack in self.stacks)

    def backward(self) -> list[BackwardMoment]:
        """The moments of the backward pass at which most bytes may exist.

        Gradients appear as activations are freed. Both change linearly over layers of one kind, so
        the maximum is at the last or the first layer of each side, or at the embedding. Where both
        sides share a tied embedding, its gradient as a table exists beside that of the head after
        each side.
        """
        # A frozen weight has no gradient, and those of adapters are next to nothing.
        size = self.work.element_bytes if self.work.method.adapter is None else 0
        weights = self.work.shape.weights
        last_matrix = max(weight.size for weight in weights if weight.kind == "matrix")
        table = self.tied_gradients // 2 if len(self.stacks) > 1 else 0
        made = size * self.work.shape.embedding
        below = sum(stack.all_kept for stack in self.stacks)
        moments = []
        for stack in reversed(self.stacks):
            moments.append(BackwardMoment(self.ends + below + stack.working, made))
            below -= stack.all_kept
            # While the most is saved, the layer at work has a gradient only of its feed-forward
            # part's last matrix.
            other_layers = stack.parameters * (stack.layers - 1) // stack.layers
            at_first_layer = made + size * (other_layers + last_matrix)
            at_work = below + stack.working + stack.kept + table
            moments.append(BackwardMoment(at_work, at_first_layer))
            made += size * stack.parameters
        moments.append(BackwardMoment(self.tied_gradients, made))
        return moments

    def terms(self) -> list[Term]:
        """Terms of the most that exists at one time: all that is saved, and what the head or a
        layer adds to it."""
        terms = [self._layers_term(stack) for stack in self.stacks]
        beside = [size for size in (self.ends, self.copies) if size]
        formula = " + ".join(f"{short(size)}B" for size in beside)
        terms.append(_activations("ends, masks, weights in FP16", sum(beside), formula))
        terms.append(self._loss_or_layer_term())
        beyond = self.tied_gradients - total(terms)
        if beyond > 0:
            name = "gradients of the embedding, as head and as table, where activations were"
            formula = f"{short(self.tied_gradients)}B, less those"
            terms.append(_activations(name, beyond, formula))
        return terms

    def _layers_term(self, stack: Stack) -> Term:
        """What the layers of a stack keep."""
        work = self.work
        name = f"{stack.prefix}layers"
        kernel = f", {work.kernel} attention"
        if work.checkpointing:
            name = f"inputs of {name}"
            kernel = ""
        kilobytes = stack.kept / (work.batch_size * stack.tokens) / 1e3
        rows = f"{work.batch_size} rows x {stack.tokens} tokens"
        formula = f"{stack.layers} layers x {rows} x {kilobytes:.4g} kB{kernel}"
        return _activations(name, stack.all_kept, formula)

    def _loss_or_layer_term(self) -> Term:
        """What the loss takes or, where that is more, a layer that is computed again or its
        gradients."""
        work = self.work
        most = self.most_working
        is_causal = len(self.stacks) == 1
        log_softmax = self.head if work.method.loss != CHUNKED else 0
        if work.checkpointing and self.loss < most:
            kind = f"{work.kernel} attention" if is_causal else "the larger of the two kinds"
            return _activations("one layer, computed again", most, f"{short(most)}B, {kind}")
        if not work.checkpointing and is_causal and self.loss - log_softmax < most:
            name = "log-softmax, and gradients within a layer"
            formula = f"{short(log_softmax)}B + {short(most)}B"
            return _activations(name, log_softmax + most, formula)
        labels = f"{work.batch_size} rows x {work.labels} labels"
        if work.label_tokens is not None:
            labels = f"{work.label_tokens} labels"
        name = "log-softmax over the vocabulary, with its gradients"
        formula = f"{LOSS_COPIES} x 4 B x {labels} x {work.shape.vocabulary} words"
        if work.method.loss != OF_LABELS:
            name = f"logits and their gradients, loss {work.method.loss}"
            formula = f"{work.logit_rows} tokens x {self.loss / work.logit_rows / 1e3:.4g} kB"
        return _activations(name, self.loss, formula)


def _activations(name: str, size: int, formula: str) -> Term:
    return Term(name, size, formula, "activations")
