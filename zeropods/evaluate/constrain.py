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
            automata: one for each question of the batch; each has the same number of neighbouring rows (beams).
            begin: how many ids of a row come before the generated text (T5: `<pad>`).
        """
        self._starts = [automaton.start for automaton in automata]
        self._begin = begin

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The scores [rows, vocabulary] after the ids [rows, length] so far."""
        states = self._states(input_ids[:, self._begin :].tolist())
        rows = [row for row, state in enumerate(states) if state is not None]
        if not rows:
            return scores
        allowed = [state.allowed for state in states if state is not None]
        row = np.repeat(rows, [len(ids) for ids in allowed])
        flat = torch.from_numpy(row * scores.shape[1] + np.concatenate(allowed)).to(scores.device)
        return _only(flat, rows, scores)

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


def _only(flat: torch.Tensor, rows: list[int], scores: torch.FloatTensor) -> torch.FloatTensor:
    """Scores where only those at `flat` remain in these rows."""
    masked = torch.full_like(scores, -torch.inf)
    masked.view(-1)[flat] = scores.reshape(-1)[flat]
    if len(rows) < len(scores):
        left_alone = sorted(set(range(len(scores))) - set(rows))
        masked[left_alone] = scores[left_alone]
    return masked
