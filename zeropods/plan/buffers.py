"""Memory of a GPU beside the states: buckets of communication, gathered parameters, temporaries of the step.

Source: DeepSpeed 0.19.8, stage_1_and_2.py (`setup_buckets`, `average_tensor`, `step`), stage3.py (`ipg_buckets`,
`_prepare_fp32_grad_for_sub_group`), partitioned_param_coordinator.py; PyTorch's DistributedDataParallel with
`gradient_as_bucket_view=False`, its default.
"""

from __future__ import annotations

from zeropods.plan.states import MASTER, kept_whole
from zeropods.plan.technique import Technique
from zeropods.plan.term import Term, elements, share
from zeropods.plan.workload import Workload
from zeropods.plan.zero_settings import ZeroSettings


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
