"""Predictions of trained models by the verbs that users call: queries, answers, perplexity and sample text."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from tests.full.train.test_causal_train import train
from zeropods.cli import main
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.wikisql import Example, in_words_of, read_split, source_of
from zeropods.errors import UserError
from zeropods.evaluate.generate import Generation, QueryAnswerer, text_perplexity
from zeropods.evaluate.score import read_predictions
from zeropods.plan.known_models import known_config
from zeropods.sql.grammar import QueryAutomaton
from zeropods.sql.linking import links
from zeropods.sql.query import format_query, parse_query, with_values_of
from zeropods.train.device import PackedLinear
from zeropods.train.sampler import load_split
from zeropods.train.saved_models import SavedModel, sample_text, task_of


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


def test_linked_answers_compare_with_quoted_cells_and_their_score_says_so(
    trained: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictions.test.jsonl"
    rows = answers(trained, sample, out, "--link-cells", "--score")
    assert "24 answers linked to the rows: " in capsys.readouterr().out
    compared = 0
    for row, example in zip(rows, itertools.islice(read_split(sample, "test"), 24), strict=True):
        linked = links(example.question, example.table)
        assert linked is not None and row["linked"] is True
        for column, _, value in row["query"]["conds"]:
            compared += 1
            cells = linked[column]
            assert value.lower() in cells or not cells
    # These weights have learnt little; without links most of what they compare is no cell.
    assert compared
    score = json.loads((tmp_path / "score.test.json").read_text())
    assert score["linked"] is True and all(group["linked"] for group in score["kinds"].values())


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


# A tiny random T5 under the grammar can say nothing but queries.


@pytest.fixture(scope="module")
def answerer(trained: Path) -> QueryAnswerer:
    torch.manual_seed(0)
    config = T5Config.from_dict({**known_config("t5-tiny"), "decoder_start_token_id": 0})
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    return QueryAnswerer(SavedModel(T5ForConditionalGeneration(config).eval(), tokenizer), "schema")


@pytest.fixture(scope="module")
def asked(sample: Path) -> list[Example]:
    """Three questions on three tables."""
    return list(itertools.islice(read_split(sample, "test"), 0, 300, 100))


@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(
    answerer: QueryAnswerer, asked: list[Example], beams: int
) -> None:
    how = Generation(max_new_tokens=30, num_beams=beams)
    together = answerer.answer([*asked, asked[0]], how)
    alone = [answerer.answer([example], how)[0] for example in asked]
    assert [answer.query for answer in together] == [answer.query for answer in (*alone, alone[0])]


@pytest.mark.parametrize("beams", [1, 3])
def test_masked_padding_of_prompts_changes_no_answer(answerer: QueryAnswerer, asked: list[Example], beams: int) -> None:
    how = Generation(max_new_tokens=30, num_beams=beams)
    padded = QueryAnswerer(replace(answerer.saved, multiple=8), "schema")
    ids = [answerer.tokenizer(source_of(example, "schema")).input_ids for example in asked]
    longest = max(len(row) for row in ids)
    assert longest % 8 and padded.saved.batch(ids)["input_ids"].shape[1] == -(-longest // 8) * 8
    assert padded.answer(asked, how) == answerer.answer(asked, how)


def test_answers_are_those_of_transformers_own_search(answerer: QueryAnswerer, asked: list[Example]) -> None:
    """Free, at a fixed length, and constrained."""
    ids = [answerer.tokenizer(source_of(example, "schema")).input_ids for example in asked]
    worded = [in_words_of("schema", example) for example in asked]
    machines = [QueryAutomaton(answerer.vocabulary, e.table.header, e.question) for e in worded]

    def allowed(number: int, row: torch.Tensor) -> list[int]:
        state = machines[number].follow(i for i in row[1:].tolist() if i != answerer.vocabulary.pad)
        return [answerer.vocabulary.pad] if state is None or state.ended else state.allowed.tolist()

    for constrained, fixed in [(False, False), (False, True), (True, False)]:
        how = Generation(max_new_tokens=30, constrained=constrained, fixed_length=fixed)
        rows = answerer.saved.generated(ids, prefix_allowed_tokens_fn=allowed if constrained else None, **how.options)
        texts = [answerer.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        if constrained:
            texts = []
            for example, machine, row in zip(asked, machines, rows, strict=True):
                query = with_values_of(example.question, machine.finish(row))
                texts.append(format_query(query, example.table.header))
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


# Causal models: answers, perplexity and sample text.


KNOWN, LENGTH, BLOCK = 5, 96, 64


@pytest.fixture(scope="module")
def run(squad_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model knows the first questions of train by heart; beside it, in `data`, what it was trained on."""
    folder = tmp_path_factory.mktemp("heart")
    wanted = Preparation(task="squad", data=squad_sample, tokenizer="gpt-tiny", max_seq_length=LENGTH, limit=KNOWN)
    prepare(wanted, folder / "data")
    steps = ("--max_train_steps", 100, "--eval_steps", 0, "--lr_scheduler_type", "constant", "--logging_steps", 50)
    train(folder / "run", folder / "data", *steps, "--per_device_train_batch_size", KNOWN)
    return folder / "run"


