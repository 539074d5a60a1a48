"""Constrained decoding: only tokens that lead to a query on the question's table keep their score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor

from zeropods.sql.grammar import QueryAutomaton, State


class ConstrainedSQL(LogitsProcessor):
    """Scores of what the grammar does not allow become minus infinity. For greedy search and beams.

    States are found again from the ids at each step, through remembered transitions, so beams may be
    reordered at will. Rows that have ended are left alone, and so are rows that left the grammar: beam
    search keeps such where fewer tokens than beams are allowed, at a score that never wins.
    """

    def __init__(self, automata: Sequence[QueryAutomaton], begin: int = 1) -> None:
        """Constrain one batch.

        Args:
            automata: one for each question; all have the same number of neighbouring rows (beams).
            begin: how many ids of a row come before the generated text (T5: `<pad>`).
        """
        self._starts = [automaton.start for automaton in automata]
        self._begin = begin

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Mask scores [rows, vocabulary] after ids [rows, length], in place.

        In place, because another tensor of this size costs more than the rest: `generate(output_logits=True)`
        would show masked logits.
        """
        states = self._states(input_ids[:, self._begin :].tolist())
        rows = [row for row, state in enumerate(states) if state is not None]
        if not rows:
            return scores
        allowed = [state.allowed for state in states if state is not None]
        places = np.repeat(rows, [len(ids) for ids in allowed]) * scores.shape[1] + np.concatenate(allowed)
        flat = torch.from_numpy(places).to(scores.device)
        others = [row for row, state in enumerate(states) if state is None]
        kept, left_alone = scores.take(flat), scores[others]
        scores.fill_(-torch.inf)
        scores.put_(flat, kept)
        scores[others] = left_alone
        return scores

    def _states(self, rows: list[list[int]]) -> list[State | None]:
        """The state of each row; None where it has ended or left the grammar."""
        beams, rest = divmod(len(rows), len(self._starts))
        if rest:
            raise ValueError(f"{len(rows)} rows for {len(self._starts)} questions; expected a multiple")
        return [_after(self._starts[number // beams], ids) for number, ids in enumerate(rows)]


def _after(state: State | None, ids: list[int]) -> State | None:
    for id_ in ids:
        if state is None:
            return None
        state = state.next(id_)
    return None if state is None or state.ended else state
