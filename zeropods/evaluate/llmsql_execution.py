"""Execution accuracy on LLMSQL, by the rules of its own evaluator.

They are those of the package llmsql 0.1.16 (`evaluation/evaluate.py`, `utils/evaluation_utils.py`
and `utils/regex_extractor.py`; MIT licence), written anew: an answer is a text, from which up to
ten statements are taken; it is right if one of them returns the rows of the gold statement, in any
order. Rows are compared as SQLite returns them: `2` and `2.0` are equal, `2` and `'2'` are not, nor
are texts in another letter case. No result is left out, be it empty, a lone NULL or a count of 0.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import Field

from zeropods.data.llmsql import DATABASE_FILE, FETCH, SQLQuestion
from zeropods.errors import UserError
from zeropods.files import first_line, no_file, validated_lines, write_text
from zeropods.measure.intervals import score_interval
from zeropods.measure.score_json import QueryScore
from zeropods.sql.query import Query
from zeropods.sql.statement import query_of_statement
from zeropods.sql.table import SQLTable

EVALUATOR = "llmsql 0.1.16"
LLMSQL_EXECUTION = "llmsql_execution"
"""Name of the accuracy among the measures that a score has besides those of its task."""
MOST_STATEMENTS = 10
"""Number of statements that are taken from one answer."""
SELECT = re.compile("SELECT", re.IGNORECASE)
STATEMENT_IN_TEXT = re.compile(r"SELECT\b.*?(?=;|\n{4}|```|\Z)", re.IGNORECASE | re.DOTALL)
"""A statement ends at a semicolon, three blank lines, a fence of Markdown or the end."""
PLACEHOLDERS = ("FROM 'Table'", 'FROM "Table"', "FROM Table")
"""What stands for the question's table in an answer, in the order in which it is replaced."""
SECONDS_AT_MOST = 60.0
"""Time after which a statement counts as one that fails. The package has no limit."""
STEPS_BETWEEN_LOOKS = 100_000
"""Number of SQLite's instructions between two looks at the clock."""
FAILURES = (sqlite3.Error, sqlite3.Warning, TypeError, ValueError)
"""What a statement may fail with. A `TypeError` comes from rows that Python cannot sort, such as a
NULL and a text in one column: the package counts them as failed, and so do we."""
Rows = list[tuple[str | int | float | bytes | None, ...]]
LONE_NULL: Rows = [(None,)]
MEND_COMPLETIONS = "correct it, or write the file again"


@dataclass(frozen=True, kw_only=True)
class LLMSQLScore:
    """The counts of the evaluator's report, by the names that they have there."""

    evaluator: str = EVALUATOR
    total: int
    """Number of answers, those to questions `beyond_form` included."""
    matches: int
    """Number of right answers."""
    accuracy: float
    pred_none: int
    """Number of statements in answers that return a lone NULL."""
    gold_none: int
    """Number of questions whose gold statement returns a lone NULL."""
    sql_errors: int
    """Number of statements in answers that fail."""
    beyond_form: int
    """Number of questions that count as wrong since they were not asked: their gold statement is
    not of WikiSQL's form."""


@dataclass(frozen=True, kw_only=True)
class LLMSQLQueryScore(QueryScore):
    """The score of queries on LLMSQL: by WikiSQL's rules, and by LLMSQL's."""

    llmsql: LLMSQLScore


@dataclass(frozen=True)
class _Verdict:
    """What the evaluator finds of one answer; the counts add up to those of `LLMSQLScore`."""

    is_right: bool
    is_gold_none: bool
    pred_none: int
    sql_errors: int


NOT_ASKED = _Verdict(is_right=False, is_gold_none=False, pred_none=0, sql_errors=0)
"""The verdict on a question `beyond_form`, which counts as wrong."""


def statements_in(answer: str) -> list[str]:
    """The statements of an answer, each once; one begins wherever the word SELECT does."""
    statements: list[str] = []
    for start in SELECT.finditer(answer):
        match = STATEMENT_IN_TEXT.search(answer, start.start())
        if match is not None and match[0].strip() not in statements:
            statements.append(match[0].strip())
    return statements[:MOST_STATEMENTS]


def on_table(statement: str, table_id: str) -> str:
    """The statement with the table's own name in place of a placeholder."""
    for placeholder in PLACEHOLDERS:
        statement = statement.replace(placeholder, f'FROM "{table_id}"')
    return statement.strip()


