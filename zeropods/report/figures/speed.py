"""Time and rates of a run. A rate is of all ranks together."""

from __future__ import annotations

from statistics import mean

from zeropods.measure.tokens import real_tokens
from zeropods.report.figures.ranks import Record, largest, longest, of_ranks


def duration_seconds(record: Record) -> float | None:
    """Seconds from a process's start to its end, of the slowest rank: start-up, steps, evaluation and saving.

    None for a run that was resumed: nobody has measured all of it.
    """
    return None if is_resumed(record) else largest(record, "wall_seconds")


def start_seconds(record: Record) -> float | None:
    """Seconds from a process's start to its first step, of the slowest rank."""
    return largest(record, "start_seconds")


def evaluate_seconds(record: Record) -> float | None:
    """Seconds of all evaluations, of the slowest rank."""
    return longest(record, "evaluate_seconds")


def save_seconds(record: Record) -> float | None:
    """Seconds of all saving, of the slowest rank."""
    return longest(record, "save_seconds")


def is_resumed(record: Record) -> bool:
    """Whether the last attempt, the one that was measured, went on from an earlier one's checkpoint."""
    return any(rank["first_step"] > 0 for rank in record["ranks"])


def samples(record: Record) -> int:
    """Training rows of all ranks in the steps of this attempt: rows x passes x steps, summed over ranks."""
    a_step = record["per_device_train_batch_size"] * record["gradient_accumulation_steps"]
    return sum(a_step * len(rank["step_seconds"]) for rank in record["ranks"])


def tokens_per_sample(record: Record) -> tuple[float, float] | None:
    """Mean real tokens of a training row: tokens of all ranks / `samples`; None without a count.

    Source and target; of a causal model all tokens, and those with a loss, which are among them.
    """
    rows = samples(record)
    source, target = (sum(rank[f"{side}_tokens"] for rank in record["ranks"]) for side in ("source", "target"))
    return (source / rows, target / rows) if rows and source + target else None


def tokens_per_second(record: Record) -> float | None:
    """Real tokens a second, no padding: samples/s x mean real tokens a sample, of T5 both sides."""
    rate, rows = record["samples_per_second"], samples(record)
    tokens = sum(real_tokens(rank, record["task"]) for rank in record["ranks"])
    return None if rate is None or not tokens else rate * tokens / rows


def padding_share(record: Record) -> float | None:
    """Share of 1 of what was computed that was padding: 1 - real tokens / tokens with padding, of all ranks."""
    padded = sum(rank["padded_tokens"] for rank in record["ranks"])
    real = sum(real_tokens(rank, record["task"]) for rank in record["ranks"])
    return 1 - real / padded if padded else None


def evaluation_samples_per_second(record: Record) -> float | None:
    """Rows of the dev split / mean seconds of an evaluation, of the slowest rank."""
    seconds, rows = of_ranks(record, "evaluate_seconds"), record["dev_rows"]
    if not rows or not seconds or not all(seconds):
        return None
    slowest = max(map(mean, seconds))
    return rows / slowest if slowest else None
