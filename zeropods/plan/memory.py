"""Memory of one process, before it runs: every term with its formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zeropods.plan.buffers import backward_buffers, released_before_step, step_temporaries
from zeropods.plan.host import host_terms
from zeropods.plan.peak import peak_allocated
from zeropods.plan.states import States, states
from zeropods.plan.technique import Technique
from zeropods.plan.term import PARTS, Term, total
from zeropods.plan.workload import Workload
from zeropods.plan.zero_settings import ZeroSettings

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
