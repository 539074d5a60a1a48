"""What an environment offers: ports, compiled extensions and turns at compiling one; files that are safe."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.files import check_weights
from zeropods.pods.processes import DEMO, FRESH_SECONDS, POD, make_private_folder
from zeropods.programs import (
    EXTENSIONS,
    LISTENED,
    TURN_LOCK,
    Turn,
    extension_cache,
    free_port,
    is_held,
    prepare_compiling,
)

HOLD = """
import sys
from zeropods.programs import Turn
Turn(sys.argv[1]).try_acquire()
print("taken", flush=True)
sys.stdin.read()
"""
SECONDS = 120.0
ROOT = Path(__file__).resolve().parents[3]


def test_free_ports_are_not_those_of_the_kernel_and_follow_no_seed() -> None:
    ports = set()
    for _ in range(3):
        random.seed(1)
        ports.add(free_port("127.0.0.1"))
    assert len(ports) > 1 and ports <= set(LISTENED)


def test_an_environment_has_a_cache_of_its_own_unless_one_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXTENSIONS, str(tmp_path))
    prepare_compiling()
    assert extension_cache() == tmp_path
    monkeypatch.delenv(EXTENSIONS)
    expected = extension_cache()
    prepare_compiling()
    assert extension_cache() == expected
    if sys.prefix != sys.base_prefix:
        assert expected == Path(sys.prefix) / "torch_extensions"


def test_operations_are_compiled_from_a_clone_that_is_not_installed(tmp_path: Path) -> None:
    # Without any installed package the first one that is missing is torch, not this project.
    command = [sys.executable, "-S", "-E", str(ROOT / "tools" / "compile_ops.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 1 and "No module named 'torch'" in ended.stderr


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the turn until it ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_a_second_process_waits_for_the_first_and_no_longer(
    how: str, holder: subprocess.Popen[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    turn = Turn(str(tmp_path / "lock"))
    if how == "it ends":
        (tmp_path / f"{tmp_path.name}.so").touch()
    waiting = threading.Thread(target=turn.try_acquire, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and is_held(tmp_path / TURN_LOCK)
    if how == "it is killed":
        holder.send_signal(signal.SIGKILL)
    else:
        holder.communicate("", timeout=SECONDS)
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    turn.release()
    assert not is_held(tmp_path / TURN_LOCK)
    # Whoever waits for a compiler is told so, its own or that of another process.
    error = capfd.readouterr().err
    compiles = how == "it is killed"
    assert (f"waits for another process, which compiles DeepSpeed's {tmp_path.name}" in error) == compiles
    assert (f"compiling DeepSpeed's {tmp_path.name}, once" in error) == compiles


# Files that are safe: weights that run nothing when they are read, private folders that nobody else holds.

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
    with pytest.raises(UserError, match="no weights"):
        check_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(UserError, match=rf"{name}: names '{named}' as weights; expected \*.safetensors"):
        check_weights(tmp_path)


@pytest.mark.parametrize("config", ['{"d_model": 8}', "{"])
def test_safetensors_and_what_is_no_json_are_left_to_who_loads_them(tmp_path: Path, config: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model-1.safetensors").touch()
    check_weights(tmp_path)


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
