"""The executed notebooks as a folder of pages: an index, and each notebook with its tables and
plots.

    tools/gallery.py

Reads what `make demo` left in `build/notebooks`, writes `build/gallery`. No page loads anything
from the network.
"""

from __future__ import annotations

import argparse
import base64
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jinja2 import Template
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from zeropods.errors import UserError, guarded
from zeropods.outputs import new_folder

TOOLS = Path(__file__).resolve().parent
BUILD = TOOLS.parent / "build"
PAGE_SUFFIXES = (".html", ".png")
"""Endings of the files of a gallery."""


@dataclass(frozen=True)
class Card:
    """What the index says about a notebook."""

    name: str
    title: str
    text: str
    """The notebook's first paragraph, in Markdown."""
    picture: bytes | None
    """The notebook's last plot, as PNG; None where it draws none."""
    faulty: bool
    """Whether one of its cells ended with an error."""


def main() -> None:
    """Write the pages, the index last."""
    parser = argparse.ArgumentParser(
        description="The executed notebooks as HTML.", allow_abbrev=False
    )
    parser.add_argument(
        "--notebooks", type=Path, default=BUILD / "notebooks", help="executed copies"
    )
    parser.add_argument("--out", type=Path, default=BUILD / "gallery")
    arguments = parser.parse_args()
    print(f"gallery: {write_gallery(arguments.notebooks, arguments.out)}")


def write_gallery(notebooks: Path, out: Path) -> Path:
    """Write a page for each executed notebook and return the index.

    The folder appears whole, and replaces an older gallery. A `UserError` is raised where nothing
    has been executed, or where `out` holds something else.
    """
    executed = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        notebook = _read(path)
        if _outputs(notebook):
            executed[path.stem] = notebook
    if not executed:
        raise UserError(f"{notebooks}: no executed notebook there; `make demo` executes them")
    _check_replaceable(out)
    cards = [card(name, notebook) for name, notebook in executed.items()]
    with new_folder(out) as folder:
        for of_notebook in cards:
            _write_page(folder, of_notebook, executed[of_notebook.name])
        text = (TOOLS / "gallery.html").read_text(encoding="utf-8")
        index = Template(text, autoescape=True, trim_blocks=True)
        (folder / "index.html").write_text(index.render(cards=cards), encoding="utf-8")
    return out / "index.html"


def _check_replaceable(out: Path) -> None:
    foreign = sorted(path.name for path in out.glob("*") if path.suffix not in PAGE_SUFFIXES)
    content = ""
    if foreign:
        content = foreign[0]
    elif out.is_file():
        content = "no pages"
    if content:
        raise UserError(f"{out}: holds {content}, not a gallery; name another folder")


def _write_page(folder: Path, of_notebook: Card, notebook: NotebookNode) -> None:
    exporter = HTMLExporter(extra_template_paths=[str(TOOLS)], template_file="gallery.html.j2")
    notebook.metadata["title"] = of_notebook.title
    body, _ = exporter.from_notebook_node(notebook)
    (folder / f"{of_notebook.name}.html").write_text(body, encoding="utf-8")
    if of_notebook.picture is not None:
        (folder / f"{of_notebook.name}.png").write_bytes(of_notebook.picture)


def card(name: str, notebook: NotebookNode) -> Card:
    """A notebook's title and first paragraph as written there, its last plot, and whether it
    failed."""
    title, text = _first_words(notebook)
    outputs = _outputs(notebook)
    pictures = []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            pictures.append(data["image/png"])
    last_picture = None
    if pictures:
        last_picture = base64.b64decode(pictures[-1])
    return Card(
        name=name,
        title=title or name,
        text=text,
        picture=last_picture,
        faulty=any(output.output_type == "error" for output in outputs),
    )


def _first_words(notebook: NotebookNode) -> tuple[str, str]:
    """The title and the first paragraph of a notebook; both empty where it has no prose."""
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    if not prose:
        return "", ""
    title, _, rest = prose[0].partition("\n")
    paragraph, _, _ = rest.strip().partition("\n\n")
    return title.lstrip("# ").strip(), paragraph


def _read(path: Path) -> NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError:
        raise UserError(f"{path}: no notebook; execute it again, or remove it") from None


def _outputs(notebook: NotebookNode) -> list[NotebookNode]:
    outputs = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs += cell.outputs
    return outputs


if __name__ == "__main__":
    sys.exit(guarded(main))
