"""Perplexity of a text: what a causal language model's score is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zeropods.atomic import write_json
from zeropods.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """How well a text is predicted, token by token."""

    task: str = field(default="lm", init=False)
    tokens: int
    """Tokens that were predicted: all of a dev or test split but the first."""
    loss: float
    """Mean, nats a token."""
    perplexity: float
    """exp(loss): as unsure as a choice among so many equally likely tokens. It is of a tokenizer's tokens: models with
    different tokenizers cannot be compared by it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def text_score(loss_sum: float, tokens: int) -> TextScore:
    """The score of a text.

    Args:
        loss_sum: nats of all predicted tokens together.

    Raises:
        UserError: no tokens, or a loss that is not finite or beyond what a number can hold as perplexity.
    """
    if tokens < 1:
        raise UserError(f"perplexity of {tokens} tokens; expected a text of at least two tokens")
    loss = loss_sum / tokens
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    if not math.isfinite(perplexity):
        raise UserError(f"perplexity: a loss of {loss:.4g} nats a token over {tokens} tokens; the model is broken")
    return TextScore(tokens=tokens, loss=loss, perplexity=perplexity)


def write_perplexity(folder: Path, split: str, *, loss_sum: float, tokens: int) -> TextScore:
    """Write `score.SPLIT.json` of a run folder; it appears whole.

    Args:
        loss_sum: nats of all predicted tokens of the split together, over all ranks.
        tokens: how many they are.

    Raises:
        UserError: as `text_score`.
    """
    score = text_score(loss_sum, tokens)
    write_json(Path(folder) / f"score.{split}.json", score.to_json())
    return score
