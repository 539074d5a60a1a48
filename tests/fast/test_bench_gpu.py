"""The benchmark on a GPU, as far as it needs no torch: cells, figures, what is missing, the archive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import LOCK
from benchmarks.gpu.archive import write_archive
from benchmarks.gpu.cells import Cell, matrix, recompiled
from benchmarks.gpu.duration import Duration, duration
from benchmarks.gpu.losses import compared
from benchmarks.gpu.machine import Machine, said_of_gpu, see_one_gpu
from benchmarks.gpu.needs import how_to_bring, required
from benchmarks.gpu.predicted import predicted_rate, predicted_seconds
from benchmarks.gpu.rows import false_fits, mfu, rows
from benchmarks.gpu.steady import rate, ratio_of_rates, steady_steps
from zeropods.files import folder_locked

ROOT = Path(__file__).resolve().parents[2]
H200 = Machine(device="cuda", gpu="NVIDIA H200", memory_bytes=140 << 30)
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
"""


def record(**values: object) -> dict:
    cell = Cell(name="t5-large-none-32", kind="train", model="t5-large").to_json()
    return {"cell": cell, "status": "ok", "batch": 32, "step_seconds": [0.1] * 4, "samples_per_second": 320.0, **values}


def called(*flags: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", *map(str, flags)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def bench(*flags: object, blocked: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command, on a Python that has no such package."""
    (folder / "sitecustomize.py").write_text(BLOCKED.format(package=blocked))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    argv = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", *map(str, flags)]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_matrix_has_twelve_cells() -> None:
    assert len({cell.name for cell in matrix()}) == 12


def test_every_model_with_a_fast_path_has_its_control_first() -> None:
    names = [cell.name for cell in matrix()]
    assert names.index("t5-large-control") < names.index("t5-large-none-32")


def test_zero3_is_never_compiled() -> None:
    cell = next(cell for cell in matrix() if cell.technique == "zero3_offload")
    assert recompiled(cell, "blocks").compile == "off"


def test_steps_that_warm_up_do_not_count() -> None:
    assert steady_steps([5.0, 1.0, 2.0, 3.0, 4.0], warm=2) == [2.0, 3.0, 4.0]


def test_the_first_step_never_counts() -> None:
    assert steady_steps([5.0, 1.0, 2.0, 3.0], warm=0) == [1.0, 2.0, 3.0]


def test_a_run_that_was_too_slow_counts_its_later_half() -> None:
    assert steady_steps([5.0, 4.0, 1.0, 2.0], warm=100) == [1.0, 2.0]


def test_a_cell_trains_for_the_seconds_asked_for_by_its_predicted_rate() -> None:
    import numpy as np

    cell, shapes = Cell(name="x", kind="train", model="t5-large", compile="blocks"), np.array([[48, 24]])
    found = duration(cell, 32, shapes, H200, seconds=30.0, warm=None)
    counted = found.steps - found.warm
    assert counted == pytest.approx(30.0 / predicted_seconds(cell, 32, shapes, H200), abs=1)
    assert found.warm == 40
    assert found.seconds == 240.0


def test_a_cell_of_so_many_steps_has_no_other_end() -> None:
    import numpy as np

    cell = Cell(name="x", kind="train", model="t5-small", steps=3)
    assert duration(cell, 32, np.array([[48, 24]]), H200, seconds=30.0, warm=None) == Duration(
        steps=3, warm=0, seconds=float("inf")
    )


def test_rate_is_rows_of_all_steps_over_their_seconds() -> None:
    assert rate([1.0, 3.0], batch=32) == 16.0


def test_ratio_of_equal_steps_has_no_width() -> None:
    assert ratio_of_rates([0.1] * 5, 64, [0.2] * 5, 32) == pytest.approx((4.0, 4.0, 4.0))


def test_mfu_of_t5_large_at_22_and_22_tokens() -> None:
    # 6 x (302.0 M x 22 + 50.3 M x 22 + 352.4 M x 22 + 32.9 M x 22) = 97.4 GFLOP a sample.
    assert mfu(record(tokens_per_sample=[22, 22]), H200) == pytest.approx(320 * 97.36e9 / 989.4e12, rel=1e-3)


def test_three_epochs_are_169_065_samples() -> None:
    assert rows({"t5-large-none-32": record()}, H200)[0]["three_epochs_seconds"] == pytest.approx(169_065 / 320)


def test_a_planned_batch_that_ran_out_of_memory_is_a_false_fit() -> None:
    assert false_fits(record(tries=[{"status": "oom"}, {"status": "ok"}]), H200)


def test_a_small_model_is_predicted_to_wait_for_its_launches() -> None:
    import numpy as np

    eager = Cell(name="x", kind="train", model="t5-small")
    graphs = Cell(name="x", kind="train", model="t5-small", compile="graphs")
    slow, fast = (predicted_rate(cell, 32, np.array([[24, 24]]), H200) for cell in (eager, graphs))
    assert slow is not None
    assert fast is not None
    assert fast > 2 * slow


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--forecast", "NVIDIA H200"), "zeropods: --forecast 'NVIDIA H200': give its --gpu-memory, in GiB"),
        (("--forecast", "X", "--gpu-memory", "9"), "zeropods: --forecast 'X': its published peak is not known"),
    ],
)
def test_a_forecast_needs_a_known_gpu_and_its_memory(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out"), "--data", str(tmp_path), *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert not (tmp_path / "out").exists()


def test_nothing_is_predicted_of_a_cpu() -> None:
    import numpy as np

    cpu = Machine(device="cpu", gpu=None, memory_bytes=1 << 30)
    assert predicted_rate(Cell(name="x", kind="train", model="t5-tiny"), 32, np.array([[24, 24]]), cpu) is None


def test_losses_are_compared_once_all_three_runs_are_there() -> None:
    assert compared({"losses-fp32": record(losses=[])}) is None


def test_equal_losses_are_within_noise() -> None:
    run = record(losses=[{"step": s, "loss": 2.0} for s in range(10)])
    run["cell"]["steps"] = 10
    found = compared(dict.fromkeys(("losses-fp32", "losses-fast", "losses-fp32-other-seed"), run))
    assert found is not None
    assert found["within_noise"]


def test_a_wheel_is_named_with_its_version() -> None:
    assert required("datasets") in (ROOT / "requirements.txt").read_text().splitlines()


def test_deepspeed_comes_as_a_wheel_made_of_its_source() -> None:
    assert any("pip wheel" in line and "deepspeed==" in line for line in how_to_bring(["deepspeed"]))


def test_a_package_that_every_cell_needs_is_asked_for_in_one_line(tmp_path: Path) -> None:
    done = bench("--out", tmp_path / "out", "--data", tmp_path, blocked="datasets", folder=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "pip download" in done.stderr
    assert required("datasets") in done.stderr


def test_what_depends_on_torch_comes_without_another_torch() -> None:
    lines = how_to_bring(["accelerate", "datasets"])
    assert [line for line in lines if "accelerate" in line] == [line for line in lines if "--no-deps" in line]


def test_a_damaged_record_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "out" / "cells").mkdir(parents=True)
    (tmp_path / "out" / "cells" / "t5-small-control.json").write_text('{"cell": {')
    done = called("--out", tmp_path / "out", "--data", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "t5-small-control.json: not JSON" in done.stderr


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    assert "holds something that is no benchmark" in called("--out", tmp_path, "--data", tmp_path).stderr


def test_a_second_call_into_a_folder_is_refused(tmp_path: Path) -> None:
    with folder_locked(tmp_path, LOCK, signs=(LOCK,), kind="benchmark", flag="--out"):
        done = called("--out", tmp_path, "--data", tmp_path)
    assert "in use by process" in done.stderr


def test_a_failed_cell_fails_the_call_and_one_without_memory_does_not(tmp_path: Path) -> None:
    for name, status in (("t5-small-control", "failed"), ("t5-large-control", "oom")):
        path = tmp_path / "cells" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**record(status=status), "gpu": None}))
    done = called("--out", tmp_path, "--data", tmp_path, "--only", "*-control")
    assert (done.returncode, done.stderr.splitlines()[0].split(";")[0]) == (1, "failed: t5-small-control"), done.stderr


