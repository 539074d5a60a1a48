"""The settings of the causal notebooks, and the published recipes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.launch.local import train_arguments
from zeropods.launch.planning import check_arguments
from zeropods.pods.hostfile import Host
from zeropods.train.arguments import CausalArguments
from zeropods.workshop import ROOT, CausalWorkshop
from zeropods.workshop.causal import SCRIPT, TECHNIQUES
from zeropods.workshop.recipes import RECIPES

EACH = [(name, task) for name, tasks in RECIPES.items() for task in tasks]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ZEROPODS_")]:
        monkeypatch.delenv(name)


def test_the_default_is_a_small_model_and_generated_questions() -> None:
    workshop = CausalWorkshop()
    assert (workshop.model_id, workshop.data.name, workshop.training["init"]) == (  # type: ignore[union-attr]
        "bloom-tiny",
        "sample-squad",
        "random",
    )


def test_the_published_questions_are_the_workshops() -> None:
    workshop = CausalWorkshop(recipe="published")
    keys = ("num_train_epochs", "learning_rate", "weight_decay", "per_device_train_batch_size", "precision")
    assert (workshop.model_id, workshop.preparation.limit, workshop.preparation.max_seq_length) == (
        "bigscience/bloom-560m",
        500,
        512,
    )
    assert [workshop.training[key] for key in keys] == [3, 5e-5, 0.01, 4, "fp16"]


def test_the_environment_decides_where_the_notebook_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROPODS_CAUSAL_RECIPE", "published")
    assert CausalWorkshop(task="lm").model_id == "distilbert/distilgpt2"


def test_the_notebook_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROPODS_CAUSAL_STEPS", "7")
    assert CausalWorkshop(steps=3).training["max_train_steps"] == 3


def test_runs_lie_where_those_of_the_other_notebooks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROPODS_RUNS", "runs/there")
    assert CausalWorkshop().area == ROOT / "runs" / "there"


def test_a_recipe_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="recipe 'real'; expected sample, published"):
        CausalWorkshop(recipe="real")


def test_a_recipe_of_another_task_is_refused() -> None:
    with pytest.raises(UserError, match="'multi_node': is for lm, not for 'squad'"):
        CausalWorkshop(recipe="multi_node")


def test_a_data_set_of_another_task_is_refused() -> None:
    with pytest.raises(UserError, match="'wikitext-2': is for lm, this notebook is for squad"):
        CausalWorkshop(dataset="wikitext-2").get_data()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; expected sample, squad, wikitext-2 or a folder"):
        CausalWorkshop(dataset=str(tmp_path / "none")).get_data()


def test_each_technique_has_a_run_and_a_configuration_of_its_own() -> None:
    runs = [CausalWorkshop().on(technique) for technique in TECHNIQUES]
    assert len({run["outputdir"] for run in runs}) == len(TECHNIQUES)
    assert all(run["deepspeed"].is_file() for run in runs[1:]) and runs[0]["deepspeed"] is None


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
def test_the_effective_batch_is_the_same_on_any_number_of_processes(processes: int) -> None:
    flags = CausalWorkshop().on("zero1", processes)
    assert flags["per_device_train_batch_size"] * flags["gradient_accumulation_steps"] * processes == 16


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="3 processes: an effective batch of 16 rows does not divide"):
        CausalWorkshop().on("zero1", 3)


@pytest.mark.parametrize(("name", "task"), EACH)
def test_the_flags_of_a_recipe_are_flags_of_the_script(name: str, task: str) -> None:
    flags: dict[str, Any] = {key: value for key, value in flags_of(name, task).items() if value is not None}
    flags |= {key: str(flags[key]) for key in ("data", "outputdir")} | {"deepspeed": None}
    assert CausalArguments(**flags).max_grad_norm == 1.0


@pytest.mark.parametrize(("name", "task"), EACH)
def test_a_recipe_agrees_with_its_configuration(name: str, task: str, tmp_path: Path) -> None:
    arguments = train_arguments(**flags_of(name, task))
    check_arguments(
        Launch(script=SCRIPT, arguments=tuple(arguments), folder=tmp_path, hosts=(Host("a", 1),), master_port=0)
    )


def flags_of(name: str, task: str) -> dict[str, Any]:
    workshop = CausalWorkshop(recipe=name, task=task)
    flags = workshop.on(workshop.basis.technique)
    flags.pop("slots")
    return flags
