"""A matrix file and the order of its runs; what is left to do by what earlier calls have left; results."""

import argparse
import json
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, as_record
from zeropods.cli import main, parser
from zeropods.errors import UserError
from zeropods.files import folder_locked
from zeropods.launch import command
from zeropods.launch.command import Launch
from zeropods.launch.lost_pods_and_hangs import Ending
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.script_call import flag_values
from zeropods.report.plan import published
from zeropods.sweep.matrix import ROWS, Matrix, at_tiny_scale, matrix_of, read_matrix, write_matrix
from zeropods.sweep.results import Sweep, Trial
from zeropods.sweep.run import SWEEP_LOCK, order_of, refuse_other_runs, run_sweep, sweep_pods, take_up, trials

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = ROOT / "matrices" / "published.yaml"
FLAGS = {"init": "random", "max_steps": 30, "effective_batch_size": 48}
PLAIN = {"model": "t5-tiny", "technique": "zero1", "pods": 2, "data": "raw", "flags": FLAGS}
CAUSAL_FLAGS = {"init": "random", "max_train_steps": 3, "max_seq_length": 32, "effective_batch_size": 8}
CAUSAL = {
    "script": "causal_train.py", "model": "gpt-tiny", "technique": ["none", "zero2"], "pods": 1, "prompt": "lm",
    "data": "text", "flags": CAUSAL_FLAGS,
}  # fmt: skip


def read(document: dict[str, Any] = PLAIN, **changes: Any) -> Matrix:
    """A small matrix with other values; a value of None takes the key away."""
    return matrix_of({key: value for key, value in {**document, **changes}.items() if value is not None}, "m.yaml")


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({}, ["zero1-2-pods"]),
        (
            {"technique": ["zero1", "zero2"], "pods": [1, 2]},
            ["zero1-1-pod", "zero1-2-pods", "zero2-1-pod", "zero2-2-pods"],
        ),
        ({"technique": ["none", "ddp"], "pods": [1, 3]}, ["none-1-pod", "ddp-3-pods"]),
        ({"technique": "ddp", "pods": 1, "slots": 2}, ["ddp-1-pod"]),
        ({"technique": ["zero3", "zero3++"], "pods": 2}, ["zero3-2-pods"]),
        ({"technique": ["zero3", "zero3++"], "pods": 2, "slots": 2}, ["zero3-2-pods", "zero3++-2-pods"]),
        ({"pods": [1, 2, 3], "exclude": [{"technique": "zero1", "pods": [1, 3]}]}, ["zero1-2-pods"]),
        (
            {"technique": None, "cells": [{"technique": "none", "pods": 1}, {"technique": "zero2"}]},
            ["none-1-pod", "zero2-2-pods"],
        ),
    ],
)  # fmt: skip
def test_a_matrix_is_every_combination_that_can_be(changes: dict[str, Any], cells: list[str]) -> None:
    assert [cell.name for cell in read(**changes).cells] == [f"t5-tiny-{cell}-schema" for cell in cells]


def test_values_of_flags_are_the_scripts_and_the_projects_matrices_can_be_read(tmp_path: Path) -> None:
    text = (
        "model: t5-tiny\ntechnique: none\npods: 1\ndata: raw\nflags: {init: random, learning_rate: 1e-3, dropout: }\n"
    )
    (tmp_path / "m.yaml").write_text(text)
    assert read_matrix(tmp_path / "m.yaml").flags == {"init": "random", "learning_rate": "1e-3"}
    assert all(read_matrix(path).cells for path in (ROOT / "matrices").glob("*.yaml"))


def test_flags_of_a_cell_win_over_the_common_ones(tmp_path: Path) -> None:
    cells = [{"technique": "zero1"}, {"technique": "zero2", "flags": {"max_steps": 7, "effective_batch_size": 6}}]
    first, second = (
        flag_values(trial.launch.arguments) for trial in trials(read(technique=None, cells=cells), tmp_path)
    )
    assert (first["max_steps"], first["per_device_train_batch_size"], first["init"]) == ("30", "24", "random")
    assert (second["max_steps"], second["per_device_train_batch_size"], second["init"]) == ("7", "3", "random")


def test_the_published_matrix_has_the_published_runs_and_t5_3b() -> None:
    matrix = read_matrix(PUBLISHED)
    runs = {}
    for cell in matrix.cells:
        flags = matrix.flags_of(cell)
        key = Path(cell.model).name, cell.technique, cell.pods
        runs[key] = flags[ROWS] * cell.pods, flags["gradient_checkpointing"]
        assert (cell.prompt, flags["precision"], flags["epochs"]) == ("question", "fp32", 3)
    assert runs.pop(("t5-3b", "zero3_offload", 3)) == (3, True)
    rows = {(r.model, r.technique, r.pods): (r.effective_batch_size, r.gradient_checkpointing) for r in published()}
    assert runs == rows and matrix.questions


