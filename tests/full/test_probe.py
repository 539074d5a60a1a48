"""A probe of this machine, and a plan by it; the grid of runs by which plans are judged."""

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from benchmarks.plan_grid import GridRun, grid, judged
from tests.full.launches import until
from zeropods.cli import main
from zeropods.measure.calibration import Sample, read_probe
from zeropods.pods.cluster import Cluster
from zeropods.train import probe


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    assert main(["probe", "--alone", "--out", str(path), "--json"]) == 0
    return path


def test_a_probe_is_kept_and_a_plan_says_that_it_is_used(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read_probe(machine)
    assert found.processes == 2 and found.machines == 1 and found.hardware["cores"] >= 1
    assert max(found.matmul_flops_per_second["fp32"].values()) > 1e9 and found.memory_bandwidth > 1e8
    assert 0 < found.latency_seconds < 1 and found.bandwidth > 1e6 and 1e8 < found.process_bytes < 2e9
    capsys.readouterr()
    assert main(["plan", "--model", "t5-tiny", "--device", "cpu", "--machine", str(machine)]) == 0
    assert f"the probe of {found.name}" in " ".join(capsys.readouterr().out.split())


def test_a_rank_that_was_killed_is_named_and_the_others_end_on_their_pods(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "MOST_SECONDS", 6.0)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    seen: dict[str, psutil.Process] = {}
    variables: list[dict[str, str]] = []

    def look() -> None:
        until(lambda: seen.update(ranks(tmp_path)) or len(seen) == 3)
        variables.extend(seen[number].environ() for number in "012")
        seen["1"].kill()

    looking = threading.Thread(target=look)
    looking.start()
    assert main(["probe", "--pods", cluster.name]) == 1
    looking.join()
    assert f"probe: process 1 on {cluster.pods[1].address}: ended with status " in capsys.readouterr().err
    assert {each["GLOO_SOCKET_IFNAME"] for each in variables} == {"lo"}
    until(lambda: not ranks(tmp_path))


def ranks(home: Path) -> dict[str, psutil.Process]:
    """Processes that probe with this home of transformers, by rank; without the programs that began them."""
    found = psutil.process_iter(["name", "cmdline", "environ"])
    probing = [each for each in found if "zeropods.train.probe" in (each.info["cmdline"] or [])]
    own = [each for each in probing if (each.info["environ"] or {}).get("HF_HOME") == str(home)]
    return {each.info["environ"]["RANK"]: each for each in own if each.info["name"].startswith("python")}


def test_the_judging_half_tells_how_far_off_a_plan_is(machine: Path) -> None:
    runs = []
    for number, cell in enumerate(grid()):
        parts = {"memory": (cell.rows * 1e8, 1e9), "time": (cell.rows * 1.0, 0.1 * cell.processes)}
        # One run of the half that judges needs twice the memory, and all are 5 % slower.
        far = 2 if number == 1 else 1
        exact = {name: sum(values) for name, values in parts.items()}
        is_judge = number % 2
        measured = {"memory": far * exact["memory"], "time": (1.05 if is_judge else 1) * exact["time"]}
        sample = Sample(cell.technique, "cpu", "t5", parts, measured)
        half = "judge" if is_judge else "fit"
        runs.append(GridRun(cell=cell, half=half, status="ok", sample=sample, live_bytes_ratio=1.0))
    figures, calibration = judged(runs, replace(read_probe(machine), processes=2))
    found = {figure.name: figure.value for figure in figures}
    assert calibration.factors["cpu"]["memory"] == pytest.approx([1, 1])
    assert found["resident memory above the bare process: median error"] == pytest.approx(0, abs=1e-6)
    assert found["resident memory above the bare process: runs within 8%"] == pytest.approx(100 * 31 / 32)
    assert found["step: median error"] == pytest.approx(5) and found["step: runs within 20%"] == 100
    assert json.dumps([asdict(figure) for figure in figures])
