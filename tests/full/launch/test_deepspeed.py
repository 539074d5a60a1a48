"""transformers' schedules, and DeepSpeed's launcher over real pods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full.clusters import command, zeropods
from tests.full.launches import RANK, ROOT, left, processes, record, train, until
from zeropods.programs import EXTENSIONS, child_environment, extension_cache

# The operation of optimizer offload, compiled or found up to date.

WITHOUT_THE_PROJECT = """
import runpy, sys
from importlib.util import find_spec
from pathlib import Path
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
sys.path[:] = [folder for folder in sys.path if not Path(folder, "zeropods").is_dir()]
assert find_spec("zeropods") is None
runpy.run_path(sys.argv[1], run_name="__main__")
"""
WITHOUT_A_TOOLKIT = """
import torch.utils.cpp_extension
torch.utils.cpp_extension.CUDA_HOME = None
from zeropods.programs import compile_in_turns, prepare_compiling
prepare_compiling()
compile_in_turns()
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
print(get_accelerator()._name, CPUAdamBuilder().load(verbose=False).__name__)
"""


def test_operations_are_compiled_by_a_clone_where_only_its_packages_are_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_PROJECT, str(ROOT / "tools" / "compile_ops.py")]
    environment = {**child_environment(), EXTENSIONS: str(extension_cache())}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    assert (extension_cache() / "cpu_adam" / "cpu_adam.so").is_file()


def test_offload_on_a_gpu_needs_no_cuda_toolkit() -> None:
    # DeepSpeed for CUDA takes the builder of the CPU, which asks neither for nvcc nor for its version.
    environment = {**child_environment(), "DS_ACCELERATOR": "cuda", EXTENSIONS: str(extension_cache())}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_TOOLKIT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "cuda cpu_adam"


def test_schedules_are_those_of_transformers_without_settings_of_their_own() -> None:
    from transformers import SchedulerType

    from zeropods.train.flags import LR_SCHEDULES

    with_settings = {"cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"}
    assert set(LR_SCHEDULES) == {kind.value for kind in SchedulerType} - with_settings


# Its own launcher over real pods: through `zeropods launch`, and by the command that `pods up` prints.


LIMIT_SECONDS = 600
ODD = ["""it's $5; 50% "off" `id` * \\ äö""", "$HOME", "*", "`id`", "a;b", "50%", ""]


@pytest.fixture(scope="module")
def up(shared_home: Path) -> Iterator[dict[str, Any]]:
    """What `pods up` says of two pods."""
    yield json.loads(zeropods("pods", "up", "--count", 2, "--json").stdout)
    zeropods("pods", "down")


def test_a_launch_over_deepspeed_is_recorded_printed_as_one_document_and_imports_no_torch_here_nor_on_any_pod(
    up: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = zeropods("launch", "--json", "--", RANK, "--outputdir", tmp_path / "run", "--said", *ODD)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == record(tmp_path / "run")["status"] == "ok"
    assert json.loads(done.stdout)["argv"] == ["rank.py", *ODD]
    assert len(record(tmp_path / "run")["ranks"]) == 2 and not left(tmp_path / "run")
    imported = [line.rpartition("|")[2].strip() for line in (tmp_path / "run" / "launch.log").read_text().splitlines()]
    # By the runner, and by the launcher of each of the two pods.
    assert imported.count("deepspeed.constants") == 3 and "torch" not in imported


def test_deepspeeds_own_command_works_as_it_is_printed(up: dict[str, Any], tmp_path: Path) -> None:
    done = subprocess.run(
        [*up["command"], str(RANK), "--outputdir", str(tmp_path / "run")],
        env={**child_environment(), **up["export"]},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "ranks").glob("*.json"))) == 2


def test_a_run_ends_with_its_runner_and_an_interrupted_one_ends_no_stranger_of_deepspeeds_name(
    up: dict[str, Any], tmp_path: Path
) -> None:
    """DeepSpeed's own runner would run `pkill -f` for its launch processes, on every pod."""
    sought = f"{sys.executable} -u -m deepspeed.launcher.launch"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sought]) as stranger:
        try:
            # The kernel shows no arguments for a moment after it has begun.
            until(lambda: stranger.pid in processes(sought))
            killed, interrupted = (
                subprocess.Popen(
                    command("launch", "--num-pods", 1, "--", RANK, "--outputdir", tmp_path / name, "--seconds", 600),
                    cwd=ROOT,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for name in ("killed", "interrupted")
            )
            for name in ("killed", "interrupted"):
                train(tmp_path / name, ranks=1)
            (runner,) = processes("deepspeed.launcher.runner", tmp_path / "killed")
            os.kill(runner, signal.SIGKILL)
            interrupted.send_signal(signal.SIGINT)
            said = interrupted.communicate(timeout=LIMIT_SECONDS)[1]
            assert interrupted.returncode == 130 and record(tmp_path / "interrupted")["status"] == "interrupted", said
            said = killed.communicate(timeout=LIMIT_SECONDS)[1]
            assert killed.returncode == 1 and record(tmp_path / "killed")["status"] == "failed", said
            assert "SIGKILL" in record(tmp_path / "killed")["reason"]
            until(lambda: not left(tmp_path))
            assert stranger.poll() is None
        finally:
            stranger.kill()
