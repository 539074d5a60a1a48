"""A recorded run: what is planned for it, and what it measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

from zeropods.errors import UserError
from zeropods.measure.record import BatchShape, RankMeasurement, Record
from zeropods.plan.facts import shape_recorded
from zeropods.plan.gpus import is_before_ampere, published_flops, workspace_bytes
from zeropods.plan.machines import Machines, step_time
from zeropods.plan.memory import CONTEXT_BYTES, PlannedMemory, plan_memory
from zeropods.plan.workload import Shape, Workload, ZeroSettings, read_zero_settings
from zeropods.techniques import technique_named

DEVICE_USED_COLUMN = "device_used_bytes"
"""Column of samples with the bytes in use on a rank's GPU, by all its processes."""


@dataclass(frozen=True)
class PlannedRun:
    """A finished run on GPUs: what is planned for it, and what it measured, by quantity: `memory`
    in bytes, `time` in seconds of a step. None where a value is not known."""

    work: Workload
    """Its workload, with its largest batch."""
    gpu: str
    planned: dict[str, float | None]
    measured: dict[str, float | None]


def planned_memory(record: Record) -> PlannedMemory | None:
    """Planned memory of one process of a recorded run, from its largest batch, its shape and its
    DeepSpeed configuration; None where it cannot be planned (`recorded_work`).

    For a run without a GPU nothing is counted for CUDA and cuBLAS.
    """
    work = recorded_work(record)
    if work is None:
        return None
    gpu = next((rank.gpu for rank in record.ranks if rank.gpu), None)
    if gpu is None:
        return plan_memory(work, 0)
    return _memory_on_gpu(work, gpu)


def _memory_on_gpu(work: Workload, gpu: str) -> PlannedMemory:
    """Planned memory of one process on a GPU, with what CUDA and cuBLAS take."""
    return plan_memory(work, CONTEXT_BYTES, workspace_bytes(gpu))


@lru_cache(maxsize=1)
def recorded_work(record: Record) -> Workload | None:
    """The workload of a recorded run: its largest batch, and how the work was divided. The last
    answer is kept, by the identity of the record.

    None where it cannot be planned: a technique without a plan (`zero3++`, `custom`), a precision
    or a shape that is not known here, a configuration whose sizes are not numbers, a model that
    cannot be traced, or no rank that measured a batch.
    """
    rank = _rank_with_largest_batch(record)
    if rank is None or rank.largest_batch is None:
        return None
    batch = rank.largest_batch
    shape = shape_recorded(json.dumps(rank.shape))
    if shape is None or record.precision not in shape.precisions:
        return None
    labels = _labels_of_a_row(rank, batch, shape)
    if min(batch.rows, batch.source_tokens, labels) < 1:
        return None

    attention = record.identity.get("attn_implementation")
    if attention not in shape.attentions:
        attention = shape.attentions[0]
    has_scaled_rates = bool(record.identity.get("scaled_rates"))
    try:
        zero = read_zero_settings(record.deepspeed) if record.deepspeed else ZeroSettings()
        work = Workload(
            shape=shape,
            batch_size=batch.rows,
            tokens=batch.source_tokens,
            labels=labels,
            # On an H200 the plan with these met what T5 took to 0.2 %; without a GPU, memory is
            # planned from padded labels.
            label_tokens=batch.label_tokens if rank.gpu else None,
            precision=record.precision,
            checkpointing=record.gradient_checkpointing,
            rates_by_kind=has_scaled_rates and not shape.is_decoder_only,
            technique=technique_named(record.technique),
            ranks=record.world_size,
            zero=zero,
            gradient_accumulation=record.gradient_accumulation_steps,
            attention=attention,
            before_ampere=is_before_ampere(rank.gpu or ""),
            dropout=_has_dropout(record),
        )
        # Traces the model, which raises where it cannot be planned.
        work.saved()
    except UserError:
        return None
    return work


def _has_dropout(record: Record) -> bool | None:
    """Whether a run had dropout; None where it had the rate with which the model was published."""
    rate = record.identity.get("dropout")
    if isinstance(rate, int | float):
        return rate > 0
    return None


