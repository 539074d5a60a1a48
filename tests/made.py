"""Records made by hand, complete and consistent, for tests of what reads them."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zeropods.measure.record import RankMeasurement, Record, RunConfig, Statistics, samples_per_second, train_seconds
from zeropods.pods.backends.local import Settings
from zeropods.pods.rendezvous import Pod
from zeropods.tables import GIB, MIB

CONFIG_KEYS = {each.name for each in fields(RunConfig)}
RANK, RECORD = TypeAdapter(RankMeasurement), TypeAdapter(Record)


def a_rank(number: int = 0, **values: Any) -> dict[str, Any]:
    """A rank that took 20 steps of 0.8 s, the first of them warm-up."""
    steps, warm = values.get("step_seconds", [0.8] * 20), values.get("warmup_steps", 1)
    measured: dict[str, Any] = {
        "host": f"pod{number + 1}",
        "machine": "0" * 8,
        "status": "ok",
        "step": values.get("first_step", 0) + len(steps),
        "stopped_by": "steps",
        "wall_seconds": 30.0,
        "start_seconds": 5.0,
        "warmup_seconds": sum(steps[:warm]),
        "evaluate_seconds": [0.5],
        "save_seconds": [0.25],
        "losses": [{"step": 1, "loss": 8.0}, {"step": len(steps), "loss": 2.0}],
        "eval_losses": [{"step": len(steps) // 2, "loss": 3.0}, {"step": len(steps), "loss": 2.25}],
        "ended_unix_seconds": 1_700_000_030.0,
        "peak_resident_bytes": GIB,
    }
    whole = {**measured, **values, "step_seconds": steps[warm:]}
    for key in ("step_seconds", "evaluate_seconds", "save_seconds"):
        whole[key] = Statistics.of(whole[key])
    return json.loads(json.dumps(asdict(RankMeasurement(rank=number, **whole))))


def a_batch(rows: int, source_tokens: int, target_tokens: int, **values: Any) -> dict[str, Any]:
    """The largest batch of a rank, all of whose target tokens carry a loss."""
    counts = {"rows": rows, "source_tokens": source_tokens, "target_tokens": target_tokens}
    return {**counts, "label_tokens": rows * target_tokens, **values}


def statistics(peak: float, mean: float = 1.0, minimum: float = 1.0, **values: Any) -> dict[str, Any]:
    """Statistics of some samples of one column."""
    return {"samples": 9, "peak": peak, "mean": mean, "minimum": minimum, "p95": peak, "median": mean, **values}


def a_config(**values: Any) -> dict[str, Any]:
    """`config.json` of a run on one pod, or on as many as `pods` says."""
    pods, slots = values.get("pods", 1), values.get("slots", 1)
    world = values.get("world_size", pods * slots)
    batch = values.get("effective_batch_size", 32 * world)
    return {
        "schema_version": 3,
        "run_id": "0123456789ab",
        "attempt": 0,
        "started_at": "2026-01-02T03:04:05+00:00",
        "task": "text2sql",
        "model_id": "t5-tiny",
        "init": "random",
        "technique": "none" if world == 1 else "ddp",
        "pods": pods,
        "slots": slots,
        "world_size": world,
        "precision": "fp32",
        "prompt": "schema",
        "per_device_train_batch_size": batch // world,
        "gradient_accumulation_steps": 1,
        "effective_batch_size": batch,
        "gradient_checkpointing": False,
        "train_rows": 1_000,
        "dev_rows": 100,
        "dataset": {"path": "prepared", "content_key": "c" * 16},
        "deepspeed": None,
        "identity": {},
        "argv": ["textsql_train.py"],
        "hosts": ["pod1"],
        "versions": {"python": "3.11.4"},
        "git_revision": None,
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_bytes": 24 * GIB, "gpus": []},
        "device": "cpu",
        **values,
    }


def a_record(*, ranks: list[dict[str, Any]] | None = None, **values: Any) -> dict[str, Any]:
    """A record of 20 steps of 32 samples in 16 s on one pod, or of what the given ranks measured on as many."""
    ranks = [a_rank()] if ranks is None else ranks
    given = {key: value for key, value in values.items() if key in CONFIG_KEYS}
    config = a_config(**{"pods": max(1, len(ranks)), "hosts": [rank["host"] for rank in ranks] or ["pod1"], **given})
    measured = [RANK.validate_json(json.dumps(rank)) for rank in ranks]
    return {
        **config,
        "restarts": 0,
        "status": "ok",
        "reason": None,
        "pod": None,
        "rank": None,
        "last_lines": [],
        "exits": [],
        "steps": max((rank["step"] for rank in ranks), default=0),
        "train_seconds": train_seconds(measured),
        "samples_per_second": samples_per_second(measured, config["effective_batch_size"]),
        "losses": ranks[0]["losses"] if ranks else [],
        "eval_losses": ranks[0]["eval_losses"] if ranks else [],
        "ranks": ranks,
        "measured_precision": None,
        **values,
    }


SETTINGS = Settings(
    count=2, slots=None, backend="local", lease="idle", lease_seconds=60.0, cpu=1, memory=1, nvidia_gpu=0
)
"""Settings of a cluster that nobody starts."""


def a_pod(number: int, **changes: Any) -> Pod:
    """A pod that nobody has started."""
    made: dict[str, Any] = {
        "name": f"pod{number}", "worker": f"w{number}", "address": f"127.0.1.{number}", "hostname": "here", "slots": 1,
        "ssh_port": 2_222, "host_key": f"ssh-ed25519 {number}", "control_port": 30_000 + number,
    }  # fmt: skip
    return Pod(**{**made, **changes})


def as_record(document: dict[str, Any]) -> Record:
    """Parse such a document as a record."""
    return RECORD.validate_json(json.dumps(document))


def a_failed_record(status: str = "failed", reason: str = "it broke", **values: Any) -> dict[str, Any]:
    """A record of a run whose only rank ended before its first step."""
    rank = a_rank(status=status, reason=reason, step_seconds=[], losses=[], eval_losses=[], stopped_by=None)
    return a_record(ranks=[rank], status=status, reason=reason, **values)


def a_score(**values: Any) -> dict[str, Any]:
    """A score of 10 examples."""
    return {
        "task": "text2sql",
        "examples": 10,
        "executable": 8,
        "exact_match": 0.5,
        "logical_form_accuracy": 0.6,
        "execution_accuracy": 0.75,
        "intervals": {"execution_accuracy": [0.5, 1.0]},
        "groups": None,
        **values,
    }


def write_run(folder: Path, record: dict[str, Any] | str, **files: dict[str, Any]) -> Path:
    """Write a run folder with its record, and other files: `score_test` becomes `score.test.json`."""
    folder.mkdir(parents=True)
    text = record if isinstance(record, str) else json.dumps(record)
    (folder / "record.json").write_text(text)
    for name, document in files.items():
        (folder / f"{name.replace('_', '.')}.json").write_text(json.dumps(document))
    return folder


def a_run(
    folder: Path,
    technique: str | None = None,
    pods: int = 1,
    seconds: float = 0.8,
    *,
    mebibytes: int = 8,
    **values: Any,
) -> Path:
    """A run with steps of 48 samples and `seconds` each, whose states take `mebibytes` MiB in each process.

    Args:
        values: keys of the record; `rank`, what each rank measured; `score_test` and `score_dev`, its scores.
    """
    live = {"parameters": mebibytes * MIB, "gradients": 0, "optimizer": 0}
    given = {"step_seconds": [seconds] * 20, "live_bytes": live, **values.pop("rank", {})}
    scores = {name: values.pop(name) for name in ("score_test", "score_dev") if name in values}
    own = {} if technique is None else {"technique": technique}
    ranks = [a_rank(number, **given) for number in range(pods)]
    record = {"ranks": ranks, "pods": pods, "run_id": str(folder), "effective_batch_size": 48, **own, **values}
    return write_run(folder, a_record(**record), **scores)
