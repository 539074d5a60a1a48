"""What a forward pass keeps for its backward pass, counted tensor by tensor, as transformers 5.23 runs it on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.built import BuiltShape, value
from zeropods.plan.shapes import EAGER, FUSED, MASKED, PLAIN, CausalShape, T5Shape
from zeropods.plan.workload import Term, Workload, short, total

FLOAT, MASK = 4, 1
"""Bytes of an FP32 element, and of an element of a mask."""
GATED_COPIES, GPT2_COPIES, BLOOM_COPIES = 4, 5, 2
"""Tensors of the feed-forward's width that a layer saves: gate, its SiLU, up and their product; GPT-2's GELU is made of
plain operations and saves four steps and its result; BLOOM's saves its input and its result."""
AUTOCAST_GPT2_COPIES = 8
"""In FP16: three of the four are FP32 then, since autocast raises to a power in FP32."""
GRADIENTS = 3
"""Gradients of the feed-forward's width, at one time in a causal layer's backward pass; two in a T5's."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers of one kind: a T5's encoder or decoder, or all of a causal model. Bytes of one pass."""

    prefix: str
    """`encoder `, `decoder `, or nothing."""
    tokens: int
    """Tokens per row."""
    layers: int
    parameters: int
    """Of all layers."""
    layer: int
    """What one layer saves."""
    layer_input: int
    """What one layer keeps with gradient checkpointing."""
    transient: int
    """Gradients in the backward pass of a layer."""
    ends: int
    """What is saved beside the layers: dropout or norm of the embedding, rotations, the last norm, its output."""


@dataclass(frozen=True)
class Moments:
    """Bytes of activations and gradients at the moments of a pass at which there can be most of both.

    Gradients appear as activations go. Both change in a straight line over like layers, so the most is at an end of
    them.
    """

    loss: int
    """All that was saved, and the head's own gradients; there is no gradient of a parameter yet."""
    backward: tuple[tuple[int, int], ...]
    """In the order of the pass: what is saved and at work, and the gradients of parameters made by then."""


