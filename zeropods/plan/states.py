"""Parameters, gradients and optimizer states of one process, between a backward pass and the optimizer's step.

Without DeepSpeed: PyTorch's AdamW over FP32 weights, or this project's over FP32 masters of BF16 weights
(`train.master`). With it, as DeepSpeed 0.19.8 does it: every stage keeps an FP32 master partition beside the weights,
also where these are FP32 themselves (stage_1_and_2.py, `single_partition_of_fp32_groups`; stage3.py,
`_create_fp32_partitions`, whose test for "the same device" compares a device with a string and so never holds).
"""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.technique import Technique
from zeropods.plan.term import Term, elements, share
from zeropods.plan.workload import Workload
from zeropods.plan.zero_settings import ZeroSettings

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
