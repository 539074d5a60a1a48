"""In which order cells are run, so that a machine that becomes slower with time favours none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced(cells: Sequence[T], repeats: int) -> list[tuple[int, T]]:
    """Repeats, counted from 1, with their cells, in the order in which they are run.

    Each repeat runs every cell once. Repeats come in pairs: a row of a Williams design (Williams 1949,
    Aust. J. Sci. Res. A 2, 149-168), and the same row backwards. After every pair, the mean place of all cells is
    the same, so that a steady drift cancels out. After as many repeats as there are cells (twice as many where
    their number is odd), each cell has had each place equally often, and has followed each other cell equally often.
    The order of a repeat does not depend on how many follow: more repeats go on where fewer have ended.
    """
    return [(repeat, cells[place]) for repeat in range(1, repeats + 1) for place in row(len(cells), repeat)]


def row(cells: int, repeat: int) -> tuple[int, ...]:
    """The order of the cells 0 ... cells - 1 in one repeat, counted from 1."""
    shift, backwards = divmod(repeat - 1, 2)
    forwards = tuple((place + shift) % cells for place in _first_row(cells))
    return forwards[::-1] if backwards else forwards


def _first_row(cells: int) -> tuple[int, ...]:
    """0, 1, n - 1, 2, n - 2 ...: all differences between neighbours are different, modulo n."""
    return tuple((place + 1) // 2 if place % 2 else -(place // 2) % cells for place in range(cells))
