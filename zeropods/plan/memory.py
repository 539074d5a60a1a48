"""Memory of one process, before it runs: every term with its formula."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.plan.facts import shape_recorded
from zeropods.plan.machines import is_before_ampere
from zeropods.plan.workload import MASTER, MOMENTS, PARTS, Activations, Term, Workload, total, touched
from zeropods.tables import GIB
from zeropods.techniques import TECHNIQUES, ZeroSettings, keys_beyond, read_zero_settings

if TYPE_CHECKING:
    from zeropods.measure.record import Record

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
    process, saved = _Process(work), Activations(work).terms()
    context = Term("CUDA and its libraries", context_bytes, f"{context_bytes / GIB:.2g} GiB, a constant", "context")
    return PlannedMemory(
        terms=(
            *process.states()[0],
            *process.buffers(),
            *process.beyond(total(saved)),
            *saved,
            *((context,) if context_bytes else ()),
        ),
        host_terms=process.host_terms(),
        state_bytes=sum(map(total, _Process(replace(work, passes=1)).states())),
        peak_allocated_bytes=process.peak_allocated(),
    )


def planned(record: Record) -> PlannedMemory | None:
    """Memory of one process of a recorded run, by its largest batch, its shape and its DeepSpeed configuration.

    None where it cannot be planned. Without a GPU nothing is counted for CUDA.
    """
    work = recorded_work(record)
    context = CONTEXT_BYTES if any(rank.gpu for rank in record.ranks) else 0
    return None if work is None else plan_memory(work, context)


def recorded_work(record: Record) -> Workload | None:
    """The largest batch of a recorded run, and how it was divided.

    None where that cannot be planned: another technique than `TECHNIQUES` (`custom`), a precision or a shape that is
    not known here, a configuration whose sizes are no numbers, a model that cannot be traced, or no rank that
    measured a batch.
    """
    technique = next((each for each in TECHNIQUES if each.name == record.technique), None)
    measured = [(rank, rank.largest_batch) for rank in record.ranks if rank.shape and rank.largest_batch]
    # Older records give NVMe offload and ZeRO++ the name of the technique that they come from.
    if not measured or technique is None or keys_beyond(record.deepspeed or {}):
        return None
    rank, batch = max(measured, key=lambda each: each[1].rows * (each[1].source_tokens + each[1].target_tokens))
    shape = shape_recorded(json.dumps(rank.shape))
    if shape is None or record.precision not in shape.precisions:
        return None
    tokens, labels = batch.source_tokens, batch.target_tokens
    if shape.joint:
        # Labels of the largest batch were not counted: they are taken to be as frequent in it as in all batches.
        of_all = rank.target_tokens / rank.source_tokens if rank.source_tokens else 1.0
        labels = max(1, round(of_all * tokens))
    attention, dropout = (record.identity.get(name) for name in ("attn_implementation", "dropout"))
    try:
        work = Workload(
            shape=shape,
            rows=batch.rows,
            tokens=tokens,
            labels=labels,
            precision=record.precision,
            checkpointing=record.gradient_checkpointing,
            own_rates=bool(record.identity.get("scaled_rates")) and not shape.joint,
            technique=technique,
            ranks=record.world_size,
            zero=read_zero_settings(record.deepspeed) if record.deepspeed else ZeroSettings(),
            passes=record.gradient_accumulation_steps,
            attention=attention if attention in shape.attentions else shape.attentions[0],
            before_ampere=is_before_ampere(rank.gpu or ""),
            dropout=dropout > 0 if isinstance(dropout, int | float) else None,
        )
        work.saved()
    except UserError:
        return None
    return work


class _Process:
    """One of the processes of a workload, and what its memory follows from."""

    def __init__(self, work: Workload) -> None:
        self.work, self.technique, self.ranks, self.zero = work, work.technique, work.ranks, work.zero

    # Parameters, gradients and optimizer states, between a backward pass and the optimizer's step.
    #
    # Without DeepSpeed: PyTorch's AdamW over FP32 weights, or this project's over FP32 masters of BF16 weights
    # (`train.trainer`). With it, as DeepSpeed 0.19.8 does it: every stage keeps an FP32 master partition beside the
    # weights, also where these are FP32 themselves (stage_1_and_2.py, `single_partition_of_fp32_groups`; stage3.py,
    # `_create_fp32_partitions`, whose test for "the same device" compares a device with a string and so never holds).

    def states(self) -> tuple[list[Term], list[Term]]:
        """States in the memory of the GPU, and in that of the host."""
        work, size, stage = self.work, self.work.element_bytes, self.technique.stage
        weights = Term.of("weights", size, work.shape.parameters, self.ranks if stage == 3 else 1, "parameters")
        whole, small = self.gradients_are_whole(), self.kept_whole()
        gathered = [Term.of("small weights, kept whole", size, small, part="parameters")] if small else []
        gradients = Term.of("gradients", size, work.shape.parameters, 1 if whole else self.ranks, "gradients")
        if not whole and stage != 3:
            some = Term.of("gradients", size, touched(work.shape, work.own_rates, self.ranks), part="gradients")
            formula = f"{some.formula}: tensors that a share of 1 / {self.ranks} touches, whole"
            gradients = replace(some, formula=formula)
        if stage or work.is_half:
            optimizer = self._shared("master and Adam's moments, FP32", MASTER + MOMENTS, "optimizer")
        else:
            optimizer = self._shared("Adam's moments, FP32", MOMENTS, "optimizer")
        if not self.technique.offloads:
            return [weights, *gathered, gradients, optimizer], []
        master = self._shared("gradients of the master, FP32", MASTER, "gradients")
        if stage == 3:
            return gathered, [weights, gradients, master, optimizer]
        return [weights, gradients] if whole else [weights], [master, optimizer]

    def gradients_are_whole(self) -> bool:
        """Whether a process holds a gradient for every parameter at the end of its backward pass.

        Stage 1 reduces each gradient as soon as it is there if communication overlaps, and keeps only its own
        (`process_gradients`, `copy_grads_in_partition`); else, and while gradients add up, it keeps all.
        """
        stage = self.technique.stage
        return stage == 0 or (stage == 1 and (self.work.passes > 1 or not self.zero.overlap))

    def kept_whole(self) -> int:
        """Elements that stage 3 gathers after each step and keeps, beside each rank's share of them."""
        is_shared = self.technique.stage == 3 and self.ranks > 1
        return sum(size for size, _ in self.work.shape.weights if is_shared and size <= self.zero.persistent_elements)

    def _shared(self, name: str, size: int, part: str = "buffers") -> Term:
        """Something of each parameter, which the ranks of a ZeRO stage share."""
        return Term.of(name, size, self.work.shape.parameters, self.ranks if self.technique.stage else 1, part)

    # Memory of a GPU beside the states: buckets of communication, gathered parameters, temporaries of the step.
    #
    # Source: DeepSpeed 0.19.8, stage_1_and_2.py (`setup_buckets`, `average_tensor`, `step`), stage3.py (`ipg_buckets`,
    # `_prepare_fp32_grad_for_sub_group`), partitioned_param_coordinator.py; PyTorch's DistributedDataParallel with
    # `gradient_as_bucket_view=False`, its default.

    def buffers(self) -> tuple[Term, ...]:
        """What is there during the backward pass."""
        size, shape, zero, technique = self.work.element_bytes, self.work.shape, self.zero, self.technique
        if technique.is_alone:
            return ()
        if technique.stage == 0:
            return (Term.of("DistributedDataParallel's buckets: all gradients once more", size, shape.parameters),)
        if technique.stage == 3:
            return (*self._buckets(2 if self.ranks > 1 else 1), *self._gathered())
        if not (zero.contiguous or technique.offloads):
            # `buffered_reduce_fallback`
            number = min(shape.parameters, max(zero.reduce_elements, shape.largest_tensor))
            return (Term.of("reduce bucket, copied together", size, number),)
        name = "copy of one gradient on its way to the host"
        copy = (Term.of(name, size, shape.largest_tensor),) if technique.offloads else ()
        return (*self._buckets(2 if zero.overlap else 1), *copy)

    def _buckets(self, copies: int) -> tuple[Term, ...]:
        size, most, largest = self.work.element_bytes, self.zero.reduce_elements, self.work.shape.largest_tensor
        bucket = Term.of("reduce bucket", size, most)
        if copies > 1:
            bucket = Term("reduce buckets", copies * bucket.bytes, f"{copies} x {bucket.formula}")
        alone = Term.of("gradient that is larger than a bucket", size, largest)
        return (bucket,) if largest <= most else (bucket, alone)

    def _gathered(self) -> tuple[Term, ...]:
        """Whole parameters that stage 3 holds; one process alone has them whole, unless they lie on the host."""
        if self.ranks == 1 and not self.technique.offloads:
            return ()
        shape, size = self.work.shape, self.work.element_bytes
        others = shape.parameters - self.kept_whole()
        live = min(others, max(self.zero.live_elements, shape.largest_tensor))
        return (
            Term.of("parameters gathered for use", size, live),
            Term.of("parameters fetched ahead", size, min(self.zero.prefetch_elements, others - live)),
        )

    def step_temporaries(self) -> Term:
        """What the optimizer's step needs for a moment, when activations are gone."""
        stage, is_half = self.technique.stage, self.work.is_half
        if self.technique.offloads or (stage == 0 and not is_half):
            return Term("temporaries of the step", 0, "0 B: a fused AdamW works in place")
        if stage == 0:
            return self._shared("gradients of the masters, FP32", MASTER)
        return self._shared("gradients of the partition, flat", MASTER + (self.work.element_bytes if is_half else 0))

    def beyond(self, saved: int) -> tuple[Term, ...]:
        """The step's temporaries as far as they exceed the activations and buckets that are gone by then."""
        step, is_released = self.step_temporaries(), self.technique.stage in (1, 2)
        spare = saved + sum(term.bytes for term in self.buffers() if is_released and "bucket" in term.name)
        if step.bytes <= spare:
            return ()
        return (Term(step.name, step.bytes - spare, f"{step.formula}, less freed activations and buckets"),)

    def peak_allocated(self) -> int:
        """Bytes of tensors at the worst moment, on the worst-off rank: in the loss, the backward pass or the step."""
        held, buffers = self.states()[0], total(self.buffers())
        gradients = total(held, "gradients")
        stage, accumulates = self.technique.stage, self.work.passes > 1
        # Buckets of stages 1 and 2 are made when the first gradient is there, and given back before the step.
        early = 0 if stage in (1, 2) else buffers
        before = gradients if accumulates or stage == 3 else 0
        # Gradients are made as the backward pass comes to them; a partition is there from the first one on.
        grows = self.gradients_are_whole() and not accumulates
        pass_ = Activations(self.work)
        backward = [buffers + saved + (made if grows else gradients) for saved, made in pass_.backward()]
        step = early + gradients + self.step_temporaries().bytes
        return total(held) - gradients + max(early + before + pass_.in_loss(), step, *backward)

    # Memory of the host: what is offloaded, how pinning rounds it up, and the model while it is loaded.
    #
    # Source: DeepSpeed 0.19.8, stage_1_and_2.py (`param_buffer_of_bit16_for_cpu_offload_groups`,
    # `temp_grad_buffer_for_cpu_offload`); PyTorch's CachingHostAllocator, which rounds pinned memory up to a power of
    # two.

    def host_terms(self) -> tuple[Term, ...]:
        """All of the host's memory, the states that lie there included."""
        process = Term("interpreter and libraries", PROCESS_BYTES, "2 GiB, an allowance", "context")
        shape, size, technique = self.work.shape, self.work.element_bytes, self.technique
        lasting = self.states()[1]
        if technique.offloads and technique.stage != 3:
            gradient = Term.of("gradient on its way", size, shape.largest_tensor)
            lasting += [self._shared("weights on their way to the GPU", size), gradient]
        # Adam's moments are not pinned: PyTorch makes them like its parameters, but not where these lie.
        pinned = [term for term in lasting if self.zero.pins and term.part != "optimizer"]
        rounded = sum((1 << max(0, term.bytes - 1).bit_length()) - term.bytes for term in pinned)
        if rounded:
            names = f"{len(pinned)} pinned buffers, each rounded up to a power of two"
            lasting.append(Term("rounding of pinned memory", rounded, names))
        loaded = Term.of(LOADING, MASTER, shape.parameters, part="parameters")
        missing = max(0, loaded.bytes - total(lasting))
        loading = replace(loaded, bytes=missing, formula=f"{loaded.formula}, less what comes after it")
        return (*lasting, loading, process) if missing else (*lasting, process)