def test_a_matrix_at_tiny_scale_has_the_same_cells_of_tiny_models(capsys: pytest.CaptureFixture[str]) -> None:
    whole = read_matrix(PUBLISHED)
    tiny = at_tiny_scale(whole, "m.yaml")
    assert [(cell.technique, cell.pods) for cell in tiny.cells] == [(cell.technique, cell.pods) for cell in whole.cells]
    assert {cell.model for cell in tiny.cells} == {"t5-tiny", "t5-large-tiny", "t5-3b-tiny"}
    assert main(["sweep", str(PUBLISHED), "--scale", "tiny", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and all("-tiny --" in line and "--init random --max_steps 3" in line for line in lines)
    assert "runs/published-tiny/prepared/sample-t5-3b-tiny-question" in lines[2]
    assert "--per_device_train_batch_size 1 " in lines[2]


def test_tiny_scale_takes_the_place_of_what_a_cell_asks_for_and_of_its_data() -> None:
    cells = [{"technique": "zero1", "flags": {"max_steps": 900, "dropout": 0}}]
    given = {"technique": None, "data": None, "dataset_path": "p", "questions": 4, "model": "google-t5/t5-base"}
    tiny = at_tiny_scale(read(cells=cells, **given), "m.yaml")
    (cell,) = tiny.cells
    assert (cell.model, tiny.flags_of(cell)["max_steps"], tiny.flags_of(cell)["dropout"]) == ("t5-tiny", 3, 0)
    assert (tiny.data, tiny.limit, tiny.dataset_path, tiny.questions) == ("sample", 300, {}, 4)
    causal = {**CAUSAL, "model": ["mistral-7b", "distilgpt2", "bigscience/bloom-560m"]}
    models = {cell.model for cell in at_tiny_scale(read(causal), "m.yaml").cells}
    assert models == {"llama-tiny", "gpt-tiny", "bloom-tiny"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"script": "mine.py"}, "script mine.py: --scale is for textsql_train.py, causal_train.py"),
        ({"model": "runs/mine", "flags": {}}, "model 'runs/mine' is unknown"),
        ({"model": ["t5-small", "t5-base"]}, "m.yaml --scale tiny: cells: t5-tiny-zero1-.* occurs twice"),
    ],
)
def test_what_has_no_tiny_scale_is_refused_in_a_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        at_tiny_scale(read(**changes), "m.yaml")


