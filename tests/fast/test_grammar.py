"""The grammar over a small vocabulary, any segmentation, on tables and questions made up by hypothesis."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zeropods.sql.grammar import MOST_CONDITIONS, GrammarState, QueryAutomaton, Vocabulary, fold
from zeropods.sql.query import AGGREGATES, Condition, Query, format_query, parse_query

PAD, EOS, UNK, EXTRA = 0, 1, 2, 3
CHARACTERS = string.ascii_letters + string.digits + ".,=<>()š"
LONGER = "▁SELECT ▁SEL ECT ▁FROM ▁table ▁AND AN ▁MAX ▁COUNT ▁= ▁> ▁New ▁new ▁NEW ▁Team ▁T ea eam ▁n ▁1 12 ▁a"
PIECES = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "▁", *CHARACTERS, *LONGER.split()]
VOCABULARY = Vocabulary(PIECES, eos=EOS, unk=UNK, pad=PAD, special=[EXTRA])
WORDS = ["a", "AND", "and", "New", "team", "Team", "MAX", "=", "12", "2.5", "3rd", "(b)", "Š", "日本", "ﬁ"]

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
questions = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)
headers = st.lists(texts, min_size=1, max_size=4)


def segmented(text: str, choose: random.Random) -> list[int]:
    """Ids of one segmentation of a text: at each character any piece that fits, else `<unk>`."""
    rest, ids = "".join(f"▁{word}" for word in text.split()), []
    while rest:
        fitting = [id_ for id_ in range(EXTRA + 1, len(PIECES)) if rest.startswith(PIECES[id_])]
        if fitting:
            ids.append(choose.choice(fitting))
        elif not ids or ids[-1] != UNK:
            ids.append(UNK)
        rest = rest[len(PIECES[ids[-1]]) if fitting else 1 :]
    return ids


def after(header: list[str], question: str, text: str) -> GrammarState | None:
    return QueryAutomaton(VOCABULARY, header, question).follow(segmented(text, random.Random(0)))


def query_after(header: list[str], question: str, text: str) -> Query | None:
    state = after(header, question, text)
    return state.query if state else None


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[str], str, Query]:
    """A header, a question, and a query whose values are runs of the question's words."""
    header = draw(st.lists(texts, min_size=1, max_size=4, unique=True))
    words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8))
    column = st.integers(0, len(header) - 1)
    start = st.integers(0, len(words) - 1)
    spans = st.tuples(start, start).map(lambda pair: " ".join(words[min(pair) : max(pair) + 1]))
    conditions = st.lists(st.builds(Condition, column, st.integers(0, 2), spans), max_size=MOST_CONDITIONS)
    query = Query(draw(column), draw(st.integers(0, len(AGGREGATES) - 1)), tuple(draw(conditions)))
    return header, " ".join(words), query


@settings(deadline=None, max_examples=50)
@given(asked(), st.randoms(use_true_random=False))
def test_any_segmentation_of_a_query_is_accepted(case, choose):
    header, question, query = case
    text = VOCABULARY.normalize(format_query(query, header))
    state = QueryAutomaton(VOCABULARY, header, question).follow([*segmented(text, choose), EOS])
    assert state is not None
    assert state.ended


@settings(deadline=None, max_examples=50)
@given(asked(), st.randoms(use_true_random=False))
def test_what_the_text_says_is_given_back(case, choose):
    header, question, query = case
    assume(not {"Š", "日"} <= set(" ".join([question, *header])))
    header = [VOCABULARY.normalize(name) for name in header]
    text = VOCABULARY.normalize(format_query(query, header))
    expected = parse_query(text, header)
    assume(expected is not None and len(expected.conds) <= MOST_CONDITIONS)
    state = QueryAutomaton(VOCABULARY, header, question).follow(segmented(text, choose))
    assert state.query == expected


@settings(deadline=None, max_examples=50)
@given(headers, questions, st.randoms(use_true_random=False))
def test_random_walk_ends_in_a_query_that_parses(header, question, choose):
    state = QueryAutomaton(VOCABULARY, header, question).start
    while not state.ended:
        assert len(state.allowed) == len(set(state.allowed))
        state = state.next(choose.choice(sorted(state.allowed.tolist())))
    parsed = parse_query(format_query(state.query, header), header)
    assert parsed == state.query or len(parsed.conds) > MOST_CONDITIONS


