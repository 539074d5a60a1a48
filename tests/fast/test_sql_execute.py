"""Queries on a table of four rows, by the official evaluator's rules."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropods.data.wikisql import Table, read_split
from zeropods.sql.execute import Execution, Rows, execute, is_usable, matching_rows, number
from zeropods.sql.query import Condition, Query

TABLE = Table(
    id="t",
    header=("Name", "Goals", "Crowd"),
    types=("text", "real", "real"),
    rows=(("Ann", 3, "1,200"), ("Bob", 5, 900), ("ann", 5.5, None), ("Čech", -1, "unknown")),
)


@pytest.mark.parametrize(
    ("query", "result"),
    [
        (Query(0, 0), ["ann", "bob", "ann", "čech"]),
        (Query(1, 0, (Condition(0, 0, "ANN"),)), [3.0, 5.5]),
        (Query(0, 0, (Condition(0, 0, "ČECH"),)), ["čech"]),
        (Query(1, 1), [5.5]),
        (Query(1, 2), [-1.0]),
        (Query(1, 3), [4]),
        (Query(2, 3), [3]),
        (Query(1, 4), [12.5]),
        (Query(1, 5), [3.125]),
        (Query(0, 0, (Condition(1, 1, "3"),)), ["bob", "ann"]),
        (Query(0, 0, (Condition(1, 2, "3"),)), ["čech"]),
        (Query(0, 0, (Condition(1, 1, "0"), Condition(1, 2, "5"))), ["ann"]),
        (Query(0, 0, (Condition(2, 0, "1,200"),)), ["ann"]),
        (Query(0, 0, (Condition(2, 0, "1200 people"),)), ["ann"]),
        (Query(1, 0, (Condition(0, 0, "nobody"),)), []),
        (Query(1, 1, (Condition(0, 0, "nobody"),)), [None]),
    ],
)
def test_result_is_the_hand_computed_one(query, result):
    assert execute(query, TABLE) == result


@pytest.mark.parametrize("value", ["many", "", "nan", "'; DROP TABLE cells; --", "\ud800", "\0", "−"])
def test_value_without_a_number_matches_no_cell_of_a_real_column(value):
    assert execute(Query(0, 0, (Condition(1, 0, value),)), TABLE) == []


@pytest.mark.parametrize("value", ["' OR 1=1 --", '" OR "col0', "\ud800", "\0", "%"])
def test_odd_text_value_is_only_a_value(value):
    assert execute(Query(0, 0, (Condition(0, 0, value),)), TABLE) == []


@pytest.mark.parametrize(
    "query",
    [
        Query(3, 0),
        Query(-1, 0),
        Query(0, 0, (Condition(7, 0, "x"),)),
        Query(0, 0, (Condition(0, 3, "x"),)),
        Query(0, 0, (Condition(0, 0, "x"),) * 2_000),
    ],
)
def test_query_that_cannot_run_has_no_result(query):
    assert execute(query, TABLE) is None
    assert matching_rows(query, TABLE) is None


def test_sum_beyond_64_bits_has_no_result():
    table = Table("t", ("N",), ("text",), ((str(2**63 - 1),),) * 2)
    assert execute(Query(0, 4), table) is None


def test_equal_and_odd_column_names_do_not_matter():
    table = Table("t", ('a"b', 'A"B', ""), ("text",) * 3, (("x", "y", "z"),))
    assert execute(Query(1, 0, (Condition(2, 0, "z"),)), table) == ["y"]


def test_one_execution_serves_many_queries():
    with closing(Execution(TABLE)) as execution:
        counts = [execution.execute(Query(0, 3, (Condition(1, 1, str(goals)),))) for goals in range(-2, 7)]
    assert counts == [[4], [3], [3], [3], [3], [2], [2], [1], [0]]


def test_matching_rows_keep_their_spelling_and_order():
    assert matching_rows(Query(1, 4, (Condition(0, 0, "ANN"),)), TABLE) == Rows(
        ("Name", "Goals", "Crowd"), (("Ann", 3, "1,200"), ("ann", 5.5, None))
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3.0),
        ("-3.5", -3.5),
        ("−0.247", -0.247),
        ("1,234,567", 1_234_567.0),
        ("2e3", 2_000.0),
        (".5", 0.5),
        ("12.5 km (7.8 mi)", 12.5),
        ("n·m @ 4,800", 4_800.0),
        ("about -5", 5.0),
        ("none", None),
        ("", None),
    ],
)
def test_number_is_the_whole_text_or_the_first_in_it(text, expected):
    assert number(text) == expected


@given(st.text())
def test_any_value_executes_on_any_column(value):
    for column in range(3):
        assert execute(Query(0, 0, (Condition(column, 0, value),)), TABLE) is not None


@pytest.mark.parametrize(
    ("agg", "result", "usable"),
    [
        (0, ["x"], True),
        (0, [None, "x"], True),
        (0, [0.0], True),
        (0, [], False),
        (1, [None], False),
        (4, [0.0], True),
        (3, [2], True),
        (3, [0], False),
        (0, None, False),
    ],
)
def test_result_is_usable_where_it_found_something(agg, result, usable):
    assert is_usable(Query(0, agg), result) is usable


@pytest.mark.parametrize(("split", "count"), [("dev", 1_935)])
def test_usable_examples_are_exactly_the_listed_ones(shared_data, split, count):
    folder = shared_data / "wikisql"
    listed = json.loads((folder / f"{split}.executable.json").read_text())
    examples = [example for example in read_split(folder, split) if example.table.rows]
    examples.sort(key=lambda example: example.table.id)
    usable = []
    for _, group in groupby(examples, key=lambda example: example.table.id):
        usable += _usable(list(group))
    assert len(usable) == count
    assert sorted(usable) == sorted(listed)


def _usable(examples):
    with closing(Execution(examples[0].table)) as execution:
        return [each.index for each in examples if is_usable(each.query, execution.execute(each.query))]
