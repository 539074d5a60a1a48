"""The record of a launch whose ranks all ended before they had opened the run: what the supervisor
knows of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zeropods.data.manifest import FILE as MANIFEST
from zeropods.data.manifest import Manifest, read_manifest
from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.launch.outcome import UnopenedError
from zeropods.measure import environment
from zeropods.measure.record import (
    CONFIG,
    RECORD,
    SCHEMA_VERSION,
    Record,
    RunConfig,
    compose_record,
    write_record,
)
from zeropods.tasks import task_or_unknown
from zeropods.techniques import technique_of
from zeropods.train.flags import PASSES, ROWS

UNKNOWN_TEXT = "unknown"
"""Stands for a text that only the ranks would have found out."""


def record_unopened(planned: Launch, end: UnopenedError) -> None:
    """Write `record.json` of a launch that ended before it had opened the run.

    Where an earlier launch has opened the run, its record stays as it is; if it left none, one is
    composed of what its ranks wrote, with this launch's end.
    """
    folder = planned.folder
    ending: dict[str, Any] = {
        "status": end.status,
        "reason": end.reason,
        "pod": end.pod,
        "rank": end.rank,
        "last_lines": end.last_lines,
        "exits": end.exits,
        "restarts": planned.restarts,
    }
    if not (folder / CONFIG).is_file():
        record = Record(
            **vars(_requested(planned)),
            **ending,
            steps=0,
            train_seconds=None,
            samples_per_second=None,
            losses=[],
            eval_losses=[],
            ranks=[],
        )
        write_record(folder, record)
    elif not (folder / RECORD).is_file():
        write_record(folder, compose_record(folder, **ending))


def _requested(planned: Launch) -> RunConfig:
    """The `config.json` that the ranks would have written, as far as the launch's arguments and its
    data tell."""
    kind = planned.call.kind
    flags = planned.call.values
    # The script's own names of some flags, by their usual names.
    names_here: Mapping[str, str] = {} if kind is None else kind.names_here
    data = str(flags.get(names_here.get("dataset_path", "dataset_path"), ""))
    manifest = _manifest(Path(data))
    config = None
    if planned.call.deepspeed is not None:
        config = planned.call.deepspeed.config
    rows = _positive_or_1(flags.get(ROWS))
    passes = _positive_or_1(flags.get(PASSES))
    ranks = planned.world_size
    technique = technique_of(config, ranks)
    if planned.call.parsed is not None:
        technique = planned.call.parsed.technique(config, ranks)
    return RunConfig(
        schema_version=SCHEMA_VERSION,
        run_id=secrets.token_hex(6),
        attempt=0,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        task=_task(flags, manifest),
        model_id=str(flags.get(names_here.get("model_id", "model_id"), UNKNOWN_TEXT)),
        init=Path(str(flags.get("init", UNKNOWN_TEXT))).name,
        technique=technique,
        pods=len(planned.hosts),
        slots=planned.hosts[0].slots,
        world_size=ranks,
        precision=str(flags.get("precision", UNKNOWN_TEXT)),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        effective_batch_size=rows * passes * ranks,
        gradient_checkpointing=flags.get("gradient_checkpointing") is True,
        dev_rows=None,
        **_facts_of_data(data, manifest),
        deepspeed=config,
        identity={},
        argv=[planned.script.name, *planned.arguments],
        hosts=[host.address for host in planned.hosts],
        versions=environment.versions(),
        git_revision=environment.git_revision(Path(__file__).parent),
        hardware={},
        device=None,
    )


def _manifest(data: Path) -> Manifest | None:
    """The manifest of prepared data in a folder; None for raw data, and where the manifest is
    damaged."""
    if (data / MANIFEST).is_file():
        with suppress(UserError):
            return read_manifest(data)
    return None


def _facts_of_data(path: str, manifest: Manifest | None) -> dict[str, Any]:
    """The fields of a `RunConfig` that the manifest of prepared data tells, or what stands for them
    without one.

    Args:
        path: folder of the data, as the flag names it.
    """
    if manifest is None:
        return {"prompt": None, "train_rows": 0, "dataset": {}}
    has_answers = task_or_unknown(manifest.task).has_answers
    return {
        "prompt": manifest.prompt if has_answers else None,
        "train_rows": manifest.splits["train"].rows,
        "dataset": {"path": path, "content_key": manifest.content_key},
    }


def _task(flags: Mapping[str, object], manifest: Manifest | None) -> str:
    if manifest is not None:
        return manifest.task
    return str(flags.get("task", UNKNOWN_TEXT))


def _positive_or_1(value: object) -> int:
    """A flag's value if it is a positive whole number; otherwise 1, as where a script of somebody
    else does not have the flag."""
    if isinstance(value, int) and value > 0:
        return value
    return 1
