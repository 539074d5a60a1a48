"""Memory of one process, before it runs: every term with its formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zeropods.plan.workload import PARTS, Term, Workload, elements, share, total
from zeropods.techniques import Technique, ZeroSettings

# Parameters, gradients and optimizer states of one process, between a backward pass and the optimizer's step.
#
# Without DeepSpeed: PyTorch's AdamW over FP32 weights, or this project's over FP32 masters of BF16 weights
# (`train.master`). With it, as DeepSpeed 0.19.8 does it: every stage keeps an FP32 master partition beside the
# weights,
# also where these are FP32 themselves (stage_1_and_2.py, `single_partition_of_fp32_groups`; stage3.py,
# `_create_fp32_partitions`, whose test for "the same device" compares a device with a string and so never holds).

MASTER, MOMENTS = 4, 8
"""Bytes a parameter of an FP32 master, and of Adam's two moments."""


@dataclass(frozen=True)
class States:
    """Terms in the memory of the GPU, and in that of the host."""

    device: tuple[Term, ...]
    host: tuple[Term, ...]


def states(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> States:
    """The terms of one of `ranks` processes."""
    weights, gradients = _weights(job, technique, ranks), _gradients(job, technique, ranks, zero)
    optimizer, small = _optimizer(job, technique, ranks), _small_weights(job, technique, ranks, zero)
    if not technique.offloads:
        return States((weights, *small, gradients, optimizer), ())
    on_host = (_master_gradients(job, ranks), optimizer)
    if technique.stage == 3:
        return States(small, (weights, gradients, *on_host))
    kept = (gradients,) if technique.stage == 1 and gradients_are_whole(job, technique, zero) else ()
    return States((weights, *kept), on_host)


def gradients_are_whole(job: Workload, technique: Technique, zero: ZeroSettings) -> bool:
    """Whether a process holds a gradient for every parameter at the end of its backward pass.

    Stage 1 reduces each gradient as soon as it is there if communication overlaps, and keeps only its own
    (`process_gradients`, `copy_grads_in_partition`); else, and while gradients add up, it keeps all.
    """
    return technique.stage == 0 or (technique.stage == 1 and (job.accumulates or not zero.overlap))


def _weights(job: Workload, technique: Technique, ranks: int) -> Term:
    return _term("parameters", "weights", job.element_bytes, job, ranks if technique.stage == 3 else 1)


def kept_whole(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> int:
    """Elements that stage 3 gathers after each step and keeps, beside each rank's share of them."""
    is_shared = technique.stage == 3 and ranks > 1
    return job.in_small_tensors(zero.persistent_elements) if is_shared else 0


def _small_weights(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> tuple[Term, ...]:
    count, size = kept_whole(job, technique, ranks, zero), job.element_bytes
    if not count:
        return ()
    return (Term("small weights, kept whole", size * count, elements(size, count), "parameters"),)


def _gradients(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> Term:
    whole, size = gradients_are_whole(job, technique, zero), job.element_bytes
    if whole or technique.stage == 3:
        return _term("gradients", "gradients", size, job, 1 if whole else ranks)
    count = job.touched(ranks)
    formula = f"{elements(size, count)}: tensors that a share of 1 / {ranks} touches, whole"
    return Term("gradients", size * count, formula, "gradients")


def _master_gradients(job: Workload, ranks: int) -> Term:
    return _term("gradients", "gradients of the master, FP32", MASTER, job, ranks)


def _optimizer(job: Workload, technique: Technique, ranks: int) -> Term:
    if technique.stage:
        return _term("optimizer", "master and Adam's moments, FP32", MASTER + MOMENTS, job, ranks)
    if job.is_half:
        return _term("optimizer", "master and Adam's moments, FP32", MASTER + MOMENTS, job, 1)
    return _term("optimizer", "Adam's moments, FP32", MOMENTS, job, 1)


def _term(part: str, name: str, size: int, job: Workload, ranks: int) -> Term:
    return Term(name, size * share(job.parameters, ranks), elements(size, job.parameters, ranks), part)


# Memory of a GPU beside the states: buckets of communication, gathered parameters, temporaries of the step.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`setup_buckets`, `average_tensor`, `step`), stage3.py (`ipg_buckets`,
# `_prepare_fp32_grad_for_sub_group`), partitioned_param_coordinator.py; PyTorch's DistributedDataParallel with
# `gradient_as_bucket_view=False`, its default.


def backward_buffers(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> tuple[Term, ...]:
    """What is there during the backward pass."""
    if technique.stage == 3:
        return (*_buckets(job, zero, copies=2 if ranks > 1 else 1), *_gathered(job, technique, ranks, zero))
    if technique.stage:
        if not (zero.contiguous or technique.offloads):
            return (_copied_together(job, zero),)
        return (*_buckets(job, zero, copies=2 if zero.overlap else 1), *_offload_copy(job, technique))
    if technique.is_alone:
        return ()
    name = "DistributedDataParallel's buckets: all gradients once more"
    return (Term(name, job.element_bytes * job.parameters, elements(job.element_bytes, job.parameters)),)


def released_before_step(terms: tuple[Term, ...], technique: Technique) -> int:
    """Bytes of those that DeepSpeed has given back when the optimizer steps."""
    return sum(term.bytes for term in terms if technique.stage in (1, 2) and "bucket" in term.name)


def step_temporaries(job: Workload, technique: Technique, ranks: int) -> Term:
    """What the optimizer's step needs for a moment, when activations are gone."""
    if technique.offloads or (technique.stage == 0 and not job.is_half):
        return Term("temporaries of the step", 0, "0 B: a fused AdamW works in place")
    if technique.stage == 0:
        size, name = MASTER, "gradients of the masters, FP32"
    else:
        size, name = MASTER + (job.element_bytes if job.is_half else 0), "gradients of the partition, flat"
    shared = ranks if technique.stage else 1
    return Term(name, size * share(job.parameters, shared), elements(size, job.parameters, shared))


def _buckets(job: Workload, zero: ZeroSettings, copies: int) -> tuple[Term, ...]:
    size = job.element_bytes
    many = f"{copies} x " if copies > 1 else ""
    name = "reduce bucket" if copies == 1 else "reduce buckets"
    buckets = Term(name, copies * size * zero.reduce_elements, many + elements(size, zero.reduce_elements))
    if job.largest_tensor <= zero.reduce_elements:
        return (buckets,)
    alone = "gradient that is larger than a bucket"
    return buckets, Term(alone, size * job.largest_tensor, elements(size, job.largest_tensor))


def _copied_together(job: Workload, zero: ZeroSettings) -> Term:
    """Stages 1 and 2 without contiguous gradients (`buffered_reduce_fallback`)."""
    size, number = job.element_bytes, min(job.parameters, max(zero.reduce_elements, job.largest_tensor))
    return Term("reduce bucket, copied together", size * number, elements(size, number))


def _offload_copy(job: Workload, technique: Technique) -> tuple[Term, ...]:
    if not technique.offloads:
        return ()
    size = job.element_bytes
    name = "copy of one gradient on its way to the host"
    return (Term(name, size * job.largest_tensor, elements(size, job.largest_tensor)),)


def _gathered(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> tuple[Term, ...]:
    """Whole parameters that stage 3 holds; one process alone has them whole, unless they lie on the host."""
    if ranks == 1 and not technique.offloads:
        return ()
    size, others = job.element_bytes, job.parameters - kept_whole(job, technique, ranks, zero)
    live = min(others, max(zero.live_elements, job.largest_tensor))
    next_ones = min(zero.prefetch_elements, others - live)
    return (
        Term("parameters gathered for use", size * live, elements(size, live)),
        Term("parameters fetched ahead", size * next_ones, elements(size, next_ones)),
    )


# Host memory of one process: what is offloaded, how pinning rounds it up, and the model while it is loaded.
#
# Source: DeepSpeed 0.19.8, stage_1_and_2.py (`param_buffer_of_bit16_for_cpu_offload_groups`,
# `temp_grad_buffer_for_cpu_offload`); PyTorch's CachingHostAllocator, which rounds pinned memory up to a power of
# two.

PROCESS_BYTES = 2 << 30
"""Interpreter, PyTorch, CUDA and its libraries: an allowance. A process without a GPU has 0.7 GB (measured)."""


def host_terms(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings, held: States) -> tuple[Term, ...]:
    """Of one process, the states that lie on the host included."""
    process = Term("interpreter and libraries", PROCESS_BYTES, "2 GiB, an allowance", "context")
    lasting = (*held.host, *_buffers(job, technique, ranks))
    pinned = tuple(term for term in lasting if technique.offloads and zero.pins and _is_pinned(term))
    rounded = sum(_power_of_two(term.bytes) - term.bytes for term in pinned)
    if rounded:
        names = f"{len(pinned)} pinned buffers, each rounded up to a power of two"
        lasting = (*lasting, Term("rounding of pinned memory", rounded, names))
    loaded = max(0, MASTER * job.parameters - total(lasting))
    formula = f"{elements(MASTER, job.parameters)}, less what comes after it"
    loading = Term("the model while it is loaded, FP32", loaded, formula, "parameters")
    return (*lasting, loading, process) if loaded else (*lasting, process)


def _buffers(job: Workload, technique: Technique, ranks: int) -> tuple[Term, ...]:
    if not technique.offloads or technique.stage == 3:
        return ()
    size = job.element_bytes
    copies = size * share(job.parameters, ranks)
    return (
        Term("weights on their way to the GPU", copies, elements(size, job.parameters, ranks)),
        Term("gradient on its way", size * job.largest_tensor, elements(size, job.largest_tensor)),
    )


def _is_pinned(term: Term) -> bool:
    """Adam's moments are not: PyTorch makes them like its parameters, but not where these lie."""
    return term.part != "optimizer"


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


# The most that a GPU's tensors take at one time, over the moments of a step.
#
# Gradients appear as activations go: while the loss is computed there are none, at the end of the backward pass all.
# Both change in a straight line over like layers, so the most is at an end of them, in the loss, or in the
# optimizer's
# step.


def peak_allocated(job: Workload, technique: Technique, ranks: int, zero: ZeroSettings) -> int:
    """Bytes of tensors at the worst moment, on the worst-off rank."""
    held = states(job, technique, ranks, zero).device
    lasting = total(held) - total(held, "gradients")
    gradients = total(held, "gradients")
    buffers = total(backward_buffers(job, technique, ranks, zero))
    # Buckets of stages 1 and 2 are made when the first gradient is there, and given back before the step.
    early = 0 if technique.stage in (1, 2) else buffers
    before = gradients if job.accumulates or technique.stage == 3 else 0
    step = early + gradients + step_temporaries(job, technique, ranks).bytes
    moments, grows = job.moments(), _grows(job, technique, zero)
    backward = [buffers + saved + (made if grows else gradients) for saved, made in moments.backward]
    return lasting + max(early + before + moments.loss, step, *backward)


def _grows(job: Workload, technique: Technique, zero: ZeroSettings) -> bool:
    """Whether gradients are made as the backward pass comes to them; a partition is there from the first one on."""
    return gradients_are_whole(job, technique, zero) and not job.accumulates


# Memory of one process, before it runs: every term with its formula.

CONTEXT_BYTES = 500_000_000
"""What CUDA, cuBLAS and NCCL take of a GPU before the first tensor: what is left of the published figures of an A100
once all else is counted. Drivers and libraries differ by some 0.2 GB."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """What one process needs; of its host, what one process adds."""

    terms: tuple[Term, ...]
    """Of the GPU."""
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
        """Of one process."""
        return total(self.host_terms)

    def parts(self) -> dict[str, int]:
        """Bytes of the GPU by part, and `total`, their sum."""
        return {part: total(self.terms, part) for part in PARTS} | {"total": self.device_bytes}


@lru_cache(maxsize=1024)
def plan_memory(
    job: Workload,
    technique: Technique,
    ranks: int,
    zero: ZeroSettings | None = None,
    *,
    context_bytes: int = CONTEXT_BYTES,
) -> PlannedMemory:
    """The memory of one of `ranks` processes; `none` is one process whatever `ranks` says.

    Args:
        zero: keys of the DeepSpeed configuration; those of `dsconfig/` if not given.
        context_bytes: of CUDA and its libraries; 0 without a GPU.
    """
    zero, ranks = zero or ZeroSettings(), 1 if technique.is_alone else ranks
    job = job.under(technique)
    held = states(job, technique, ranks, zero)
    buffers = backward_buffers(job, technique, ranks, zero)
    saved = job.activation_terms()
    spare = total(saved) + released_before_step(buffers, technique)
    step = _beyond(step_temporaries(job, technique, ranks), spare)
    context = Term("CUDA and its libraries", context_bytes, f"{context_bytes / 1e9:.3g} GB, a constant", "context")
    return PlannedMemory(
        terms=(*held.device, *buffers, *step, *saved, *((context,) if context_bytes else ())),
        host_terms=host_terms(job, technique, ranks, zero, held),
        state_bytes=_state_bytes(states(replace(job, accumulates=False), technique, ranks, zero)),
        peak_allocated_bytes=peak_allocated(job, technique, ranks, zero),
    )


def _beyond(step: Term, spare: int) -> tuple[Term, ...]:
    """The step's temporaries as far as they exceed what has been freed before it."""
    if step.bytes <= spare:
        return ()
    return (Term(step.name, step.bytes - spare, f"{step.formula}, less freed activations and buckets"),)


def _state_bytes(held: States) -> int:
    return total(held.device) + total(held.host)
