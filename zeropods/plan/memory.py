"""Memory of one process, before it runs: every term with its formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate

from zeropods.plan.activations import Activations
from zeropods.plan.methods import FOREACH, NF4_BYTES, QLORA
from zeropods.plan.terms import PARTS, Term, total
from zeropods.plan.workload import MASTER, Shape, Workload, share
from zeropods.tables import GIB, MIB

CONTEXT_BYTES = 500_000_000
"""Bytes that CUDA, cuBLAS and NCCL take of a GPU before the first tensor: the rest of the published
figures of an A100 once all else is counted. Drivers and libraries differ by some 0.2 GB."""
MULTIPLYING_THREADS = 2
"""Threads of a process that multiply matrices on its GPU, each with a workspace of its own: the one
that runs the forward pass, and autograd's for the GPU, which runs the backward pass and what
checkpointing computes again."""
PROCESS_BYTES = 2 << 30
"""Bytes of Python, PyTorch, CUDA and its libraries: an allowance. A process without a GPU has 0.7
GB (measured)."""
LOADING = "the model while it is loaded, FP32"
"""Name of the term of host memory that is given back before the first step."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Memory that one process needs, and what it adds to the memory of its host."""

    terms: tuple[Term, ...]
    """Terms of the GPU's memory."""
    host_terms: tuple[Term, ...]
    nvme_terms: tuple[Term, ...] = ()
    """Terms of what lies on a disk of the host."""
    state_bytes: int
    """Bytes of parameters, gradients and optimizer states on any device, just before the
    optimizer's step: gradients that accumulated over several passes are reduced to a rank's share
    by then."""
    peak_allocated_bytes: int
    """Most bytes that tensors take at one time: `torch.cuda.max_memory_allocated`."""
    rank_0_reads: bool
    """Whether rank 0 alone reads the weights, so that only its pod holds the whole model while it
    is loaded."""

    @property
    def device_bytes(self) -> int:
        """Most bytes that the GPU shows as used, as if gradients and activations were both whole at
        one time.

        They are not, but the allocator keeps the blocks of freed tensors, and not every new tensor
        fits into one. So this is what must fit; `peak_allocated_bytes` is for tensors alone.
        """
        return total(self.terms)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of one process."""
        return total(self.host_terms)

    def host_bytes_of_pod(self, slots: int) -> int:
        """Bytes of host memory of the fullest pod, which runs this many processes."""
        if not self.rank_0_reads:
            return slots * self.host_bytes
        after_loading = [term for term in self.host_terms if term.name != LOADING]
        # While rank 0 holds the whole model, the others have nothing of it in host memory.
        while_loading = self.host_bytes + (slots - 1) * total(after_loading, "context")
        return max(while_loading, slots * total(after_loading))

    def parts(self) -> dict[str, int]:
        """Bytes of the GPU's memory by part, and `total`, their sum."""
        by_part = {part: total(self.terms, part) for part in PARTS}
        return {**by_part, "total": self.device_bytes}