class Database:
    """LLMSQL's tables, which statements can read and not change; `close` frees them."""

    def __init__(self, path: Path, seconds: float = SECONDS_AT_MOST) -> None:
        """Open a database.

        Args:
            path: the database's file.
            seconds: time after which a statement fails.

        Raises:
            UserError: there is no such file, or it is no database.
        """
        if not path.is_file():
            raise UserError(f"{path}: {no_file(path)}, and answers are executed on it; {FETCH}")
        self._path = path
        self._seconds = seconds
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            names = self._connection.execute("SELECT name FROM sqlite_master").fetchall()
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise UserError(f"{path}: cannot be read ({first_line(error)}); {FETCH}") from None
        self._names = {name for (name,) in names}

    def close(self) -> None:
        self._connection.close()

    def check_table(self, question: SQLQuestion) -> None:
        """Refuse a question whose table is missing, since no answer to it would be right."""
        if question.table.id not in self._names:
            raise UserError(
                f"{self._path}: has no table {question.table.id!r}, which question "
                f"{question.question_id} is about; {FETCH}"
            )

    def rows(self, statement: str) -> Rows | None:
        """What a statement returns, sorted; None where it fails."""
        deadline = time.monotonic() + self._seconds

        def is_late() -> bool:
            return time.monotonic() > deadline

        # SQLite interrupts the statement as soon as the handler returns true.
        self._connection.set_progress_handler(is_late, STEPS_BETWEEN_LOOKS)
        try:
            return sorted(self._connection.execute(statement).fetchall())
        except FAILURES:
            return None


def with_llmsql(
    score: QueryScore,
    questions: Sequence[SQLQuestion],
    answers: Mapping[int, str],
    questions_path: Path,
) -> LLMSQLQueryScore:
    """A score with the accuracy by LLMSQL's rules.

    Args:
        score: the score by WikiSQL's rules.
        questions: all questions of the split, in order.
        answers: the text of each answer by the index of its question; at least one.
        questions_path: their file, beside which the database lies.

    Raises:
        UserError: the database cannot be read, or lacks a table that is asked about.
    """
    verdicts = []
    beyond_form = 0
    # Answers may be given to the first part of the split only. Questions after the last one that
    # has an answer count neither as right nor as wrong, and so do others without an answer, except
    # those beyond the form, which can have none.
    last = max(answers)
    with closing(Database(questions_path.with_name(DATABASE_FILE))) as database:
        for question in questions[: last + 1]:
            if question.index in answers:
                verdicts.append(_verdict(question, answers[question.index], database))
            elif question.query is None:
                beyond_form += 1
                verdicts.append(NOT_ASKED)
    right = [verdict.is_right for verdict in verdicts]
    accuracy = fmean(right)
    llmsql = LLMSQLScore(
        total=len(verdicts),
        matches=sum(right),
        accuracy=accuracy,
        pred_none=sum(verdict.pred_none for verdict in verdicts),
        gold_none=sum(verdict.is_gold_none for verdict in verdicts),
        sql_errors=sum(verdict.sql_errors for verdict in verdicts),
        beyond_form=beyond_form,
    )
    with_accuracy = replace(
        score,
        intervals={**score.intervals, LLMSQL_EXECUTION: score_interval(right)},
        own_metrics={**score.own_metrics, LLMSQL_EXECUTION: accuracy},
    )
    return LLMSQLQueryScore(**vars(with_accuracy), llmsql=llmsql)


def _verdict(question: SQLQuestion, answer: str, database: Database) -> _Verdict:
    """Compare what the statements in an answer select with what the gold statement selects;
    `UserError` if the database lacks the question's table."""
    database.check_table(question)
    gold = database.rows(question.sql)
    results = []
    for statement in statements_in(answer):
        results.append(database.rows(on_table(statement, question.table.id)))
    return _Verdict(
        is_right=gold is not None and gold in results,
        is_gold_none=gold == LONE_NULL,
        pred_none=results.count(LONE_NULL),
        sql_errors=results.count(None),
    )


# The file that the evaluator reads: `{"question_id", "completion"}`, one line for each answer.


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A line of the file; other keys are not read, as by the evaluator."""

    question_id: Annotated[int, Field(strict=True)]
    completion: str
    """The answer, as the model wrote it."""


def read_completions(path: Path, questions: Sequence[SQLQuestion]) -> dict[int, str]:
    """The answers of a file by the indices of their questions.

    Raises:
        UserError: a line is at fault, or names a question that is not among `questions` or has an
            answer already.
    """
    indices = {question.question_id: question.index for question in questions}
    answers: dict[int, str] = {}
    for place, line in validated_lines(Completion, path, MEND_COMPLETIONS):
        place_and_question = f"{place}: question_id {line.question_id}"
        index = indices.get(line.question_id)
        if index is None:
            raise UserError(
                f"{place_and_question} is not one of the split; "
                "score the file against the split and data it was made from"
            )
        if index in answers:
            raise UserError(f"{place_and_question} occurs twice; keep one of them")
        answers[index] = line.completion
    return answers


def write_completions(
    path: Path, questions: Sequence[SQLQuestion], answers: Mapping[int, str]
) -> None:
    """Write answers, given by the indices of their questions, as LLMSQL's evaluator reads them."""
    lines = []
    for index, answer in answers.items():
        line = {"question_id": questions[index].question_id, "completion": answer}
        lines.append(json.dumps(line) + "\n")
    write_text(path, "".join(lines))


def query_in(answer: str, table: SQLTable) -> Query | None:
    """The first statement of an answer that is a query of WikiSQL's form on this table; None if
    none is."""
    for statement in statements_in(answer):
        query = query_of_statement(on_table(statement, table.id), table)
        if query is not None:
            return query
    return None
