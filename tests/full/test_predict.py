"""Prediction of a trained T5, free and constrained, by the verbs that users call."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from zeropods.cli import main
from zeropods.data.encoding import train_tokenizer
from zeropods.data.wikisql import Example, SQLTable, read_split, source_of
from zeropods.evaluate.generate import Generation, QueryAnswerer
from zeropods.evaluate.models import SavedModel
from zeropods.evaluate.score import read_predictions
from zeropods.sql.grammar import QueryAutomaton
from zeropods.sql.query import Query, format_query, parse_query
from zeropods.train.device import PackedLinear


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


def test_predict_and_score_print_one_document_each(
    trained: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictions.test.jsonl"
    rows = answers(trained, sample, out, "--json", "--unconstrained")
    assert any(row["query"] is None for row in rows)
    assert [prediction.to_json() for prediction in read_predictions(out)] == rows
    said = capsys.readouterr()
    speed = json.loads(said.out)
    assert said.err == "" and speed["questions_per_second"] == pytest.approx(24 / speed["seconds"])
    assert main(["score", str(out), "--data", str(sample), "--split", "test", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["examples"], score["unparseable"]) == (24, sum(row["query"] is None for row in rows))
    assert json.loads((tmp_path / "score.test.json").read_text()) == score
    for _ in range(2):
        answers(trained, sample, tmp_path / "others.jsonl", "--limit", "1")
    assert (tmp_path / "score.test.json").exists(), "the score of answers that are still there"
    answers(trained, sample, out, "--limit", "1")
    assert not (tmp_path / "score.test.json").exists(), "a score of answers that are gone"


OLD = '{"index": 0, "question": "q", "prediction": "p", "query": null}\n'


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--model", "nowhere"], "no trained model"),
        (["--max-seq-length", "9"], "--max-seq-length: is for squad, this is text2sql"),
        (["--out", "mine.csv"], "--out mine.csv: is there, and holds no predictions; choose another file"),
    ],
)
def test_bad_calls_are_one_line_and_leave_the_old_file(
    trained: Path,
    sample: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    out, mine = tmp_path / "p.jsonl", tmp_path / "mine.csv"
    out.write_text(OLD)
    mine.write_text("question,sql\n")
    call = ["predict", "--model", str(trained), "--data", str(sample), "--split", "test", "--out", str(out)]
    assert main([*call, *changed]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert (out.read_text(), mine.read_text()) == (OLD, "question,sql\n")


# A tiny random T5 under the grammar can say nothing but queries.

HEADERS = [["Player", "NHL team", "Age"], ["Year", "Number of votes"], ["a"]]
QUESTIONS = ["Which player of New Jersey Devils is older than 30?", "How many votes in 1999?", "Ü 3"]
TEXTS = [*QUESTIONS, *map(" ".join, HEADERS), "SELECT MAX MIN COUNT SUM AVG FROM table WHERE = > < AND"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS * 4, vocabulary=150)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**shape, vocab_size=len(tokenizer) + 8, decoder_start_token_id=tokenizer.pad_token_id)
    ).eval()


@pytest.fixture(scope="module")
def answerer(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> QueryAnswerer:
    return QueryAnswerer(SavedModel(model, tokenizer), "question")


def examples(rows: list[int]) -> list[Example]:
    tables = [SQLTable(str(row), tuple(HEADERS[row]), ("text",) * len(HEADERS[row]), ()) for row in rows]
    return [Example(row, QUESTIONS[row], table, Query(0, 0, ())) for row, table in zip(rows, tables, strict=True)]


def said(answerer: QueryAnswerer, rows: list[int], **how: int) -> list[Query | None]:
    """The queries that the model says for these questions, asked as one batch."""
    answers = answerer.answer(examples(rows), Generation(**{"max_new_tokens": 30, **how}))
    return [answer.query for answer in answers]


@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(answerer: QueryAnswerer, beams: int) -> None:
    together = said(answerer, [0, 1, 2, 0], num_beams=beams)
    alone = [said(answerer, [row], num_beams=beams)[0] for row in (0, 1, 2)]
    assert together == [*alone, alone[0]]


def test_answers_are_those_of_transformers_own_search(answerer: QueryAnswerer) -> None:
    """Free, at a fixed length, and constrained."""
    asked = examples([0, 1, 2])
    ids = [answerer.tokenizer(source_of(example, "question")).input_ids for example in asked]
    machines = [QueryAutomaton(answerer.vocabulary, e.table.header, e.question) for e in asked]

    def allowed(number: int, row: torch.Tensor) -> list[int]:
        state = machines[number].follow(i for i in row[1:].tolist() if i != answerer.vocabulary.pad)
        return [answerer.vocabulary.pad] if state is None or state.ended else state.allowed.tolist()

    for constrained, fixed in [(False, False), (False, True), (True, False)]:
        how = Generation(max_new_tokens=30, constrained=constrained, fixed_length=fixed)
        rows = answerer.saved.generated(ids, prefix_allowed_tokens_fn=allowed if constrained else None, **how.options)
        texts = [answerer.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        if constrained:
            queries = [machine.finish(row) for machine, row in zip(machines, rows, strict=True)]
            texts = [format_query(query, e.table.header) for query, e in zip(queries, asked, strict=True)]
        assert [answer.text for answer in answerer.answer(asked, how)] == texts


def test_answers_of_packed_weights_are_those_of_plain_ones(
    trained: Path, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list(itertools.islice(read_split(sample, "test"), 16))
    found = []
    # The operations are there on any CPU that oneDNN knows, also where nothing is gained.
    for capability in ("DEFAULT", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda said=capability: said)
        answerer = QueryAnswerer.load(trained)
        packed = any(isinstance(module, PackedLinear) for module in answerer.model.modules())
        assert packed == (capability == "AVX512" and not torch.cuda.is_available())
        found.append(answerer.answer(asked, Generation(max_new_tokens=30)))
    # Roundings differ, and may decide between two tokens that are as likely.
    assert sum(one == other for one, other in zip(*found, strict=True)) >= len(asked) - 1