def test_the_gpu_is_found_among_what_else_was_said() -> None:
    assert said_of_gpu('a warning\n{"gpu": "NVIDIA H200", "memory_bytes": 1}\nanother') is not None


def test_one_gpu_of_several_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    see_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


def test_without_deepspeed_its_cells_wait_and_are_named(tmp_path: Path) -> None:
    flags = ("--out", tmp_path / "out", "--data", tmp_path, "--only", "*zero1*")
    done = bench(*flags, blocked="deepspeed", folder=tmp_path)
    assert done.returncode == 1
    assert "t5-small-zero1-32, t5-large-zero1-32" in done.stderr


def test_a_data_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = bench("--out", tmp_path, "--data", tmp_path / "none", blocked="nothing", folder=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr


def test_an_archive_holds_no_weights(tmp_path: Path) -> None:
    for name in ("cells/a.json", "summary.md", "runs/a/record.json", "runs/a/model/model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with tarfile.open(write_archive(tmp_path)) as packed:
        assert not [name for name in packed.getnames() if "safetensors" in name]


def test_a_gpu_that_is_not_known_gets_a_larger_batch_than_a_cpu() -> None:
    import numpy as np

    from benchmarks.gpu.best_batch import best_batch

    cell = Cell(name="x", kind="train", model="t5-small", batch=None)
    gpu = Machine(device="cuda", gpu="NVIDIA B9000", memory_bytes=100 << 30)
    assert best_batch(cell, lambda _: np.array([[48, 24]]), 56_355, gpu)[0] > 32