class Activations:
    """Bytes saved by the parts of one forward pass, and the transient ones of its backward pass."""

    stacks: tuple[Stack, ...]
    mask = 0
    """Bytes of the mask of causality, where no kernel makes it itself: added to the scores, or a byte each."""
    copies = 0
    """Bytes of copies of weights in FP16, which autocast makes and its products save."""
    tied_gradients = 0
    """Bytes of a tied embedding's gradients, as the head and as the table: both are there while they are added."""

    def __init__(self, work: Workload) -> None:
        self.work, self.size = work, work.activation_bytes
        self.head = FLOAT * work.rows * work.labels * work.shape.vocabulary
        """Log-softmax over the vocabulary, FP32, of each label; the gradients behind and before it are twice that."""

    def moments(self) -> Moments:
        """In the loss, at the last and the first layer of each side from the last to the first, and at the embedding.

        Where both sides share a tied embedding, its gradient as a table is there beside that of the head after each.
        """
        size, beside, has_sides = self.work.element_bytes, self.mask + self.copies, len(self.stacks) > 1
        matrix = max(weight.size for weight in self.work.shape.weights if weight.kind == "matrix")
        made, backward = size * self.work.shape.embedding, []
        below = [stack.layers * self.kept(stack) for stack in self.stacks]
        for number in reversed(range(len(self.stacks))):
            stack, before = self.stacks[number], beside + sum(below[:number]) + self.working(self.stacks[number])
            ends = sum(each.ends for each in self.stacks[: number + 1])
            backward.append((before + ends + below[number], made))
            # Of the layer at work only the feed-forward part's last matrix has its gradient while the most is saved.
            others = size * (stack.parameters * (stack.layers - 1) // stack.layers + matrix)
            backward.append((before + self.kept(stack) + (self.tied_gradients // 2 if has_sides else 0), made + others))
            made += size * stack.parameters
        return Moments(self.in_loss(), (*backward, (self.tied_gradients, made)))

    def _ends_term(self) -> Term:
        """What is saved beside the layers."""
        parts = (sum(stack.ends for stack in self.stacks), self.mask, self.copies)
        formula = " + ".join(f"{short(part)}B" for part in parts if part)
        return _term("ends, mask, copies of weights", sum(parts), formula)

    def terms(self) -> tuple[Term, ...]:
        """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
        terms = (*map(self._kept_term, self.stacks), self._ends_term(), self._most_term())
        beyond = self.tied_gradients - total(terms)
        if beyond <= 0:
            return terms
        name = "gradients of the embedding, as head and as table, where activations were"
        return *terms, _term(name, beyond, f"{short(self.tied_gradients)}B, less those")

    def kept(self, stack: Stack) -> int:
        """Bytes that each layer keeps until its backward pass."""
        return stack.layer_input if self.work.checkpointing else stack.layer

    def working(self, stack: Stack) -> int:
        """What the layer at work adds: its gradients, and with checkpointing its own activations."""
        return stack.transient + (stack.layer if self.work.checkpointing else 0)

    def in_loss(self) -> int:
        """Bytes saved when the loss is computed, its own gradients included."""
        layers = sum(stack.layers * self.kept(stack) for stack in self.stacks)
        return layers + sum(stack.ends for stack in self.stacks) + self.mask + self.copies + 3 * self.head

    def _kept_term(self, stack: Stack) -> Term:
        name = f"inputs of {stack.prefix}layers" if self.work.checkpointing else f"{stack.prefix}layers"
        return _term(name, stack.layers * self.kept(stack), self._kept_formula(stack))

    def _kept_formula(self, stack: Stack) -> str:
        each = self.kept(stack) / (self.work.rows * stack.tokens) / 1e3
        by = "" if self.work.checkpointing else f", {self.work.kernel} attention"
        return f"{stack.layers} layers x {self.work.rows} rows x {stack.tokens} tokens x {each:.4g} kB{by}"

    def _most_term(self) -> Term:
        """What the loss takes, or, where that is more, one layer that is computed again, or its gradients."""
        work, again = self.work, max(map(self.working, self.stacks))
        if work.checkpointing and 3 * self.head < again:
            by = f"{work.kernel} attention" if len(self.stacks) == 1 else "the larger of both kinds"
            return _term("one layer, computed again", again, f"{short(again)}B, {by}")
        transient = self.stacks[0].transient
        if not work.checkpointing and len(self.stacks) == 1 and 2 * self.head < transient:
            formula = f"{short(self.head)}B + {short(transient)}B"
            return _term("log-softmax, and gradients within a layer", self.head + transient, formula)
        formula = f"3 x 4 B x {work.rows} rows x {work.labels} labels x {work.shape.vocabulary} words"
        return _term("log-softmax over the vocabulary, with its gradients", 3 * self.head, formula)


def activations(work: Workload) -> Activations:
    """Those of one forward pass."""
    if isinstance(work.shape, BuiltShape):
        return BuiltActivations(work, work.shape)
    if isinstance(work.shape, T5Shape):
        return T5Activations(work, work.shape)
    assert isinstance(work.shape, CausalShape)
    return CausalActivations(work, work.shape)


def _term(name: str, size: int, formula: str) -> Term:
    return Term(name, size, formula, "activations")


# An encoder-decoder.


class T5Activations(Activations):
    """Those of a T5; every position of the target counts as a label.

    SDPA attention with a bias goes to the memory-efficient kernel (FlashAttention takes none), which saves queries,
    keys, values, output, bias and the softmax's logarithms, not the probabilities. T5's norm computes in FP32, and
    saves that copy where activations are BF16. Our loss (`train.text2sql`) makes logits over the label positions and
    takes their log-softmax in FP32.
    """

    def __init__(self, work: Workload, shape: T5Shape) -> None:
        super().__init__(work)
        self.shape, self.tied_gradients = shape, 2 * work.element_bytes * shape.embedding
        source, target = work.tokens, work.labels
        # The decoder's mask is the causal one, equal for all rows: so is its bias.
        encoder = self._self_attention(source, work.rows) + self._feed_forward(source)
        decoder = self._self_attention(target, 1) + self._cross_attention() + self._feed_forward(target)
        self.encoder = self._stack("encoder ", source, encoder)
        self.decoder = self._stack("decoder ", target, decoder)
        self.stacks = (self.encoder, self.decoder)

    def _stack(self, prefix: str, tokens: int, layer: int) -> Stack:
        rows = self.work.rows * tokens
        return Stack(
            prefix=prefix,
            tokens=tokens,
            layers=self.shape.layers,
            parameters=sum(weight.size for weight in self.shape.stack(1 if prefix == "encoder " else 2)),
            layer=layer,
            layer_input=self.size * rows * self.shape.d_model,
            # Gradients of the feed-forward's input and output.
            transient=2 * self.size * rows * self.shape.d_ff,
            ends=self._ends(rows),
        )

    def _norm(self, rows: int) -> int:
        """Input, input over its deviation, and scaled output; the deviation; in BF16 an FP32 copy of the input."""
        return rows * (self.shape.d_model * (3 * self.size + (FLOAT if self.work.is_half else 0)) + FLOAT)

    def _self_attention(self, tokens: int, biased_rows: int) -> int:
        rows, heads = self.work.rows * tokens, self.shape.heads
        bias = self.size * biased_rows * heads * tokens**2
        saved = 4 * self.size * rows * heads * self.shape.d_kv + FLOAT * rows * heads
        return self._norm(rows) + saved + bias + self._mask(rows * self.shape.d_model)

    def _cross_attention(self) -> int:
        work, heads, target = self.work, self.shape.heads, self.work.rows * self.work.labels
        bias = self.size * work.rows * heads * work.labels * work.tokens
        saved = 2 * self.size * (target + work.rows * work.tokens) * heads * self.shape.d_kv + FLOAT * target * heads
        return self._norm(target) + saved + bias + self._mask(target * self.shape.d_model)

    def _feed_forward(self, tokens: int) -> int:
        """ReLU's output, and the same after dropout, which the second matrix multiplies."""
        rows = self.work.rows * tokens
        inner = rows * self.shape.d_ff
        saved = (1 + self.work.drops) * self.size * inner + self._mask(inner)
        return self._norm(rows) + saved + self._mask(rows * self.shape.d_model)

    def _ends(self, rows: int) -> int:
        """A norm whose scaled output goes into dropout and on to the next product; dropout of the embedding before."""
        return self._norm(rows) + 2 * self._mask(rows * self.shape.d_model)

    def _mask(self, count: int) -> int:
        """Dropout saves a mask of one byte an element."""
        return MASK * count if self.work.drops else 0


# A decoder alone.


class CausalActivations(Activations):
    """Those of the families of `CausalShape`, with this project's loss: logits where there is a label.

    Rows carry no mask in training: they are padded on the right, where nothing that has a loss looks.
    """

    def __init__(self, work: Workload, shape: CausalShape) -> None:
        super().__init__(work)
        self.shape, self.rows = shape, work.rows * work.tokens
        self.residual = FLOAT if work.autocast else self.size
        """Bytes of an element of the residual: autocast leaves it, and what is computed of it, FP32."""
        per_score = {PLAIN: FLOAT, EAGER: self.size if shape.family == "gpt2" else FLOAT}
        self.softmax = per_score.get(work.kernel, 0)
        """Bytes of one score in the softmax, which all but GPT-2's computes in FP32; kernels keep none."""
        scores = work.rows * shape.heads * work.tokens**2
        mask_element = {FUSED: 0, MASKED: MASK, PLAIN: FLOAT, EAGER: self.size}[work.kernel]
        self.mask = mask_element * (1 if work.kernel == PLAIN else work.rows) * work.tokens**2
        self.copies = self.size * (shape.layer_matmul + shape.embedding) if work.autocast else 0
        self.tied_gradients = 2 * work.element_bytes * shape.embedding if shape.tied else 0
        self.layers = Stack(
            prefix="",
            tokens=work.tokens,
            layers=shape.layers,
            parameters=shape.layers * sum(weight.size for weight in shape.layer()),
            layer=self._attention(scores) + self._feed_forward(),
            layer_input=self.residual * self.rows * shape.hidden,
            # Of the feed-forward part, or of the scores.
            transient=max(GRADIENTS * self.size * self.rows * shape.ffn, 2 * self.softmax * scores),
            ends=self._ends(),
        )
        self.stacks = (self.layers,)

    def _attention(self, scores: int) -> int:
        """Norm, queries, keys and values with their rotation, scores, output, dropout of the result."""
        shape, kernel, size = self.shape, self.work.kernel, self.size
        queries, keys = (self.rows * heads * shape.head_size for heads in (shape.heads, shape.kv_heads))
        logarithms = FLOAT * self.rows * shape.heads
        if kernel == FUSED:
            saved = size * (queries + 2 * keys) + logarithms
        elif kernel == MASKED:
            # Keys and values are repeated for each head of queries, here and below.
            saved = 3 * size * queries + logarithms + size * self.rows * self.work.tokens
        else:
            saved = 3 * (FLOAT if kernel == PLAIN else size) * queries + self._per_score() * scores
        heads = self.rows * (shape.heads + shape.kv_heads) if shape.family == "qwen3" else 0
        # Qwen3's norms of queries and of keys; rotation after them saves nothing of its input.
        norms = self._norm(self.rows, shape.hidden) + self._norm(heads, shape.head_size, output=False)
        return norms + saved + size * queries + self._dropout_mask()

    def _per_score(self) -> int:
        """Bytes saved for each score: the softmax's output, what the values are multiplied with if that is another,
        a mask."""
        is_plain, softmax = self.work.kernel == PLAIN, self.softmax
        if self.work.drops:
            return softmax + MASK + (softmax if is_plain else self.size)
        return softmax if is_plain or softmax == self.size else softmax + self.size

    def _feed_forward(self) -> int:
        of_gpt2 = AUTOCAST_GPT2_COPIES if self.work.autocast else GPT2_COPIES
        copies = {"gpt2": of_gpt2, "bloom": BLOOM_COPIES}.get(self.shape.family, GATED_COPIES)
        saved = copies * self.size * self.rows * self.shape.ffn
        return self._norm(self.rows, self.shape.hidden) + saved + self._dropout_mask()

    def _norm(self, rows: int, width: int, *, output: bool = True) -> int:
        """LayerNorm: input, mean, deviation. RMS norm: an FP32 copy of its input, that over the deviation, and this.

        Args:
            output: whether what comes after it saves its result.
        """
        each = self.residual + (self.size if output else 0)
        if self.shape.has_biases:
            return rows * (each * width + 2 * FLOAT)
        return rows * ((FLOAT + each) * width + FLOAT)

    def _ends(self) -> int:
        """Last norm and the head's input; BLOOM's norm of the embedding, else rotations and the embedding's dropout."""
        shape, work, norm = self.shape, self.work, self._norm(self.rows, self.shape.hidden, output=False)
        last = norm + self.size * work.rows * work.labels * shape.hidden
        if shape.family == "bloom":
            return last + norm
        rotations = 0 if shape.family == "gpt2" else 2 * self.size * work.tokens * shape.head_size
        return last + rotations + self._dropout_mask()

    def _dropout_mask(self) -> int:
        """GPT-2 and BLOOM drop out of what is added to the residual."""
        return MASK * self.rows * self.shape.hidden if self.work.drops and self.shape.has_biases else 0


# Any model that transformers builds.


class BuiltActivations(Activations):
    """Those that a pass of the model itself has shown (`plan.built`), with this project's loss."""

    def __init__(self, work: Workload, shape: BuiltShape) -> None:
        super().__init__(work)
        self.shape, saved = shape, shape.saved(work)
        sizes = (work.rows, work.tokens, work.labels)
        self.copies = self.size * (sum(shape.stack_parameters) + shape.embedding) if work.autocast else 0
        self.tied_gradients = 2 * work.element_bytes * shape.embedding if shape.tied else 0
        scores = 2 * FLOAT * work.rows * shape.heads if work.kernel in (EAGER, PLAIN) else 0
        sides = (("encoder ", work.tokens), ("decoder ", work.labels)) if shape.has_encoder else (("", work.tokens),)
        self.stacks = tuple(
            Stack(
                prefix=prefix,
                tokens=tokens,
                layers=stack.layers,
                parameters=parameters,
                layer=round(value(stack.all, *sizes) / stack.layers),
                layer_input=round(value(stack.input, *sizes)),
                transient=max(GRADIENTS * self.size * work.rows * tokens * shape.inner, scores * tokens**2),
                # All that lies outside the layers is there until the first backward pass through one.
                ends=round(value(saved.ends, *sizes)) if stack is saved.stacks[-1] else 0,
            )
            for (prefix, tokens), stack, parameters in zip(sides, saved.stacks, shape.stack_parameters, strict=True)
        )