@pytest.mark.parametrize(
    "changes",
    [
        {"exclude": [{"pods": 2}], "pods": [2, 4], "seeds": [1, 2], "repeats": 2, "timeout_seconds": 90},
        {"data": None, "dataset_path": {"schema": "prepared/a b", "question": "q"}, "prompt": ["schema", "question"]},
        {"technique": None, "cells": [{"technique": "zero1", "flags": {"max_steps": 3}}, {"technique": "zero2"}]},
        {**CAUSAL, "tokenizer": {"gpt-tiny": "gpt-tiny"}, "slots": 2},
    ],
)
def test_a_matrix_that_was_written_is_read_as_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    matrix = read(**changes)
    write_matrix(matrix, tmp_path / "m.yaml")
    assert read_matrix(tmp_path / "m.yaml") == matrix


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tecnique": "zero1"}, "m.yaml: tecnique: no such key; technique?"),
        ({"technique": "zero4"}, "technique: 'zero4'; expected one of none, ddp, zero1"),
        ({"technique": "zero3++"}, r"no cell is left: zero3\+\+ divides nothing on pods of 1 slot; give slots: 2"),
        ({"technique": ["zero1", "zero1"]}, "cells: t5-tiny-zero1-2-pods-schema occurs twice"),
        ({"prompt": "plain"}, "prompt: 'plain'; expected one of question, schema"),
        ({"pods": 0}, r"pods\[1\]: 0; expected greater than or equal to 1"),
        ({"seeds": [1, 2, 3], "repeats": 2}, "seeds: 3 for 2 repeats; give one for each"),
        ({"seeds": [1], "flags": {**FLAGS, "seed": 5}}, "flags.seed: contradicts seeds"),
        ({"cells": [{"pods": 2}, {"pods": [2, 4]}]}, "cells: t5-tiny-zero1-2-pods-schema occurs twice"),
        ({"exclude": [{"pods": 9}]}, r"exclude\[1\]: pods 9: there is no such cell"),
        ({"cells": [{"pods": 2, "flags": {"task": "a"}}]}, r"cells\[1\].flags.task: is the prompt axis"),
        ({"flags": {**FLAGS, "deepspeed": "a.json"}}, "flags.deepspeed: follows from the technique axis"),
        ({"flags": {**FLAGS, "effective_batch_size": 7}}, "7 rows cannot be divided evenly among 2 processes"),
        ({"flags": {**FLAGS, "per_device_train_batch_size": 4}}, "per_device_train_batch_size: follows from"),
        ({"flags": {"max_steps": [1, 2]}}, "flags: .*; max_steps: expected text, a number"),
        ({"data": None}, "data: is missing; name a folder with raw data"),
        ({"dataset_path": "p"}, "dataset_path: contradicts data 'raw'"),
        ({"data": None, "dataset_path": {"question": "p"}}, "dataset_path.question: no cell of this matrix"),
        ({"data": None, "dataset_path": "p", "prompt": ["schema", "question"]}, r"for .* prompts \(question, schema\)"),
        ({"data": None, "dataset_path": "p", "limit": 5}, "limit: is for data that is to be prepared"),
        ({"tokenizer": {"t5-small": "a"}}, "tokenizer.t5-small: no cell of this matrix"),
        ({**CAUSAL, "questions": 5}, "questions: 5; runs with prompt lm answer none, so nothing can be scored"),
        ({"script": "mine.py", "questions": 5}, "questions: 5; runs of mine.py answer none"),
        ({"link_cells": True}, "link_cells: true; no questions are answered; give questions"),
        ({**CAUSAL, "prompt": "squad", "questions": 5, "link_cells": True}, "link_cells: true; is for text2sql, whose"),
        ({"questions": 5, "link_cells": "yes"}, "link_cells: 'yes'; expected a valid boolean"),
        ({**CAUSAL, "prompt": "schema"}, "prompt: 'schema'; expected one of lm, squad"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_key_and_its_value(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read(**changes)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("m.yaml: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"model: [t5-tiny\ntechnique: zero1\n", "m.yaml: line 2: "),
        (b"model: !!python/object:os.system x\n", "m.yaml: line 1: "),
        (b"model: t5-tiny\nflags: {seed: 1}\nflags: {}\n", "m.yaml: line 3: flags occurs twice; correct the YAML"),
        (b"model: m\ntechnique: none\npods: 1\nflags: &x {a: *x}\n", "a: expected text, a number"),
        (b"model: \xff", "can't decode byte 0xff"),
        (None, r"m.yaml: no such file; expected a matrix like matrices/demo.yaml"),
    ],
)
def test_a_file_that_is_no_yaml_of_a_matrix_is_refused(text: bytes | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "m.yaml").write_bytes(text)
    with pytest.raises(UserError, match=said) as caught:
        read_matrix(tmp_path / "m.yaml")
    assert "\n" not in str(caught.value)


def test_the_causal_script_is_run_by_its_own_flags(tmp_path: Path) -> None:
    first = trials(read(CAUSAL), tmp_path)[0]
    assert first.name == "gpt-tiny-none-1-pod-lm/1"
    values = flag_values(first.launch.arguments)
    assert (values["model_name_or_path"], values["max_seq_length"]) == ("gpt-tiny", "32")
    assert values["data"] == str(tmp_path / "prepared" / "text-gpt-tiny-lm")
    assert not {"model_id", "dataset_path", "effective_batch_size"} & set(values)


@pytest.mark.parametrize(("cells", "repeats"), [(1, 2), (2, 2), (4, 4), (6, 6), (3, 6), (5, 10)])
def test_no_cell_is_favoured(cells: int, repeats: int) -> None:
    orders = [order_of(cells, repeat) for repeat in range(1, repeats + 1)]
    assert all(sorted(order) == list(range(cells)) for order in orders)
    assert {orders[0].index(cell) + orders[1].index(cell) for cell in range(cells)} == {cells - 1}
    assert set(Counter(place for order in orders for place in enumerate(order)).values()) == {repeats // cells}
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == cells * (cells - 1) and set(followed.values()) <= {repeats // cells}


# What is left to do, and results.

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
    folder = trial.launch.folder
    folder.mkdir(parents=True)
    command.remember(trial.launch)
    for name in ("config", "record"):
        (folder / f"{name}.json").write_text(json.dumps(record))
    return trial


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
    take_up(recorded(trial, record), None, again=again)
    assert trial.status == status
    assert trial.reason == ("pod2: why" if status not in ("ok", None) else None)


def test_a_damaged_record_stops_the_sweep_before_it_begins(trial: Trial) -> None:
    recorded(trial, a_record(schema_version=1))
    with pytest.raises(UserError, match="schema_version 1"):
        take_up(trial, None, again=False)


def test_runs_of_another_matrix_are_refused_with_what_differs(trial: Trial, tmp_path: Path) -> None:
    recorded(trial, a_record())
    refuse_other_runs(trials(a_matrix(repeats=3, timeout_seconds=9), tmp_path))
    a_sweep(tmp_path).write()
    with pytest.raises(UserError, match=r"pod-schema/1: was run with other .*\(--learning_rate 0.1 -> 0.5\)"):
        run_sweep(a_matrix(flags={"effective_batch_size": 48, "learning_rate": 0.5}), tmp_path)
    assert not (tmp_path / "matrix.yaml").exists()


def test_hosts_of_a_hostfile_have_the_slots_of_the_matrix(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("first slots=2\nsecond slots=1\n")
    with pytest.raises(UserError, match=r"first has slots=2, but .* slots: 1;"), sweep_pods(read(), None, hostfile):
        pass


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with folder_locked(tmp_path / "out", SWEEP_LOCK, signs=(), kind="sweep", flag="--out"):
        for out, said in (
            ("out", "in use by process"),
            ("", "is not empty and is not a sweep folder"),
            ("mine", "is a file; choose another --out"),
        ):
            with pytest.raises(UserError, match=said):
                run_sweep(a_matrix(), tmp_path / out)


def a_sweep(out: Path, *statuses: str | None) -> Sweep:
    """A sweep whose runs ended so, in their order, each with 32 samples in 0.8 s per step."""
    planned = trials(a_matrix(), out)
    for trial, status in zip(planned, statuses, strict=False):
        if status is not None:
            record = a_record(ranks=[a_rank(step_seconds=[0.8] * 20)]) if status == "ok" else a_failed_record(status)
            trial.take(as_record(record), 30.0)
    return Sweep(out=out, matrix=a_matrix(), trials=planned)


@pytest.mark.parametrize(("status", "row"), [("failed", "refused"), ("pod_lost", "pod_lost"), ("interrupted", None)])
def test_a_run_that_never_began_is_tried_again_or_a_result(
    status: str, row: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_begins(launch: Launch, *_: object) -> None:
        raise UnopenedError(launch.folder, Ending(status, "why not"), ["last line"])

    monkeypatch.setattr("zeropods.sweep.run.run_planned", never_begins)
    alone = a_matrix(cells=[{"technique": "none", "pods": 1}], repeats=1)
    with pytest.raises(KeyboardInterrupt) if row is None else nullcontext():
        sweep = run_sweep(alone, tmp_path / "out")
        assert [(each.status, each.reason) for each in sweep.trials] == [(row, "why not")]
        assert sweep.is_measured is (row != "refused")


def test_people_read_a_table_and_a_sweep_is_measured_when_every_run_has_a_result(tmp_path: Path) -> None:
    assert a_sweep(tmp_path, "ok", "oom", "timeout", "failed").is_measured
    assert not a_sweep(tmp_path, "ok", "ok", "interrupted", "ok").is_measured
    sweep = a_sweep(tmp_path, "ok", "oom", "ok", "ok")
    assert sweep.table().header == ("cell", "repeats ok", "samples/s", "result")
    left_out = "left out: none is one process; on several pods ddp is the baseline"
    assert sweep.table().rows == (
        (NONE, "2 of 2", "40.00", "ok"),
        (ZERO1, "1 of 2", "40.00", "oom: it broke; ok"),
        ("well-none-2-pods-schema", "", "", left_out),
    )
    assert a_sweep(tmp_path).table().rows[0][1:] == ("0 of 2", "n/a", "not run yet")


def test_repeats_of_a_cell_that_computed_in_different_precisions_have_no_mean(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, "ok", "ok", "ok", "ok")
    of_none = [trial for trial in sweep.trials if trial.cell.name == NONE]
    for trial, precision in zip(of_none, ("fp32", "bf16"), strict=True):
        formats = {"weights": "fp32", "master_weights": "fp32", "optimizer_states": "fp32", "gradients_sent": None}
        trial.take(as_record(a_record(measured_precision={**formats, "linear_output": precision})), None)
    said = "ok; not one mean, since repeats computed in "
    (_, rate, result), *_ = [row[1:] for row in sweep.table().rows]
    assert rate == "n/a" and result.startswith(said) and "fp32" in result and "bf16" in result
    assert sweep.to_json()["cells"][0]["precision"] is not None


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
