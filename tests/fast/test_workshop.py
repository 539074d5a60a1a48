"""The settings of the notebooks, and the sizes of models that they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.plan.parameters import t5_parameters
from zeropods.plan.shapes import t5_shape
from zeropods.workshop import ROOT, Workshop


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATASET", "MODEL", "STEPS", "RUNS", "LIMIT", "INIT"):
        monkeypatch.delenv(f"ZEROPODS_{name}", raising=False)


def test_the_default_is_the_embedded_job() -> None:
    workshop = Workshop()
    assert (workshop.dataset, workshop.model, workshop.training["init"]) == ("sample", "t5-tiny", "random")


def test_the_environment_decides_where_the_notebook_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROPODS_MODEL", "t5-small")
    assert Workshop().model == "t5-small"


def test_the_notebook_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROPODS_MODEL", "t5-small")
    assert Workshop(model="t5-tiny").model == "t5-tiny"


def test_a_number_that_is_none_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROPODS_STEPS", "many")
    with pytest.raises(UserError, match="ZEROPODS_STEPS: 'many'; expected int"):
        Workshop()


def test_paths_are_relative_to_the_project() -> None:
    assert Workshop(runs=Path("runs/a")).summary_folder == ROOT / "runs" / "a" / "summary"


def test_a_number_of_steps_takes_the_place_of_the_clock() -> None:
    training = Workshop(steps=30).training
    assert (training["max_steps"], training["max_train_seconds"]) == (30, None)


def test_models_that_are_fine_tuned_begin_with_their_weights() -> None:
    assert Workshop(model="t5-large").training["init"] == "pretrained"


def test_other_settings_are_another_run() -> None:
    runs = {Workshop(**given).run_folder for given in ({}, {"steps": 3}, {"limit": 9}, {"model": "t5-small"})}
    assert len(runs) == 4


def test_the_effective_batch_is_the_same_on_any_number_of_pods() -> None:
    rows = [Workshop().on_pods("zero1", pods)["per_device_train_batch_size"] * pods for pods in (1, 2, 3)]
    assert len(set(rows)) == 1


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="5 pods: an effective batch of 48 rows does not divide"):
        Workshop(pods=5).on_pods("zero1")


def test_each_technique_and_number_of_pods_has_a_run_of_its_own() -> None:
    asked = [("zero1", 3), ("zero1", 2), ("zero2", 3), ("zero3_offload", 3)]
    assert len({Workshop().on_pods(*each)["outputdir"] for each in asked}) == len(asked)


@pytest.mark.parametrize("technique", ["zero1", "zero2", "zero3_offload"])
def test_a_technique_of_the_notebook_has_its_configuration(technique: str) -> None:
    assert Workshop().on_pods(technique)["deepspeed"].is_file()


def test_a_data_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; expected sample, wikisql or a folder"):
        Workshop(dataset=str(tmp_path / "none")).get_data()


@pytest.mark.parametrize(("name", "parameters"), [("t5-small", 60_506_624), ("t5-large", 737_668_096)])
def test_the_published_models_have_their_published_sizes(name: str, parameters: int) -> None:
    assert t5_parameters(t5_shape(name)) == parameters