def _rank_with_largest_batch(record: Record) -> RankMeasurement | None:
    """The rank whose largest batch has the most tokens, the first of several; None where no rank
    measured both a batch and its model's shape."""
    largest = None
    most_tokens = -1
    for rank in record.ranks:
        batch = rank.largest_batch
        if not rank.shape or batch is None:
            continue
        tokens = batch.rows * (batch.source_tokens + batch.target_tokens)
        if tokens > most_tokens:
            largest = rank
            most_tokens = tokens
    return largest


def _labels_of_a_row(rank: RankMeasurement, batch: BatchShape, shape: Shape) -> int:
    """Number of label tokens in each row of a rank's largest batch, padding included.

    Of a causal model only the labels of tokens that are no padding were counted: in the padded row
    their share is taken to be that among all tokens that the rank has read.
    """
    if not shape.is_decoder_only:
        return batch.target_tokens
    share_with_label = 1.0
    if rank.source_tokens:
        share_with_label = rank.target_tokens / rank.source_tokens
    return max(1, round(share_with_label * batch.source_tokens))


def planned_run(record: Record) -> PlannedRun | None:
    """What is planned for a finished run and what it measured; None for one that did not end well,
    had no GPU or cannot be planned.

    Where no peak FLOP/s of its GPU are known, its time is not planned, and counts as not measured.
    """
    largest_work = recorded_work(record)
    if largest_work is None or record.status != "ok":
        return None
    # There is a rank: one has measured the largest batch.
    gpu = record.ranks[0].gpu
    if gpu is None:
        return None
    # Memory must be enough for the largest batch; time goes by the mean one.
    planned_bytes = _memory_on_gpu(largest_work, gpu).device_bytes
    mean_work = _mean_work(record, largest_work)
    planned_seconds = None
    measured_seconds = None
    if published_flops(gpu, mean_work.precision) is not None:
        machines = Machines(pods=record.pods, slots=record.slots, gpu=gpu)
        planned_seconds = step_time(mean_work, machines).seconds
        measured_seconds = measured_step(record)
    return PlannedRun(
        work=largest_work,
        gpu=gpu,
        planned={"memory": planned_bytes, "time": planned_seconds},
        measured={"memory": _measured_memory(record), "time": measured_seconds},
    )


def _mean_work(record: Record, largest: Workload) -> Workload:
    """The workload of a run's mean batch, which has the tokens and labels of the `largest` one
    scaled to the mean number of tokens of a row, padding included.

    It is the largest one itself where no tokens were counted.
    """
    steps = sum(rank.steps for rank in record.ranks)
    batches = steps * record.gradient_accumulation_steps
    padded_tokens = sum(rank.padded_tokens for rank in record.ranks)
    mean_tokens_of_row = padded_tokens / max(1, batches * largest.batch_size)
    if not mean_tokens_of_row:
        return largest
    tokens_of_row = largest.tokens
    # The labels of a causal model are among its tokens.
    if not largest.shape.is_decoder_only:
        tokens_of_row += largest.labels
    scale = mean_tokens_of_row / tokens_of_row
    tokens = max(1, round(scale * largest.tokens))
    labels = max(1, round(scale * largest.labels))
    return replace(largest, tokens=tokens, labels=labels)


def _measured_memory(record: Record) -> float | None:
    """Peak bytes in use on the fullest GPU; None where no rank sampled them."""
    peaks = []
    for rank in record.ranks:
        samples = rank.sampled.get(DEVICE_USED_COLUMN)
        if samples is not None:
            peaks.append(samples.peak)
    return max(peaks, default=None)


def measured_step(record: Record) -> float | None:
    """Median seconds of a step after warm-up, of the slowest rank; None where not all ranks
    measured one."""
    medians = []
    for rank in record.ranks:
        if rank.step_seconds and rank.step_seconds.median:
            medians.append(rank.step_seconds.median)
    if len(medians) < len(record.ranks):
        return None
    return max(medians, default=None)
