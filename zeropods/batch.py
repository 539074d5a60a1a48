"""What each rank contributes to an optimizer step, so that the effective batch is the same on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

ROWS, PASSES = "per_device_train_batch_size", "gradient_accumulation_steps"
"""The flags of a training script that say it."""


@dataclass(frozen=True)
class Batch:
    """The share of one rank in an optimizer step."""

    rows: int
    """Rows per forward pass: `--per_device_train_batch_size`."""
    passes: int
    """Forward passes per step: `--gradient_accumulation_steps`."""

    @property
    def flags(self) -> dict[str, int]:
        """The share as flags of a training script."""
        return {ROWS: self.rows, PASSES: self.passes}


def batch_on(ranks: int, effective: int, most_rows: int) -> Batch | None:
    """The share of each rank in `effective` rows per step; None where these do not divide among so many ranks.

    As many rows per pass as divide the share, and never more than `most_rows`, since more may not fit into memory.
    """
    if not 1 <= ranks <= effective or effective % ranks:
        return None
    share = effective // ranks
    rows = next(rows for rows in range(min(most_rows, share), 0, -1) if share % rows == 0)
    return Batch(rows, share // rows)
