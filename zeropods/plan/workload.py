"""What one process trains on, whatever the model: the sizes that memory and time follow from, and its activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

from zeropods.plan.shapes import EAGER, FORWARD, FUSED, MASKED, PLAIN, Saved, Shape, value
from zeropods.techniques import TECHNIQUES, Technique, ZeroSettings

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "context")
"""What the memory of a GPU is divided into."""
FLOAT = 4
"""Bytes of an FP32 element."""
MASTER, MOMENTS = 4, 8
"""Bytes per parameter of an FP32 master, and of Adam's two moments."""
GRADIENTS = {True: 3, False: 2}
"""Gradients of the feed-forward's width at one time in the backward pass of a causal layer, and of another."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the batch of one forward pass of one process, padding included; and how its states are divided."""

    shape: Shape
    rows: int
    tokens: int
    """Tokens per row; of a T5 those of the source."""
    labels: int
    """Tokens per row that carry a loss; of a T5 all of the target."""
    precision: str = "fp32"
    """`fp32`, or `bf16`: BF16 weights and gradients beside an FP32 master; `fp16`: alike, or by autocast."""
    checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass."""
    own_rates: bool = False
    """Whether the optimizer's parameter groups are those of `train.trainer`, not Trainer's."""
    technique: Technique = TECHNIQUES[0]
    ranks: int = 1
    """Processes that it is divided among."""
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    passes: int = 1
    """Forward and backward passes of a step, whose gradients are added up."""
    attention: str = "sdpa"
    """One of `plan.shapes.ATTENTIONS`."""
    before_ampere: bool = False
    """Whether the GPU is older than FlashAttention takes: a T4, a V100."""
    dropout: bool | None = None
    """Whether there is dropout; as the model was published if not given."""

    @property
    def autocast(self) -> bool:
        """Whether weights and gradients are FP32 and products alone FP16, of copies made in each pass: transformers'
        way of FP16 without DeepSpeed."""
        return self.precision == "fp16" and self.technique.stage == 0

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of a gradient."""
        return ELEMENT_BYTES["fp32" if self.autocast else self.precision]

    @property
    def is_half(self) -> bool:
        """Whether weights are kept a second time, as an FP32 master."""
        return self.precision != "fp32" and not self.autocast

    @property
    def kernel(self) -> str:
        """What attention really runs: `FUSED`, `MASKED`, `PLAIN` or `EAGER`.

        Source: transformers 5.23 (`integrations/sdpa_attention.py`, `masking_utils.py`); PyTorch 2.13's choice
        (`sdp_utils.cpp`): FlashAttention takes FP16 and BF16 on GPUs from Ampere on, without a mask; the
        memory-efficient kernel takes FP32, older GPUs and a mask too, but no keys that several heads share, and then
        the plain formula runs, in FP32. Behind a mask transformers repeats the keys itself.
        """
        shape = self.shape
        if self.attention == "eager":
            return EAGER
        if not shape.joint:
            return FUSED
        if self.attention == "sdpa" and self.tokens >= (shape.window or self.tokens + 1):
            return MASKED
        is_plain = self.precision == "fp32" or self.before_ampere
        return PLAIN if shape.kv_heads < shape.heads and is_plain else FUSED

    def saved(self) -> Saved:
        """What a pass saves."""
        precision = "autocast" if self.autocast else "bf16" if self.is_half else "fp32"
        drops = self.shape.drops and self.dropout is not False
        return self.shape.trace(f"{precision} {self.kernel}{' dropout' * drops}")

    def flops(self) -> tuple[float, float]:
        """FLOPs of a pass forward and backward, a third of them forward; and of what checkpointing computes again.

        Padding is computed too. Behind a mask, and where scores are kept, the whole square of attention is computed, at
        least twice what is needed.
        """
        sizes, whole = (self.tokens, self.labels), self.kernel != FUSED
        again = FORWARD * self.shape.layer_products(*sizes, whole=whole) if self.checkpointing else 0.0
        return self.rows * self.shape.training_flops(*sizes, whole=whole), self.rows * again