@lru_cache(maxsize=1024)
def plan_memory(
    work: Workload, context_bytes: int = CONTEXT_BYTES, workspace_bytes: int = 0
) -> PlannedMemory:
    """The memory that one process needs on its GPU, on its host and on its host's disk.

    Args:
        context_bytes: bytes of the GPU that CUDA and its libraries take; 0 without a GPU.
        workspace_bytes: bytes of cuBLAS's workspace for one thread (`gpus.workspace_bytes`); 0
            without a GPU.
    """
    activations = Activations(work)
    activation_terms = activations.terms()
    states = _states(work)
    buffers = _buffers(work)
    step = _step_term(work)

    terms = [*states.on_gpu, *buffers]
    # Temporaries of the optimizer's step take the place of activations and buckets, which were
    # freed before it.
    freed = total(activation_terms) + total(_freed_before_the_step(work, buffers))
    if step.bytes > freed:
        formula = f"{step.formula}, less freed activations and buckets"
        terms.append(replace(step, bytes=step.bytes - freed, formula=formula))
    terms += activation_terms
    workspaces = MULTIPLYING_THREADS * workspace_bytes
    if workspaces:
        formula = f"{MULTIPLYING_THREADS} threads x {workspace_bytes / MIB:.3g} MiB"
        terms.append(Term("cuBLAS's workspaces", workspaces, formula))
    if context_bytes:
        formula = f"{context_bytes / GIB:.2g} GiB, a constant"
        terms.append(Term("CUDA and its libraries", context_bytes, formula, "context"))

    gradient_bytes = total(states.on_gpu, "gradients")
    # Gradients are left out here and count with what is transient: they come and go in each step.
    lasting_bytes = total(states.on_gpu) - gradient_bytes
    transient_bytes = _most_transient_bytes(work, activations, buffers, gradient_bytes, step.bytes)
    # Just before the optimizer's step, gradients that accumulated are reduced to a rank's share, as
    # after a single pass.
    states_before_the_step = _states(replace(work, gradient_accumulation=1))
    return PlannedMemory(
        terms=tuple(terms),
        host_terms=_host_terms(work, states.on_host),
        nvme_terms=tuple(states.on_nvme),
        state_bytes=sum(map(total, states_before_the_step.wherever_they_lie)),
        # PyTorch's allocator gives cuBLAS its workspaces; CUDA's context is outside of it.
        peak_allocated_bytes=lasting_bytes + transient_bytes + workspaces,
        rank_0_reads=work.technique.divides_parameters,
    )


def _most_transient_bytes(
    work: Workload,
    activations: Activations,
    buffers: list[Term],
    gradient_bytes: int,
    step_bytes: int,
) -> int:
    """Most bytes that the GPU holds at one time beside parameters and optimizer states: gradients,
    activations, buffers and temporaries, while the loss is computed, in the backward pass or in the
    optimizer's step.

    Args:
        buffers: the terms of `_buffers`.
        gradient_bytes: bytes of gradients that the GPU holds at the end of the backward pass.
        step_bytes: bytes of the temporaries of the optimizer's step.
    """
    technique = work.technique
    # Buckets of stages 1 and 2 are made when the first gradient exists, and freed before the step.
    makes_buckets_late = technique.divides_optimizer and not technique.divides_parameters
    lasting_buffer_bytes = 0 if makes_buckets_late else total(buffers)

    in_loss = lasting_buffer_bytes + activations.in_loss()
    # ZeRO-3 of DeepSpeed never frees a rank's share of the gradients.
    keeps_gradients = technique.uses_deepspeed and technique.divides_parameters
    if work.gradient_accumulation > 1 or keeps_gradients:
        in_loss += gradient_bytes

    in_step = gradient_bytes + step_bytes
    # What FSDP gathers is freed before the step.
    if not work.is_fsdp:
        in_step += lasting_buffer_bytes
    candidates = [in_loss, in_step]

    # Whole gradients are made as the backward pass reaches them; a partition exists from the first
    # gradient on.
    gradients_grow = _gradients_are_whole(work) and work.gradient_accumulation == 1
    for moment in activations.backward():
        gradients = gradient_bytes
        if gradients_grow:
            gradients = moment.gradients_made
        elif work.is_fsdp and work.gradient_accumulation == 1:
            # Shards of what the backward pass has come through.
            elements_made = moment.gradients_made // work.element_bytes
            gradients = work.trained_bytes * share(elements_made, work.ranks)
        candidates.append(total(buffers) + moment.saved_and_working + gradients)
    return max(candidates)


# Parameters, gradients and optimizer states, between a backward pass and the optimizer's step.
#
# Without DeepSpeed: PyTorch's AdamW over FP32 weights, or this project's over FP32 masters of BF16
# weights (`train.master_adamw`). With DeepSpeed 0.19.8: every stage keeps an FP32 master partition
# beside the weights, even where these are FP32 themselves (stage_1_and_2.py,
# `single_partition_of_fp32_groups`; stage3.py, `_create_fp32_partitions`, whose test for "the same
# device" compares a device with a string and so never holds).


@dataclass(frozen=True)
class _States:
    """Terms of parameters, gradients and optimizer states."""

    on_gpu: list[Term]
    on_host: list[Term]
    on_nvme: list[Term] = field(default_factory=list)

    @property
    def wherever_they_lie(self) -> tuple[list[Term], ...]:
        """The terms of every place."""
        return self.on_gpu, self.on_host, self.on_nvme


