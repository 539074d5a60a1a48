"""What came of a run: losses, accuracy, energy, cost."""

from __future__ import annotations

from typing import Any

from zeropods.report.figures.ranks import Record, of_ranks
from zeropods.report.figures.speed import duration_seconds

JOULES_A_KWH = 3.6e6
SECONDS_AN_HOUR = 3_600
Score = dict[str, Any]


def train_loss(record: Record) -> float | None:
    """The last training loss, nats a label token."""
    return record["losses"][-1]["loss"] if record["losses"] else None


def eval_loss(record: Record) -> float | None:
    """The last evaluation loss, nats a label token."""
    return record["eval_losses"][-1]["loss"] if record["eval_losses"] else None


def energy_joules(record: Record) -> float | None:
    """Joules of all ranks' GPUs from start to end, by NVML's own counters, summed."""
    joules = of_ranks(record, "energy_joules")
    return None if joules is None else sum(joules)


def energy_kwh(record: Record) -> float | None:
    """Kilowatt-hours: joules / 3.6 million."""
    joules = energy_joules(record)
    return None if joules is None else joules / JOULES_A_KWH


def cost(record: Record, price_per_hour: float | None) -> float | None:
    """Price of the run: pods x hours from start to end x price of a pod and hour; None without a price."""
    seconds = duration_seconds(record)
    if seconds is None or price_per_hour is None:
        return None
    return record["pods"] * seconds / SECONDS_AN_HOUR * price_per_hour


def inference_result(score: Score | None) -> tuple[str, float] | None:
    """What a run is judged by, and its name: of SQuAD F1, of text perplexity, of text-to-SQL execution accuracy; where
    no query could be run, logical form."""
    if score is None:
        return None
    if score.get("task") == "squad":
        return "F1", score["f1"]
    if score.get("task") == "lm":
        return "perplexity", score["perplexity"]
    if score["execution_accuracy"] is not None:
        return "execution", score["execution_accuracy"]
    return "logical form", score["logical_form_accuracy"]
