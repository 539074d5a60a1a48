"""The copies of executed notebooks in docs/gallery: each is of its notebook, small, and of no particular machine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.noise import noise
from tests.pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GALLERY = ROOT / "docs" / "gallery"
COPIES = sorted(GALLERY.glob("*.ipynb"))
MOST_BYTES = 400_000
FULL_PATH = re.compile(r"(?<![\w.~/:<-])/(?:home|media|mnt|opt|root|srv|tmp|Users|var|work)/")
HOST = re.compile(r"data-heading='hostname'[^>]*>([^<]*)<")
"""Matches a host's name in a table of pods."""
needs_copies = pytest.mark.skipif(not COPIES, reason="docs/gallery holds no copy yet; make gallery")


def cells(path: Path) -> list[tuple[str, str]]:
    """Kind and text of each cell."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in json.loads(path.read_text("utf-8"))["cells"] for output in cell.get("outputs", [])]


def older(notebooks: list[Path], gallery: Path) -> list[str]:
    """A line for each notebook that has no copy with its present cells."""
    lines = []
    for notebook in notebooks:
        copy = gallery / notebook.name
        if not copy.is_file():
            lines.append(f"docs/gallery/{copy.name}: is not there; make gallery")
        elif cells(copy) != cells(notebook):
            lines.append(f"docs/gallery/{copy.name}: is older than notebooks/{copy.name}; make gallery")
    return lines


@needs_copies
def test_every_notebook_has_a_copy_with_its_present_cells_and_there_is_no_other() -> None:
    lines = older(NOTEBOOKS, GALLERY)
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)
    assert [path.name for path in COPIES] == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"source": ["1 + 2"]}, "docs/gallery/a.ipynb: is older than notebooks/a.ipynb; make gallery"),
        ({"cell_type": "markdown"}, "docs/gallery/a.ipynb: is older than notebooks/a.ipynb; make gallery"),
        ({"outputs": ["of this run"], "execution_count": 1}, None),
    ],
)
def test_a_notebook_whose_cells_have_changed_is_named_and_outputs_do_not_count(
    tmp_path: Path, change: dict[str, Any], line: str | None
) -> None:
    cell = {"cell_type": "code", "source": "1 + 1", "outputs": [], "execution_count": None}
    for folder, content in (("notebooks", cell), ("gallery", {**cell, **change})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.ipynb").write_text(json.dumps({"cells": [content]}))
    notebook = tmp_path / "notebooks" / "a.ipynb"
    assert older([notebook], tmp_path / "gallery") == ([line] if line else [])
    assert older([notebook], tmp_path) == ["docs/gallery/a.ipynb: is not there; make gallery"]


@needs_copies
@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.stem)
def test_a_copy_is_small_shows_outputs_without_an_error_and_names_no_place_of_a_machine(path: Path) -> None:
    assert path.stat().st_size <= MOST_BYTES
    shown = outputs(path)
    assert shown and [output["evalue"] for output in shown if output["output_type"] == "error"] == []
    words = [json.dumps(value) for output in shown for value in (output.get("text"), texts(output))]
    assert [found for word in words for found in FULL_PATH.findall(word)] == []
    assert {host for word in words for host in HOST.findall(word)} <= {"localhost"}


def texts(output: dict[str, Any]) -> list[Any]:
    """What an output shows in words."""
    return [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]


@needs_copies
@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.stem)
def test_no_cell_of_a_copy_shows_what_another_library_says(path: Path) -> None:
    assert noise(outputs(path)) == []


def stream(name: str, text: str) -> dict[str, str]:
    return {"output_type": "stream", "name": name, "text": text}


WARNING = "/a/torch/utils.py:12: FutureWarning: this is deprecated"


def test_lines_of_other_libraries_are_told_from_our_own() -> None:
    ours = "train: 100%|██| 10/10 [00:22<00:00,  2.30s/ steps]\nrun 1 of 4: a/1 begins\n/a/b: this run is finished; x\n"
    theirs = f"Loading weights: 100%|██| 9/9\n{WARNING}\n  warnings.warn(\n"
    assert noise([stream("stderr", ours), stream("stdout", "fwd MACs: 606\n")]) == []
    assert noise([stream("stderr", ours + theirs)]) == theirs.splitlines()
    assert noise([stream("stdout", f"6\n{WARNING}\n")]) == [WARNING]


@needs_copies
def test_the_list_leads_to_every_copy() -> None:
    text = (GALLERY / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\* \[[^]]+\]\(([^)]+)\): ", text, re.MULTILINE) == [path.name for path in COPIES]
