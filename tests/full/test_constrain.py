"""Generation under the grammar: a tiny random T5 can say nothing but queries."""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from zeropods.data.tokenizers import train_tokenizer
from zeropods.evaluate.generate import ConstrainedSQL
from zeropods.sql.grammar import QueryAutomaton, Vocabulary
from zeropods.sql.query import Query
from zeropods.sql.text import format_query, parse_query

HEADERS = [["Player", "NHL team", "Age"], ["Year", "Number of votes"], ["a"]]
QUESTIONS = ["Which player of New Jersey Devils is older than 30?", "How many votes in 1999?", "Ü 3"]
TEXTS = [*QUESTIONS, *map(" ".join, HEADERS), "SELECT MAX MIN COUNT SUM AVG FROM table WHERE = > < AND"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 4, vocabulary=150)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary.of(tokenizer)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = T5Config(
        d_model=32,
        d_ff=64,
        d_kv=16,
        num_layers=2,
        num_heads=2,
        vocab_size=len(tokenizer) + 8,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5ForConditionalGeneration(config).eval()


def automata(vocabulary: Vocabulary, rows: list[int]) -> list[QueryAutomaton]:
    return [QueryAutomaton(vocabulary, HEADERS[row], QUESTIONS[row]) for row in rows]


def answers(model, tokenizer, vocabulary, rows: list[int], **settings: int) -> list[Query]:
    """The queries that the model says for these questions, asked as one batch."""
    source = tokenizer([QUESTIONS[row] for row in rows], return_tensors="pt", padding=True)
    inputs = {"input_ids": source.input_ids, "attention_mask": source.attention_mask}
    machines = automata(vocabulary, rows)
    with torch.inference_mode():
        found = model.generate(
            **inputs, **{"max_new_tokens": 30, **settings}, logits_processor=[ConstrainedSQL(machines)]
        )
    return [machine.finish(ids) for machine, ids in zip(machines, found.tolist(), strict=True)]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("length", [2, 7, 40])
def test_every_answer_is_a_query_on_its_table(model, tokenizer, vocabulary, beams, length):
    queries = answers(model, tokenizer, vocabulary, [0, 1, 2], num_beams=beams, max_new_tokens=length)
    for query, header in zip(queries, HEADERS, strict=True):
        assert parse_query(format_query(query, header), header) is not None


@pytest.mark.parametrize("beams", [1, 3])
def test_ids_that_end_spell_a_complete_query(model, tokenizer, vocabulary, beams):
    source = tokenizer([QUESTIONS[2]] * 2, return_tensors="pt", padding=True)
    machines = automata(vocabulary, [2, 2])
    found = model.generate(
        input_ids=source.input_ids,
        attention_mask=source.attention_mask,
        max_new_tokens=100,
        num_beams=beams,
        logits_processor=[ConstrainedSQL(machines)],
    )
    for machine, ids in zip(machines, found[:, 1:].tolist(), strict=True):
        state = machine.follow(ids[: ids.index(tokenizer.eos_token_id) + 1])
        assert state is not None
        assert state.query is not None


@pytest.mark.parametrize("beams", [1, 3])
def test_answer_does_not_depend_on_the_rest_of_the_batch(model, tokenizer, vocabulary, beams):
    together = answers(model, tokenizer, vocabulary, [0, 1, 2, 0], num_beams=beams)
    alone = [answers(model, tokenizer, vocabulary, [row], num_beams=beams)[0] for row in (0, 1, 2)]
    assert together == [*alone, alone[0]]


def test_only_allowed_scores_remain(vocabulary):
    machine = automata(vocabulary, [0])[0]
    start = torch.tensor([[vocabulary.pad]])
    scores = ConstrainedSQL([machine])(start, torch.zeros(1, len(vocabulary.pieces) + 8))
    assert scores[0].isfinite().nonzero().flatten().tolist() == sorted(machine.start.allowed.tolist())


def test_row_that_has_ended_is_left_alone(vocabulary, tokenizer):
    machine = automata(vocabulary, [2])[0]
    ids = torch.tensor([[vocabulary.pad, *tokenizer("SELECT a FROM table").input_ids, vocabulary.pad]])
    assert ConstrainedSQL([machine])(ids, torch.zeros(1, 200)).isfinite().all()


def test_rows_that_do_not_fit_the_questions_are_refused(vocabulary):
    processor = ConstrainedSQL(automata(vocabulary, [0, 1]))
    with pytest.raises(ValueError, match="3 rows for 2 questions"):
        processor(torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 200))
