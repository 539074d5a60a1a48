"""What a record holds, read back strictly."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeropods.errors import UserError
from zeropods.measure.rank import STRICT, Loss, RankMeasurement

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 2
NO_NUMBERS = {"family": str, "tied": bool}
"""What a causal shape says by something else than whole numbers."""
Status = Literal["ok", "oom", "failed", "timeout", "interrupted", "pod_lost"]


@dataclass(kw_only=True)
class Record:
    """`record.json`: what was asked for, how it ended, and what every rank measured."""

    __pydantic_config__ = STRICT

    schema_version: Literal[2]
    run_id: str
    attempt: int
    """Number of earlier attempts."""
    restarts: int = 0
    """How many times the last launch had gone on by itself."""
    started_at: str
    """Of the last attempt, ISO 8601, UTC."""
    task: str
    model_id: str
    init: Literal["pretrained", "random"]
    technique: str
    pods: int
    slots: int
    world_size: int
    precision: str
    prompt: str | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    gradient_checkpointing: bool
    train_rows: int
    dev_rows: int | None
    dataset: dict[str, str]
    deepspeed: dict[str, Any] | None
    """The effective configuration."""
    identity: dict[str, Any]
    """What must be equal for two calls to mean the same run."""
    argv: list[str]
    hosts: list[str]
    """Pods in the order of their ranks, each once."""
    versions: dict[str, str | None]
    git_revision: str | None
    hardware: dict[str, Any]
    status: Status
    reason: str | None
    pod: str | None
    last_lines: list[str]
    steps: int
    train_seconds: float | None
    samples_per_second: float | None
    losses: list[Loss]
    eval_losses: list[Loss]
    ranks: list[RankMeasurement]


def check_form(path: Path, record: dict[str, Any], text: str) -> None:
    """Refuse a record of another version, with a key missing or unknown, or with a value of another kind.

    Args:
        text: the JSON that `record` was read from.

    Raises:
        UserError: the first fault: file, key, value, remedy.
    """
    from pydantic import ValidationError

    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version {version!r}; this version reads {SCHEMA_VERSION}: run it again")
    try:
        # JSON, since a strict dataclass takes no dictionary from Python.
        _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        shown = "" if first["type"] == "missing" else f" is {first['input']!r:.60}"
        raise UserError(f"{path}: {place}{shown}: {first['msg']}; run it again") from None
    for rank in record["ranks"]:
        for field in fields(RankMeasurement):
            if field.name not in rank:
                raise UserError(f"{path}: ranks.{rank.get('rank')}.{field.name}: missing; run it again")
        for name, value in (rank["shape"] or {}).items():
            if type(value) is not NO_NUMBERS.get(name, int):
                raise UserError(f"{path}: ranks.{rank['rank']}.shape.{name} is {value!r:.60}; run it again")


@cache
def _adapter() -> TypeAdapter[Record]:
    from pydantic import TypeAdapter

    return TypeAdapter(Record)
