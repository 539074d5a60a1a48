"""The notebooks, executed on fresh kernels as `make demo` executes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeropods.measure.records import read_record

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"ZEROPODS_STEPS": "10", "ZEROPODS_LIMIT": "400", "ZEROPODS_QUESTIONS": "24", "ZEROPODS_REPEATS": "1"}
AGAIN = () if os.environ.get("ZEROPODS_SOAK") == "1" else ("02_train_single_pod", "03_train_pods", "06_summary")
"""What a second call executes: those that train or sum up; in a soak all."""
LIMIT_SECONDS = 600
pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS)


def demo(folder: Path, *notebooks: str, **settings: str) -> subprocess.Popen[str]:
    """`tools/demo.py` with its runs and executed copies below a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZEROPODS_")} | {
        "ZEROPODS_RUNS": str(folder / "runs"),
        **settings,
    }
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), "--out", str(folder / "copies"), *notebooks]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    """What a demo printed, once it has ended well."""
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, errors
    return out


def streams(copy: Path) -> str:
    """What the cells of an executed copy wrote beside their results."""
    outputs = [out for cell in json.loads(copy.read_text())["cells"] for out in cell.get("outputs", [])]
    return "".join("".join(out["text"]) for out in outputs if out["output_type"] == "stream")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a demo on the sample, and what its first and second call printed."""
    folder = tmp_path_factory.mktemp("sample")
    return folder, finished(demo(folder, **SMALL)), finished(demo(folder, *AGAIN, **SMALL))


def test_the_demo_prints_the_summary_of_its_run(sample: tuple[Path, str, str]) -> None:
    rows = [[cell.strip() for cell in line.split("|")[2:5]] for line in sample[1].splitlines() if "t5-tiny |" in line]
    assert ["t5-tiny", "none", "1"] in rows
    assert ["t5-tiny", "zero3_offload", "3"] in rows


def test_the_demo_ends_with_the_report(sample: tuple[Path, str, str]) -> None:
    report = sample[1].splitlines()[-1].removeprefix("report: ")
    assert Path(report).is_file()


def test_the_demo_scores_the_test_split(sample: tuple[Path, str, str]) -> None:
    (score,) = (sample[0] / "runs").glob("*/score.test.json")
    assert json.loads(score.read_text())["examples"] == int(SMALL["ZEROPODS_QUESTIONS"])


def test_a_second_call_trains_nothing_and_says_so(sample: tuple[Path, str, str]) -> None:
    said = streams(sample[0] / "copies" / "02_train_single_pod.ipynb")
    assert "this run is finished; nothing to do" in said


def test_a_second_call_prints_the_same_summary(sample: tuple[Path, str, str]) -> None:
    tables = [out[out.index("## Runs") :] for out in sample[1:]]
    assert tables[0] == tables[1]


def test_executed_copies_are_kept_as_pages(sample: tuple[Path, str, str]) -> None:
    assert len(list((sample[0] / "copies").glob("*.html"))) == 7


def test_each_technique_on_pods_leaves_a_record_and_a_profile(sample: tuple[Path, str, str]) -> None:
    folders = sorted((sample[0] / "runs").glob("*-pods"))
    found = [(record["technique"], record["pods"], record["status"]) for record in map(read_record, folders)]
    assert sorted(found) == [
        ("zero1", 2, "ok"),
        ("zero1", 3, "ok"),
        ("zero2", 3, "ok"),
        ("zero3_offload", 3, "ok"),
    ]
    assert all("Flops Profiler" in (folder / "profile.txt").read_text() for folder in folders)


def test_pods_of_a_notebook_have_the_same_losses(sample: tuple[Path, str, str]) -> None:
    records = [read_record(folder) for folder in sorted((sample[0] / "runs").glob("*-pods"))]
    curves = [[entry["loss"] for entry in record["losses"]] for record in records]
    assert len(curves) == 4 and len(curves[0]) == int(SMALL["ZEROPODS_STEPS"])
    assert all(curve == pytest.approx(curves[0], rel=1e-3) for curve in curves)


def test_every_run_of_the_matrix_has_a_result(sample: tuple[Path, str, str]) -> None:
    (file,) = (sample[0] / "runs").glob("*-sweep-*/sweep.json")
    cells = json.loads(file.read_text())["cells"]
    assert {(cell["technique"], cell["pods"], cell["status"]) for cell in cells} == {
        ("none", 1, "ok"),
        ("zero1", 2, "ok"),
        ("zero2", 2, "ok"),
    }


def test_what_was_planned_stands_beside_what_was_measured(sample: tuple[Path, str, str]) -> None:
    (file,) = (sample[0] / "runs").glob("summary/summary.json")
    runs = json.loads(file.read_text())["runs"]
    assert len(runs) == 8
    assert all(0.99 < run["measured_bytes"] / run["planned_bytes"] < 1.01 for run in runs)


def test_no_pod_outlives_its_notebook(sample: tuple[Path, str, str]) -> None:
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if str(sample[0]) in read(path)]


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_a_notebook_that_fails_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    process = demo(tmp_path, "05_inference", **SMALL)
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1 and "no trained model" in errors.splitlines()[-1]


def test_an_interrupted_demo_leaves_no_process_behind(sample: tuple[Path, str, str], tmp_path: Path) -> None:
    shutil.copytree(sample[0] / "runs" / "prepared", tmp_path / "runs" / "prepared")
    process = demo(tmp_path, "02_train_single_pod", **{**SMALL, "ZEROPODS_STEPS": "100000"})
    lock = wait_for_lock(tmp_path / "runs")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    trainer = int(lock.read_text().split()[1])
    assert process.returncode == 130 and not is_alive(trainer)


def wait_for_lock(runs: Path) -> Path:
    """The lock of the run, once a process has written itself into it."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for lock in runs.glob("*/run.lock"):
            if lock.read_text():
                return lock
        time.sleep(0.2)
    raise AssertionError("no run began in time")


def is_alive(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return Path(f"/proc/{pid}").exists()


def test_the_notebooks_run_on_wikisql(tmp_path: Path, shared_data: Path) -> None:
    settings = {
        "ZEROPODS_DATASET": str(shared_data / "wikisql"),
        "ZEROPODS_MODEL": "t5-small",
        "ZEROPODS_INIT": "random",
        "ZEROPODS_TOKENIZER": str(shared_data / "t5" / "spiece.model"),
        "ZEROPODS_STEPS": "6",
        "ZEROPODS_BATCH_SIZE": "4",
        "ZEROPODS_LIMIT": "24",
        "ZEROPODS_QUESTIONS": "4",
    }
    finished(demo(tmp_path, "01_prepare_dataset", "02_train_single_pod", "05_inference", **settings))
    (score,) = (tmp_path / "runs").glob("*/score.dev.json")
    assert json.loads(score.read_text())["unparseable"] == 0
