"""`zeropods sweep`: what is left to do by what earlier calls have left; its results as a file, a table, a status."""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, as_record
from zeropods.cli import parser
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.launch.command import Launch
from zeropods.launch.lost_pods_and_hangs import Ending
from zeropods.launch.outcome import UnopenedError
from zeropods.sweep.matrix import Matrix, matrix_of
from zeropods.sweep.results import Sweep
from zeropods.sweep.run import Trial, held, refuse_other_runs, run_sweep, standing_row, trials

NONE, ZERO1 = "well-none-1-pod-schema", "well-zero1-2-pods-schema"


def a_matrix(**changes: Any) -> Matrix:
    """Two cells, twice, of a script that needs no data."""
    document = {
        "script": "tests/full/rank.py",
        "model": "well",
        "cells": [{"technique": "none", "pods": [1, 2]}, {"technique": "zero1", "pods": 2}],
        "repeats": 2,
        "flags": {"effective_batch_size": 48, "learning_rate": 0.1},
    }
    return matrix_of(document | changes, "m.yaml")


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return trials(a_matrix(), tmp_path)[0]


def recorded(trial: Trial, record: dict[str, Any]) -> Trial:
    """The trial with what a run of it leaves."""
    trial.folder.mkdir(parents=True)
    command.remember(trial.launch)
    for name in ("config", "record"):
        (trial.folder / f"{name}.json").write_text(json.dumps(record))
    return trial


def standing(trial: Trial, *, again: bool = False) -> str | None:
    return standing_row(trial, None, again=again).status


@pytest.mark.parametrize(
    ("record", "again", "status"),
    [
        (a_record(), True, "ok"),
        *((a_failed_record(status, "why", pod="pod2"), False, status) for status in ("oom", "timeout", "pod_lost")),
        (a_failed_record("oom"), True, None),
        (a_failed_record("interrupted", "SIGINT"), False, None),
    ],
)
def test_a_run_that_has_a_result_is_not_run_again(record: Any, again: bool, status: str | None, trial: Trial) -> None:
    row = standing_row(recorded(trial, record), None, again=again)
    assert row.status == status
    assert row.reason == ("pod2: why" if status not in ("ok", None) else None)


def test_a_damaged_record_stops_the_sweep_before_it_begins(trial: Trial) -> None:
    recorded(trial, a_record(schema_version=1))
    with pytest.raises(UserError, match="schema_version 1"):
        standing(trial)


def test_runs_of_another_matrix_are_refused_with_what_differs(trial: Trial, tmp_path: Path) -> None:
    recorded(trial, a_record())
    refuse_other_runs(trials(a_matrix(repeats=3, timeout_seconds=9), tmp_path))
    a_sweep(tmp_path).keep()
    with pytest.raises(UserError, match=r"pod-schema/1: was run with other .*\(--learning_rate 0.1 -> 0.5\)"):
        run_sweep(a_matrix(flags={"effective_batch_size": 48, "learning_rate": 0.5}), tmp_path)
    assert not (tmp_path / "matrix.yaml").exists()


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    with held(tmp_path / "out"), pytest.raises(UserError, match="in use by process"), held(tmp_path / "out"):
        pass
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="holds something that is no sweep"), held(tmp_path):
        pass
    with pytest.raises(UserError, match="is a file; choose another --out"), held(tmp_path / "mine"):
        pass


def a_sweep(out: Path, *statuses: str | None) -> Sweep:
    """A sweep whose runs ended so, in their order, each with 32 samples in 0.8 s per step."""
    rows = [trial.row for trial in trials(a_matrix(), out)]
    for number, status in enumerate(statuses):
        if status is not None:
            record = a_record(ranks=[a_rank(step_seconds=[0.8] * 20)]) if status == "ok" else a_failed_record(status)
            rows[number] = rows[number].recorded(as_record(record), 30.0)
    return Sweep(out=out, matrix=a_matrix(), rows={row.folder: row for row in rows})


@pytest.mark.parametrize(
    ("statuses", "measured"),
    [(("ok", "oom", "timeout", "failed"), True), (("ok", "ok", "interrupted", "ok"), False), (("ok",), False)],
)
def test_a_sweep_is_measured_when_every_run_has_a_result(statuses: Any, measured: bool, tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, *statuses)
    assert sweep.is_measured is measured


@pytest.mark.parametrize(("status", "row"), [("failed", "refused"), ("pod_lost", "pod_lost"), ("interrupted", None)])
def test_a_run_that_never_began_is_tried_again_or_a_result(
    status: str, row: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_begins(launch: Launch, *_: object) -> None:
        raise UnopenedError(launch.folder, Ending(status, "why not"), ["last line"])

    monkeypatch.setattr("zeropods.sweep.run.run_one", never_begins)
    alone = a_matrix(cells=[{"technique": "none", "pods": 1}], repeats=1)
    with pytest.raises(KeyboardInterrupt) if row is None else nullcontext():
        sweep = run_sweep(alone, tmp_path / "out")
        assert [(each.status, each.reason) for each in sweep.rows.values()] == [(row, "why not")]
        assert sweep.is_measured is (row != "refused")


def test_people_read_a_table(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, "ok", "oom", "ok", "ok")
    assert sweep.table().header == ("cell", "repeats ok", "samples/s", "result")
    left_out = "left out: none is one process; on several pods ddp is the baseline"
    assert sweep.table().rows == (
        (NONE, "2 of 2", "40.00", "ok"),
        (ZERO1, "1 of 2", "40.00", "oom: it broke; ok"),
        ("well-none-2-pods-schema", "", "", left_out),
    )
    assert a_sweep(tmp_path).table().rows[0][1:] == ("0 of 2", "n/a", "not run yet")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "two.yaml").write_text(json.dumps(a_matrix().to_json()))
    return tmp_path / "two.yaml"


def called(*words: object) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The verb with these words: its arguments and its result."""
    arguments = parser().parse_args(["sweep", *map(str, words)])
    return arguments, arguments.run(arguments)


def test_a_dry_run_lists_the_runs_in_their_order_and_writes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, said = called(file, "--out", tmp_path / "out", "--dry-run")
    assert [(run["cell"], run["repeat"]) for run in said["runs"]] == [(NONE, 1), (ZERO1, 1), (ZERO1, 2), (NONE, 2)]
    assert not (tmp_path / "out").exists() and arguments.status(said) == 0
    lines = arguments.readable(said).splitlines()
    assert len(lines) == 5 and lines[-1].startswith("# left out: well-none-2-pods-schema: none is one process")
    monkeypatch.chdir(tmp_path)
    assert called(file, "--dry-run")[1]["out"] == str(tmp_path / "runs" / "two")
