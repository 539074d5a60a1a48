"""Memory of one process, before it runs: every term with its formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate

from zeropods.plan.workload import EAGER, ELEMENT_BYTES, MASTER, MOMENTS, PLAIN, Shape, Workload, share, value
from zeropods.tables import GIB, MIB

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "context")
"""The parts that the memory of a GPU is divided into."""
GRADIENTS = {True: 3, False: 2}
"""Gradients of the feed-forward's width that a layer's backward pass holds at one time, by whether it is causal."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
CONTEXT_BYTES = 500_000_000
"""Bytes that CUDA, cuBLAS and NCCL take of a GPU before the first tensor: the rest of the published figures of an A100
once all else is counted. Drivers and libraries differ by some 0.2 GB."""
MULTIPLYING_THREADS = 2
"""Threads of a process that multiply matrices on its GPU, each with a workspace of its own: the one that runs the
forward pass, and autograd's for the GPU, which runs the backward pass and what checkpointing computes again."""
PROCESS_BYTES = 2 << 30
"""Bytes of Python, PyTorch, CUDA and its libraries: an allowance. A process without a GPU has 0.7 GB (measured)."""
LOADING = "the model while it is loaded, FP32"
"""Name of the term of host memory that is given back before the first step."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Memory that one process needs, and what it adds to the memory of its host."""

    terms: tuple[Term, ...]
    """Terms of the GPU's memory."""
    host_terms: tuple[Term, ...]
    state_bytes: int
    """Bytes of parameters, gradients and optimizer states on any device, just before the optimizer's step: gradients
    that accumulated over several passes are reduced to a rank's share by then."""
    peak_allocated_bytes: int
    """Most bytes that tensors take at one time: `torch.cuda.max_memory_allocated`."""

    @property
    def device_bytes(self) -> int:
        """Most bytes that the GPU shows as used, counting gradients and activations as if both were whole at one time.

        They are not, but the allocator keeps the blocks of freed tensors, and not every new tensor fits into one. So
        this is what must fit; `peak_allocated_bytes` is for tensors alone.
        """
        return total(self.terms)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of one process."""
        return total(self.host_terms)

    def parts(self) -> dict[str, int]:
        """Bytes of the GPU's memory by part, and `total`, their sum."""
        return {part: total(self.terms, part) for part in PARTS} | {"total": self.device_bytes}


@lru_cache(maxsize=1024)
def plan_memory(work: Workload, context_bytes: int = CONTEXT_BYTES, workspace_bytes: int = 0) -> PlannedMemory:
    """The memory of one process.

    Args:
        context_bytes: bytes of CUDA and its libraries; 0 without a GPU.
        workspace_bytes: bytes of cuBLAS's workspace for one thread (`gpus.workspace_bytes`); 0
            without a GPU.
    """
    stage, activations, buffers = work.technique.stage, Activations(work), _buffers(work)
    (held, lasting), saved = _states(work), activations.terms()
    terms = [*held, *buffers]
    # Temporaries of the optimizer's step, where they exceed the activations and buckets that were freed before it.
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
    workspaces = MULTIPLYING_THREADS * workspace_bytes
    if workspaces:
        formula = f"{MULTIPLYING_THREADS} threads x {workspace_bytes / MIB:.3g} MiB"
        terms.append(Term("cuBLAS's workspaces", workspaces, formula))
    if context_bytes:
        formula = f"{context_bytes / GIB:.2g} GiB, a constant"
        terms.append(Term("CUDA and its libraries", context_bytes, formula, "context"))
    # Tensors at the worst moment, on the worst-off rank: in the loss, the backward pass or the step.
    gradients = total(held, "gradients")
    # Buckets of stages 1 and 2 are made when the first gradient exists, and freed before the step.
    early = 0 if stage in (1, 2) else total(buffers)
    before = gradients if work.passes > 1 or stage == 3 else 0
    # Whole gradients are made as the backward pass reaches them; a partition exists from the first gradient on.
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
        peak_allocated_bytes=total(held) - gradients + max(moments) + workspaces,
    )


# Parameters, gradients and optimizer states, between a backward pass and the optimizer's step.
#
# Without DeepSpeed: PyTorch's AdamW over FP32 weights, or this project's over FP32 masters of BF16 weights
# (`train.trainer`). With DeepSpeed 0.19.8: every stage keeps an FP32 master partition beside the weights, even where
# these are FP32 themselves (stage_1_and_2.py, `single_partition_of_fp32_groups`; stage3.py, `_create_fp32_partitions`,
# whose test for "the same device" compares a device with a string and so never holds).


