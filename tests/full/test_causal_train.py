"""Runs of `causal_train.py`: what they leave, on questions and on text, on one process and on two; what they refuse."""

import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.full.conftest import ROOT, cut_text, run_several
from zeropods.cli import main
from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, key_of_preparation, prepare
from zeropods.errors import guarded
from zeropods.export import export
from zeropods.measure.record import BatchShape, Record, read_record
from zeropods.train.arguments import CausalArguments, parse_flags
from zeropods.train.causal import Causal
from zeropods.train.run import fine_tune

TINY = [
    "--model_name_or_path", "gpt-tiny", "--init", "random", "--precision", "fp32", "--threads", "1", "--dropout", "0",
    "--logging_steps", "1", "--save_steps", "0", "--learning_rate", "3e-3", "--memory_interval", "0",
]  # fmt: skip
LM = ["--task", "lm", "--max_seq_length", "32"]
CURVE = ["--max_train_steps", "5", "--eval_steps", "0"]
WHOLE = [*CURVE, "--per_device_train_batch_size", "12", "--gradient_accumulation_steps", "1"]
ALSO = ["--eval_on_start", True, "--save_steps", 5, "--save_total_limit", 1, "--generation_prompt", "The town"]


def train(folder: Path, data: Path, *flags: object) -> Record:
    """Train in this process and return the record."""
    argv = [*TINY, "--data", str(data), "--outputdir", str(folder), *map(str, flags)]
    fine_tune(Causal(parse_flags(CausalArguments, argv)), argv)
    return read_record(folder)


