"""The plan of a run that was recorded: to be set beside what it measured."""

from __future__ import annotations

from typing import Any

from zeropods.errors import UserError
from zeropods.measure.record import BatchShape, RankMeasurement, Record
from zeropods.plan.jobs import CausalJob, Job
from zeropods.plan.machines import is_before_ampere
from zeropods.plan.memory import CONTEXT_BYTES, PlannedMemory, plan_memory
from zeropods.plan.parameters import BYTES, known_shape
from zeropods.plan.shapes import CausalShape
from zeropods.plan.workload import ELEMENT_BYTES, Workload, attentions
from zeropods.techniques import TECHNIQUES, ZeroSettings, read_zero_settings


def planned(record: Record) -> PlannedMemory | None:
    """Memory of one process of a schema-2 record, by its largest batch, its shape and its DeepSpeed configuration.

    None where it cannot be planned: another technique than `TECHNIQUES` (`custom`), a precision or a shape that is not
    known here, a configuration whose sizes are no numbers, or no rank that measured a batch. Without a GPU nothing is
    counted for CUDA.
    """
    technique = next((each for each in TECHNIQUES if each.name == record.technique), None)
    measured = [rank for rank in record.ranks if rank.shape and _positions(rank.largest_batch)]
    if technique is None or not measured:
        return None
    rank = max(measured, key=lambda rank: _positions(rank.largest_batch))
    job = _work(record, rank)
    if job is None:
        return None
    try:
        zero = read_zero_settings(record.deepspeed) if record.deepspeed else ZeroSettings()
    except UserError:
        return None
    context = CONTEXT_BYTES if rank.gpu else 0
    return plan_memory(job, technique, record.world_size, zero, context_bytes=context)


def _positions(batch: BatchShape | None) -> int:
    """Of a batch with padding; 0 where it was not measured, or can be no batch. A text has no target."""
    if batch is None or batch.target_tokens < 0 or min(batch.rows, batch.source_tokens) < 1:
        return 0
    return batch.rows * (batch.source_tokens + batch.target_tokens)


def _work(record: Record, rank: RankMeasurement) -> Workload | None:
    """What that rank's largest batch was; None for a precision or a batch that such a model cannot have."""
    if rank.shape is None or rank.largest_batch is None:
        return None
    shape, batch, asked = known_shape(rank.shape), rank.largest_batch, record.identity
    settings: dict[str, Any] = {
        "rows": batch.rows,
        "precision": record.precision,
        "checkpointing": record.gradient_checkpointing,
        "accumulates": record.gradient_accumulation_steps > 1,
    }
    if isinstance(shape, CausalShape):
        return _causal(shape, rank, batch.source_tokens, asked, settings) if record.precision in ELEMENT_BYTES else None
    if record.precision not in BYTES or batch.target_tokens < 1:
        return None
    settings |= {"source_tokens": batch.source_tokens, "target_tokens": batch.target_tokens}
    return Job(shape=shape, own_rates=bool(asked.get("scaled_rates")), **settings)


def _causal(
    shape: CausalShape, rank: RankMeasurement, tokens: int, asked: dict[str, Any], settings: dict[str, Any]
) -> CausalJob:
    """Labels of the largest batch were not counted: they are taken to be as frequent in it as in all batches."""
    of_all = rank.target_tokens / rank.source_tokens if rank.source_tokens else 1.0
    attention, dropout = asked.get("attn_implementation"), asked.get("dropout")
    return CausalJob(
        shape=shape,
        tokens=tokens,
        labels=max(1, round(of_all * tokens)),
        attention=attention if attention in attentions(shape) else attentions(shape)[0],
        before_ampere=is_before_ampere(rank.gpu or ""),
        dropout=shape.family == "gpt2" if dropout is None else dropout > 0,
        **settings,
    )