def _states(work: Workload) -> _States:
    """Parameters, gradients and optimizer states of one process, by where they lie between its
    backward pass and the optimizer's step."""
    technique = work.technique
    shape = work.shape

    ranks_of_weights = work.ranks if technique.divides_parameters else 1
    if work.method.adapter is not None:
        # With adapters nothing is offloaded.
        return _States(on_gpu=_states_of_adapters(work, ranks_of_weights), on_host=[])
    # FSDP's shards are FP32, whatever it gathers them in.
    size_of_weight = work.trained_bytes if work.is_fsdp else work.element_bytes
    weights = Term.of("weights", size_of_weight, shape.parameters, ranks_of_weights, "parameters")
    # It stays empty where parameters are not divided.
    kept_whole = []
    kept_elements = _elements_kept_whole(work)
    if kept_elements:
        name = "small weights, kept whole"
        kept_whole.append(Term.of(name, size_of_weight, kept_elements, part="parameters"))
    gradients = _gradients_term(work)
    optimizer = _optimizer_term(work)
    if not technique.offloads:
        return _States(on_gpu=[weights, *kept_whole, gradients, optimizer], on_host=[])

    name = "gradients of the master, FP32"
    if work.master_bytes < MASTER:
        name = "gradients of the master, BF16"
    # The master itself is in the optimizer's term.
    master_gradients = Term.of(name, work.master_bytes, shape.parameters, work.ranks, "gradients")
    if work.zero.on_nvme:
        on_nvme = [master_gradients, optimizer]
        return _States(on_gpu=kept_whole, on_host=[weights, gradients], on_nvme=on_nvme)
    if technique.divides_parameters:
        on_host = [weights, gradients, master_gradients, optimizer]
        return _States(on_gpu=kept_whole, on_host=on_host)
    on_host = [master_gradients, optimizer]
    if _gradients_are_whole(work):
        return _States(on_gpu=[weights, gradients], on_host=on_host)
    # Each gradient is added to the master's share on the host as soon as it exists.
    return _States(on_gpu=[weights], on_host=on_host)


def _states_of_adapters(work: Workload, ranks_of_weights: int) -> list[Term]:
    """Frozen weights, and the adapters with their gradients and optimizer states.

    Args:
        ranks_of_weights: number of ranks among which weights are divided; 1 where each has them
            all.
    """
    frozen_share = share(work.frozen_bytes, ranks_of_weights)
    divisor = f" / {ranks_of_weights} ranks" if ranks_of_weights > 1 else ""
    formula = f"{work.element_bytes} B x {work.shape.parameters / 1e6:.4g} M{divisor}"
    if work.method.adapter == QLORA:
        quantised = f"{NF4_BYTES:.4g} B x {work.shape.matrices / 1e6:.4g} M matrices"
        formula = f"{formula}, but {quantised}"
    weights = Term("frozen weights", frozen_share, formula, "parameters")
    adapters = Term.of("adapters", work.trained_bytes, work.trained, ranks_of_weights, "parameters")
    return [weights, adapters, _gradients_term(work), _optimizer_term(work)]


def _gradients_term(work: Workload) -> Term:
    """The gradients that a process holds at the end of its backward pass: all of them, its share,
    or in ZeRO's stages 1 and 2 whole tensors, all that its share touches."""
    size_of_gradient = work.trained_bytes
    if _gradients_are_whole(work):
        return Term.of("gradients", size_of_gradient, work.trained, part="gradients")
    # Each tensor of an adapter is small beside a share, and taken as divided in every stage.
    if work.technique.divides_parameters or work.method.adapter is not None:
        return Term.of("gradients", size_of_gradient, work.trained, work.ranks, "gradients")
    elements = touched(work.shape, work.rates_by_kind, work.ranks)
    term = Term.of("gradients", size_of_gradient, elements, part="gradients")
    tensors = f"tensors that a share of 1 / {work.ranks} touches, whole"
    return replace(term, formula=f"{term.formula}: {tensors}")


