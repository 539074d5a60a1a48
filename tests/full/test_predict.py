"""Prediction of a trained T5, free and constrained, by the verbs that users call."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from zeropods.cli import main
from zeropods.data.tokenizers import train_tokenizer
from zeropods.data.wikisql import read_split
from zeropods.evaluate.generate import ConstrainedSQL, Generation, QueryAnswerer
from zeropods.evaluate.score import read_predictions
from zeropods.sql.grammar import QueryAutomaton, Vocabulary
from zeropods.sql.query import Query, format_query, parse_query


def answers(run: Path, data: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    arguments = ["predict", "--model", str(run), "--data", str(data), "--split", "test", "--limit", "24"]
    assert main([*arguments, "--max-new-tokens", "40", "--out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("flags", [(), ("--num-beams", "3")])
def test_every_constrained_answer_is_a_query_on_its_table(
    trained: Path, sample: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    rows = answers(trained, sample, tmp_path / "p.jsonl", *flags)
    for row, example in zip(rows, itertools.islice(read_split(sample, "test"), 24), strict=True):
        assert (row["index"], row["question"]) == (example.index, example.question)
        assert parse_query(row["prediction"], example.table.header) is not None and row["query"] is not None


def test_answers_in_batches_are_those_one_at_a_time(trained: Path, sample: Path) -> None:
    answerer = QueryAnswerer.load(trained)
    examples = list(itertools.islice(read_split(sample, "test"), 16))
    single, batched = (answerer.answer(examples, Generation(max_new_tokens=30, batch_size=size)) for size in (1, 16))
    # A batch is multiplied by other kernels, whose roundings may decide between two tokens that are as likely.
    assert sum(one == other for one, other in zip(single, batched, strict=True)) >= len(examples) - 1


def test_predict_and_score_print_one_document_each(
    trained: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.jsonl"
    rows = answers(trained, sample, out, "--json", "--unconstrained")
    assert any(row["query"] is None for row in rows)
    assert [prediction.to_json() for prediction in read_predictions(out)] == rows
    speed = json.loads(capsys.readouterr().out)
    assert speed["questions_per_second"] == pytest.approx(24 / speed["seconds"])
    assert main(["score", str(out), "--data", str(sample), "--split", "test", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["examples"], score["unparseable"]) == (24, sum(row["query"] is None for row in rows))
    assert json.loads((tmp_path / "score.test.json").read_text()) == score


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--model", "nowhere"], "no trained model"),
        (["--max-seq-length", "9"], "--max-seq-length: is for squad, this is text2sql"),
    ],
)
def test_bad_calls_are_one_line_and_leave_the_old_file(
    trained: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: list[str], said: str
) -> None:
    out = tmp_path / "p.jsonl"
    out.write_text("old")
    call = ["predict", "--model", str(trained), "--data", str(sample), "--split", "test", "--out", str(out)]
    assert main([*call, *changed]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert out.read_text() == "old"


# A tiny random T5 under the grammar can say nothing but queries.

HEADERS = [["Player", "NHL team", "Age"], ["Year", "Number of votes"], ["a"]]
QUESTIONS = ["Which player of New Jersey Devils is older than 30?", "How many votes in 1999?", "Ü 3"]
TEXTS = [*QUESTIONS, *map(" ".join, HEADERS), "SELECT MAX MIN COUNT SUM AVG FROM table WHERE = > < AND"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS * 4, vocabulary=150)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    return Vocabulary.of(tokenizer)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**shape, vocab_size=len(tokenizer) + 8, decoder_start_token_id=tokenizer.pad_token_id)
    ).eval()


def automata(vocabulary: Vocabulary, rows: list[int]) -> list[QueryAutomaton]:
    return [QueryAutomaton(vocabulary, HEADERS[row], QUESTIONS[row]) for row in rows]


def said(model: Any, tokenizer: Any, vocabulary: Vocabulary, rows: list[int], **how: int) -> list[Query]:
    """The queries that the model says for these questions, asked as one batch."""
    source = tokenizer([QUESTIONS[row] for row in rows], return_tensors="pt", padding=True)
    inputs = {"input_ids": source.input_ids, "attention_mask": source.attention_mask, "max_new_tokens": 30, **how}
    machines = automata(vocabulary, rows)
    with torch.inference_mode():
        found = model.generate(**inputs, logits_processor=[ConstrainedSQL(machines)])
    return [machine.finish(ids) for machine, ids in zip(machines, found.tolist(), strict=True)]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("length", [2, 40])
def test_any_weights_say_queries_however_short_they_are_cut(
    model: Any, tokenizer: Any, vocabulary: Vocabulary, beams: int, length: int
) -> None:
    queries = said(model, tokenizer, vocabulary, [0, 1, 2], num_beams=beams, max_new_tokens=length)
    for query, header in zip(queries, HEADERS, strict=True):
        assert parse_query(format_query(query, header), header) is not None


@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(
    model: Any, tokenizer: Any, vocabulary: Vocabulary, beams: int
) -> None:
    together = said(model, tokenizer, vocabulary, [0, 1, 2, 0], num_beams=beams)
    alone = [said(model, tokenizer, vocabulary, [row], num_beams=beams)[0] for row in (0, 1, 2)]
    assert together == [*alone, alone[0]]


def test_only_allowed_scores_remain_until_a_row_has_ended(tokenizer: Any, vocabulary: Vocabulary) -> None:
    (machine,) = automata(vocabulary, [2])
    start, end = [vocabulary.pad], tokenizer("SELECT a FROM table").input_ids
    scores = ConstrainedSQL([machine])(torch.tensor([start]), torch.zeros(1, 200))  # type: ignore[arg-type]
    assert scores[0].isfinite().nonzero().flatten().tolist() == sorted(machine.start.allowed.tolist())
    ended = torch.tensor([[*start, *end, vocabulary.pad]])
    assert ConstrainedSQL([machine])(ended, torch.zeros(1, 200)).isfinite().all()  # type: ignore[arg-type]