@cache
def touched(shape: Shape, own_rates: bool, ranks: int) -> int:
    """Elements of all tensors that a rank's share touches in ZeRO's stages 1 and 2, where they are most.

    Source: DeepSpeed 0.19.8, stage_1_and_2.py: `get_partition_info` says which tensors a rank's share touches, in each
    parameter group of the optimizer; `copy_grads_in_partition` makes a buffer of the sum of their sizes.
    """
    changes: Counter[int] = Counter()
    for sizes in shape.groups(own_rates):
        # A parameter group is cut into equal shares wherever a tensor ends.
        part, begin = share(sum(sizes), ranks), 0
        for size in sizes:
            changes[begin // part] += size
            begin += size
            changes[min(ranks, share(begin, part))] -= size
    return max(accumulate(change for _, change in sorted(changes.items())))


# One part of a plan's memory: how many bytes, and from what.


@dataclass(frozen=True)
class Term:
    """Bytes of one process, with their formula."""

    name: str
    bytes: int
    formula: str
    """With the numbers put in: `4 B x 737.7 M / 3 ranks`."""
    part: str = "buffers"
    """One of `PARTS`."""

    @classmethod
    def of(cls, name: str, size: int, number: int, ranks: int = 1, part: str = "buffers") -> Term:
        """`number` elements of `size` bytes, of which each of some ranks has its share."""
        shared = f" / {ranks} ranks" if ranks > 1 else ""
        return cls(name, size * share(number, ranks), f"{size} B x {short(number)}{shared}", part)


def total(terms: Iterable[Term], part: str | None = None) -> int:
    """Bytes of all terms, or of those of one part."""
    return sum(term.bytes for term in terms if part in (None, term.part))


def share(number: int, ranks: int) -> int:
    """Elements of one rank where some share them; the last partition is padded to the size of the others."""
    return -(-number // ranks)


def short(number: float) -> str:
    """A count as people read it: `737.7 M`."""
    size, prefix = next(((size, f" {prefix}") for size, prefix in PREFIXES if number >= size), (1, ""))
    return f"{number / size:.4g}{prefix}"


# What a forward pass keeps for its backward pass, counted tensor by tensor, as transformers 5.23 runs it on a GPU.


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers of one kind: the encoder's, the decoder's, or all of a causal model. Bytes of one pass."""

    prefix: str
    """`encoder `, `decoder `, or nothing."""
    tokens: int
    """Tokens per row."""
    layers: int
    parameters: int
    """Of all layers."""
    kept: int
    """What each layer keeps until its backward pass: with gradient checkpointing its input, else all that it saves."""
    working: int
    """What the layer at work adds: gradients of the feed-forward part or of the scores, and what is computed again."""


class Activations:
    """Bytes saved by one forward pass with this project's loss, and the transient ones of its backward pass.

    The loss makes logits over the label positions and takes their log-softmax in FP32. Rows are padded on the right;
    those of a causal model carry no mask in training, since nothing that has a loss looks there.
    """

    def __init__(self, work: Workload) -> None:
        self.work, shape, size = work, work.shape, ELEMENT_BYTES[work.precision]
        saved, sizes = work.saved(), (work.rows, work.tokens, work.labels)
        self.head = FLOAT * work.rows * work.labels * shape.vocabulary
        """Log-softmax over the vocabulary, FP32, of each label; the gradients behind and before it are twice that."""
        self.tied_gradients = 2 * work.element_bytes * shape.embedding if shape.tied else 0
        """Of a tied embedding, as the head and as the table: both are there while they are added."""
        self.ends = round(value(saved.ends, *sizes) + (value(saved.held, *sizes) if work.checkpointing else 0))
        """What is saved beside the layers: it is there until the backward pass has come through all of them."""
        self.copies = 0
        """Copies of weights in FP16, which autocast keeps until the loss is there; layers that are not computed again
        keep them anyway."""
        if work.autocast and work.checkpointing:
            self.copies = round(sum(layers.get("000", 0) for layers in saved.layers))
        scores = 2 * saved.scores * work.rows if work.kernel in (EAGER, PLAIN) else 0
        sides = (("", work.tokens),) if shape.joint else (("encoder ", work.tokens), ("decoder ", work.labels))
        self.stacks = list[Stack]()
        for side, (prefix, tokens) in enumerate(sides):
            layer = round(value(saved.layers[side], *sizes) / shape.layers[side])
            gradients = max(GRADIENTS[shape.joint] * size * work.rows * tokens * shape.inner, scores * tokens**2)
            kept, again = (round(value(saved.inputs[side], *sizes)), layer) if work.checkpointing else (layer, 0)
            self.stacks.append(
                Stack(
                    prefix=prefix,
                    tokens=tokens,
                    layers=shape.layers[side],
                    parameters=shape.layer_parameters[side],
                    kept=kept,
                    working=gradients + again,
                )
            )

    def in_loss(self) -> int:
        """Bytes when the loss is computed, its own gradients included; there is no gradient of a parameter yet."""
        return sum(stack.layers * stack.kept for stack in self.stacks) + self.ends + self.copies + 3 * self.head

    def backward(self) -> list[tuple[int, int]]:
        """Bytes saved and at work, and those of gradients of parameters made by then, where there can be most of both.

        Gradients appear as activations go. Both change in a straight line over like layers, so the most is at the last
        or the first layer of each side, or at the embedding. Where both sides share a tied embedding, its gradient as a
        table is there beside that of the head after each.
        """
        size, has_sides = self.work.element_bytes, len(self.stacks) > 1
        matrix = max(weight.size for weight in self.work.shape.weights if weight.kind == "matrix")
        made, found = size * self.work.shape.embedding, list[tuple[int, int]]()
        below = sum(stack.layers * stack.kept for stack in self.stacks)
        for stack in reversed(self.stacks):
            found.append((self.ends + below + stack.working, made))
            below -= stack.layers * stack.kept
            # Of the layer at work only the feed-forward part's last matrix has its gradient while the most is saved.
            others = size * (stack.parameters * (stack.layers - 1) // stack.layers + matrix)
            table = self.tied_gradients // 2 if has_sides else 0
            found.append((below + stack.working + stack.kept + table, made + others))
            made += size * stack.parameters
        return [*found, (self.tied_gradients, made)]

    def terms(self) -> tuple[Term, ...]:
        """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
        beside = (self.ends, self.copies)
        ends = _term(
            "ends, masks, weights in FP16", sum(beside), " + ".join(f"{short(each)}B" for each in beside if each)
        )
        terms = (*map(self._kept_term, self.stacks), ends, self._most_term())
        beyond = self.tied_gradients - total(terms)
        if beyond <= 0:
            return terms
        name = "gradients of the embedding, as head and as table, where activations were"
        return *terms, _term(name, beyond, f"{short(self.tied_gradients)}B, less those")

    def _kept_term(self, stack: Stack) -> Term:
        name = f"inputs of {stack.prefix}layers" if self.work.checkpointing else f"{stack.prefix}layers"
        each = stack.kept / (self.work.rows * stack.tokens) / 1e3
        by = "" if self.work.checkpointing else f", {self.work.kernel} attention"
        formula = f"{stack.layers} layers x {self.work.rows} rows x {stack.tokens} tokens x {each:.4g} kB{by}"
        return _term(name, stack.layers * stack.kept, formula)

    def _most_term(self) -> Term:
        """What the loss takes, or, where that is more, one layer that is computed again, or its gradients."""
        work, most = self.work, max(stack.working for stack in self.stacks)
        if work.checkpointing and 3 * self.head < most:
            by = f"{work.kernel} attention" if len(self.stacks) == 1 else "the larger of both kinds"
            return _term("one layer, computed again", most, f"{short(most)}B, {by}")
        if not work.checkpointing and len(self.stacks) == 1 and 2 * self.head < most:
            formula = f"{short(self.head)}B + {short(most)}B"
            return _term("log-softmax, and gradients within a layer", self.head + most, formula)
        formula = f"3 x 4 B x {work.rows} rows x {work.labels} labels x {work.shape.vocabulary} words"
        return _term("log-softmax over the vocabulary, with its gradients", 3 * self.head, formula)


def _term(name: str, size: int, formula: str) -> Term:
    return Term(name, size, formula, "activations")
