"""Finished runs answer test questions and are scored: those of a matrix, and those of a launch."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.evaluate.score_json import score_of
from zeropods.measure.record import read_record
from zeropods.pods.cluster import Cluster
from zeropods.report.summary import read_runs
from zeropods.sweep.matrix import at_tiny_scale, matrix_of
from zeropods.sweep.run import run_sweep

ROOT = Path(__file__).resolve().parents[2]
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
    assert row[-1] == "ok" and 0 <= float(row[sweep.table().header.index("right, of 1")]) <= 1
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


def test_a_matrix_of_other_data_is_refused_and_a_set_that_has_gone_is_made_again(tmp_path: Path) -> None:
    document = {
        "model": "t5-tiny", "technique": "none", "pods": 1, "data": "sample", "limit": 40, "tokenizer": "t5-tiny",
        "flags": FLAGS,
    }  # fmt: skip
    assert run_sweep(matrix_of(document, "m.yaml"), tmp_path / "out").is_measured
    shutil.rmtree(tmp_path / "out" / "prepared")
    assert run_sweep(matrix_of(document, "m.yaml"), tmp_path / "out").is_measured
    with pytest.raises(UserError, match=r"was run with other settings .* choose another --out"):
        run_sweep(matrix_of({**document, "limit": 80}, "m.yaml"), tmp_path / "out")


def test_the_largest_published_run_has_its_result_over_pods_at_tiny_scale(cluster: Cluster, tmp_path: Path) -> None:
    """On two of its three pods: each imports all that a run needs. What the others ask for is read in the fast lane."""
    file = ROOT / "matrices" / "published.yaml"
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    document["cells"] = [{**document["cells"][-1], "pods": 2}]
    # As many examples as one step of the others takes.
    matrix = at_tiny_scale(matrix_of(document, str(file)), str(file)).model_copy(update={"limit": 96})
    sweep = run_sweep(matrix, tmp_path / "out", cluster)
    (row,) = sweep.rows.values()
    assert row.status == "ok" and score_of(sweep.out / row.folder) is not None
    record = read_record(sweep.out / row.folder)
    assert (record.model_id, record.technique, record.pods) == ("t5-3b-tiny", "zero3_offload", 2)
    assert (record.effective_batch_size, record.gradient_checkpointing, record.steps) == (2, True, 3)
    assert record.eval_losses


def test_a_launch_is_scored(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    data = ["--model_id", "t5-tiny", "--dataset_path", str(prepared), "--outputdir", str(tmp_path / "run")]
    launch = ["launch", "--launcher", "none", "--questions", str(QUESTIONS), "--json", "--", "textsql_train.py"]
    assert main([*launch, *data, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["score"]["examples"] == QUESTIONS
    assert json.loads((tmp_path / "run" / "score.test.json").read_text()) == result["score"]