@pytest.mark.parametrize("flags", [("--batch-size", "3"), ("--num-beams", "3")])
def test_what_a_model_knows_by_heart_scores_one(
    run: Path, squad_sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    out = tmp_path / "predictions.train.jsonl"
    assert (task_of(run), task_of(run / "model")) == ("squad", "squad")
    call = ["predict", "--model", str(run), "--data", str(squad_sample), "--split", "train", "--out", str(out)]
    assert main([*call, "--limit", str(KNOWN), "--max-new-tokens", "12", "--json", *flags]) == 0
    speed = json.loads(capsys.readouterr().out)
    assert speed["questions_per_second"] == pytest.approx(KNOWN / speed["seconds"])
    assert main(["score", str(out), "--data", str(squad_sample), "--split", "train", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["examples"], score["exact_match"], score["f1"]) == (KNOWN, 1.0, 1.0)


@pytest.fixture(scope="module")
def language(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder with random weights, and a set that was prepared with its tokenizer."""
    folder, prepared = tmp_path_factory.mktemp("lm") / "model", tmp_path_factory.mktemp("lm") / "prepared"
    manifest, _ = prepare(Preparation(task="lm", data=text, tokenizer="gpt-tiny", max_seq_length=BLOCK), prepared)
    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    GPT2LMHeadModel(GPT2Config(vocab_size=manifest.vocabulary_size, **shape)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(prepared / "tokenizer").save_pretrained(folder)
    return folder, prepared


def test_perplexity_is_that_of_transformers_own_loss(language: tuple[Path, Path]) -> None:
    folder, prepared = language
    model, rows = GPT2LMHeadModel.from_pretrained(folder).eval(), load_split(prepared, "dev")
    assert rows is not None
    loss_sum, tokens = 0.0, 0
    for i in range(len(rows)):
        ids, labels = (torch.tensor(column)[None].long() for column in rows[i])
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            loss_sum += float(model(input_ids=ids, labels=labels).loss) * count
        tokens += count
    score = text_perplexity(folder, prepared, "dev", batch_size=3)
    assert (score.tokens, score.loss) == (tokens, pytest.approx(loss_sum / tokens, rel=1e-5))
    assert score.perplexity == pytest.approx(math.exp(score.loss))


def test_raw_text_has_the_perplexity_of_the_prepared_set(
    language: tuple[Path, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prepared = language
    call = ["perplexity", str(folder), "--split", "test", "--json"]
    assert main([*call, "--data", str(text), "--max-seq-length", str(BLOCK), "--out", str(tmp_path)]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert main([*call, "--data", str(prepared)]) == 0
    assert raw == json.loads(capsys.readouterr().out) == json.loads((tmp_path / "score.test.json").read_text())


def test_a_sample_is_the_likeliest_text_ends_with_the_models_positions_and_begins_with_words(
    language: tuple[Path, Path],
) -> None:
    first, second = (sample_text(language[0], "The town", max_new_tokens=9) for _ in range(2))
    assert (first.prompt, first.text, first.new_tokens) == ("The town", second.text, 9) and first.seconds > 0
    assert sample_text(language[0], "the " * 40, max_new_tokens=500).new_tokens < LENGTH
    for prompt, said in {"": "contains no tokens", "town " * 400: f"the model has only {LENGTH} positions"}.items():
        with pytest.raises(UserError, match=said):
            sample_text(language[0], prompt)


# What is asked of a model that cannot do it.


OLD = '{"index": 0, "question": "q", "prediction": "p", "query": null}\n'
OF_SQUAD = "predict --model heart --data squad --split train"
PERPLEXITY = "perplexity --split dev"


@pytest.fixture
def here(
    trained: Path, run: Path, language: tuple[Path, Path], sample: Path, squad_sample: Path, text: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> Path:  # fmt: skip
    """A working folder with models, data, a file of predictions and one of something else."""
    monkeypatch.chdir(tmp_path)
    for name, place in {
        "trained": trained, "heart": run, "gpt": language[0], "blocks": language[1], "data": sample,
        "squad": squad_sample, "text": text, "known": run.parent / "data",
    }.items():  # fmt: skip
        (tmp_path / name).symlink_to(place)
    for name, config in {"t5": {"is_encoder_decoder": True}, "silent": {}, "of-text": {"prompt": "lm"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "p.jsonl").write_text(OLD)
    (tmp_path / "mine.csv").write_text("question,sql\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict --model nowhere --data data", "nowhere: no such folder; expected a run or model folder"),
        ("predict --model trained --data data --max-seq-length 9", "length: is for squad, but this task is text2sql"),
        ("predict --model trained --data data --out mine.csv", "mine.csv: exists and does not contain predictions; c"),
        ("predict --model trained --data data --prompt question", "was trained with schema; leave it out, or add --fo"),
        ("predict --model t5 --task squad --data t5", "--task squad: t5 is a T5, which is for text2sql; leave it out"),
        ("predict --model t5 --data nowhere", "t5: does not record its prompt; give --prompt question or schema"),
        ("predict --model t5", "t5: a model folder, which does not record where its data are; give --data DIR"),
        ("predict --model silent --data squad", "does not record its task; give --task text2sql or squad"),
        ("predict --model of-text --data squad", "trained on plain text"),
        (f"{OF_SQUAD} --link-cells", "--link-cells: is for text2sql, but this task is squad"),
        ("predict --model trained --data data --link-cells --unconstrained", "--link-cells: binds what is constrained"),
        (f"{OF_SQUAD} --unconstrained", "--unconstrained: is for text2sql, but this task is squad"),
        (f"{OF_SQUAD} --max-new-tokens {LENGTH}", f"--max-new-tokens {LENGTH}: leaves no room for a prompt"),
        (f"{OF_SQUAD} --split test", "test-v1.1.json: no such file"),
        (f"{OF_SQUAD} --precision fp16", "--precision fp16: needs a GPU"),
        (f"{PERPLEXITY} trained --data data", "trained: its model is a t5; expected a causal one, such as gpt2"),
        (f"{PERPLEXITY} ./none --data data", "./none: no such folder; expected a run or model folder, or a hub id"),
        (f"{PERPLEXITY} heart --data blocks", "prepared with a tokenizer other than"),
        (f"{PERPLEXITY} heart --data known", "prepared for squad; perplexity needs text"),
        (f"{PERPLEXITY} gpt --data blocks --max-seq-length 32", "is already cut into blocks"),
        (f"{PERPLEXITY} gpt --data text --max-seq-length {LENGTH + 1}", f", but the model has only {LENGTH} positions"),
    ],
)
def test_a_call_that_cannot_be_is_one_line_and_leaves_the_old_files(
    words: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "fp16" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    verb, *more = words.split()
    usual = ["--split", "test", "--limit", "2", "--out", "p.jsonl"] if verb == "predict" else []
    assert main([verb, *usual, *more]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert ((here / "p.jsonl").read_text(), (here / "mine.csv").read_text()) == (OLD, "question,sql\n")


def test_another_prompt_than_the_models_can_be_forced(here: Path) -> None:
    words = "predict --model trained --data data --split test --limit 2 --out p.jsonl --prompt question --force-prompt"
    assert main(words.split()) == 0


@pytest.mark.parametrize("data", ["blocks", "text"])
def test_a_split_that_is_not_there_has_no_perplexity(here: Path, data: str) -> None:
    with pytest.raises(UserError, match="has no split 'validation'; expected train or dev or test"):
        text_perplexity(here / "gpt", here / data, "validation")