@settings(deadline=None, max_examples=50)
@given(headers, questions, st.integers(0, 40), st.randoms(use_true_random=False))
def test_query_cut_at_any_length_parses(header, question, length, choose):
    automaton = QueryAutomaton(VOCABULARY, header, question)
    state, ids = automaton.start, [PAD]
    while not state.ended and len(ids) < length:
        ids.append(choose.choice(sorted(state.allowed.tolist())))
        state = state.next(ids[-1])
    query = automaton.finish(ids)
    assert parse_query(format_query(query, header), header) is not None


@settings(deadline=None, max_examples=50)
@given(headers, questions, st.randoms(use_true_random=False))
def test_values_are_spans_of_the_question(header, question, choose):
    state = QueryAutomaton(VOCABULARY, header, question).start
    while not state.ended:
        state = state.next(choose.choice(sorted(state.allowed.tolist())))
    span = fold(VOCABULARY.normalize(question))
    assert all(fold(condition.value) in span for condition in state.query.conds)


@pytest.mark.parametrize(
    ("header", "question", "text", "query"),
    [
        # The case that was emitted is kept; unknown characters come from the question.
        (["team"], "Was it New team?", "SELECT team FROM table WHERE team = NEW tEAM", (0, 0, (0, 0, "NEW tEAM"))),
        (["team"], "is it 日本 or not", "SELECT team FROM table WHERE team = 日本", (0, 0, (0, 0, "日本"))),
        # An upper case without a piece is told from its lower case, which has one.
        (["team"], "is it šea", "SELECT team FROM table WHERE team = Šea", (0, 0, (0, 0, "Šea"))),
        (["a", "日本 team"], "", "SELECT 日本 team FROM table", (1, 0)),
        # A column that begins with an aggregate comes before the aggregate, the first of equal names is meant.
        (["a", "MAX a"], "", "SELECT MAX a FROM table", (1, 0)),
        (["a", "b", "a"], "", "SELECT a FROM table", (0, 0)),
        (["a", "New  team "], "", "SELECT New team FROM table", (1, 0)),
        (["Team", "Team (b)", "Teams"], "", "SELECT Team (b) FROM table", (1, 0)),
        # The reading with most conditions is taken.
        (["a"], "is it b AND a = 12", "SELECT a FROM table WHERE a = b AND a = 12", (0, 0, (0, 0, "b"), (0, 0, "12"))),
        # A value cuts no word and no number, but may leave out punctuation and units.
        *((["a"], "is a team 2.5 3rd", f"SELECT a FROM table WHERE a = {v}", None) for v in ("ea", "tea", "2", "3r")),
        *(
            (["a"], "is (b) 2.5m, or 3rd", f"SELECT a FROM table WHERE a = {v}", (0, 0, (0, 0, v)))
            for v in ("2.5", "(b)", "b", "3")
        ),
    ],
)
def test_a_text_spells_its_query_or_none(header: list[str], question: str, text: str, query: Any) -> None:
    expected = query and Query(query[0], query[1], tuple(Condition(*condition) for condition in query[2:]))
    assert query_after(header, question, text) == expected


def test_fifth_condition_is_not_offered():
    text = "SELECT a FROM table WHERE " + " AND ".join(["a = 1"] * MOST_CONDITIONS)
    assert after(["a"], "2 or 1", text).allowed.tolist() == [EOS]


def test_question_without_words_offers_no_condition():
    assert after(["a"], " ", "SELECT a FROM table").allowed.tolist() == [EOS]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("", Query(0, 0)),
        ("SELECT COUNT", Query(0, 3)),
        ("SELECT b", Query(1, 0)),
        ("SELECT b FROM table WHERE a = New tea", Query(1, 0)),
        ("SELECT b FROM table WHERE a = New AND a", Query(1, 0, (Condition(0, 0, "New"),))),
    ],
)
def test_what_is_complete_of_a_cut_query_counts(text, query):
    automaton = QueryAutomaton(VOCABULARY, ["a", "b"], "the New team")
    ids = segmented(text, random.Random(0))
    assert automaton.finish([PAD, *ids]) == automaton.finish([PAD, *ids, EOS, PAD]) == query


def test_id_that_is_not_allowed_leads_nowhere():
    start = QueryAutomaton(VOCABULARY, ["a"], "").start
    assert all(start.next(id_) is None for id_ in set(range(len(PIECES))) - set(start.allowed.tolist()))


def test_header_without_a_name_is_rejected():
    with pytest.raises(ValueError, match="at least one column with a name"):
        QueryAutomaton(VOCABULARY, ["", "  "], "")


def test_vocabulary_without_a_space_is_rejected():
    with pytest.raises(ValueError, match="no piece"):
        Vocabulary(["<pad>", "</s>", "<unk>", "a"], eos=EOS, unk=UNK, pad=PAD)
