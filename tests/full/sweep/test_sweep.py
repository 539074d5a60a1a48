"""Sweeps over real pods that end in every way: each run has a result, a score if it ended well, and leaves nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.full.clusters import processes_of
from tests.full.launches import ROOT, ended, left, processes, processes_of_pod, until
from zeropods import pods
from zeropods.errors import UserError
from zeropods.measure.record import read_record
from zeropods.measure.score_json import score_of
from zeropods.pods.cluster import Cluster, names
from zeropods.report.summary import read_runs
from zeropods.sweep.matrix import at_tiny_scale, matrix_of
from zeropods.sweep.run import run_sweep

OVER_PODS, ALONE = {"technique": "ddp", "pods": 2}, {"technique": "none", "pods": 1}
EVERY_END = [{"model": ["well", "oom", "slow", "broken"], **OVER_PODS}, {"model": ["well", "oom", "killed"], **ALONE}]
ENDS = {
    "well-ddp-2-pods-schema": ("ok", None),
    "oom-ddp-2-pods-schema": ("oom", "pod1: rank 0: no memory left"),
    "slow-ddp-2-pods-schema": ("timeout", "took longer than 20 s"),
    "broken-ddp-2-pods-schema": ("failed", "left no measurement"),
    "well-none-1-pod-schema": ("ok", None),
    "oom-none-1-pod-schema": ("oom", "no memory left"),
    "killed-none-1-pod-schema": ("failed", "killed by SIGKILL"),
}
SWEEP = """
import sys
from pathlib import Path
from tests.full.over_pdsh import pdsh_argv
from zeropods import pods
from zeropods.errors import guarded
from zeropods.sweep.matrix import read_matrix
from zeropods.sweep.run import run_sweep
file, out, *names = sys.argv[1:]
cluster = pods.find(names[0]) if names else None
sys.exit(guarded(lambda: int(not run_sweep(read_matrix(Path(file)), out, cluster, argv=pdsh_argv).is_measured)))
"""
"""`zeropods sweep` with pdsh itself in the place of DeepSpeed's launcher, as `over_pdsh` has it for a launch."""


