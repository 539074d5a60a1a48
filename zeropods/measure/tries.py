"""Ways of training that were tried for some steps by `zeropods plan --tune`: how each ended, kept
in a file, so that later plans for the same GPUs know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zeropods import files
from zeropods.measure.record import STRICT, Count
from zeropods.plan.estimate import Span, SpanOfRuns
from zeropods.plan.gpus import words
from zeropods.plan.workload import Workload, ZeroSettings

TRIES = "tries.json"
"""Name of their file, in the folder of all clusters."""
MEND = "remove the file, and tune again"
"""Remedy for a file that cannot be read."""
OK, OUT_OF_MEMORY = "ok", "oom"
"""Statuses of records that say whether a way fits."""


@dataclass(frozen=True, kw_only=True)
class TriedWay:
    """What makes two tries the same way of training, apart from the rows of a pass and their
    lengths."""

    __pydantic_config__ = STRICT

    family: str
    parameters: Count
    technique: str
    precision: str
    attention: str
    checkpointing: bool
    ranks: Count
    accumulates: bool
    """Whether a step has several passes, whose gradients are kept."""
    secondary_ranks: Count = 1
    """Number of processes, those of a pod, among which ZeRO++ divides parameters a second time."""

    @classmethod
    def of(cls, work: Workload) -> TriedWay:
        """The way of a workload."""
        return cls(
            family=work.shape.family,
            parameters=work.shape.parameters,
            technique=work.technique.name,
            precision=work.precision,
            attention=work.attention,
            checkpointing=work.checkpointing,
            ranks=work.ranks,
            accumulates=work.gradient_accumulation > 1,
            secondary_ranks=work.zero.secondary_ranks,
        )


@dataclass(frozen=True, kw_only=True)
class Try:
    """One way of training with a batch, and how it ended."""

    __pydantic_config__ = STRICT

    way: TriedWay
    rows: Count
    """Rows of a pass of one process."""
    passes: Count
    """Passes of a step."""
    tokens: Count
    """Tokens of a row, padding included; for a T5, of its source. Where memory was not enough they
    are the most that a row of the data may have, as are the labels."""
    labels: Count
    """Tokens of a row with a loss; for a T5, of its target."""
    gpu: str | None
    """Name of the GPU; None where it ran without one, so that no plan uses it."""
    gpu_memory_bytes: Count
    """Memory of one GPU: what the plan was made with, or what is published where the try ran on
    another GPU."""
    status: str
    reason: str | None
    step_seconds: float | None
    """Median seconds of a step after warm-up, of the slowest rank."""
    planned_step_seconds: float
    planned_bytes: Count
    folder: str
    """The run folder, or where it should have been."""

    @property
    def what_was_tried(self) -> tuple[object, ...]:
        """What must be equal for a later try to replace this one."""
        return (self.way, self.rows, self.passes, self.gpu, self.gpu_memory_bytes)

    @property
    def samples_per_second(self) -> float | None:
        """Rows of all processes per second; None where no step was measured."""
        if not self.step_seconds:
            return None
        return self.way.ranks * self.rows * self.passes / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class _File:
    """What the file holds."""

    __pydantic_config__ = STRICT

    tries: list[Try]


def kept_tries(folder: Path) -> list[Try]:
    """The tries that are kept in this folder, the oldest first; `UserError` says what is wrong with
    their file."""
    path = folder / TRIES
    if not path.is_file():
        return []
    return files.validated(_File, path, path.read_bytes(), MEND).tries


def keep(tried: Try, folder: Path) -> Path:
    """Write a try into the file of tries in this folder, in place of an earlier one of the same
    way, batch and GPU; returns the file."""
    others = []
    for other in kept_tries(folder):
        if other.what_was_tried != tried.what_was_tried:
            others.append(other)
    path = folder / TRIES
    files.write_json(path, asdict(_File(tries=[*others, tried])))
    return path


def tries_on(gpu: str, tries: Sequence[Try]) -> list[Try]:
    """The tries on GPUs that a name means: those whose own names have all of its words."""
    return [tried for tried in tries if tried.gpu and words(gpu) <= words(tried.gpu)]


def span_with_tries(tries: Sequence[Try], of_runs: SpanOfRuns | None) -> SpanOfRuns:
    """What tries have shown of memory, and what runs have shown where tries say nothing.

    A way that ran needs no more memory than there was, nor does it with fewer and shorter rows; one
    that ran out of memory needs more than there was, and so it does with more and longer rows.

    Args:
        tries: those on GPUs of the kind that is planned for.
        of_runs: what finished runs have shown; None where nothing is known of any.
    """

    def span(work: Workload, quantity: str, planned: float) -> Span | None:
        if quantity == "memory":
            needed = _tried_memory(tries, work, planned)
            if needed is not None:
                return Span(low=needed, high=needed, most=needed)
        return None if of_runs is None else of_runs(work, quantity, planned)

    return span


def _tried_memory(tries: Sequence[Try], work: Workload, planned: float) -> float | None:
    """Bytes that a workload needs, as far as tries say; None where none says anything.

    They are the planned ones, but no more than a GPU had on which the same way ran with a batch
    that was as large or larger, and at least one byte more than a GPU had on which it ran out of
    memory with one that was as small or smaller.
    """
    if not _is_trained_as_tries(work):
        return None
    way = TriedWay.of(work)
    sizes = (work.batch_size, work.tokens, work.labels)
    needed = planned
    is_known = False
    for tried in tries:
        if tried.way != way:
            continue
        tried_sizes = (tried.rows, tried.tokens, tried.labels)
        differences = [
            size - tried_size for size, tried_size in zip(sizes, tried_sizes, strict=True)
        ]
        is_at_most_as_large = max(differences) <= 0
        is_at_least_as_large = min(differences) >= 0
        if tried.status == OK and is_at_most_as_large:
            needed = min(needed, tried.gpu_memory_bytes)
            is_known = True
        elif tried.status == OUT_OF_MEMORY and is_at_least_as_large:
            needed = max(needed, tried.gpu_memory_bytes + 1)
            is_known = True
    return needed if is_known else None


def _is_trained_as_tries(work: Workload) -> bool:
    """Whether a workload is trained as tries are: without what can only be planned, such as an
    adapter, and with ZeRO's default settings but for `secondary_ranks`, which `TriedWay` has."""
    settings_of_tries = ZeroSettings(secondary_ranks=work.zero.secondary_ranks)
    return not work.method.planned_only and work.zero == settings_of_tries
