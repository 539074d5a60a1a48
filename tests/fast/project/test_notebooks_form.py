"""The form of every notebook: what a reader and a fresh kernel can rely on."""

import ast
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINES_A_CELL = 10
LINES_A_NOTEBOOK = 40
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
OWN_SETTINGS = "15_"
"""The notebook that takes its settings from elsewhere than its parameters."""


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def sources(path: Path) -> list[str]:
    """The texts of the code cells."""
    return ["".join(cell["source"]) for cell in code_cells(path)]


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def code(path: Path) -> list[ast.Module]:
    """Each code cell as Python: shell lines and magics are none."""
    return [ast.parse(source, str(path)) for source in sources(path)]


def broken(path: Path) -> list[str]:
    """The rules that a notebook does not keep."""
    sizes = [len(lines_of(source)) for source in sources(path)]
    rules = {
        "begins with its title and two sentences": has_title_and_two_sentences(path),
        "the first code cell and no other holds the parameters": has_parameters_first(path),
        "its parameters are constants": are_parameters_constants(path),
        "its settings are those of the parameters": takes_settings_from_parameters(path),
        "prose stands before every code cell": has_prose_before_code(path),
        "cells are short": max(sizes) <= LINES_A_CELL,
        "it is short": sum(sizes) <= LINES_A_NOTEBOOK,
        "the last expression of a cell is its output": shows_last_expressions(path),
        "defines no function": not defines_anything(path),
        "nothing is stored from a run": not is_executed(path),
        "names its kernel": read(path)["metadata"]["kernelspec"]["name"] == "python3",
    }
    return [rule for rule, holds in rules.items() if not holds]


def lines_of(source: str) -> list[str]:
    """The lines that are not empty."""
    return [line for line in source.splitlines() if line.strip()]


def has_title_and_two_sentences(path: Path) -> bool:
    first = "".join(read(path)["cells"][0]["source"])
    opening = re.fullmatch(r"# [^\n]+\n\n(.+)", first, re.DOTALL)
    return opening is not None and len(re.findall(r"[.!?](?=\s|$)", opening[1])) == 2


def has_parameters_first(path: Path) -> bool:
    tags = [cell["metadata"].get("tags", []) for cell in code_cells(path)]
    tagged = [number for number, of_cell in enumerate(tags) if "parameters" in of_cell]
    return tagged == [0]


def are_parameters_constants(path: Path) -> bool:
    """Papermill puts a cell of its own assignments behind the parameters: nothing may be computed
    from them in theirs."""
    statements = code(path)[0].body
    for statement in statements:
        is_constant = isinstance(statement, ast.Assign) and ast.literal_eval(statement.value) != ""
        if not is_constant:
            return False
    return bool(statements)


def takes_settings_from_parameters(path: Path) -> bool:
    return path.name.startswith(OWN_SETTINGS) or "Workshop.of(vars()" in sources(path)[1]


def has_prose_before_code(path: Path) -> bool:
    kinds = [cell["cell_type"] for cell in read(path)["cells"]]
    return all(before == "markdown" for before, kind in pairwise(kinds) if kind == "code")


def shows_last_expressions(path: Path) -> bool:
    """The parameters show nothing."""
    return all(isinstance(tree.body[-1], ast.Expr) for tree in code(path)[1:])


def defines_anything(path: Path) -> bool:
    nodes: list[ast.AST] = []
    for tree in code(path):
        nodes += ast.walk(tree)
    return any(isinstance(node, DEFINITIONS) for node in nodes)


def is_executed(path: Path) -> bool:
    cells = code_cells(path)
    has_outputs = any(cell["outputs"] for cell in cells)
    return has_outputs or any(cell["execution_count"] is not None for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_rules(path: Path) -> None:
    assert broken(path) == []


def test_no_two_notebooks_assign_the_same_constant() -> None:
    assigned = Counter[str]()
    for path in NOTEBOOKS:
        assigned.update(constants(path))
    assert not [name for name, times in assigned.items() if times > 1]


def constants(path: Path) -> set[str]:
    """The names to which a notebook assigns constants, its parameters aside."""
    names = set[str]()
    for tree in code(path)[1:]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names.add(ast.unparse(node.targets[0]))
    return names
