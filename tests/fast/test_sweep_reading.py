"""A matrix file: what it means, and what is refused of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.sweep.matrix import TECHNIQUES, Matrix, write_matrix
from zeropods.sweep.reading import matrix_of, read_matrix

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {"init": "random", "max_steps": 30, "effective_batch_size": 48}
PLAIN = {"model": "t5-tiny", "technique": "zero1", "pods": 2, "data": "raw", "flags": FLAGS}


def read(**changes: Any) -> Matrix:
    """A small matrix with other values; a value of None takes the key away."""
    return matrix_of({key: value for key, value in {**PLAIN, **changes}.items() if value is not None}, "m.yaml")


def names(matrix: Matrix) -> list[str]:
    return [cell.name for cell in matrix.cells]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_values_of_axes_need_no_list() -> None:
    assert names(read()) == ["t5-tiny-zero1-2-pods-schema"]


def test_a_matrix_is_every_combination_of_its_axes() -> None:
    matrix = read(
        model=["t5-tiny", "t5-small"], technique=["zero1", "zero2"], pods=[1, 2], prompt=["schema", "question"]
    )
    assert len(matrix.cells) == len(set(names(matrix))) == 16
    assert names(matrix)[0] == "t5-tiny-zero1-1-pod-schema"


def test_combinations_that_cannot_be_are_left_out_with_a_reason() -> None:
    matrix = read(technique=["none", "ddp"], pods=[1, 3])
    assert names(matrix) == ["t5-tiny-none-1-pod-schema", "t5-tiny-ddp-3-pods-schema"]
    left = {left.cell.name: left.reason for left in matrix.left_out}
    assert "one process" in left["t5-tiny-none-3-pods-schema"] and "that is none" in left["t5-tiny-ddp-1-pod-schema"]


def test_one_pod_of_several_processes_can_be_data_parallel() -> None:
    assert names(read(technique="ddp", pods=1, slots=2)) == ["t5-tiny-ddp-1-pod-schema"]


def test_excluded_cells_are_not_there() -> None:
    matrix = read(technique=["zero1", "zero2"], pods=[1, 2, 3], exclude=[{"technique": "zero2", "pods": [1, 3]}])
    assert [(cell.technique, cell.pods) for cell in matrix.cells] == [
        ("zero1", 1), ("zero1", 2), ("zero1", 3), ("zero2", 2),
    ]  # fmt: skip


def test_cells_are_matrices_of_their_own() -> None:
    cells = [{"technique": "none", "pods": 1}, {"technique": ["zero1", "zero2"], "pods": 2}]
    matrix = read(technique=None, pods=None, cells=cells)
    assert [(cell.technique, cell.pods) for cell in matrix.cells] == [("none", 1), ("zero1", 2), ("zero2", 2)]


def test_an_exponent_without_a_point_is_a_number_to_the_script(tmp_path: Path) -> None:
    text = "model: t5-tiny\ntechnique: none\npods: 1\ndata: raw\nflags: {init: random, learning_rate: 1e-3}\n"
    assert read_matrix(written(tmp_path / "m.yaml", text)).flags["learning_rate"] == "1e-3"


def test_a_flag_without_a_value_is_left_out() -> None:
    assert "dropout" not in read(flags={**FLAGS, "dropout": None}).flags


@pytest.mark.parametrize("path", sorted((ROOT / "matrices").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_matrices_of_the_project_can_be_read(path: Path) -> None:
    assert read_matrix(path).cells


@pytest.mark.parametrize(
    "changes",
    [
        {"technique": ["none", "zero1"], "pods": [1, 3], "repeats": 3, "timeout_seconds": 90},
        {"exclude": [{"pods": 2}], "pods": [2, 4], "seeds": [1, 2], "repeats": 2},
        {"tokenizer": {"t5-tiny": "t5-tiny"}, "slots": 2},
        {"data": None, "dataset_path": {"schema": "prepared/a b", "question": "q"}, "prompt": ["schema", "question"]},
        {"technique": None, "cells": [{"technique": list(TECHNIQUES), "pods": 4}], "script": "mine.py"},
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
        ({"technique": "zero4"}, "m.yaml: technique: 'zero4'; expected one of none, ddp, zero1"),
        ({"technique": []}, "m.yaml: technique: empty; give at least one value"),
        ({"technique": None}, "m.yaml: technique: is missing"),
        ({"technique": ["zero1", "zero1"]}, "technique: 'zero1' is there twice"),
        ({"prompt": "plain"}, "prompt: 'plain'; expected one of question, schema"),
        ({"pods": 0}, "pods: 0; expected a whole number, at least 1"),
        ({"pods": True}, "pods: True; expected a whole number"),
        ({"model": 5}, "model: 5; expected text"),
        ({"repeats": 0}, "repeats: 0; expected a whole number, at least 1"),
        ({"repeats": 10_001}, "repeats: 10001 of 1 cells are more than 10,000 runs; give fewer"),
        ({"repeats": "two"}, "repeats: 'two'; expected a whole number"),
        ({"timeout_seconds": -1}, "timeout_seconds: -1; expected seconds, more than 0"),
        ({"seeds": [1, 2, 3], "repeats": 2}, "seeds: 3 for 2 repeats; give one for each"),
        ({"seeds": [1], "flags": {**FLAGS, "seed": 5}}, "flags.seed: contradicts seeds"),
        ({"cells": [{"technique": "zero1", "gpus": 2}]}, r"cells\[1\]: gpus: no such key"),
        ({"cells": []}, r"cells: \[\]; expected a list of cells"),
        ({"cells": [{"pods": 2}, {"pods": [2, 4]}]}, "cells: t5-tiny-zero1-2-pods-schema is there twice"),
        ({"model": ["a/t5-tiny", "t5-tiny"]}, "cells: t5-tiny-zero1-2-pods-schema is there twice"),
        ({"exclude": [{"pods": 9}]}, r"exclude\[1\]: pods 9: there is no such cell"),
        ({"exclude": [{"pods": 2}]}, "no cell is left: exclude leaves out all of them"),
        ({"technique": "none"}, "no cell is left: none is one process"),
        ({"model": "t5-giant"}, "model: model 't5-giant' has no shape known here; expected one of t5-tiny"),
        ({"flags": {"max_steps": 3}}, "model: t5-tiny has no pretrained weights"),
        ({"flags": {**FLAGS, "max_step": 3}}, "flags: --max_step: no flag of textsql_train.py; --max_steps"),
        ({"flags": {**FLAGS, "learning_rate": "fast"}}, "flags: --learning_rate: 'fast'; expected a number"),
        ({"flags": {**FLAGS, "dropout": 2}}, "flags: --dropout 2.0; expected at least 0, and less"),
        ({"flags": {**FLAGS, "deepspeed": "a.json"}}, "flags.deepspeed: follows from the technique axis"),
        ({"flags": {**FLAGS, "effective_batch_size": 7}}, "7 rows do not divide over 2 processes"),
        ({"flags": {**FLAGS, "effective_batch_size": "many"}}, "effective_batch_size: 'many'; expected a whole number"),
        ({"flags": {**FLAGS, "per_device_train_batch_size": 4}}, "per_device_train_batch_size: follows from"),
        ({"flags": {**FLAGS, "max_train_seconds": 9}}, "flags.max_train_seconds: 9; clocks of processes differ"),
        ({"flags": [1]}, r"flags: \[1\]; expected flags of the script"),
        ({"flags": {"max_steps": [1, 2]}}, r"flags.max_steps: \[1, 2\]; expected text, a number"),
        ({"data": None}, "data: is missing; name a folder with raw data"),
        ({"dataset_path": "p"}, "dataset_path: contradicts data 'raw'"),
        ({"data": None, "dataset_path": {"question": "p"}}, "dataset_path.question: no prompt of this matrix"),
        ({"data": None, "dataset_path": "p", "prompt": ["schema", "question"]}, "one set for prompts question, schema"),
        ({"tokenizer": {"t5-small": "a"}}, "tokenizer.t5-small: no model of this matrix"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_key_and_its_value(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read(**changes)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("m.yaml: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [t5-tiny\ntechnique: zero1\n", "m.yaml: line 2: "),
        ("model: a\ntechnique: none\nmodel: b\n", "m.yaml: line 3: model: is there twice"),
        ("flags:\n  seed: 1\n  seed: 2\n", "m.yaml: line 3: seed: is there twice"),
        ("- zero1\n", "m.yaml: list; expected keys with values"),
        ("", "m.yaml: NoneType; expected keys with values"),
        ("model: !!python/object:os.system x\n", "m.yaml: line 1: "),
        ("a: \x07\n", "m.yaml: "),
        ("[" * 50_000, "m.yaml: lists in lists"),
    ],
)
def test_a_file_that_is_no_yaml_of_a_matrix_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read_matrix(written(tmp_path / "m.yaml", text))
    assert "\n" not in str(caught.value)


def test_an_alias_that_leads_back_to_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"flags\.a: "):
        read_matrix(written(tmp_path / "m.yaml", "model: m\ntechnique: none\npods: 1\nflags: &x {a: *x}\n"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: no such file; expected a matrix like matrices/demo.yaml"):
        read_matrix(tmp_path / "none.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_bytes(b"model: \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_matrix(tmp_path / "m.yaml")
