"""Memory of one process, before it runs: every term with its formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate

from zeropods.plan.workload import EAGER, ELEMENT_BYTES, MASTER, MOMENTS, PLAIN, Shape, Workload, share, value
from zeropods.tables import GIB

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "context")
"""What the memory of a GPU is divided into."""
GRADIENTS = {True: 3, False: 2}
"""Gradients of the feed-forward's width at one time in the backward pass of a causal layer, and of another."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
CONTEXT_BYTES = 500_000_000
"""What CUDA, cuBLAS and NCCL take of a GPU before the first tensor: what is left of the published figures of an A100
once all else is counted. Drivers and libraries differ by some 0.2 GB."""
PROCESS_BYTES = 2 << 30
"""Interpreter, PyTorch, CUDA and its libraries: an allowance. A process without a GPU has 0.7 GB (measured)."""
LOADING = "the model while it is loaded, FP32"
"""Name of the term of host memory that is given back before the first step."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """What one process needs; of its host, what one process adds."""

    terms: tuple[Term, ...]
    """Terms of the GPU."""
    host_terms: tuple[Term, ...]
    state_bytes: int
    """Parameters, gradients and optimizer states on whatever device, just before the optimizer's step: gradients that
    added up over several passes are reduced to a rank's share by then."""
    peak_allocated_bytes: int
    """The most that tensors take at one time: `torch.cuda.max_memory_allocated`."""

    @property
    def device_bytes(self) -> int:
        """The most that the GPU shows as used: gradients and activations counted as if both were whole at one time.

        They are not, but the allocator keeps the blocks of what is freed, and not every new tensor fits into one. So
        this is what must fit; `peak_allocated_bytes` is what tensors alone come to.
        """
        return total(self.terms)

    @property
    def host_bytes(self) -> int:
        """Host memory of one process."""
        return total(self.host_terms)

    def parts(self) -> dict[str, int]:
        """Bytes of the GPU by part, and `total`, their sum."""
        return {part: total(self.terms, part) for part in PARTS} | {"total": self.device_bytes}


@lru_cache(maxsize=1024)
def plan_memory(work: Workload, context_bytes: int = CONTEXT_BYTES) -> PlannedMemory:
    """The memory of one process.

    Args:
        context_bytes: bytes of CUDA and its libraries; 0 without a GPU.
    """
    stage, activations, buffers = work.technique.stage, Activations(work), _buffers(work)
    (held, lasting), saved = _states(work), activations.terms()
    terms = [*held, *buffers]
    # What the optimizer's step needs for a moment, as far as it exceeds the activations and buckets that are gone.
    if work.technique.offloads or (stage == 0 and not work.is_half):
        step = Term("temporaries of the step", 0, "0 B: a fused AdamW works in place")
    elif stage == 0:
        step = Term.of("gradients of the masters, FP32", MASTER, work.shape.parameters)
    else:
        each = MASTER + work.element_bytes * work.is_half
        step = Term.of("gradients of the partition, flat", each, work.shape.parameters, work.ranks)
    spare = total(saved) + sum(term.bytes for term in buffers if stage in (1, 2) and "bucket" in term.name)
    if step.bytes > spare:
        formula = f"{step.formula}, less freed activations and buckets"
        terms.append(replace(step, bytes=step.bytes - spare, formula=formula))
    terms += saved
    if context_bytes:
        formula = f"{context_bytes / GIB:.2g} GiB, a constant"
        terms.append(Term("CUDA and its libraries", context_bytes, formula, "context"))
    # Tensors at the worst moment, on the worst-off rank: in the loss, the backward pass or the step.
    gradients = total(held, "gradients")
    # Buckets of stages 1 and 2 are made when the first gradient is there, and given back before the step.
    early = 0 if stage in (1, 2) else total(buffers)
    before = gradients if work.passes > 1 or stage == 3 else 0
    # Gradients are made as the backward pass comes to them; a partition is there from the first one on.
    grows = _gradients_are_whole(work) and work.passes == 1
    moments = [
        early + before + activations.in_loss(),
        early + gradients + step.bytes,
        *(total(buffers) + kept + (made if grows else gradients) for kept, made in activations.backward()),
    ]
    return PlannedMemory(
        terms=tuple(terms),
        host_terms=_host_terms(work, lasting),
        state_bytes=sum(map(total, _states(replace(work, passes=1)))),
        peak_allocated_bytes=total(held) - gradients + max(moments),
    )


# Parameters, gradients and optimizer states, between a backward pass and the optimizer's step.
#
# Without DeepSpeed: PyTorch's AdamW over FP32 weights, or this project's over FP32 masters of BF16 weights
# (`train.trainer`). With it, as DeepSpeed 0.19.8 does it: every stage keeps an FP32 master partition beside the
# weights, also where these are FP32 themselves (stage_1_and_2.py, `single_partition_of_fp32_groups`; stage3.py,
# `_create_fp32_partitions`, whose test for "the same device" compares a device with a string and so never holds).


