"""How many real tokens a rank trained on, by the task of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ONE_TEXT = ("squad", "lm")
"""Tasks whose row is one text: the tokens that carry a loss are among those that were read."""


def real_tokens(rank: Mapping[str, Any], task: str) -> int:
    """Tokens without padding, over the steps that were timed: source and target, or all of a text."""
    return rank["source_tokens"] + (0 if task in ONE_TEXT else rank["target_tokens"])