def _optimizer_term(work: Workload) -> Term:
    """Adam's moments, and the master of the weights where there is one."""
    # By the bytes of both moments of an element.
    types: dict[float, str] = {8: "FP32", 4: "BF16"}
    type_of_moments = types.get(work.moment_bytes, "8 bits")
    if not work.master_bytes:
        name = f"Adam's moments, {type_of_moments}"
    elif type_of_moments == "8 bits":
        name = "master, FP32, and Adam's moments, 8 bits"
    else:
        name = f"master and Adam's moments, {type_of_moments}"
    ranks = work.ranks if work.technique.divides_optimizer else 1
    bytes_of_an_element = work.master_bytes + work.moment_bytes
    # With scales of 8-bit moments it is no whole number.
    if bytes_of_an_element == int(bytes_of_an_element):
        return Term.of(name, int(bytes_of_an_element), work.trained, ranks, "optimizer")
    return Term.about(name, bytes_of_an_element, work.trained, ranks, "optimizer")


def _gradients_are_whole(work: Workload) -> bool:
    """Whether a process holds a gradient for every parameter at the end of its backward pass.

    Without DeepSpeed it does, but for FSDP; from stage 2 on it does not. Stage 1 reduces each
    gradient as soon as it exists if communication overlaps, and keeps only its own share
    (DeepSpeed's `process_gradients`, `copy_grads_in_partition`); otherwise, and while gradients
    accumulate, it keeps all.
    """
    if not work.technique.uses_deepspeed:
        return not work.is_fsdp
    if work.technique.divides_gradients:
        return False
    return work.gradient_accumulation > 1 or not work.zero.overlap


def _elements_kept_whole(work: Workload) -> int:
    """Number of elements of the small tensors that stage 3 gathers after each step and keeps,
    beside each rank's share of them; 0 for one rank, whose share is all of them, and for FSDP,
    which keeps none."""
    if not work.technique.divides_parameters or work.ranks == 1 or work.is_fsdp:
        return 0
    limit = work.zero.persistent_elements
    return sum(weight.size for weight in work.shape.weights if weight.size <= limit)


# Memory of a GPU beside the states: communication buckets, gathered parameters, temporaries of the
# step.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`setup_buckets`, `average_tensor`, `step`), stage3.py
# (`ipg_buckets`, `_create_fp16_sub_groups`, `_prepare_fp32_grad_for_sub_group`, `step`: one
# sub-group after the other), partitioned_param_coordinator.py; PyTorch's
# DistributedDataParallel with `gradient_as_bucket_view=False`, its default.


def _buffers(work: Workload) -> list[Term]:
    """Terms of the buffers that exist during the backward pass: none for one process without an
    engine or of FSDP, unless it has a QLoRA."""
    technique = work.technique
    terms = []
    if work.method.adapter == QLORA:
        name = "one matrix, dequantised for use"
        terms.append(Term.of(name, work.element_bytes, work.shape.largest_matrix))
    if technique.is_alone:
        return terms
    if work.is_fsdp:
        return [*terms, *_buffers_of_fsdp(work)]
    if not technique.uses_deepspeed:
        name = "DistributedDataParallel's buckets: a second copy of all gradients"
        return [*terms, Term.of(name, work.trained_bytes, work.trained)]
    if technique.divides_parameters:
        return [*terms, *_buffers_of_stage_3(work)]
    return [*terms, *_buffers_of_stages_1_and_2(work)]


