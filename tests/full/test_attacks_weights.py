"""Weights that would run a program when they are read: they are refused, and the program does not run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.full.test_train import refused
from zeropods.errors import UserError


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._file,)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """What is there if the trap was sprung."""
    return tmp_path / "sprung"


@pytest.fixture
def model(tmp_path: Path, trained: Path, sprung: Path) -> Path:
    """A trained model whose weights are a pickle."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (trained / "model").iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    return folder


def test_the_trap_works(model: Path, sprung: Path) -> None:
    pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert sprung.exists()


def test_training_refuses_a_folder_with_pickled_weights_only(
    capsys: pytest.CaptureFixture[str], prepared: Path, model: Path, sprung: Path, tmp_path: Path
) -> None:
    said = refused(
        capsys, "--init", "pretrained", "--model_id", model, "--dataset_path", prepared,
        "--outputdir", tmp_path / "run",
    )  # fmt: skip
    assert f"{model}: no weights (*.safetensors) in this folder" in said
    assert not sprung.exists()


def test_prediction_refuses_a_folder_with_pickled_weights_only(model: Path, sprung: Path) -> None:
    from zeropods.evaluate.generate import QueryAnswerer

    with pytest.raises(UserError, match="no trained model"):
        QueryAnswerer.load(model)
    assert not sprung.exists()


def test_safetensors_of_another_name_beside_a_pickle_do_not_let_it_in(
    capsys: pytest.CaptureFixture[str], prepared: Path, trained: Path, model: Path, sprung: Path, tmp_path: Path
) -> None:
    (model / "other.safetensors").write_bytes((trained / "model" / "model.safetensors").read_bytes())
    said = refused(
        capsys, "--init", "pretrained", "--model_id", model, "--dataset_path", prepared,
        "--outputdir", tmp_path / "run",
    )  # fmt: skip
    assert "cannot be loaded" in said
    assert not sprung.exists()
