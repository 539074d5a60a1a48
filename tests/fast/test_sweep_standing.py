"""What is left to do of a sweep, by what earlier calls have left; its results, as a file and as a table."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, as_record
from zeropods.errors import UserError
from zeropods.launch import planning
from zeropods.sweep.matrix import Matrix
from zeropods.sweep.reading import matrix_of
from zeropods.sweep.results import Row, Sweep, earlier_rows, read_sweep
from zeropods.sweep.run import held, refuse_other_runs, run_sweep, standing_row
from zeropods.sweep.trial import Trial, trials


def a_matrix(**changes: Any) -> Matrix:
    """Two cells, twice, of a script that needs no data."""
    document = {
        "script": "tests/full/sweep_rank.py",
        "model": "well",
        "cells": [{"technique": "none", "pods": 1}, {"technique": "zero1", "pods": 2}],
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
    planning.remember(trial.launch)
    for name in ("config", "record"):
        (trial.folder / f"{name}.json").write_text(json.dumps(record))
    return trial


def standing(trial: Trial, *, again: bool = False) -> str | None:
    return standing_row(trial, {}, again=again).status


def values(arguments: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_a_cell_has_a_folder_for_each_repeat(tmp_path: Path) -> None:
    folders = [trial.folder.relative_to(tmp_path).as_posix() for trial in trials(a_matrix(), tmp_path)]
    none, zero1 = "well-none-1-pod-schema", "well-zero1-2-pods-schema"
    assert folders == [f"{none}/1", f"{zero1}/1", f"{zero1}/2", f"{none}/2"]


def test_the_effective_batch_is_divided_over_the_processes_of_a_cell(tmp_path: Path) -> None:
    matrix = a_matrix(slots=2, flags={"effective_batch_size": 48, "gradient_accumulation_steps": 3})
    one, four = (values(trial.arguments) for trial in trials(matrix, tmp_path)[:2])
    assert (one["--per_device_train_batch_size"], four["--per_device_train_batch_size"]) == ("16", "4")


def test_a_technique_is_its_configuration(tmp_path: Path) -> None:
    none, zero1 = (values(trial.arguments) for trial in trials(a_matrix(), tmp_path)[:2])
    assert "--deepspeed" not in none and Path(zero1["--deepspeed"]).name == "zero1.json"


def test_each_repeat_has_its_seed(tmp_path: Path) -> None:
    planned = trials(a_matrix(seeds=[7, 8]), tmp_path)
    assert {(trial.repeat, values(trial.arguments)["--seed"]) for trial in planned} == {(1, "7"), (2, "8")}


def test_repeats_without_seeds_are_equal_but_for_their_folder(tmp_path: Path) -> None:
    first, *_, last = (values(trial.arguments) for trial in trials(a_matrix(), tmp_path))
    assert {name for name in first if first[name] != last[name]} == {"--outputdir"}


def test_raw_data_becomes_a_set_for_each_model_and_prompt(tmp_path: Path) -> None:
    planned = trials(a_matrix(data="raw", prompt=["schema", "question"]), tmp_path)
    sets = {values(trial.arguments)["--dataset_path"] for trial in planned}
    assert sets == {str(tmp_path / "prepared" / f"raw-well-{prompt}") for prompt in ("schema", "question")}


def test_a_command_is_what_somebody_would_type(tmp_path: Path) -> None:
    none, zero1 = (trial.command for trial in trials(a_matrix(), tmp_path)[:2])
    assert "launch" not in none and zero1.startswith("zeropods launch --num-pods 2 -- ")


def test_a_run_that_never_began_waits(trial: Trial) -> None:
    assert standing(trial) is None


def test_a_finished_run_is_not_run_again(trial: Trial) -> None:
    assert standing(recorded(trial, a_record()), again=True) == "ok"


@pytest.mark.parametrize("status", ["oom", "timeout", "failed", "pod_lost"])
def test_a_run_that_did_not_end_well_is_a_result(status: str, trial: Trial) -> None:
    row = standing_row(recorded(trial, a_failed_record(status, "why", pod="pod2")), {}, again=False)
    assert (row.status, row.reason) == (status, "pod2: why")


def test_a_result_that_is_not_ok_is_tried_again_if_asked(trial: Trial) -> None:
    assert standing(recorded(trial, a_failed_record("oom")), again=True) is None


def test_an_interrupted_run_is_run_again(trial: Trial) -> None:
    assert standing(recorded(trial, a_failed_record("interrupted", "SIGINT"))) is None


def test_a_run_that_was_killed_is_run_again(trial: Trial) -> None:
    recorded(trial, a_record())
    (trial.folder / "record.json").unlink()
    assert standing(trial) is None


def test_a_run_that_was_refused_before_it_began_stays_refused(trial: Trial) -> None:
    refused = replace(Row.of(trial), status="failed", reason="no such pod")
    earlier = {(refused.cell, refused.repeat): refused}
    assert standing_row(trial, earlier, again=False) == refused
    assert standing_row(trial, earlier, again=True).status is None


def test_a_damaged_record_stops_the_sweep_before_it_begins(trial: Trial) -> None:
    recorded(trial, a_record(schema_version=1))
    with pytest.raises(UserError, match="schema_version 1"):
        standing(trial)


def test_runs_of_another_matrix_are_refused_with_what_differs(trial: Trial, tmp_path: Path) -> None:
    recorded(trial, a_record())
    other = trials(a_matrix(flags={"effective_batch_size": 48, "learning_rate": 0.5}), tmp_path)
    with pytest.raises(UserError, match=r"pod-schema/1: was run with other .*\(--learning_rate: 0.1, now 0.5\)"):
        refuse_other_runs(other)


def test_a_refused_matrix_leaves_that_of_the_runs_where_it_was(trial: Trial, tmp_path: Path) -> None:
    recorded(trial, a_record())
    a_sweep(tmp_path).write()
    with pytest.raises(UserError, match="was run with other settings"):
        run_sweep(a_matrix(flags={"effective_batch_size": 48, "learning_rate": 0.5}), tmp_path)
    assert read_sweep(tmp_path).matrix == a_matrix() and not (tmp_path / "matrix.yaml").exists()


def test_runs_of_the_same_matrix_are_not_refused(trial: Trial, tmp_path: Path) -> None:
    recorded(trial, a_record())
    refuse_other_runs(trials(a_matrix(repeats=3, timeout_seconds=9), tmp_path))


def test_a_second_sweep_in_a_folder_is_refused(tmp_path: Path) -> None:
    with held(tmp_path / "out"), pytest.raises(UserError, match="in use by process"), held(tmp_path / "out"):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="holds something that is no sweep"), held(tmp_path):
        pass


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match="is a file; choose another --out"), held(tmp_path / "out"):
        pass


def a_sweep(out: Path, *statuses: str | None) -> Sweep:
    """A sweep whose runs ended so, in their order, each with 32 samples in 0.8 s a step."""
    rows = [Row.of(trial) for trial in trials(a_matrix(), out)]
    for number, status in enumerate(statuses):
        if status is not None:
            record = a_record(ranks=[a_rank(step_seconds=[0.8] * 20)]) if status == "ok" else a_failed_record(status)
            rows[number] = rows[number].ended(as_record(record), 30.0)
    return Sweep(out=out, matrix=a_matrix(), rows=tuple(rows))


def test_a_sweep_that_was_written_is_read_as_the_same(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, "ok", "oom", None, "timeout")
    sweep.write()
    assert read_sweep(tmp_path) == sweep


def test_a_sweep_is_measured_when_every_run_has_a_result(tmp_path: Path) -> None:
    assert a_sweep(tmp_path, "ok", "oom", "timeout", "failed").is_measured
    assert not a_sweep(tmp_path, "ok", "ok", "interrupted", "ok").is_measured
    assert not a_sweep(tmp_path, "ok").is_measured


def test_the_table_has_a_line_for_each_cell(tmp_path: Path) -> None:
    table = a_sweep(tmp_path, "ok", "oom", "ok", "ok").table()
    assert table.header == ("cell", "repeats ok", "samples/s", "result")
    assert table.rows == (
        ("well-none-1-pod-schema", "2 of 2", "40", "ok"),
        ("well-zero1-2-pods-schema", "1 of 2", "40", "oom: it broke; ok"),
    )


def test_what_has_not_run_is_said_to_be_so(tmp_path: Path) -> None:
    assert a_sweep(tmp_path).table().rows[0][1:] == ("0 of 2", "n/a", "not run yet")


def test_combinations_that_cannot_be_are_lines_of_the_table(tmp_path: Path) -> None:
    matrix = a_matrix(cells=[{"technique": "none", "pods": [1, 2]}])
    table = Sweep(out=tmp_path, matrix=matrix, rows=tuple(map(Row.of, trials(matrix, tmp_path)))).table()
    assert table.rows[1][0] == "well-none-2-pods-schema" and table.rows[1][3].startswith("left out: none is one")


def test_rows_of_another_matrix_are_none_of_this_one(tmp_path: Path) -> None:
    a_sweep(tmp_path, "ok").write()
    assert len(earlier_rows(tmp_path, a_matrix())) == 4 and not earlier_rows(tmp_path, a_matrix(repeats=3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"schema_version": 9}, "schema_version 9, not 1"), ({"cells": [{"cell": "a"}]}, "cells: not as this version")],
)
def test_a_foreign_sweep_file_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    document = a_sweep(tmp_path, "ok").to_json() | changes
    (tmp_path / "sweep.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=said):
        read_sweep(tmp_path)


def test_a_sweep_may_be_moved(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path / "a", "ok")
    sweep.write()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read_sweep(tmp_path / "b").rows == sweep.rows
