"""What runs differ in besides technique and pods, so that nobody compares what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from zeropods.report.entry import Entry

SHOWN_DIGITS = 12
"""Of the prepared data's content key."""
NOT_RECORDED = "not recorded"
FACTS = (
    "model_id",
    "init",
    "task",
    "prompt",
    "precision",
    "effective_batch_size",
    "gradient_checkpointing",
    "train_rows",
    "steps",
)
TECHNIQUE = {
    "deepspeed",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
}
"""Flags that a technique or a number of pods changes by itself; the effective batch size is compared."""


def differences(entries: Sequence[Entry]) -> list[str]:
    """A line for each thing other than technique and pods in which the runs differ: `what: value (runs)`."""
    known = {entry.name: dict(_compared(entry)) for entry in entries if entry.facts}
    keys = dict.fromkeys(key for facts in known.values() for key in facts)
    lines = []
    for key in keys:
        runs: dict[str, list[str]] = {}
        for name, facts in known.items():
            runs.setdefault(_text(facts.get(key, NOT_RECORDED)), []).append(name)
        if len(runs) > 1:
            lines.append(f"{key}: " + "; ".join(f"{value} ({', '.join(names)})" for value, names in runs.items()))
    return lines


def _compared(entry: Entry) -> Iterator[tuple[str, Any]]:
    facts = entry.facts
    yield from ((key, facts[key]) for key in FACTS if key in facts)
    identity = facts.get("identity", {})
    if "dataset_path" in identity:
        yield "data", str(identity["dataset_path"])[:SHOWN_DIGITS]
    yield from ((key, identity[key]) for key in sorted(identity.keys() - TECHNIQUE - {*FACTS, "dataset_path"}))
    for group in ("hardware", "versions"):
        yield from ((f"{group} {key}", value) for key, value in facts.get(group, {}).items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
