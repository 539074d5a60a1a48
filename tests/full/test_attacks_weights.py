"""Weights that would run a program when they are read: they are refused, and the program does not run."""

from __future__ import annotations

import pickle
import shutil
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
    """A trained model whose weights are a pickle that works."""
    folder = Path(
        shutil.copytree(trained / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    )
    weights = folder / "pytorch_model.bin"
    weights.write_bytes(pickle.dumps(Trap(sprung)))
    pickle.loads(weights.read_bytes())
    sprung.unlink()
    return folder


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside safetensors of another name"])
def test_training_refuses_pickled_weights(
    capsys: pytest.CaptureFixture[str], prepared: Path, trained: Path, model: Path, sprung: Path, beside: bool
) -> None:
    if beside:
        shutil.copy(trained / "model" / "model.safetensors", model / "other.safetensors")
    flags = ("--init", "pretrained", "--model_id", model, "--dataset_path", prepared)
    said = refused(capsys, *flags, "--outputdir", model.parent / "run")
    assert ("cannot be loaded" if beside else f"{model}: no weights (*.safetensors) in this folder") in said
    assert not sprung.exists()


def test_prediction_refuses_a_folder_with_pickled_weights_only(model: Path, sprung: Path) -> None:
    from zeropods.evaluate.generate import QueryAnswerer

    with pytest.raises(UserError, match="no trained model"):
        QueryAnswerer.load(model)
    assert not sprung.exists()
