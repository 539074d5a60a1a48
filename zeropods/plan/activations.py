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
"""FP32 tensors over the vocabulary that a loss has at one time: the log-softmax, and the gradients
of its output and of its input."""
HALF_COPIES = {OF_TRANSFORMERS: 14 / 4, FUSED_LOSS: 8 / 4}
"""Bytes of other losses over BF16 logits, as multiples of the FP32 log-softmax's. Of transformers:
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
    """Bytes that the layer at work adds in the backward pass: gradients of its feed-forward part
    or, where they are more, of its attention scores; and what is computed again."""

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
        self.log_softmax = ELEMENT_BYTES["fp32"] * work.logit_rows * shape.vocabulary
        """Bytes of the FP32 log-softmax over the vocabulary, of all tokens with a loss."""
        self.loss = self._loss_bytes()
        """Most bytes of the loss: logits, log-softmax and their gradients."""
        self.tied_gradients = 0
        """Bytes of a tied embedding's gradients, as the head and as the table: both exist while
        they are added. 0 where the head has a matrix of its own, or the embedding is frozen."""
        trains_embedding = work.method.adapter is None
        if shape.tied and trains_embedding:
            self.tied_gradients = 2 * work.element_bytes * shape.embedding
        beside_layers = value_at(saved.ends, *sizes)
        if work.checkpointing:
            # Masks and rotations, which all layers are given.
            beside_layers += value_at(saved.held, *sizes)
        self.ends = round(beside_layers)
        """Bytes saved beside the layers. `backward` counts them at the last layer of a stack, where
        the backward pass enters it, and not at the first."""
        self.copies = 0
        """With checkpointing, bytes of FP16 copies of weights, which autocast keeps until the loss
        is computed. Without it they are among the bytes of the layers, and this is 0."""
        if work.autocast and work.checkpointing:
            # The copies are what does not grow with rows, tokens or labels: the coefficient of the
            # exponents 0, 0 and 0.
            self.copies = round(sum(layers.get("000", 0) for layers in saved.layers))
        if shape.is_decoder_only:
            self.stacks = [self._stack(0, "", work.tokens)]
        else:
            self.stacks = [
                self._stack(0, "encoder ", work.tokens),
                self._stack(1, "decoder ", work.labels),
            ]

    def _loss_bytes(self) -> int:
        """Most bytes that the loss takes beside what the layers have saved."""
        work = self.work
        loss = work.method.loss
        if loss == CHUNKED:
            # About as many logits at a time as the hidden states have elements, and the gradient of
            # the hidden states (Liger-Kernel, ops/fused_linear_cross_entropy.py).
            return 2 * work.element_bytes * work.logit_rows * work.shape.width
        copies: float = LOSS_COPIES
        if work.is_half:
            copies = HALF_COPIES.get(loss, LOSS_COPIES)
        return round(copies * self.log_softmax)

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

        elements_of_a_token = GRADIENTS_OF_FEED_FORWARD[shape.is_decoder_only] * shape.inner
        gradient_bytes = (
            ELEMENT_BYTES[work.precision] * work.batch_size * tokens * elements_of_a_token
        )
        if work.kernel in (EAGER, PLAIN):
            # A decoder's scores are over its own tokens and, beside an encoder, over the source's.
            keys = tokens if side == 0 else max(tokens, work.tokens)
            # The gradients of scores and of their softmax exist at the same time.
            score_bytes = 2 * saved.scores * work.batch_size * tokens * keys
            gradient_bytes = max(gradient_bytes, score_bytes)

        bytes_of_a_layer = round(value_at(saved.layers[side], *sizes) / shape.layers[side])
        kept = bytes_of_a_layer
        computed_again = 0
        if work.checkpointing:
            kept = round(value_at(saved.inputs[side], *sizes))
            computed_again = bytes_of_a_layer
            if work.is_fsdp and work.method.adapter is not None:
                kept *= KEPT_BY_ADAPTERS_UNDER_FSDP
        return Stack(
            prefix=prefix,
            tokens=tokens,
            layers=shape.layers[side],
            parameters=shape.layer_parameters[side],
            kept=kept,
            working=gradient_bytes + computed_again,
        )

    def in_loss(self) -> int:
        """Bytes while the loss is computed, its gradients included; no parameter has one yet."""
        in_stacks = sum(stack.all_kept for stack in self.stacks)
        return in_stacks + self.ends + self.copies + self.loss

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
        shape = self.work.shape
        # A frozen weight has no gradient, and those of adapters are next to nothing.
        element_bytes = self.work.element_bytes if self.work.method.adapter is None else 0
        table_gradient = self.tied_gradients // 2 if len(self.stacks) > 1 else 0
        # The head's gradient comes first; it is as large as the embedding's.
        gradients_made = element_bytes * shape.embedding
        still_kept = sum(stack.all_kept for stack in self.stacks)
        moments = []
        for stack in reversed(self.stacks):
            at_last_layer = self.ends + still_kept + stack.working
            moments.append(BackwardMoment(at_last_layer, gradients_made))
            still_kept -= stack.all_kept
            at_first_layer = still_kept + stack.working + stack.kept + table_gradient
            other_layers = stack.parameters * (stack.layers - 1) // stack.layers
            # While the most is saved, the layer at work has a gradient only of its feed-forward
            # part's last matrix.
            new_elements = other_layers + shape.largest_matrix
            moments.append(
                BackwardMoment(at_first_layer, gradients_made + element_bytes * new_elements)
            )
            gradients_made += element_bytes * stack.parameters
        moments.append(BackwardMoment(self.tied_gradients, gradients_made))
        return moments

    def terms(self) -> list[Term]:
        """Terms of the most that exists at one time: all that is saved, and what the loss or a
        layer adds to it; with a tied embedding its gradients, as far as they are more than that."""
        terms = [self._layers_term(stack) for stack in self.stacks]
        beside_layers = [number for number in (self.ends, self.copies) if number > 0]
        formula = " + ".join(f"{short(number)}B" for number in beside_layers)
        terms.append(_activations("ends, masks, weights in FP16", sum(beside_layers), formula))
        terms.append(self._loss_or_layer_term())
        # The embedding comes last in the backward pass, when all else is freed.
        beyond_activations = self.tied_gradients - total(terms)
        if beyond_activations > 0:
            name = "gradients of the embedding, as head and as table, where activations were"
            formula = f"{short(self.tied_gradients)}B, less those"
            terms.append(_activations(name, beyond_activations, formula))
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
        """The larger of two: what the loss takes, or what the layer at work adds. That is a layer
        that is computed again, or without checkpointing, in a causal model, the gradients within a
        layer beside the log-softmax, which is still kept."""
        work = self.work
        working = self.most_working
        is_causal = len(self.stacks) == 1
        # A chunked loss keeps none.
        log_softmax = self.log_softmax if work.method.loss != CHUNKED else 0
        if work.checkpointing and self.loss < working:
            kind = f"{work.kernel} attention" if is_causal else "the larger of the two kinds"
            return _activations("one layer, computed again", working, f"{short(working)}B, {kind}")
        beside_layer = log_softmax + working
        if not work.checkpointing and is_causal and self.loss < beside_layer:
            name = "log-softmax, and gradients within a layer"
            formula = f"{short(log_softmax)}B + {short(working)}B"
            return _activations(name, beside_layer, formula)
        if work.method.loss != OF_LABELS:
            name = f"logits and their gradients, loss {work.method.loss}"
            formula = f"{work.logit_rows} tokens x {self.loss / work.logit_rows / 1e3:.4g} kB"
            return _activations(name, self.loss, formula)
        labels = f"{work.batch_size} rows x {work.labels} labels"
        if work.label_tokens is not None:
            labels = f"{work.label_tokens} labels"
        name = "log-softmax over the vocabulary, with its gradients"
        formula = f"{LOSS_COPIES} x 4 B x {labels} x {work.shape.vocabulary} words"
        return _activations(name, self.loss, formula)


def _activations(name: str, size: int, formula: str) -> Term:
    return Term(name, size, formula, "activations")
