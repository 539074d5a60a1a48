"""The benchmark on a GPU, as far as it needs no torch: cells, figures, what is missing, the
archive."""

import json
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import LOCK, main
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.machine import Machine, required
from benchmarks.gpu.summary import (
    ARCHIVE,
    PREFIX,
    mfu,
    rate,
    ratio_of_rates,
    rows,
    steady_steps,
    write_archive,
)
from zeropods.errors import guarded
from zeropods.files import folder_locked

H200 = Machine(device="cuda", gpu="NVIDIA H200", memory_bytes=140 << 30)


def record(**values: object) -> dict[str, object]:
    cell = Cell(name="t5-large-none-32", kind="train", model="t5-large")
    return {
        "cell": asdict(cell),
        "status": "ok",
        "batch": 32,
        "step_seconds": [0.1] * 4,
        "samples_per_second": 320.0,
        **values,
    }


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called; flags can be added."""
    argv = ["benchmarks.gpu", "--device", "cpu"]
    argv += ["--out", f"{tmp_path}/out", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    return argv


@pytest.mark.parametrize(
    ("seconds", "warm", "counted"),
    [
        ([5.0, 1.0, 2.0, 3.0, 4.0], 2, [2.0, 3.0, 4.0]),
        # The first step never counts.
        ([5.0, 1.0, 2.0, 3.0], 0, [1.0, 2.0, 3.0]),
        # A run that was too slow to warm up counts its later half.
        ([5.0, 4.0, 1.0, 2.0], 100, [1.0, 2.0]),
    ],
)
def test_steps_that_warm_up_do_not_count(
    seconds: list[float],
    warm: int,
    counted: list[float],
) -> None:
    assert steady_steps(seconds, warm=warm) == counted


def test_rates_and_their_ratio_by_hand() -> None:
    assert rate([1.0, 3.0], batch=32) == 16.0
    assert ratio_of_rates([0.1] * 5, 64, [0.2] * 5, 32) == pytest.approx((4.0, 4.0, 4.0))


def test_mfu_of_t5_large_at_22_and_22_tokens() -> None:
    # 6 x (302.0 M x 22 + 50.3 M x 22 + 352.4 M x 22 + 32.9 M x 22 + 59.5 M of attention)
    # = 97.7 GFLOP a sample.
    expected = 320 * 97.72e9 / 989.4e12
    assert mfu(record(tokens_per_sample=[22, 22]), H200) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("gpu", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA GH200 480GB", 4.0e12),
        ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        # Between the others, where it is not known.
        ("a card of the future", 2.0e12),
    ],
)
def test_a_step_of_the_optimizer_is_predicted_by_the_memory_of_the_very_card(
    gpu: str,
    bandwidth: float,
) -> None:
    machine = Machine(device="cuda", gpu=gpu, memory_bytes=1)
    assert machine.bandwidth == pytest.approx(bandwidth)


def test_three_epochs_are_169_065_samples() -> None:
    (row,) = rows({"t5-large-none-32": record()}, H200)
    assert row["three_epochs_seconds"] == pytest.approx(169_065 / 320)


FAILED = json.dumps({**record(status="failed"), "gpu": None})
OOM = json.dumps({**record(status="oom"), "gpu": None})


@pytest.mark.parametrize(
    ("files", "flags", "blocked", "said"),
    [
        ({}, "--forecast X", "", "zeropods: --forecast 'X': give its --gpu-memory, in GiB"),
        (
            {},
            "--forecast X --gpu-memory 9",
            "",
            "zeropods: --forecast 'X': its published peak is not known",
        ),
        ({}, "", "datasets", f"pip download -d wheels {required('datasets')}"),
        ({}, "--only *zero1*", "deepspeed", "t5-small-zero1-32, t5-large-zero1-32"),
        ({"cells/t5-small-control.json": '{"cell": {'}, "", "", "t5-small-control.json: not JSON"),
        ({"thesis.txt": ""}, "", "", "is not empty and is not a benchmark folder"),
        ({}, "--data none", "", "none: "),
        (
            {"cells/t5-small-control.json": FAILED, "cells/t5-large-control.json": OOM},
            "--only *-control",
            "",
            "failed: t5-small-control;",
        ),
    ],
)
def test_what_stands_in_the_way_is_said_and_fails_the_call(
    files: dict[str, str],
    flags: str,
    blocked: str,
    said: str,
    tmp_path: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    discover = Distribution.discover

    def without_blocked(**context: str) -> Iterable[Distribution]:
        if context.get("name") == blocked:
            return ()
        return discover(**context)

    monkeypatch.setattr(Distribution, "discover", without_blocked)
    for name, text in files.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command += flags.split()
    assert guarded(main) == 1
    assert said in capsys.readouterr().err


def test_a_package_that_is_too_old_is_named_before_anything_is_imported(
    tmp_path: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    metadata = tmp_path / "installed" / "transformers-5.9.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.4\nName: transformers\nVersion: 5.9.1\n")
    monkeypatch.syspath_prepend(metadata.parents[1])
    assert guarded(main) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "transformers 5.9.1: too old; use 5.17 or later" in line
    assert f"pip install --no-index --find-links wheels {required('transformers')}" in line


@pytest.mark.usefixtures("command")
def test_a_second_call_into_a_folder_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with folder_locked(tmp_path / "out", LOCK, signs=(LOCK,), kind="benchmark", flag="--out"):
        assert guarded(main) == 1
    assert "in use by process" in capsys.readouterr().err


def test_an_archive_holds_no_weights(tmp_path: Path) -> None:
    weights = "runs/a/model/model.safetensors"
    for name in ("cells/a.json", "summary.md", "runs/a/record.json", weights):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with tarfile.open(write_archive(tmp_path, tmp_path / ARCHIVE, PREFIX)) as packed:
        assert not [name for name in packed.getnames() if "safetensors" in name]