def _states(work: Workload) -> tuple[list[Term], list[Term]]:
    """Terms of the states in the memory of the GPU, and of those in that of the host."""
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

    Stage 1 reduces each gradient as soon as it exists if communication overlaps, and keeps only its own share
    (`process_gradients`, `copy_grads_in_partition`); otherwise, and while gradients accumulate, it keeps all.
    """
    stage = work.technique.stage
    return stage == 0 or (stage == 1 and (work.passes > 1 or not work.zero.overlap))


def _kept_whole(work: Workload) -> int:
    """Number of elements that stage 3 gathers after each step and keeps, beside each rank's share of them."""
    is_shared = work.technique.stage == 3 and work.ranks > 1
    return sum(size for size, _ in work.shape.weights if is_shared and size <= work.zero.persistent_elements)


# Memory of a GPU beside the states: communication buckets, gathered parameters, temporaries of the step.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`setup_buckets`, `average_tensor`, `step`), stage3.py (`ipg_buckets`,
# `_prepare_fp32_grad_for_sub_group`), partitioned_param_coordinator.py; PyTorch's DistributedDataParallel with
# `gradient_as_bucket_view=False`, its default.


def _buffers(work: Workload) -> list[Term]:
    """Terms of the buffers that exist during the backward pass."""
    size, shape, zero, technique = work.element_bytes, work.shape, work.zero, work.technique
    stage, most, largest = technique.stage, zero.reduce_elements, shape.largest_tensor
    if technique.is_alone:
        return []
    if stage == 0:
        return [Term.of("DistributedDataParallel's buckets: a second copy of all gradients", size, shape.parameters)]
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
    # A single process has stage 3's parameters whole, unless they lie on the host.
    if stage == 3 and (work.ranks > 1 or technique.offloads):
        others = shape.parameters - _kept_whole(work)
        live = min(others, max(zero.live_elements, largest))
        ahead = min(zero.prefetch_elements, others - live)
        terms.append(Term.of("parameters gathered for use", size, live))
        terms.append(Term.of("parameters fetched ahead", size, ahead))
    return terms


# Memory of the host: what is offloaded, how pinning rounds it up, and the model while it is being loaded.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`param_buffer_of_bit16_for_cpu_offload_groups`,
# `temp_grad_buffer_for_cpu_offload`); PyTorch's CachingHostAllocator, which rounds pinned memory up to a power of two.


