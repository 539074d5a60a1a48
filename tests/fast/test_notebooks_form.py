"""The form of every notebook: what a reader and a fresh kernel can rely on."""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINES_A_CELL, LINES_A_NOTEBOOK = 10, 40
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def sources(path: Path, kind: str = "code") -> list[str]:
    return ["".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == kind]


def code(path: Path) -> list[ast.Module]:
    """Each code cell as Python: shell lines and magics are none."""
    return [ast.parse(source, str(path)) for source in sources(path)]


def broken(path: Path) -> Iterator[str]:
    """The rules that a notebook does not keep."""
    notebook, trees = read(path), code(path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sizes = [sum(bool(line.strip()) for line in source.splitlines()) for source in sources(path)]
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    opening = re.fullmatch(r"# [^\n]+\n\n(.+)", "".join(notebook["cells"][0]["source"]), re.DOTALL)
    tagged = ["parameters" in cell["metadata"].get("tags", []) for cell in cells]
    # Papermill puts a cell of its own assignments behind the parameters: nothing may be computed from them in theirs.
    assigned = [isinstance(line, ast.Assign) and ast.literal_eval(line.value) != "" for line in trees[0].body]
    rules = {
        "begins with its title and two sentences": opening and len(re.findall(r"[.!?](?=\s|$)", opening[1])) == 2,
        "the first code cell and no other holds the parameters": tagged == [True] + [False] * (len(tagged) - 1),
        "its parameters are constants": assigned and all(assigned),
        "its settings are those of the parameters": "Workshop.of(vars()" in sources(path)[1] or "15_" in path.name,
        "prose stands before every code cell": all(b == "markdown" for b, kind in pairwise(kinds) if kind == "code"),
        "cells are short": max(sizes) <= LINES_A_CELL,
        "it is short": sum(sizes) <= LINES_A_NOTEBOOK,
        "the last expression of a cell is its output": all(isinstance(tree.body[-1], ast.Expr) for tree in trees[1:]),
        "defines no function": not any(isinstance(node, DEFINITIONS) for tree in trees for node in ast.walk(tree)),
        "nothing is stored from a run": all(not cell["outputs"] and cell["execution_count"] is None for cell in cells),
        "names its kernel": notebook["metadata"]["kernelspec"]["name"] == "python3",
    }
    yield from (rule for rule, holds in rules.items() if not holds)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_rules(path: Path) -> None:
    assert list(broken(path)) == []


def test_no_two_notebooks_assign_the_same_constant() -> None:
    assigned = Counter[str]()
    for path in NOTEBOOKS:
        nodes = [node for cell in code(path)[1:] for node in ast.walk(cell)]
        constants = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
        assigned.update({ast.unparse(node.targets[0]) for node in constants})
    assert not [name for name, times in assigned.items() if times > 1]
