"""Host memory of one process: what is offloaded, how pinning rounds it up, and the model while it is loaded.

Source: DeepSpeed 0.19.8, stage_1_and_2.py (`param_buffer_of_bit16_for_cpu_offload_groups`,
`temp_grad_buffer_for_cpu_offload`); PyTorch's CachingHostAllocator, which rounds pinned memory up to a power of two.
"""

from __future__ import annotations

from zeropods.plan.states import MASTER, States
from zeropods.plan.technique import Technique
from zeropods.plan.term import Term, elements, share, total
from zeropods.plan.workload import Workload
from zeropods.plan.zero_settings import ZeroSettings

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
