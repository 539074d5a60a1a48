"""The plan of a run that was recorded: to be set beside what it measured."""

from __future__ import annotations

from typing import Any

from zeropods.errors import UserError
from zeropods.plan.job import Job
from zeropods.plan.memory import CONTEXT_BYTES, PlannedMemory, plan_memory
from zeropods.plan.parameters import BYTES
from zeropods.plan.shapes import shape_from
from zeropods.plan.technique import TECHNIQUES
from zeropods.plan.zero_settings import ZeroSettings, read_zero_settings


def planned(record: dict[str, Any]) -> PlannedMemory | None:
    """Memory of one process of a schema-2 record, by its largest batch, its shape and its DeepSpeed configuration.

    None where it cannot be planned: another technique than `TECHNIQUES` (`custom`), a precision or a shape that is not
    known here, a configuration whose sizes are no numbers, or no rank that measured a batch. Without a GPU nothing is
    counted for CUDA.
    """
    technique = next((each for each in TECHNIQUES if each.name == record["technique"]), None)
    measured = [rank for rank in record["ranks"] if rank["shape"] and _positions(rank["largest_batch"])]
    if technique is None or not measured or record["precision"] not in BYTES:
        return None
    rank = max(measured, key=lambda rank: _positions(rank["largest_batch"]))
    batch = rank["largest_batch"]
    job = Job(
        shape=shape_from(rank["shape"]),
        rows=batch["rows"],
        source_tokens=batch["source_tokens"],
        target_tokens=batch["target_tokens"],
        precision=record["precision"],
        checkpointing=record["gradient_checkpointing"],
        own_rates=bool(record["identity"].get("scaled_rates")),
        accumulates=record["gradient_accumulation_steps"] > 1,
    )
    try:
        zero = read_zero_settings(record["deepspeed"]) if record["deepspeed"] else ZeroSettings()
    except UserError:
        return None
    context = CONTEXT_BYTES if rank["gpu"] else 0
    return plan_memory(job, technique, record["world_size"], zero, context_bytes=context)


def _positions(batch: dict[str, int] | None) -> int:
    """Of a batch with padding; 0 where it was not measured, or can be no batch."""
    if not batch or min(batch.values()) < 1:
        return 0
    return batch["rows"] * (batch["source_tokens"] + batch["target_tokens"])
