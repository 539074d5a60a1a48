"""Files that are safe: weights that run nothing when they are read, and private folders that nobody else holds."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.files import has_weights, refuse_other_weights
from zeropods.pods.processes import DEMO, FRESH_SECONDS, POD, make_private_folder

MAKE = "from zeropods.pods.processes import POD, make_private_folder as make; print(make(POD), flush=True); input()"


@pytest.mark.parametrize(
    ("name", "document", "named"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "m-1.safetensors", "b": "m-2.bin"}}, "m-2.bin"),
        ("config.json", {"transformers_weights": "adapter_model.bin"}, "adapter_model.bin"),
    ],
)
def test_a_folder_that_names_a_pickle_as_weights_is_refused(
    tmp_path: Path, name: str, document: object, named: str
) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert not has_weights(tmp_path)
    (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(UserError, match=rf"{name}: names '{named}' as weights; expected \*.safetensors"):
        refuse_other_weights(tmp_path)


@pytest.mark.parametrize("config", ['{"d_model": 8}', "{"])
def test_safetensors_and_what_is_no_json_are_left_to_who_loads_them(tmp_path: Path, config: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    (tmp_path / "config.json").write_text(config)
    refuse_other_weights(tmp_path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders of a test lie."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def left(folder: Path) -> Path:
    """A folder that a killed process left long ago."""
    folder.mkdir(exist_ok=True)
    then = folder.stat().st_mtime - 2 * FRESH_SECONDS
    os.utime(folder, (then, then))
    return folder


def test_a_new_private_folder_removes_what_its_own_kind_left_and_nothing_else(place: Path) -> None:
    of_pod, of_page = left(place / f"{POD}left"), left(place / f"{DEMO}left")
    (place / "mine").mkdir()
    (place / f"{POD}link").symlink_to(place / "mine")
    (place / f"{POD}new").mkdir()
    assert make_private_folder(POD).stat().st_mode & 0o777 == 0o700
    assert [path.is_dir() for path in (of_pod, of_page, place / "mine", place / f"{POD}new")] == [False, *[True] * 3]


def test_what_another_pod_holds_is_removed_only_after_its_end(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as pod:
        assert pod.stdout is not None
        held = left(Path(pod.stdout.readline().strip()))
        make_private_folder(POD)
        assert held.is_dir()
        pod.communicate("\n")
    make_private_folder(POD)
    assert not held.exists()