def matrix(folder: Path, cells: list[dict[str, Any]], **keys: Any) -> Path:
    """A file of `rank.py`, whose model says how a run ends. YAML takes JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"script": "tests/full/rank.py", "cells": cells, "flags": {"effective_batch_size": 2}, **keys}
    (folder / "m.yaml").write_text(json.dumps(document))
    return folder / "m.yaml"


def begun(file: Path, *cluster: str) -> subprocess.Popen[str]:
    """A sweep in a process of its own; its runs are beside its matrix."""
    command = [sys.executable, "-c", SWEEP, str(file), str(file.parent / "out"), *cluster]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)


def rows(file: Path) -> dict[str, dict[str, Any]]:
    document = json.loads((file.parent / "out" / "sweep.json").read_text())
    return {row["cell"]: row for row in document["cells"]}


def trains(file: Path, cell: str) -> None:
    """Wait until a run of a cell is trained."""
    until(lambda: (file.parent / "out" / cell / "1" / "pid.0").is_file())


@pytest.fixture(scope="module")
def measured(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, str]]:
    """A sweep whose runs end in every way: its file, its exit status, what it said."""
    file = matrix(tmp_path_factory.mktemp("sweep"), EVERY_END, timeout_seconds=20)
    process = begun(file, cluster.name)
    said = ended(process)
    yield file, process.returncode, said


def test_a_matrix_is_measured_whatever_its_runs_come_to_and_says_why(measured: tuple[Path, int, str]) -> None:
    file, status, said = measured
    assert status == 0, said
    assert {cell: row["status"] for cell, row in rows(file).items()} == {cell: end[0] for cell, end in ENDS.items()}
    for cell, row in rows(file).items():
        record = json.loads((file.parent / "out" / row["folder"] / "record.json").read_text())
        assert record["status"] == row["status"]
        assert (record["reason"] or "") in (row["reason"] or "") and (ENDS[cell][1] or "") in (row["reason"] or "")


def test_runs_begin_in_the_balanced_order_and_leave_nothing(measured: tuple[Path, int, str]) -> None:
    cells = list(ENDS)
    order = [cells[place] for place in (0, 1, 6, 2, 5, 3, 4)]
    begins = [line.split()[4] for line in measured[2].splitlines() if line.endswith("begins")]
    assert begins == [f"{cell}/1" for cell in order]
    assert not left(measured[0].parent)


def test_a_second_call_starts_nothing(measured: tuple[Path, int, str], cluster: Cluster) -> None:
    before = rows(measured[0])
    process = begun(measured[0], cluster.name)
    said = ended(process)
    assert process.returncode == 0 and said == "7 of 7 runs have a result already\n"
    assert rows(measured[0]) == before


def test_an_interrupted_sweep_goes_on_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    well, slow = (f"{end}-ddp-2-pods-schema" for end in ("well", "slow"))
    cells = [{"model": ["well", "slow"], **OVER_PODS}]
    file = matrix(tmp_path, cells)
    process = begun(file, cluster.name)
    trains(file, slow)
    process.send_signal(signal.SIGINT)
    ended(process)
    record = json.loads((tmp_path / "out" / slow / "1" / "record.json").read_text())
    assert (process.returncode, record["status"]) == (130, "interrupted") and not left(tmp_path)
    assert {cell: row["status"] for cell, row in rows(file).items()} == {well: "ok", slow: "interrupted"}

    process = begun(matrix(tmp_path, cells, timeout_seconds=3), cluster.name)
    said = ended(process)
    assert process.returncode == 0 and "1 of 2 runs have a result already" in said
    assert {cell: row["status"] for cell, row in rows(file).items()} == {well: "ok", slow: "timeout"}


def test_pods_of_a_sweep_s_own_are_renewed_and_end_with_it(home: Path, tmp_path: Path) -> None:
    file = matrix(tmp_path, [{"model": ["slow", "well"], **OVER_PODS}])
    process = begun(file)
    trains(file, "slow-ddp-2-pods-schema")
    # The script is none of ours: no pod has imported torch for it.
    assert not set(processes("zeropods.launch.forks")) & set(processes_of(home))
    (name,) = names()
    for pid in processes_of_pod(pods.find(name), 1):
        os.kill(pid, signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0, said
    ends = {cell: row["status"] for cell, row in rows(file).items()}
    assert ends == {"slow-ddp-2-pods-schema": "pod_lost", "well-ddp-2-pods-schema": "ok"}
    assert not names() and not left(tmp_path)


def test_a_cluster_of_too_few_pods_is_refused_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    file = matrix(tmp_path, [{"model": "well", "technique": "ddp", "pods": 4}], flags={})
    process = begun(file, cluster.name)
    assert "cluster shared: has 3 pods, but the matrix needs 4" in ended(process) and process.returncode == 1
    assert not (tmp_path / "out" / "well-ddp-4-pods-schema").exists()


# Finished runs of a matrix answer test questions and are scored.


QUESTIONS = 8
FLAGS = {"init": "random", "max_steps": 2, "threads": 1, "save_steps": 0, "eval_steps": 0, "memory_interval": 0}


def test_runs_of_a_matrix_are_scored_once_and_a_run_whose_data_have_gone_is_named(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "model": "t5-tiny", "technique": "none", "pods": 1, "dataset_path": str(prepared), "questions": QUESTIONS,
        "flags": FLAGS,
    }  # fmt: skip
    matrix = matrix_of(document, "m.yaml")
    sweep = run_sweep(matrix, tmp_path / "out")
    (row,) = sweep.table().rows
    kind, share = row[sweep.table().header.index("inference result")].rsplit(" ", 1)
    assert (row[-1], kind) == ("ok", "execution") and 0 <= float(share) <= 1
    (score,) = (tmp_path / "out").glob("*/1/score.test.json")
    assert json.loads(score.read_text())["examples"] == QUESTIONS
    results = read_runs([tmp_path / "out"]).tables[0]
    assert results.rows[0][results.header.index("inference result")].startswith("execution ")
    written = score.stat().st_mtime_ns
    run_sweep(matrix, tmp_path / "out")
    assert score.stat().st_mtime_ns == written

    score.unlink()
    record = score.parent / "record.json"
    record.write_text(record.read_text().replace(str(prepared), str(tmp_path)))
    (tmp_path / "manifest.json").write_text((prepared / "manifest.json").read_text().replace("test.jsonl", "test.gone"))
    capsys.readouterr()
    assert run_sweep(matrix, tmp_path / "out").is_measured
    assert f"not scored: {score.parent}: the raw data of {tmp_path} are no longer near it" in capsys.readouterr().err


def test_a_published_run_has_its_result_at_tiny_scale_its_set_is_made_again_and_other_data_are_refused(
    tmp_path: Path,
) -> None:
    """That of one process. What the others ask for is read in the fast lane; notebook 03 has such over pods."""
    file = ROOT / "matrices" / "published.yaml"
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    document["cells"] = [document["cells"][2]]
    # As many examples as one step of the others takes.
    matrix = at_tiny_scale(matrix_of(document, str(file)), str(file)).model_copy(update={"limit": 96})
    sweep = run_sweep(matrix, tmp_path / "out")
    (row,) = sweep.trials
    assert row.status == "ok" and score_of(row.launch.folder) is not None
    record = read_record(row.launch.folder)
    assert (record.model_id, record.technique, record.pods) == ("t5-large-tiny", "none", 1)
    assert (record.effective_batch_size, record.gradient_checkpointing, record.steps) == (32, True, 3)
    assert record.eval_losses
    shutil.rmtree(sweep.out / "prepared")
    assert run_sweep(matrix, sweep.out).is_measured
    with pytest.raises(UserError, match=r"was run with other settings .* choose another --out"):
        run_sweep(matrix.model_copy(update={"limit": 80}), sweep.out)