def _states(work: Workload) -> tuple[list[Term], list[Term]]:
    """States in the memory of the GPU, and in that of the host."""
    size, shape, stage, ranks = work.element_bytes, work.shape, work.technique.stage, work.ranks
    weights = Term.of("weights", size, shape.parameters, ranks if stage == 3 else 1, "parameters")
    whole, small = _gradients_are_whole(work), _kept_whole(work)
    gathered = [Term.of("small weights, kept whole", size, small, part="parameters")] if small else []
    gradients = Term.of("gradients", size, shape.parameters, 1 if whole else ranks, "gradients")
    if not whole and stage != 3:
        some = Term.of("gradients", size, touched(shape, work.own_rates, ranks), part="gradients")
        gradients = replace(some, formula=f"{some.formula}: tensors that a share of 1 / {ranks} touches, whole")
    held = ("master and Adam's moments", MASTER + MOMENTS) if stage or work.is_half else ("Adam's moments", MOMENTS)
    optimizer = Term.of(f"{held[0]}, FP32", held[1], shape.parameters, ranks if stage else 1, "optimizer")
    if not work.technique.offloads:
        return [weights, *gathered, gradients, optimizer], []
    master = Term.of("gradients of the master, FP32", MASTER, shape.parameters, ranks, "gradients")
    if stage == 3:
        return gathered, [weights, gradients, master, optimizer]
    return [weights, gradients] if whole else [weights], [master, optimizer]


def _gradients_are_whole(work: Workload) -> bool:
    """Whether a process holds a gradient for every parameter at the end of its backward pass.

    Stage 1 reduces each gradient as soon as it is there if communication overlaps, and keeps only its own
    (`process_gradients`, `copy_grads_in_partition`); else, and while gradients add up, it keeps all.
    """
    stage = work.technique.stage
    return stage == 0 or (stage == 1 and (work.passes > 1 or not work.zero.overlap))


def _kept_whole(work: Workload) -> int:
    """Elements that stage 3 gathers after each step and keeps, beside each rank's share of them."""
    is_shared = work.technique.stage == 3 and work.ranks > 1
    return sum(size for size, _ in work.shape.weights if is_shared and size <= work.zero.persistent_elements)


# Memory of a GPU beside the states: buckets of communication, gathered parameters, temporaries of the step.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`setup_buckets`, `average_tensor`, `step`), stage3.py (`ipg_buckets`,
# `_prepare_fp32_grad_for_sub_group`), partitioned_param_coordinator.py; PyTorch's DistributedDataParallel with
# `gradient_as_bucket_view=False`, its default.


def _buffers(work: Workload) -> list[Term]:
    """What is there during the backward pass."""
    size, shape, zero, technique = work.element_bytes, work.shape, work.zero, work.technique
    stage, most, largest = technique.stage, zero.reduce_elements, shape.largest_tensor
    if technique.is_alone:
        return []
    if stage == 0:
        return [Term.of("DistributedDataParallel's buckets: all gradients once more", size, shape.parameters)]
    if stage != 3 and not (zero.contiguous or technique.offloads):
        # `buffered_reduce_fallback`
        return [Term.of("reduce bucket, copied together", size, min(shape.parameters, max(most, largest)))]
    bucket = Term.of("reduce bucket", size, most)
    if zero.overlap if stage != 3 else work.ranks > 1:
        bucket = Term("reduce buckets", 2 * bucket.bytes, f"2 x {bucket.formula}")
    terms = [bucket]
    if largest > most:
        terms.append(Term.of("gradient that is larger than a bucket", size, largest))
    if stage != 3 and technique.offloads:
        terms.append(Term.of("copy of one gradient on its way to the host", size, largest))
    # One process alone has stage 3's parameters whole, unless they lie on the host.
    if stage == 3 and (work.ranks > 1 or technique.offloads):
        others = shape.parameters - _kept_whole(work)
        live = min(others, max(zero.live_elements, largest))
        ahead = min(zero.prefetch_elements, others - live)
        terms.append(Term.of("parameters gathered for use", size, live))
        terms.append(Term.of("parameters fetched ahead", size, ahead))
    return terms


# Memory of the host: what is offloaded, how pinning rounds it up, and the model while it is loaded.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`param_buffer_of_bit16_for_cpu_offload_groups`,
# `temp_grad_buffer_for_cpu_offload`); PyTorch's CachingHostAllocator, which rounds pinned memory up to a power of two.


