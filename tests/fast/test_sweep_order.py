"""The order of runs: no cell is favoured by a machine that changes with time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from zeropods.sweep.trial import balanced, row


def test_the_rows_of_four_cells_are_those_of_a_williams_design() -> None:
    assert [row(4, repeat) for repeat in (1, 2, 3, 4)] == [(0, 1, 3, 2), (2, 3, 1, 0), (1, 2, 0, 3), (3, 0, 2, 1)]


@pytest.mark.parametrize("cells", [1, 2, 3, 4, 7, 10])
def test_each_repeat_runs_every_cell_once(cells: int) -> None:
    assert all(sorted(row(cells, repeat)) == list(range(cells)) for repeat in range(1, 25))


@pytest.mark.parametrize("cells", [2, 3, 4, 7, 10])
def test_two_repeats_give_each_cell_the_same_mean_place(cells: int) -> None:
    first, second = row(cells, 1), row(cells, 2)
    assert {first.index(cell) + second.index(cell) for cell in range(cells)} == {cells - 1}


@pytest.mark.parametrize(("cells", "repeats"), [(2, 2), (4, 4), (6, 6), (3, 6), (5, 10)])
def test_each_cell_follows_each_other_equally_often(cells: int, repeats: int) -> None:
    followed = Counter(pair for repeat in range(1, repeats + 1) for pair in pairwise(row(cells, repeat)))
    assert len(followed) == cells * (cells - 1) and set(followed.values()) == {repeats // cells}


@pytest.mark.parametrize(("cells", "repeats"), [(2, 2), (4, 4), (6, 6), (3, 6), (5, 10)])
def test_each_cell_has_each_place_equally_often(cells: int, repeats: int) -> None:
    places = Counter(place for repeat in range(1, repeats + 1) for place in enumerate(row(cells, repeat)))
    assert set(places.values()) == {repeats // cells}


def test_more_repeats_go_on_where_fewer_have_ended() -> None:
    assert balanced("abc", 3)[:6] == balanced("abc", 2)


def test_a_sweep_is_in_the_order_of_its_repeats() -> None:
    assert balanced("abc", 2) == [(1, "a"), (1, "b"), (1, "c"), (2, "c"), (2, "b"), (2, "a")]
