"""A plan as people read it: techniques, what to choose, every term, published runs beside it.

All from the document of `zeropods plan --json`, so that what is printed is what is stored.
"""

from __future__ import annotations

from typing import Any

from zeropods.plan.term import PARTS
from zeropods.report.table import Table

GIB = 1 << 30
Document = dict[str, Any]


def techniques(plan: Document) -> Table:
    """A line for each technique: memory of a GPU in GiB, of a pod's host, largest batch, time."""
    request = plan["request"]
    title = (
        f"{request['model']}: {request['batch_size']} rows of {_tokens(request)} tokens a process, "
        f"{request['precision']}, on GPUs of {gib(request['gpu_memory_bytes'])} GiB"
    )
    return Table.of([_technique(estimate, plan) for estimate in plan["techniques"]], title)


def name(estimate: Document) -> str:
    """A technique, with the way of training where a plan compares some: `zero3, sdpa, checkpointing`."""
    return ", ".join((estimate["technique"], *_way(estimate)))


def choice(plan: Document) -> str:
    """What to choose, in a line or two."""
    wanted = {"technique": plan["best"], **plan["best_labels"]}
    best = next((each for each in plan["techniques"] if wanted.items() <= each.items()), None)
    if best is None:
        rows = max((estimate["largest_batch_size"] or 0 for estimate in plan["techniques"]), default=0)
        remedy = f"a batch of {rows} would" if rows else "no batch does: try bf16, more pods, gradient checkpointing"
        return f"None fits; {remedy}."
    where = "one process on one pod" if best["technique"] == "none" else f"{best['pods']} pods of {best['slots']}"
    speed = f"{rate(best['samples_per_second'])} samples/s"
    alone = "\nThe row none is one process on one pod, whatever --pods says." if _has_none(plan) else ""
    return f"Choose {name(best)}: of those that fit the fastest, {speed} on {where}.{alone}\n"


def reference(plan: Document) -> Table:
    """Published runs of this model beside the plan, each with how they differ."""
    return Table.of(
        [_reference(row) for row in plan["reference"]],
        "Published on A100-40GB pods, and planned with the settings published",
    )


def terms(plan: Document, technique: str | None = None) -> Table:
    """Every term with its formula, of all techniques or of one; of one process."""
    chosen = [each for each in plan["techniques"] if technique in (None, each["technique"])]
    lines = [
        {
            "technique": name(each),
            "where": where,
            "part": term["part"],
            "what": term["name"],
            "GiB": gib(term["bytes"]),
            "formula": term["formula"],
        }
        for each in chosen
        for where, key in (("GPU", "terms"), ("host", "host_terms"))
        for term in each[key]
    ]
    return Table.of(lines, "Every term, of one process")


def gib(size: float) -> str:
    """Bytes in GiB, as people read them."""
    shown = size / GIB
    return f"{shown:.2f}" if shown >= 1 else f"{shown:.3g}"


def rate(value: float) -> str:
    """A rate in digits that count, without an exponent."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _technique(estimate: Document, plan: Document) -> dict[str, str]:
    line = {"technique": estimate["technique"], **_labels(estimate), "fits": "yes" if estimate["fits"] else "no"}
    line |= {part: gib(estimate["bytes"][part]) for part in (*PARTS, "total")}
    line |= {
        "host": gib(estimate["host_bytes"]),
        "largest batch": str(estimate["largest_batch_size"] or "none"),
        "step (s)": f"{estimate['step_seconds']:.3g}",
        "samples/s": rate(estimate["samples_per_second"]),
    }
    if "attention" in estimate:
        line["tokens/s"] = rate(estimate["tokens_per_second"])
    if estimate["total_seconds"] is not None:
        line["hours"] = f"{estimate['total_seconds'] / 3600:.2f}"
    if estimate["cost_per_million_samples"] is not None:
        line["cost of 1 M samples"] = f"{estimate['cost_per_million_samples']:.2f}"
    if estimate["cost"] is not None:
        line["cost"] = f"{estimate['cost']:.2f}"
    return line


def _labels(estimate: Document) -> dict[str, str]:
    if "attention" not in estimate:
        return {}
    return {
        "attention": estimate["attention"],
        "checkpointing": "yes" if estimate["gradient_checkpointing"] else "no",
    }


def _way(estimate: Document) -> list[str]:
    if "attention" not in estimate:
        return []
    return [estimate["attention"], *(["checkpointing"] if estimate["gradient_checkpointing"] else [])]


def _tokens(request: Document) -> str:
    if "seq_length" in request:
        return f"{request['seq_length']}"
    return f"{request['source_length']} + {request['target_length']}"


def _reference(row: Document) -> dict[str, str]:
    low, high = row["gigabytes_a_pod_low"], row["gigabytes_a_pod_high"]
    seconds = row["published_step_seconds"]
    return {
        "technique": row["technique"],
        "pods": str(row["pods"]),
        "published GB": f"{low:g}" if low == high else f"{low:g}-{high:g}",
        "planned GB": f"{row['planned_gigabytes']:.1f}",
        "published step (s)": "" if seconds is None else f"{seconds:.3g}",
        "planned step (s)": f"{row['planned_step_seconds']:.3g}",
        "memory": row["remark"],
    }


def _has_none(plan: Document) -> bool:
    return plan["request"]["machines"]["pods"] > 1 and any(e["technique"] == "none" for e in plan["techniques"])
