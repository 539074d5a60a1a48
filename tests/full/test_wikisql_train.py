"""What the fast lane shows of WikiSQL's dev split, of its seven times larger train split."""

from __future__ import annotations

from pathlib import Path

from tests.fast import test_sql


def test_usable_examples_of_train_are_exactly_the_listed_ones(shared_data: Path) -> None:
    test_sql.test_usable_examples_are_exactly_the_listed_ones(shared_data, "train", 45_281)


def test_every_query_of_train_survives_the_round_trip(shared_data: Path) -> None:
    test_sql.test_every_real_query_survives_the_round_trip(shared_data, "train", 56_355)
