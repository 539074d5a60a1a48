"""`zeropods sweep`: what it prints, and its exit status."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeropods.cli import sweep as cli_sweep
from zeropods.errors import UserError
from zeropods.sweep.reading import read_matrix
from zeropods.sweep.results import Row, Sweep
from zeropods.sweep.trial import trials
from zeropods.workshop import Workshop

TEXT = """
script: tests/full/sweep_rank.py
model: well
cells:
  - {technique: none, pods: [1, 2]}
  - {technique: zero1, pods: 2}
repeats: 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "three.yaml").write_text(TEXT)
    return tmp_path / "three.yaml"


def called(*words: object) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The verb with these words: its arguments and its result."""

    def add(verbs: Any, name: str, help_: str, run: Any) -> Any:
        verb = verbs.add_parser(name, help=help_)
        verb.set_defaults(run=run)
        return verb

    root = argparse.ArgumentParser()
    cli_sweep.add_verbs(root.add_subparsers(), add)
    arguments = root.parse_args(["sweep", *map(str, words)])
    return arguments, arguments.run(arguments)


def result(file: Path, out: Path, *statuses: str | None) -> dict[str, Any]:
    """What the verb returns of a sweep whose runs ended so; `sweep.json` is there too."""
    matrix = read_matrix(file)
    planned = trials(matrix, out)
    rows = tuple(replace(Row.of(trial), status=status) for trial, status in zip(planned, statuses, strict=True))
    sweep = Sweep(out=out, matrix=matrix, rows=rows)
    sweep.write()
    return {"out": str(out), **sweep.to_json()}


def test_a_dry_run_lists_the_runs_in_their_order_and_writes_nothing(file: Path, tmp_path: Path) -> None:
    arguments, said = called(file, "--out", tmp_path / "out", "--dry-run")
    none, zero1 = "well-none-1-pod-schema", "well-zero1-2-pods-schema"
    assert [(run["cell"], run["repeat"]) for run in said["runs"]] == [(none, 1), (zero1, 1), (zero1, 2), (none, 2)]
    assert not (tmp_path / "out").exists() and arguments.status(said) == 0


def test_a_dry_run_shows_what_is_left_out(file: Path, tmp_path: Path) -> None:
    arguments, said = called(file, "--out", tmp_path / "out", "--dry-run")
    lines = arguments.readable(said).splitlines()
    assert len(lines) == 5 and lines[-1].startswith("# left out: well-none-2-pods-schema: none is one process")


def test_runs_lie_by_the_name_of_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert called(file, "--dry-run")[1]["out"] == str(file.parent / "runs" / "three")


def test_a_measured_matrix_is_a_success_whatever_came_of_it(file: Path, tmp_path: Path) -> None:
    assert cli_sweep.exit_status(result(file, tmp_path / "out", "ok", "oom", "timeout", "failed")) == 0


def test_a_run_without_a_result_is_no_success(file: Path, tmp_path: Path) -> None:
    assert cli_sweep.exit_status(result(file, tmp_path / "out", "ok", "interrupted", "ok", "ok")) == 1


def test_people_read_a_table(file: Path, tmp_path: Path) -> None:
    lines = cli_sweep.readable(result(file, tmp_path / "out", "ok", "oom", "ok", "ok")).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == [
        "well-none-1-pod-schema", "well-zero1-2-pods-schema", "well-none-2-pods-schema",
    ]  # fmt: skip
    assert lines[-1] == f"sweep: {tmp_path / 'out' / 'sweep.json'}"


def test_a_hostfile_that_is_not_there_is_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--hostfile .*nowhere: no such file"):
        called(file, "--out", tmp_path / "out", "--hostfile", tmp_path / "nowhere")


def test_planning_a_sweep_loads_no_library_of_training(file: Path) -> None:
    code = (
        "import argparse, pathlib, sys\n"
        "from zeropods.cli.sweep import run\n"
        "run(argparse.Namespace(matrix=pathlib.Path(sys.argv[1]), out=None, dry_run=True))\n"
        "import zeropods.sweep.run\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_matrix_of_the_notebook_is_three_cells_twice(tmp_path: Path) -> None:
    planned = trials(Workshop(dataset="sample").matrix, tmp_path)
    cells = ["none-1-pod", "zero1-2-pods", "zero2-2-pods", "zero2-2-pods", "zero1-2-pods", "none-1-pod"]
    assert [trial.cell.name for trial in planned] == [f"t5-tiny-{cell}-schema" for cell in cells]


def test_the_matrix_of_the_notebook_has_the_effective_batch_of_its_pods() -> None:
    workshop = Workshop()
    on_pods = workshop.on_pods("zero1", 3)
    assert workshop.matrix.flags["effective_batch_size"] == 3 * on_pods["per_device_train_batch_size"]


def test_the_matrix_of_the_notebook_takes_its_steps() -> None:
    assert (Workshop().matrix.flags["max_steps"], Workshop(steps=20).matrix.flags["max_steps"]) == (30, 20)


def test_the_matrix_of_the_notebook_runs_on_a_single_pod_too() -> None:
    assert [cell.pods for cell in Workshop(pods=1).matrix.cells] == [1, 1, 1]


@pytest.mark.parametrize("model", ["t5-small", "t5-large"])
def test_larger_models_are_measured_for_as_many_steps(model: str) -> None:
    assert json.loads(json.dumps(Workshop(model=model).matrix.to_json()))["flags"]["max_steps"] == 30