def _host_terms(work: Workload, states: list[Term]) -> tuple[Term, ...]:
    """All of the host's memory, the states that lie there included."""
    shape, size, lasting = work.shape, work.element_bytes, [*states]
    if work.technique.offloads and work.technique.stage != 3:
        lasting.append(Term.of("weights on their way to the GPU", size, shape.parameters, work.ranks))
        lasting.append(Term.of("gradient on its way", size, shape.largest_tensor))
    # Adam's moments are not pinned: PyTorch makes them like its parameters, but not where these lie.
    pinned = [term for term in lasting if work.zero.pins and term.part != "optimizer"]
    rounded = sum((1 << max(0, term.bytes - 1).bit_length()) - term.bytes for term in pinned)
    if rounded:
        names = f"{len(pinned)} pinned buffers, each rounded up to a power of two"
        lasting.append(Term("rounding of pinned memory", rounded, names))
    loaded = Term.of(LOADING, MASTER, shape.parameters, part="parameters")
    if (missing := loaded.bytes - total(lasting)) > 0:
        lasting.append(replace(loaded, bytes=missing, formula=f"{loaded.formula}, less what comes after it"))
    return (*lasting, Term("interpreter and libraries", PROCESS_BYTES, "2 GiB, an allowance", "context"))


@cache
def touched(shape: Shape, own_rates: bool, ranks: int) -> int:
    """Elements of all tensors that a rank's share touches in ZeRO's stages 1 and 2, where they are most.

    Source: DeepSpeed 0.19.8, stage_1_and_2.py: `get_partition_info` says which tensors a rank's share touches, in each
    parameter group of the optimizer; `copy_grads_in_partition` makes a buffer of the sum of their sizes.
    """
    changes, groups = Counter[int](), dict[str | bool, list[int]]()
    for weight in shape.weights:
        # `train.trainer` has embedding, matrices, position biases and norms apart; Trainer what decays, and the rest.
        groups.setdefault(weight.kind if own_rates else weight.is_matrix, []).append(weight.size)
    for sizes in groups.values():
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


def short(number: float) -> str:
    """A count as people read it: `737.7 M`."""
    size, prefix = next(((size, f" {prefix}") for size, prefix in PREFIXES if number >= size), (1, ""))
    return f"{number / size:.4g}{prefix}"


# What a forward pass keeps for its backward pass, counted tensor by tensor, as transformers 5.23 runs it on a GPU.


@dataclass(frozen=True)
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
        self.head = ELEMENT_BYTES["fp32"] * work.rows * work.labels * shape.vocabulary
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
            layers, parameters = shape.layers[side], shape.layer_parameters[side]
            self.stacks.append(Stack(prefix, tokens, layers, parameters, kept, gradients + again))

    def in_loss(self) -> int:
        """Bytes when the loss is computed, its own gradients included; there is no gradient of a parameter yet."""
        return sum(stack.layers * stack.kept for stack in self.stacks) + self.ends + self.copies + 3 * self.head

    def in_layers(self) -> int:
        """Bytes of all that is neither the loss nor an embedding's: what layers keep, and the one at work."""
        return self.in_loss() - 3 * self.head + max(stack.working for stack in self.stacks)

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

    def terms(self) -> list[Term]:
        """The most that there is at one time: everything saved, and the head's transient or that of one layer."""
        work, terms = self.work, list[Term]()

        def add(name: str, size: int, formula: str) -> None:
            terms.append(Term(name, size, formula, "activations"))

        for stack in self.stacks:
            name = f"inputs of {stack.prefix}layers" if work.checkpointing else f"{stack.prefix}layers"
            each = stack.kept / (work.rows * stack.tokens) / 1e3
            by = "" if work.checkpointing else f", {work.kernel} attention"
            formula = f"{stack.layers} layers x {work.rows} rows x {stack.tokens} tokens x {each:.4g} kB{by}"
            add(name, stack.layers * stack.kept, formula)
        beside = (self.ends, self.copies)
        add("ends, masks, weights in FP16", sum(beside), " + ".join(f"{short(each)}B" for each in beside if each))
        # What the loss takes, or, where that is more, one layer that is computed again, or its gradients.
        most, is_joint = max(stack.working for stack in self.stacks), len(self.stacks) == 1
        if work.checkpointing and 3 * self.head < most:
            by = f"{work.kernel} attention" if is_joint else "the larger of both kinds"
            add("one layer, computed again", most, f"{short(most)}B, {by}")
        elif not work.checkpointing and is_joint and 2 * self.head < most:
            formula = f"{short(self.head)}B + {short(most)}B"
            add("log-softmax, and gradients within a layer", self.head + most, formula)
        else:
            formula = f"3 x 4 B x {work.rows} rows x {work.labels} labels x {work.shape.vocabulary} words"
            add("log-softmax over the vocabulary, with its gradients", 3 * self.head, formula)
        beyond = self.tied_gradients - total(terms)
        if beyond > 0:
            name = "gradients of the embedding, as head and as table, where activations were"
            add(name, beyond, f"{short(self.tied_gradients)}B, less those")
        return terms