def refused(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    """The one line that a call says before it ends with status 1."""
    capsys.readouterr()
    argv = [*TINY, *map(str, flags)]
    assert guarded(lambda: fine_tune(Causal(parse_flags(CausalArguments, argv)), argv)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("zeropods: ")]
    assert len(lines) == 1, lines
    return lines[0]


def losses(record: Record, key: str = "losses") -> list[float]:
    return [entry.loss for entry in getattr(record, key)]


@pytest.fixture(scope="module")
def text(text_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text: the sample's, cut so that a few blocks of each split remain."""
    return cut_text(text_sample, tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def text_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text, prepared and trained on by one run."""
    folder = tmp_path_factory.mktemp("runs") / "lm"
    train(folder, text, *LM, *WHOLE, *ALSO)
    return folder


@pytest.fixture(scope="module")
def questions(squad_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's first 60 questions of each split, prepared."""
    folder = tmp_path_factory.mktemp("squad") / "prepared"
    wanted = Preparation(task="squad", data=squad_sample, tokenizer="gpt-tiny", max_seq_length=96, limit=60)
    prepare(wanted, folder)
    return folder


@pytest.fixture(scope="module")
def squad_run(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on questions, in one batch a step."""
    folder = tmp_path_factory.mktemp("runs") / "squad"
    train(folder, questions, *WHOLE)
    return folder


def test_a_run_on_text_says_its_perplexity_and_a_command_that_works(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", text, *LM, "--max_train_steps", 2)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("ok: 2 steps, loss ") and re.search(r", perplexity [\d.]+ \(test\), ", last), last
    assert main(shlex.split(last.partition("next: zeropods ")[2])) == 0
    assert (tmp_path / "a-summary" / "index.html").is_file()


def test_every_token_but_a_blocks_first_carries_a_loss_and_none_is_padding(text_run: Path) -> None:
    rank = read_record(text_run).ranks[0]
    rows = 5 * 12
    assert (rank.source_tokens, rank.target_tokens, rank.padded_tokens) == (rows * 32, rows * 31, rows * 32)
    assert rank.largest_batch == BatchShape(rows=12, source_tokens=32, target_tokens=0)


def test_the_loss_falls_from_that_of_a_guess(text_run: Path) -> None:
    record = read_record(text_run)
    before, after = losses(record, "eval_losses")
    assert [entry.step for entry in record.eval_losses] == [0, 5]
    assert before == pytest.approx(math.log(1_024), rel=0.03)
    assert after < before - 0.5
    assert losses(record)[-1] < losses(record)[0]


def test_the_perplexity_is_that_of_every_token_of_dev_and_test(text_run: Path) -> None:
    score = json.loads((text_run / "score.dev.json").read_text())
    assert score["loss"] == pytest.approx(losses(read_record(text_run), "eval_losses")[-1])
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    splits = json.loads((text_run / "data" / "manifest.json").read_text())["splits"]
    for split in ("dev", "test"):
        counted = json.loads((text_run / f"score.{split}.json").read_text())["tokens"]
        assert counted == splits[split]["target"]["total"]


def test_the_model_can_be_loaded_by_anyone(text_run: Path, squad_run: Path) -> None:
    from transformers import AutoModelForCausalLM

    for run, prompt in ((text_run, None), (squad_run, "squad")):
        model, found = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
        assert (type(model).__name__, model.config.architectures) == ("GPT2LMHeadModel", ["GPT2LMHeadModel"])
        assert not found["missing_keys"]
        assert getattr(model.config, "prompt", None) == prompt


def test_it_is_exported_with_its_tied_weight_once(text_run: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    done = export(text_run, tmp_path / "out")
    assert (done.source, done.checkpoint) == (str(text_run / "model"), 5)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_data_that_a_run_has_prepared_are_not_replaced(
    text_run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(text_run / "data", run / "data")
    (run / "run.lock").touch()
    before = (run / "data" / "manifest.json").read_bytes()
    said = refused(capsys, "--data", text, "--outputdir", run, "--task", "lm", "--max_seq_length", 16, *WHOLE)
    assert f"{run}/data: was prepared from other data, or with other settings" in said
    assert (run / "data" / "manifest.json").read_bytes() == before


def test_only_answers_carry_a_loss_on_questions(squad_run: Path, questions: Path) -> None:
    record = read_record(squad_run)
    rank = record.ranks[0]
    assert (record.task, record.prompt, record.identity["loss_on"]) == ("squad", "squad", "answer")
    assert 0 < rank.target_tokens < rank.source_tokens / 4 < rank.padded_tokens / 4
    assert not list(squad_run.glob("score.*"))
    assert losses(record)[-1] < losses(record)[0]


def test_an_evaluation_of_a_part_claims_no_perplexity(text_run: Path, tmp_path: Path) -> None:
    data, some = text_run / "data", ("--max_eval_steps", 1, "--per_device_eval_batch_size", 3, "--subset", 8)
    record = train(tmp_path / "run", data, *WHOLE, "--max_train_steps", 1, *some)
    assert (record.dev_rows, record.train_rows) == (3, 8)
    assert not list((tmp_path / "run").glob("score.*"))


@pytest.fixture(scope="module")
def two_ranks(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on questions on two ranks: DDP, and the two causal DeepSpeed files."""
    folder = tmp_path_factory.mktemp("two")
    rows = ("--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2")
    schedules = {"causal_zero2_offload": "cosine", "causal_zero3_offload": "linear"}
    runs: list[tuple[int, Path, list[object]]] = [(2, folder / "ddp", [])]
    for name, schedule in schedules.items():
        config = ROOT / "dsconfig" / f"{name}.json"
        flags = ["--deepspeed", config, "--lr_scheduler_type", schedule, "--num_warmup_steps", 2]
        runs.append((2, folder / name, flags))
    run_several([*TINY, "--data", questions, *CURVE, *rows], *runs, script="causal_train.py")
    return folder


def test_two_ranks_train_as_one(two_ranks: Path, squad_run: Path) -> None:
    two, one = read_record(two_ranks / "ddp"), read_record(squad_run)
    assert (two.technique, two.world_size, two.effective_batch_size) == ("ddp", 2, 12)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(two, "eval_losses") == pytest.approx(losses(one, "eval_losses"), rel=1e-5)


@pytest.mark.parametrize("name", ["causal_zero2_offload", "causal_zero3_offload"])
def test_deepspeeds_optimizer_and_schedule_train_with_what_the_flags_say(
    name: str, two_ranks: Path, squad_run: Path
) -> None:
    record = read_record(two_ranks / name)
    assert (record.status, record.technique) == ("ok", name.removeprefix("causal_"))
    # The rate of DeepSpeed's schedules is 0 in the first step.
    assert losses(record)[0] == pytest.approx(losses(read_record(squad_run))[0], rel=1e-5)
    assert losses(record)[-1] < losses(record)[0] - 0.5


def test_real_questions_and_text_train_with_a_published_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = tmp_path / "model"
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=256)).save_pretrained(model)
    own = ("--init", "pretrained", "--model_name_or_path", model, "--tokenizer_name", shared_data / "gpt2")
    few = ("--max_train_steps", 2, "--max_seq_length", 256, "--learning_rate", "1e-2")
    # The whole of both takes longer to prepare than all else here.
    for name in ("questions", "words"):
        (tmp_path / name).mkdir()
    for file in (shared_data / "squad").glob("*.json"):
        document = json.loads(file.read_text())
        (tmp_path / "questions" / file.name).write_text(json.dumps({**document, "data": document["data"][:1]}))
    words = cut_text(shared_data / "wikitext-2", tmp_path / "words")
    squad = train(tmp_path / "squad", tmp_path / "questions", "--task", "squad", "--subset", 24, *own, *few)
    text = train(tmp_path / "text", words, "--task", "lm", "--subset", 2, *own, *few)
    for record in (squad, text):
        assert record.status == "ok"
        assert losses(record)[-1] < losses(record)[0]
    assert json.loads((tmp_path / "text" / "score.dev.json").read_text())["perplexity"] > 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--attn_implementation", "flash_attention_2"), "use --attn_implementation sdpa"),
        (("--task", "lm"), "--task lm: --data {} was prepared with squad; leave the flag out"),
        (("--max_seq_length", 64), "--max_seq_length 64: --data {} was prepared with 96"),
        (("--tokenizer_name", "gpt2"), "--tokenizer_name gpt2: --data {} was prepared with gpt-tiny"),
        (("--text_field", "body"), "--text_field body: --data {} is made already"),
        (("--generation_prompt", " "), "--generation_prompt ' ': no words"),
    ],
)
def test_bad_flags_are_refused(
    capsys: pytest.CaptureFixture[str], questions: Path, tmp_path: Path, flags: tuple[object, ...], said: str
) -> None:
    run = tmp_path / "run"
    assert said.format(questions) in refused(capsys, "--data", questions, "--outputdir", run, *flags)


def test_the_best_model_needs_a_dev_split(capsys: pytest.CaptureFixture[str], text_run: Path, tmp_path: Path) -> None:
    shutil.copytree(text_run / "data", tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "dev")
    best = ("--load_best_model", True, "--eval_steps", 5, "--save_steps", 5)
    said = refused(capsys, "--data", tmp_path / "data", "--outputdir", tmp_path / "run", *best)
    assert "has no dev split" in said


def test_a_run_whose_raw_data_are_gone_goes_on_with_what_it_prepared(text_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(text_run, tmp_path / "run"))
    (run / "record.json").unlink()
    assert train(run, tmp_path / "gone", *LM, *WHOLE, *ALSO).status == "ok"


def test_data_at_the_hub_are_not_asked_for_again(text_run: Path) -> None:
    made = replace(read_manifest(text_run / "data"), source_sha256={"allenai/c4 en": "a1b2"})
    asked = {"task": "lm", "data": "allenai/c4", "dataset_config": "en", "tokenizer": "gpt-tiny", "max_seq_length": 32}
    wanted = Preparation(**asked)
    other = replace(made, source_sha256={"allenai/c4 en": "c3d4"})
    assert key_of_preparation(wanted, made) != key_of_preparation(wanted, other)
