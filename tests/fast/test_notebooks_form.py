"""The form of every notebook: what a reader and a fresh kernel can rely on."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINES_A_CELL, LINES_A_NOTEBOOK = 10, 40
AT_LEAST = 7

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if kind in (None, cell["cell_type"])]


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code(path: Path) -> list[ast.Module]:
    """Each code cell as Python: shell lines and magics are none."""
    return [ast.parse(text(cell), str(path)) for cell in cells(path, "code")]


def lines(source: str) -> int:
    return sum(bool(line.strip()) for line in source.splitlines())


def test_the_notebooks_are_found() -> None:
    assert len(NOTEBOOKS) >= AT_LEAST


def test_the_notebooks_of_the_demo_are_there() -> None:
    demo = ast.parse((ROOT / "tools" / "demo.py").read_text())
    assigned = {node.targets[0].id: node.value for node in demo.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    names = ast.literal_eval(assigned["NOTEBOOKS"])
    assert names and set(names) <= {path.stem for path in NOTEBOOKS}


def test_no_two_notebooks_have_one_number() -> None:
    numbers = [re.match(r"(\d\d)_", path.name) for path in NOTEBOOKS]
    assert all(numbers) and len({number[1] for number in numbers if number}) == len(NOTEBOOKS)


def test_no_two_notebooks_assign_the_same_constant() -> None:
    assigned = Counter[str]()
    for path in NOTEBOOKS:
        nodes = [node for cell in code(path)[1:] for node in ast.walk(cell)]
        constants = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
        assigned.update({ast.unparse(node.targets[0]) for node in constants})
    assert not [name for name, times in assigned.items() if times > 1]


@each_notebook
def test_a_notebook_begins_with_its_title_and_two_sentences(path: Path) -> None:
    opening = re.fullmatch(r"# [^\n]+\n\n(.+)", text(cells(path)[0]), re.DOTALL)
    assert opening and len(re.findall(r"[.!?](?=\s|$)", opening[1])) == 2


@each_notebook
def test_the_first_code_cell_and_no_other_holds_the_parameters(path: Path) -> None:
    tagged = ["parameters" in cell["metadata"].get("tags", []) for cell in cells(path, "code")]
    assert tagged == [True] + [False] * (len(tagged) - 1)


@each_notebook
def test_prose_stands_before_every_code_cell(path: Path) -> None:
    kinds = [cell["cell_type"] for cell in cells(path)]
    assert all(before == "markdown" for before, kind in pairwise(kinds) if kind == "code")


@each_notebook
def test_cells_are_short(path: Path) -> None:
    assert max(lines(text(cell)) for cell in cells(path, "code")) <= LINES_A_CELL


@each_notebook
def test_a_notebook_is_short(path: Path) -> None:
    assert sum(lines(text(cell)) for cell in cells(path, "code")) <= LINES_A_NOTEBOOK


@each_notebook
def test_the_last_expression_of_a_cell_is_its_output(path: Path) -> None:
    assert all(isinstance(cell.body[-1], ast.Expr) for cell in code(path)[1:])


@each_notebook
def test_the_parameters_cell_assigns_constants_as_papermill_wants_it(path: Path) -> None:
    """Papermill puts a cell of its own assignments behind this one, so nothing may be computed from them yet."""
    assigned = code(path)[0].body
    assert assigned and all(isinstance(line, ast.Assign) and ast.literal_eval(line.value) != "" for line in assigned)


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != "15_plan_8b"], ids=lambda path: path.stem)
def test_the_settings_are_those_of_the_parameters_cell(path: Path) -> None:
    assert "Workshop.of(vars()" in text(cells(path, "code")[1])


@each_notebook
def test_a_notebook_defines_no_function(path: Path) -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    assert not [node for cell in code(path) for node in ast.walk(cell) if isinstance(node, kinds)]


@each_notebook
def test_nothing_is_stored_from_a_run(path: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(path, "code"))


@each_notebook
def test_a_notebook_names_its_kernel(path: Path) -> None:
    assert json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernelspec"]["name"] == "python3"