def _buffers_of_fsdp(work: Workload) -> list[Term]:
    """What FSDP2 gathers: layers in their turn, and all that lies outside of them, which it keeps
    until the backward pass has ended (torch 2.13, `_fully_shard`: `reshard_after_forward` of the
    root is off).

    A layer's gradients are whole until they are reduced, beside the tensor that they are reduced
    from (`_fsdp_collectives.py`, `foreach_reduce`).
    """
    if work.ranks == 1:
        return []
    size_of_weight = work.element_bytes
    shape = work.shape
    stacks = zip(shape.layer_parameters, shape.layers, strict=True)
    largest_layer = max(parameters // layers for parameters, layers in stacks)
    outside_layers = shape.parameters - sum(shape.layer_parameters)
    # The layer that runs, and the next one, which is fetched meanwhile.
    two_layers = Term.of("two layers gathered", size_of_weight, 2 * largest_layer)
    if work.method.adapter == QLORA:
        two_layers = Term.about("two layers gathered", NF4_BYTES, 2 * largest_layer)
    terms = [Term.of("embedding and head gathered", size_of_weight, outside_layers), two_layers]
    # Gradients of adapters are next to nothing.
    if work.method.adapter is None:
        name = "a layer's gradients, and what they are reduced from"
        terms.append(Term.of(name, size_of_weight, 2 * largest_layer))
    return terms


def _buffers_of_stages_1_and_2(work: Workload) -> list[Term]:
    """The buckets by which gradients are reduced, and the copy of a gradient that is offloaded."""
    size_of_gradient = work.element_bytes
    largest_gradient = _largest_gradient(work)
    if not (work.zero.contiguous or work.technique.offloads):
        # No bucket is made beforehand; what there is to reduce is copied together, and a tensor
        # that is larger than a bucket by itself (`buffered_reduce_fallback`).
        elements = min(work.trained, max(work.zero.reduce_elements, largest_gradient))
        return [Term.of("reduce bucket, copied together", size_of_gradient, elements)]
    terms = _reduce_buckets(work, two=work.zero.overlap)
    if work.technique.offloads:
        name = "copy of one gradient on its way to the host"
        terms.append(Term.of(name, size_of_gradient, largest_gradient))
    return terms


def _buffers_of_stage_3(work: Workload) -> list[Term]:
    """The buckets by which gradients are reduced, and the parameters that are gathered."""
    size = work.element_bytes
    zero = work.zero
    # Several ranks copy a bucket, into the order of their shares, before they reduce it
    # (coalesced_collectives.py, `reduce_scatter_coalesced`).
    terms = _reduce_buckets(work, two=work.ranks > 1)
    # A single process has stage 3's parameters whole, unless they lie on the host.
    if work.ranks > 1 or work.technique.offloads:
        others = work.shape.parameters - _elements_kept_whole(work)
        live = min(others, max(zero.live_elements, work.shape.largest_tensor))
        ahead = min(zero.prefetch_elements, others - live)
        terms.append(Term.of("parameters gathered for use", size, live))
        terms.append(Term.of("parameters fetched ahead", size, ahead))
    if zero.secondary_ranks > 1:
        # partition_parameters.py, `_partition_param_sec`: made in the forward pass, given up after
        # the step (stage3.py, `_post_step`).
        name = "second partition of the parameters, within a pod"
        terms.append(Term.of(name, size, work.shape.parameters, zero.secondary_ranks))
    return terms


def _reduce_buckets(work: Workload, *, two: bool) -> list[Term]:
    """A reduce bucket, or two, and the largest gradient where it does not fit into one."""
    size_of_gradient = work.element_bytes
    largest_gradient = _largest_gradient(work)
    buckets = Term.of("reduce bucket", size_of_gradient, work.zero.reduce_elements)
    if two:
        buckets = Term("reduce buckets", 2 * buckets.bytes, f"2 x {buckets.formula}")
    if largest_gradient <= work.zero.reduce_elements:
        return [buckets]
    name = "gradient that is larger than a bucket"
    return [buckets, Term.of(name, size_of_gradient, largest_gradient)]


def _largest_gradient(work: Workload) -> int:
    """Number of elements of the largest tensor with a gradient; 0 with adapters, whose tensors are
    smaller than any bucket."""
    return work.shape.largest_tensor if work.method.adapter is None else 0


def _step_term(work: Workload) -> Term:
    """Temporaries of the optimizer's step on the GPU; a term of 0 bytes where there are none."""
    technique = work.technique
    parameters = work.trained
    if technique.offloads:
        return Term("temporaries of the step", 0, "0 B: a fused AdamW works in place")
    if not technique.uses_deepspeed:
        if work.master_bytes:
            return Term.of("gradients of the masters, FP32", MASTER, parameters)
        if work.method.optimizer == FOREACH:
            ranks = work.ranks if work.is_fsdp else 1
            return Term.of("square roots of moments", work.trained_bytes, parameters, ranks)
        return Term("temporaries of the step", 0, "0 B: a fused AdamW works in place")
    # Gradients are put together, and then widened where the master is wider.
    bytes_of_an_element = work.master_bytes
    if work.element_bytes < work.master_bytes:
        bytes_of_an_element += work.element_bytes
    name = "gradients of the partition, flat"
    # Only stage 3 steps one sub-group after the other; adapters are smaller than one.
    if not technique.divides_parameters or work.method.adapter is not None:
        return Term.of(name, bytes_of_an_element, parameters, work.ranks)
    zero = work.zero
    elements = largest_sub_group(
        work.shape, work.rates_by_kind, work.ranks, zero.sub_group_elements
    )
    term = Term.of(name, bytes_of_an_element, elements)
    return replace(term, formula=f"{term.formula}: the largest sub-group of a rank's share")


def _freed_before_the_step(work: Workload, buffers: list[Term]) -> list[Term]:
    """The buffers that are freed before the optimizer's step: the buckets of stages 1 and 2, and
    what FSDP gathers."""
    if work.is_fsdp:
        return buffers
    if not work.technique.uses_deepspeed or work.technique.divides_parameters:
        return []
    # The others are copies: of a gradient on its way to the host, of a matrix of a QLoRA.
    return [term for term in buffers if "bucket" in term.name]


# Memory of the host: what is offloaded, how pinning rounds it up, and the model while it is being
# loaded.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`param_buffer_of_bit16_for_cpu_offload_groups`,
# `temp_grad_buffer_for_cpu_offload`, `accumulated_grads_in_cpu`); PyTorch's CachingHostAllocator,
# which rounds pinned memory up to a power of two; transformers 5.23 (modeling_utils.py,
# `_load_pretrained_model`), where ranks other than 0 read a model of ZeRO-3 onto the meta device.


def _host_terms(work: Workload, states: list[Term]) -> tuple[Term, ...]:
    """Terms of all the host memory of one process, the model while it is loaded included.

    Args:
        states: the states that lie in host memory.
    """
    shape = work.shape
    size = work.element_bytes
    lasting = list(states)
    if work.technique.offloads and not work.technique.divides_parameters:
        name = "weights on their way to the GPU"
        lasting.append(Term.of(name, size, shape.parameters, work.ranks))
        lasting.append(Term.of("gradient on its way", size, shape.largest_tensor))
    # Adam's moments are not pinned: PyTorch makes them in the parameters' shape, but not in their
    # pinned memory.
    pinned = [term for term in lasting if work.zero.pins and term.part != "optimizer"]
    rounding = sum(_next_power_of_two(term.bytes) - term.bytes for term in pinned)
    if rounding:
        formula = f"{len(pinned)} pinned buffers, each rounded up to a power of two"
        lasting.append(Term("rounding of pinned memory", rounding, formula))
    if work.zero.on_nvme:
        # Only now: they are not PyTorch's own pinned memory, and not rounded.
        lasting.append(_buffers_of_nvme(work))
    if _accumulates_on_host(work):
        # Each tensor has a pinned buffer of its own, whose rounding is not counted.
        elements = touched(shape, work.rates_by_kind, work.ranks)
        lasting.append(Term.of("gradients of earlier passes", size, elements))
    process = Term("interpreter and libraries", PROCESS_BYTES, "2 GiB, an allowance", "context")
    # The model as it is loaded makes room for the rest, and counts as far as it is more than that.
    loading = Term.of(LOADING, MASTER, shape.parameters, part="parameters")
    beyond_lasting = loading.bytes - total(lasting)
    if beyond_lasting <= 0:
        return (*lasting, process)
    formula = f"{loading.formula}, less what comes after it"
    return (*lasting, replace(loading, bytes=beyond_lasting, formula=formula), process)


def _buffers_of_nvme(work: Workload) -> Term:
    """Buffers in host memory through which what lies on a disk is read and written: each is as
    large as the masters of the largest sub-group.

    Source: DeepSpeed 0.19.8, swap_tensor/optimizer_utils.py, `OptimizerSwapper`, to which stage3.py
    gives the largest sub-group (`_configure_tensor_swapping`).
    """
    zero = work.zero
    elements = largest_sub_group(
        work.shape, work.rates_by_kind, work.ranks, zero.sub_group_elements
    )
    bytes_of_an_element = zero.nvme_buffers * work.master_bytes
    term = Term.of("buffers of what lies on NVMe", bytes_of_an_element, elements)
    formula = f"{zero.nvme_buffers} x {work.master_bytes} B x the largest sub-group"
    return replace(term, formula=formula)


def _accumulates_on_host(work: Workload) -> bool:
    """Whether stage 1 or 2 keeps gradients of earlier passes on the host, beside the master's."""
    is_stage_1_or_2 = work.technique.uses_deepspeed and not work.technique.divides_parameters
    return is_stage_1_or_2 and work.technique.offloads and work.gradient_accumulation > 1


def _next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


@cache
def touched(shape: Shape, rates_by_kind: bool, ranks: int) -> int:
    """Number of elements of all tensors, each counted whole, that a rank's share touches in ZeRO's
    stages 1 and 2, for the rank where they are most.

    Source: DeepSpeed 0.19.8, stage_1_and_2.py: `get_partition_info` says which tensors a rank's
    share touches, in each parameter group of the optimizer; `copy_grads_in_partition` makes a
    buffer of the sum of their sizes.
    """
    # By rank, how many more elements its share touches than that of the rank before it.
    increases = Counter[int]()
    for elements, first_rank, end_rank in _ranks_of_tensors(shape, rates_by_kind, ranks):
        increases[first_rank] += elements
        increases[end_rank] -= elements
    by_rank = [increases[rank] for rank in sorted(increases)]
    return max(accumulate(by_rank))


@cache
def touched_by_all(shape: Shape, rates_by_kind: bool, ranks: int) -> int:
    """The sum over all ranks of what `touched` counts for one: a tensor that lies in several shares
    counts once for each of them."""
    touched_elements = 0
    for elements, first_rank, end_rank in _ranks_of_tensors(shape, rates_by_kind, ranks):
        touched_elements += elements * (end_rank - first_rank)
    return touched_elements


def _ranks_of_tensors(
    shape: Shape, rates_by_kind: bool, ranks: int
) -> Iterator[tuple[int, int, int]]:
    """For each tensor its number of elements, the first rank whose share holds part of it, and the
    rank after the last such one.

    Args:
        rates_by_kind: as for `_parameter_groups`.
    """
    for sizes in _parameter_groups(shape, rates_by_kind):
        # A parameter group is cut into equal shares, wherever its tensors end.
        share_elements = share(sum(sizes), ranks)
        begin = 0
        for elements in sizes:
            end = begin + elements
            first_rank = begin // share_elements
            last_rank = (end - 1) // share_elements
            yield elements, first_rank, last_rank + 1
            begin = end


@cache
def largest_sub_group(
    shape: Shape, rates_by_kind: bool, ranks: int, sub_group_elements: int
) -> int:
    """Number of elements of a rank's largest sub-group in ZeRO's stage 3.

    Source: DeepSpeed 0.19.8, stage3.py, `_create_fp16_sub_groups`: the tensors of a parameter group
    of the optimizer are put together in their order, until a rank's shares of them are at least
    `sub_group_size` elements.
    """
    largest = 0
    for sizes in _parameter_groups(shape, rates_by_kind):
        elements = 0
        for size in sizes:
            elements += share(size, ranks)
            largest = max(largest, elements)
            if elements >= sub_group_elements:
                elements = 0
    return largest


def _parameter_groups(shape: Shape, rates_by_kind: bool) -> list[list[int]]:
    """Numbers of elements of the tensors in each parameter group of the optimizer.

    Args:
        rates_by_kind: whether the groups are those of `train.trainer`, which separates embedding,
            matrices, position biases and norms; Trainer separates what decays from the rest.
    """
    groups: dict[str | bool, list[int]] = {}
    for weight in shape.weights:
        group = weight.kind if rates_by_kind else weight.is_matrix
        groups.setdefault(group, []).append(weight.size)
    return list(groups.values())