def _host_terms(work: Workload, states: list[Term]) -> tuple[Term, ...]:
    """Terms of all the host memory of one process, including the states that lie there."""
    shape, size, lasting = work.shape, work.element_bytes, [*states]
    if work.technique.offloads and work.technique.stage != 3:
        lasting.append(Term.of("weights on their way to the GPU", size, shape.parameters, work.ranks))
        lasting.append(Term.of("gradient on its way", size, shape.largest_tensor))
    # Adam's moments are not pinned: PyTorch makes them in the parameters' shape, but not in their pinned memory.
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
    """Elements of all tensors that a rank's share touches in ZeRO's stages 1 and 2, for the rank where they are most.

    Source: DeepSpeed 0.19.8, stage_1_and_2.py: `get_partition_info` says which tensors a rank's share touches, in each
    parameter group of the optimizer; `copy_grads_in_partition` makes a buffer of the sum of their sizes.
    """
    changes, groups = Counter[int](), dict[str | bool, list[int]]()
    for weight in shape.weights:
        # `train.trainer` separates embedding, matrices, position biases and norms; Trainer what decays from the rest.
        groups.setdefault(weight.kind if own_rates else weight.is_matrix, []).append(weight.size)
    for sizes in groups.values():
        # A parameter group is cut into equal shares, wherever its tensors end.
        part, begin = share(sum(sizes), ranks), 0
        for size in sizes:
            changes[begin // part] += size
            begin += size
            changes[min(ranks, share(begin, part))] -= size
    return max(accumulate(change for _, change in sorted(changes.items())))


# One part of a plan's memory: how many bytes, and by which formula.


@dataclass(frozen=True)
class Term:
    """Bytes of one process, with their formula."""

    name: str
    bytes: int
    formula: str
    """The formula with its numbers filled in: `4 B x 737.7 M / 3 ranks`."""
    part: str = "buffers"
    """One of `PARTS`."""

    @classmethod
    def of(cls, name: str, size: int, number: int, ranks: int = 1, part: str = "buffers") -> Term:
        """The term of `number` elements of `size` bytes each, divided among `ranks` ranks."""
        shared = f" / {ranks} ranks" if ranks > 1 else ""
        return cls(name, size * share(number, ranks), f"{size} B x {short(number)}{shared}", part)


def total(terms: Iterable[Term], part: str | None = None) -> int:
    """Bytes of all terms, or of those of one part."""
    return sum(term.bytes for term in terms if part in (None, term.part))


def short(number: float) -> str:
    """A count in a short form: `737.7 M`."""
    size, prefix = next(((size, f" {prefix}") for size, prefix in PREFIXES if number >= size), (1, ""))
    return f"{number / size:.4g}{prefix}"


# What a forward pass keeps for its backward pass, counted tensor by tensor, as transformers 5.23 runs it on a GPU.


@dataclass(frozen=True)
class Stack:
    """Layers of one kind: the encoder's, the decoder's, or all of a causal model. Bytes are those of one pass."""

    prefix: str
    """`encoder `, `decoder `, or empty."""
    tokens: int
    """Tokens per row."""
    layers: int
    parameters: int
    """Number of parameters of all layers."""
    kept: int
    """Bytes that each layer keeps until its backward pass: with gradient checkpointing its input, else all it saves."""
    working: int
    """Bytes that the layer at work adds: gradients of its feed-forward part or scores, and what is computed again."""


class Activations:
    """Bytes saved by one forward pass with this project's loss, and the transient bytes of its backward pass.

    The loss computes logits over the label positions and their log-softmax in FP32. Rows are padded on the right; those
    of a causal model have no mask in training, since no position with a loss looks at the padding.
    """

    def __init__(self, work: Workload) -> None:
        self.work, shape, size = work, work.shape, ELEMENT_BYTES[work.precision]
        saved, sizes = work.saved(), (work.rows, work.tokens, work.labels)
        self.head = ELEMENT_BYTES["fp32"] * work.logit_rows * shape.vocabulary
        """Bytes of the labels' FP32 log-softmax over the words; its output's and input's gradients are twice that."""
        self.tied_gradients = 2 * work.element_bytes * shape.embedding if shape.tied else 0
        """Bytes of a tied embedding's gradients, as the head and as the table: both exist while they are added."""
        self.ends = round(value(saved.ends, *sizes) + (value(saved.held, *sizes) if work.checkpointing else 0))
        """Bytes saved beside the layers: they are kept until the backward pass has come through all of them."""
        self.copies = 0
        """Bytes of FP16 copies of weights, which autocast keeps until the loss is computed; layers that are not
        computed again keep them anyway."""
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
        """Bytes while the loss is computed, its own gradients included; no parameter has a gradient yet."""
        return sum(stack.layers * stack.kept for stack in self.stacks) + self.ends + self.copies + 3 * self.head

    def in_layers(self) -> int:
        """Bytes of all that belongs to neither the loss nor an embedding: what layers keep, and the layer at work."""
        return self.in_loss() - 3 * self.head + max(stack.working for stack in self.stacks)

    def backward(self) -> list[tuple[int, int]]:
        """Pairs of bytes saved and at work, and of parameter gradients made by then, where their sum can be largest.

        Gradients appear as activations are freed. Both change linearly over layers of one kind, so the maximum is at
        the last or the first layer of each side, or at the embedding. Where both sides share a tied embedding, its
        gradient as a table exists beside that of the head after each side.
        """
        size, has_sides = self.work.element_bytes, len(self.stacks) > 1
        matrix = max(weight.size for weight in self.work.shape.weights if weight.kind == "matrix")
        made, found = size * self.work.shape.embedding, list[tuple[int, int]]()
        below = sum(stack.layers * stack.kept for stack in self.stacks)
        for stack in reversed(self.stacks):
            found.append((self.ends + below + stack.working, made))
            below -= stack.layers * stack.kept
            # While the most is saved, the layer at work has a gradient only of its feed-forward part's last matrix.
            others = size * (stack.parameters * (stack.layers - 1) // stack.layers + matrix)
            table = self.tied_gradients // 2 if has_sides else 0
            found.append((below + stack.working + stack.kept + table, made + others))
            made += size * stack.parameters
        return [*found, (self.tied_gradients, made)]

    def terms(self) -> list[Term]:
        """Terms of the most that exists at one time: all that is saved, and the transient of the head or a layer."""
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
        # Add what the loss takes or, where that is more, one layer that is computed again, or its gradients.
        most, is_joint = max(stack.working for stack in self.stacks), len(self.stacks) == 1
        if work.checkpointing and 3 * self.head < most:
            by = f"{work.kernel} attention" if is_joint else "the larger of the two kinds"
            add("one layer, computed again", most, f"{short(most)}B, {by}")
        elif not work.checkpointing and is_joint and 2 * self.head < most:
            formula = f"{short(self.head)}B + {short(most)}B"
            add("log-softmax, and gradients within a layer", self.head + most, formula)
        else:
            counted = f"{work.rows} rows x {work.labels} labels"
            if work.label_tokens is not None:
                counted = f"{work.label_tokens} labels"
            formula = f"3 x 4 B x {counted} x {work.shape.vocabulary} words"
            add("log-softmax over the vocabulary, with its gradients", 3 * self.head, formula)
        beyond = self.tied_gradients - total(terms)
        if beyond > 0:
            name = "gradients of the embedding, as head and as table, where activations were"
            add(name, beyond, f"{short(self.tied_gradients)}B, less those")
        return terms
