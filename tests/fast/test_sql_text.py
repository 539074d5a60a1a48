"""The readable form of a query, and reading it back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropods.data.wikisql import read_split
from zeropods.sql.query import AGGREGATES, OPERATORS, Condition, Query
from zeropods.sql.text import format_query, parse_query

PLAYERS = ("Player", "NHL team", "Age", "Nationality")

FORMS = [
    (Query(3, 0), "SELECT Nationality FROM table"),
    (Query(2, 1), "SELECT MAX Age FROM table"),
    (Query(0, 0, (Condition(2, 2, "30"),)), "SELECT Player FROM table WHERE Age < 30"),
    (
        Query(3, 3, (Condition(1, 0, "New Jersey Devils"), Condition(2, 1, "30"))),
        "SELECT COUNT Nationality FROM table WHERE NHL team = New Jersey Devils AND Age > 30",
    ),
]


@pytest.mark.parametrize(("query", "text"), FORMS)
def test_query_is_formatted_with_the_names_of_the_header(query, text):
    assert format_query(query, PLAYERS) == text


@pytest.mark.parametrize(("query", "text"), FORMS)
def test_text_is_parsed_to_the_query(query, text):
    assert parse_query(text, PLAYERS) == query


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SELECT",
        "SELECT FROM table",
        "SELECT Height FROM table",
        "SELECT MEDIAN Age FROM table",
        "SELECT Age FROM players",
        "SELECT Age FROM table extra",
        "SELECT Age FROM table WHERE",
        "SELECT Age FROM table WHERE Height = 3",
        "SELECT Age FROM table WHERE Age 3",
        "SELECT Age FROM table WHERE Age >= 3",
        "SELECT Age FROM table WHERE Age =",
        "select Age from table",
        "SELECT Age, Player FROM table",
    ],
)
def test_text_that_is_no_query_on_the_header_is_none(text):
    assert parse_query(text, PLAYERS) is None


@pytest.mark.parametrize(
    ("header", "text", "expected"),
    [
        (("A", "B"), "SELECT A FROM table WHERE A = x AND y", Query(0, 0, (Condition(0, 0, "x AND y"),))),
        (
            ("A", "A AND B"),
            "SELECT A FROM table WHERE A AND B = 1 AND A = 2",
            Query(0, 0, (Condition(1, 0, "1"), Condition(0, 0, "2"))),
        ),
        (("W", "W = L"), "SELECT W FROM table WHERE W = L = 3", Query(0, 0, (Condition(1, 0, "3"),))),
        (
            ("A", "A FROM table WHERE A = 1"),
            "SELECT A FROM table WHERE A = 1 FROM table",
            Query(0, 0, (Condition(0, 0, "1 FROM table"),)),
        ),
        (("Speed", "MAX Speed"), "SELECT MAX Speed FROM table", Query(1, 0)),
        (("Speed", "MAX Speed"), "SELECT MIN Speed FROM table", Query(0, 2)),
        (("Same", "Same"), "SELECT Same FROM table", Query(0, 0)),
    ],
)
def test_of_several_readings_most_conditions_then_longest_names_win(header, text, expected):
    assert parse_query(text, header) == expected


def test_whitespace_is_kept_inside_a_value_only():
    header = ("Rank\u2003", "Distance  run")
    text = " SELECT  Rank FROM table\tWHERE Distance run =   951.750\u2009km \n"
    assert parse_query(text, header) == Query(0, 0, (Condition(1, 0, "951.750\u2009km"),))


def test_name_written_in_compatibility_form_is_recognised():
    assert parse_query("SELECT V2 FROM table WHERE N. = 3", ("V²", "N.")) == Query(0, 0, (Condition(1, 0, "3"),))


@pytest.mark.parametrize("split", ["dev"])
def test_every_real_query_survives_the_round_trip(shared_data, split):
    examples = list(read_split(shared_data / "wikisql", split))
    lost = [each.index for each in examples if not _survives(each.query, each.table.header)]
    assert (len(examples), lost) == ({"train": 56_355, "dev": 8_421}[split], [])


def _survives(query, header):
    return parse_query(format_query(query, header), header) == query


WORDS = st.text(st.sampled_from("abcé²=<"), min_size=1, max_size=4).filter(lambda word: word not in OPERATORS)
HEADERS = st.lists(st.lists(WORDS, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=5, unique=True)
HOSTILE = st.sampled_from(["SELECT", "FROM", "table", "WHERE", "AND", "=", ">", "MAX", "a", "b"])
HOSTILE_TEXT = st.lists(HOSTILE, min_size=1, max_size=6).map(" ".join)


@st.composite
def queries(draw, headers, values):
    header = draw(headers)
    columns = st.integers(0, len(header) - 1)
    conditions = st.builds(Condition, columns, st.integers(0, len(OPERATORS) - 1), values)
    agg = st.integers(0, len(AGGREGATES) - 1)
    return header, draw(st.builds(Query, columns, agg, st.lists(conditions, max_size=4).map(tuple)))


@given(queries(HEADERS, st.lists(WORDS, min_size=1, max_size=3).map(" ".join)))
def test_query_without_keywords_in_its_names_survives_the_round_trip(case):
    header, query = case
    assert _survives(query, header)


@given(queries(st.lists(HOSTILE_TEXT, min_size=1, max_size=4), HOSTILE_TEXT))
def test_any_reading_has_the_same_text_and_no_fewer_conditions(case):
    header, query = case
    text = format_query(query, header)
    read = parse_query(text, header)
    assert read is not None
    assert format_query(read, header) == text
    assert len(read.conds) >= len(query.conds)


@given(st.text(), st.lists(st.text(), max_size=3))
def test_any_text_is_read_or_none(text, header):
    assert isinstance(parse_query(text, header), Query | None)


@pytest.mark.parametrize(
    ("header", "text", "conditions"),
    [
        (
            ("a", "a = a", "a AND a", "a = a AND a"),
            "SELECT a FROM table WHERE a = a" + " AND a = a = a" * 20_000,
            20_001,
        ),
        (
            ["a" + " FROM table WHERE a = a" * n for n in range(100)],
            "SELECT a" + " FROM table WHERE a = a" * 100 + " AND a = a" * 2_000,
            2_001,
        ),
    ],
)
def test_hostile_text_is_read_in_seconds(header, text, conditions):
    started = time.perf_counter()
    assert len(parse_query(text, header).conds) == conditions
    assert time.perf_counter() - started < 10
