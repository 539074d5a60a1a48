"""The settings of the notebooks, and the published recipes."""

import os
from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.launch.command import Launch, check_arguments
from zeropods.launch.script_call import ScriptCall, train_arguments
from zeropods.pods.hostfile import Host
from zeropods.train.flags import CausalArguments
from zeropods.workshop import ROOT, CausalWorkshop, Workshop, read_recipes

EACH = [(name, task) for name, tasks in read_recipes().items() for task in tasks]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ZEROPODS_")]:
        monkeypatch.delenv(name)


def test_the_notebook_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"MODEL": "t5-small", "CAUSAL_STEPS": "7", "CAUSAL_RECIPE": "published", "RUNS": "runs/a"}
    for name, value in settings.items():
        monkeypatch.setenv(f"ZEROPODS_{name}", value)
    assert (Workshop().model, Workshop(model="t5-tiny").model) == ("t5-small", "t5-tiny")
    causal = CausalWorkshop(task="lm", steps=3)
    assert (causal.model_id, causal.training["max_train_steps"]) == ("distilbert/distilgpt2", 3)
    # What another cell has called by a setting's name is none.
    assert Workshop.of({"model": "t5-large", "steps": [7], "limit": None, "examples": 3}) == Workshop(model="t5-large")
    assert (causal.area, Workshop().summary_folder) == (ROOT / "runs" / "a", ROOT / "runs" / "a" / "summary")
    monkeypatch.setenv("ZEROPODS_STEPS", "many")
    with pytest.raises(UserError, match="ZEROPODS_STEPS: 'many'; expected a whole number"):
        Workshop()


def test_other_settings_are_another_run_and_steps_take_the_place_of_the_clock() -> None:
    runs = {Workshop(**given).run_folder for given in ({}, {"steps": 3}, {"limit": 9}, {"model": "t5-small"})}
    assert len(runs) == 4
    training = Workshop(steps=30).training
    assert (training["max_steps"], training["max_train_seconds"]) == (30, None)
    assert Workshop(model="t5-large").training["init"] == "pretrained"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Where notebooks find their runs, of which that of 02 has left a model."""
    model = Workshop(runs=tmp_path).run_folder / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    return tmp_path


def test_runs_on_pods_go_on_with_the_model_of_one_pod(trained: Path) -> None:
    workshop = Workshop(runs=trained, questions=7)
    with pytest.raises(UserError, match="5 pods: an effective batch of 48 rows cannot be divided evenly"):
        Workshop(runs=trained, pods=5).on_pods("zero1")
    matrix = workshop.matrix
    cells = [(cell.technique, cell.pods) for cell in matrix.cells]
    assert cells == [("none", 1), ("ddp", 3), ("zero1", 3), ("zero3_offload", 3), ("zero1", 2)]
    assert (matrix.repeats, matrix.questions, matrix.flags["effective_batch_size"]) == (3, 7, 48)
    assert matrix.link_cells
    runs = [workshop.on_pods(technique) for technique in ("zero1", "zero3_offload")]
    # Pods may share cores; larger models have as many threads as they like.
    assert [flags["threads"] for flags in (matrix.flags, *runs)] == [1, 1, 1] and workshop.training["threads"] == 2
    assert {str(flags["init"]) for flags in (matrix.flags, *runs)} == {str(workshop.run_folder)}
    assert all(not run["outputdir"].is_relative_to(workshop.area) and run["deepspeed"].is_file() for run in runs)
    assert [cell.technique for cell in Workshop(runs=trained, pods=2).matrix.cells] == [name for name, _ in cells[:-1]]


@pytest.mark.parametrize("said", [("t5-small", "t5-large"), "t5-small, t5-large", "t5-small,t5-large"])
def test_several_models_have_runs_of_their_own_in_one_area(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(models=said)
    small, large = workshop.each
    assert (workshop.model, small.model, large.model) == ("t5-small", "t5-small", "t5-large")
    assert [one.model for one in (*Workshop(models=None).each, *Workshop(model="a").each)] == ["t5-tiny", "a"]
    assert small.run_folder != large.run_folder and small.sweep_folder != large.sweep_folder
    assert (small.summary_folder, small.states_folder) == (large.summary_folder, large.states_folder)
    monkeypatch.setenv("ZEROPODS_MODELS", "t5-small,t5-large")
    assert Workshop() == workshop and Workshop(model="t5-base").model == "t5-base"


def test_a_technique_is_asked_for_its_flags_and_for_the_file_of_its_profile(trained: Path) -> None:
    assert CausalWorkshop().on("ddp", 2)["deepspeed"] is None
    assert CausalWorkshop().on("zero2", 2)["deepspeed"].name == "zero2.json"
    with pytest.raises(UserError, match="'ddp': has no file with DeepSpeed's flops profiler; expected one of zero1, "):
        Workshop(runs=trained).on_pods("ddp")


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
def test_the_effective_batch_is_the_same_on_any_number_of_processes(processes: int, trained: Path) -> None:
    flags = CausalWorkshop().on("zero1", processes)
    assert flags["per_device_train_batch_size"] * flags["gradient_accumulation_steps"] * processes == 16
    pods = min(processes, 3)
    assert Workshop(runs=trained, pods=pods).on_pods("zero1")["per_device_train_batch_size"] * pods == 48


def test_the_published_questions_are_the_workshops_and_can_be_trained_on_all_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = CausalWorkshop(recipe="published")
    wanted, keys = answers.preparation, ("num_train_epochs", "learning_rate", "weight_decay", "precision")
    assert (answers.model_id, wanted.limit, wanted.max_seq_length) == ("bigscience/bloom-560m", 500, 512)
    assert [answers.training[key] for key in keys] == [3, 5e-5, 0.01, "fp16"]
    monkeypatch.setenv("ZEROPODS_CAUSAL_LOSS_ON", "all")
    workshop = CausalWorkshop(recipe="published")
    assert (wanted.loss, workshop.preparation.loss) == ("answer", "all")
    assert workshop.prepared != answers.prepared


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Workshop(steps=987).on_pods("zero1"), "contains no trained model yet; run notebook 02 first"),
        (lambda: Workshop(dataset="none").get_data(), "no such folder; expected sample, wikisql or a folder"),
        (lambda: CausalWorkshop(recipe="real"), "recipe 'real'; expected sample, published"),
        (lambda: CausalWorkshop(recipe="multi_node"), "'multi_node': is for lm, not for 'squad'"),
        (lambda: CausalWorkshop(dataset="wikitext-2").get_data(), "'wikitext-2': is for lm, this"),
        (lambda: CausalWorkshop(dataset="none").get_data(), "no such folder; expected sample, squad or a folder"),
        (lambda: CausalWorkshop().on("zero1", 3), "3 processes: an effective batch of 16 rows cannot be divided"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(call: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        call()


@pytest.mark.parametrize(("name", "task"), EACH)
def test_a_recipe_agrees_with_the_script_and_its_configuration(name: str, task: str, tmp_path: Path) -> None:
    workshop = CausalWorkshop(recipe=name, task=task)
    flags = {key: value for key, value in workshop.on(workshop.basis.technique).items() if key != "slots"}
    call = ScriptCall(ROOT / "causal_train.py", tuple(train_arguments(**flags)))
    check_arguments(Launch(call=call, folder=tmp_path, hosts=(Host("a", 1),), master_port=0))
    known: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    known |= {key: str(known[key]) for key in ("data", "outputdir")} | {"deepspeed": None}
    assert CausalArguments(**known).max_grad_norm == 1.0
