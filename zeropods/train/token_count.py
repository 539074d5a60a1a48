"""Tokens of a step, counted without waiting for the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeropods.measure.rank import BatchShape
from zeropods.train.step_clock import Tokens


class TokenCount:
    """Counts the forward passes of this rank, step by step."""

    def __init__(self, joint: bool = False) -> None:
        """`joint`: a row is one text, of which some tokens carry a loss; else it is a source and a target."""
        self.joint = joint
        self.largest: BatchShape | None = None
        """The pass with the most tokens, padding included."""
        self._source: int | Tensor = 0
        self._target = 0
        self._padded = 0

    def add(self, inputs: dict[str, Any]) -> None:
        """Count a forward pass of a collator's batch. Without a mask no token of it is padding."""
        (rows, source), target = inputs["input_ids"].shape, 0 if self.joint else inputs["labels"].shape[1]
        mask = inputs.get("attention_mask")
        self._source = self._source + (rows * source if mask is None else mask.sum())
        self._target += inputs["label_positions"].numel()
        self._padded += rows * (source + target)
        if self.largest is None or rows * (source + target) > _tokens(self.largest):
            self.largest = BatchShape(rows=rows, source_tokens=source, target_tokens=target)

    def take(self) -> Tokens:
        """The tokens since they were last taken."""
        source = self._source
        if isinstance(source, Tensor):
            # On its way to the CPU; it is there when the step's mark is past.
            source = source.to("cpu", non_blocking=True)
        taken = Tokens(source, self._target, self._padded)
        self._source, self._target, self._padded = 0, 0, 0
        return taken


def _tokens(batch: BatchShape) -> int:
    return batch.rows * (batch.source_tokens + batch.target_tokens)
