"""A visitor's query: bounded, read-only, and shown as text."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from zeropods.data.wikisql import Table
from zeropods.demo.answering import Answer, BoundedExecution, checked, run_query
from zeropods.demo.page import SHOWN_ROWS, answers_html, message_html, preview_html, spans
from zeropods.errors import UserError
from zeropods.sql.query import Condition, Query
from zeropods.sql.text import format_query

CATS = Table("cats", ("Name", "Age"), ("text", "real"), (("Tom", 3), ("Kit", 5), ("<b>Mia</b>", 2)))
OLDEST = Query(0, 0, (Condition(1, 1, "4"),))
ATTACK = "<script>alert(1)</script>"


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM cells", "DROP TABLE cells", "INSERT INTO cells VALUES (1, 2)", "CREATE TABLE more (a)",
        "ATTACH ':memory:' AS more", "PRAGMA query_only = OFF", "SELECT * FROM sqlite_master", "VACUUM",
    ],
)  # fmt: skip
def test_the_database_refuses_all_but_reading_its_table(statement: str) -> None:
    with closing(BoundedExecution(CATS)) as execution, pytest.raises(sqlite3.DatabaseError):
        execution._database.execute(statement)


def test_a_query_that_takes_too_long_is_stopped() -> None:
    many = Table("many", ("N",), ("real",), tuple((n,) for n in range(10_000)))
    with closing(BoundedExecution(many, seconds=0.0)) as execution:
        assert execution.execute(Query(0, 1)) is None
        assert execution.overdue


def test_selected_cells_keep_their_own_spelling() -> None:
    assert run_query(OLDEST, CATS).cells == ["Kit"]


def test_what_is_right_is_decided_without_letter_case() -> None:
    assert run_query(OLDEST, CATS).executed == ["kit"]


def test_values_that_look_like_sql_are_values() -> None:
    assert run_query(Query(0, 3, (Condition(0, 0, "'; DROP TABLE cells; --"),)), CATS).cells == [0]


@pytest.mark.parametrize("question", [None, "", "   ", "\x00\x07", "?!"])
def test_an_empty_question_is_asked_for(question: str | None) -> None:
    with pytest.raises(UserError, match="no question yet"):
        checked(question)


def test_a_question_of_100_000_characters_is_refused_with_its_length() -> None:
    with pytest.raises(UserError, match="100,000 characters"):
        checked("x" * 100_000)


def test_control_characters_and_halves_of_characters_are_dropped() -> None:
    assert checked(" how\x00 \x1b[31mmany\ud800 cats\n\u202e") == "how [31mmany cats"


def test_the_marked_parts_are_the_readable_query() -> None:
    query = Query(1, 1, (Condition(0, 0, "Tom"), Condition(1, 2, "4")))
    assert " ".join(text for text, _ in spans(query, CATS.header)) == format_query(query, CATS.header)


def answered(question: str = "Who is oldest?", right: bool | None = True) -> str:
    found = run_query(Query(0, 0, (Condition(0, 0, ATTACK),)), CATS)
    expected = run_query(OLDEST, CATS)
    answer = Answer(found=found, generated_seconds=0.1, expected=expected, right=right)
    return answers_html(question, [(ATTACK, answer), ("other", ATTACK)], CATS.header)


def test_nothing_of_others_is_markup() -> None:
    shown = answered(ATTACK) + preview_html(CATS, ATTACK) + message_html(ATTACK)
    assert "<script" not in shown and "<b>" not in shown
    assert "&lt;script&gt;" in shown and "&lt;b&gt;Mia" in shown


def test_right_and_wrong_are_said_in_words() -> None:
    assert "✓ right" in answered() and "✗ wrong" in answered(right=False)


def test_rows_beyond_the_limit_are_counted() -> None:
    many = Table("many", ("N",), ("real",), tuple((n,) for n in range(1_234)))
    answer = Answer(found=run_query(Query(0, 0), many), generated_seconds=0.1, expected=None, right=None)
    shown = answers_html("All?", [("m", answer)], many.header)
    assert f"first {SHOWN_ROWS} of 1,234 rows" in shown and "and 1,222 more" in shown
    assert shown.count("<tr>") == SHOWN_ROWS + 1
