"""The executed notebooks as a folder of pages: an index, and each notebook with its tables and plots.

    tools/gallery.py

Reads what `make demo` left in `build/notebooks`, writes `build/gallery`. No page loads anything from the network.
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
    parser = argparse.ArgumentParser(description="The executed notebooks as HTML.", allow_abbrev=False)
    parser.add_argument("--notebooks", type=Path, default=BUILD / "notebooks", help="executed copies")
    parser.add_argument("--out", type=Path, default=BUILD / "gallery")
    arguments = parser.parse_args()
    print(f"gallery: {write_gallery(arguments.notebooks, arguments.out)}")


def write_gallery(notebooks: Path, out: Path) -> Path:
    """Write a page for each executed notebook and return the index.

    The folder appears whole, and replaces an older gallery. A `UserError` is raised where nothing has been executed, or
    where `out` holds something else.
    """
    executed = {path.stem: _read(path) for path in sorted(notebooks.glob("*.ipynb"))}
    executed = {name: notebook for name, notebook in executed.items() if _outputs(notebook)}
    if not executed:
        raise UserError(f"{notebooks}: no executed notebook there; `make demo` executes them")
    _check_replaceable(out)
    cards = [card(name, notebook) for name, notebook in executed.items()]
    with new_folder(out) as folder:
        for each in cards:
            _write_page(folder, each, executed[each.name])
        index = Template((TOOLS / "gallery.html").read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)
        (folder / "index.html").write_text(index.render(cards=cards), encoding="utf-8")
    return out / "index.html"


def _check_replaceable(out: Path) -> None:
    foreign = sorted(path.name for path in out.glob("*") if path.suffix not in (".html", ".png"))
    if foreign or out.is_file():
        raise UserError(f"{out}: holds {foreign[0] if foreign else 'no pages'}, not a gallery; name another folder")


def _write_page(folder: Path, each: Card, notebook: NotebookNode) -> None:
    exporter = HTMLExporter(extra_template_paths=[str(TOOLS)], template_file="gallery.html.j2")
    notebook.metadata["title"] = each.title
    body, _ = exporter.from_notebook_node(notebook)
    (folder / f"{each.name}.html").write_text(body, encoding="utf-8")
    if each.picture is not None:
        (folder / f"{each.name}.png").write_bytes(each.picture)


def card(name: str, notebook: NotebookNode) -> Card:
    """A notebook's title and first paragraph as written there, its last plot, and whether it failed."""
    first = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    title, _, rest = first.partition("\n")
    pictures = [output.data["image/png"] for output in _outputs(notebook) if "image/png" in output.get("data", {})]
    return Card(
        name=name,
        title=title.lstrip("# ").strip() or name,
        text=rest.strip().partition("\n\n")[0],
        picture=base64.b64decode(pictures[-1]) if pictures else None,
        faulty=any(output.output_type == "error" for output in _outputs(notebook)),
    )


def _read(path: Path) -> NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError:
        raise UserError(f"{path}: no notebook; execute it again, or remove it") from None


def _outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


if __name__ == "__main__":
    sys.exit(guarded(main))
