"""The gallery: each notebook as it was executed, as a page and as a copy that a code host shows.

    tools/gallery.py

Pages go to `build/gallery`; no page loads anything from the network. Copies go to `docs/gallery`,
the one place where git holds outputs. A copy holds for as long as its notebook has the same cells.

Each page is made of what `make demo` left in `build/notebooks`; if that does not have the present
cells, of the copy. A notebook is executed, in `build/notebooks` as by `make demo`, only where
neither of the two has all of its present cells with their outputs. So this call takes seconds where
no notebook has changed. To execute all of them anew, remove both folders first.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jinja2 import Template
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from PIL import Image

from zeropods import files
from zeropods.errors import INTERRUPTED, UserError, guarded
from zeropods.files import write_text
from zeropods.outputs import new_folder

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "build" / "notebooks"
COPIES = ROOT / "docs" / "gallery"
PAGES = ROOT / "build" / "gallery"
PAGE_SUFFIXES = (".html", ".png")
"""Endings of the files of a gallery's pages."""
SUMMARY = "06_summary"
"""The notebook about all runs in the folder of runs; later ones add runs that are not its own."""
RUNS = "runs/demo"
"""Folder of the runs, as `tools/demo.py` has it."""

Notebooks = dict[str, NotebookNode]
"""Notebooks by name, in their order."""


def main() -> None:
    """Execute what has changed, then write the copies and the pages."""
    parser = argparse.ArgumentParser(
        description="Pages and copies of the executed notebooks.",
        allow_abbrev=False,
    )
    parser.add_argument("--notebooks", type=Path, default=EXECUTED, help="executed notebooks")
    parser.add_argument("--copies", type=Path, default=COPIES, help="copies for a code host")
    parser.add_argument("--out", type=Path, default=PAGES, help="pages")
    arguments = parser.parse_args()

    notebooks = read_notebooks(NOTEBOOKS)
    _check_replaceable(arguments.out)
    execute(to_execute(notebooks, arguments.notebooks, arguments.copies), arguments.notebooks)
    lacking = to_execute(notebooks, arguments.notebooks, arguments.copies)
    if lacking:
        # With several models their copies lie in folders of their own.
        place = arguments.notebooks
        raise UserError(f"{place}: no execution of {', '.join(lacking)}; unset ZEROPODS_MODELS")

    write_copies(notebooks, arguments.notebooks, arguments.copies)
    shown = {
        **whole_executions(notebooks, arguments.copies),
        **executions(notebooks, arguments.notebooks),
    }
    index = write_pages(dict(sorted(shown.items())), arguments.out)
    print(f"gallery: {index}, {arguments.copies / INDEX}")


# Notebooks and their executions.


def read_notebooks(folder: Path) -> Notebooks:
    """The notebooks of a folder, by name."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.ipynb"))}


def executions(notebooks: Notebooks, folder: Path) -> Notebooks:
    """Copies in a folder that have the cells of their notebooks, and outputs of at least one."""
    executed = {}
    for name, notebook in notebooks.items():
        path = folder / f"{name}.ipynb"
        if path.is_file():
            copy = _read(path)
            if cells(copy) == cells(notebook) and _outputs(copy):
                executed[name] = copy
    return executed


def whole_executions(notebooks: Notebooks, folder: Path) -> Notebooks:
    """Those of them in which every code cell was executed, and none ended with an error."""
    whole = {}
    for name, copy in executions(notebooks, folder).items():
        codes = [cell for cell in copy.cells if cell.cell_type == "code"]
        is_whole = all(cell.execution_count is not None for cell in codes)
        if is_whole and not _has_failed(copy):
            whole[name] = copy
    return whole


def cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Kind and text of each cell: what a copy shares with its notebook."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def to_execute(notebooks: Notebooks, executed: Path, copies: Path) -> list[str]:
    """Names of the notebooks that have no whole execution in either folder."""
    whole = {**whole_executions(notebooks, executed), **whole_executions(notebooks, copies)}
    return [name for name in notebooks if name not in whole]


def execute(names: Collection[str], out: Path) -> None:
    """Execute notebooks in their order, as `make demo` does, and keep the executed ones in `out`.

    What follows the summary is executed after it, and causal models have a folder of runs for
    themselves: so the summary is about the runs that the notebooks before it made.

    Raises:
        SystemExit: a notebook failed; `tools/demo.py` has said why.
    """
    up_to_summary = [name for name in names if name <= SUMMARY]
    later = [name for name in names if name > SUMMARY]
    for part in (up_to_summary, later):
        if part:
            print(f"gallery: executes {', '.join(part)}", flush=True)
            status = _execute_by_demo(part, out)
            if status == INTERRUPTED:
                raise KeyboardInterrupt
            if status != 0:
                raise SystemExit(status)


def _execute_by_demo(names: Collection[str], out: Path) -> int:
    """Run `tools/demo.py` to its end, and return its exit status."""
    variables = dict(os.environ)
    runs = variables.setdefault("ZEROPODS_RUNS", RUNS)
    variables.setdefault("ZEROPODS_CAUSAL_RUNS", f"{runs}-causal")
    command = [sys.executable, str(TOOLS / "demo.py"), "--out", str(out), *names]
    with subprocess.Popen(command, env=variables) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # Ctrl-C has reached it too: it ends its kernel, and then by itself.
                continue


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


def _has_failed(notebook: NotebookNode) -> bool:
    """Whether one of its cells ended with an error."""
    return any(output.output_type == "error" for output in _outputs(notebook))


# Copies for a code host: small, and without a word about the machine on which they were executed.

INDEX = "README.md"
INDEX_COLUMNS = 140
INDEX_TEXT = """\
# The notebooks as executed

With their outputs, to be looked at without running anything. `make gallery` writes this folder,
and executes a notebook again where its cells have changed.

"""
MOST_BYTES = 400_000
"""Largest size of a copy."""
COLORS = 64
"""Number of colours of a picture in a copy; plots have fewer, and shades at the edges of lines."""
NOTEBOOK_METADATA = ("kernelspec",)
CELL_METADATA = ("tags",)
"""What is kept of metadata; the rest is of one execution, such as times and versions."""
PLACE = re.compile(
    r"(?<![\w.~/:<-])/(?!(?:bin|dev|etc|lib|lib64|proc|sbin|sys|usr)/)[A-Za-z_][\w.-]*/[\w.-]+",
)
"""Matches a full path, but those that every Linux has."""
COMMON_NAMES = ("", "/", "localhost", "root")
"""Names of folders, hosts and users that tell nothing of a machine."""


def write_copies(notebooks: Notebooks, executed: Path, copies: Path) -> None:
    """Write a copy of each whole execution whose notebook has no copy with its present cells, then
    the list of all copies; remove those of notebooks that are gone.

    Raises:
        UserError: a copy would be too large, or name a place of this machine.
    """
    valid = whole_executions(notebooks, copies)
    for name, execution in whole_executions(notebooks, executed).items():
        if name not in valid:
            copy = copy_of(execution, machine_names())
            write_text(copies / f"{name}.ipynb", _checked_text(name, copy))
            valid[name] = copy
    for path in copies.glob("*.ipynb"):
        if path.stem not in notebooks:
            path.unlink()
    write_text(copies / INDEX, _index_text(dict(sorted(valid.items()))))


def copy_of(execution: NotebookNode, names: Mapping[str, str]) -> NotebookNode:
    """A copy of an executed notebook without what is of one execution or of one machine, and with
    pictures of few colours.

    Of an output that is both HTML and text, only the HTML is kept: a host shows no other.

    Args:
        names: what tells of the machine, and what the outputs have in its place.
    """
    copy = nbformat.from_dict(execution)
    copy.metadata = {key: copy.metadata[key] for key in NOTEBOOK_METADATA if key in copy.metadata}
    for cell in copy.cells:
        cell.metadata = {key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata}
    for output in _outputs(copy):
        if output.output_type == "stream":
            output.text = _without(names, output.text)
            continue
        if "text/html" in output.data:
            output.data.pop("text/plain", None)
        for kind, value in output.data.items():
            if kind == "image/png":
                output.data[kind] = _with_few_colors(value)
            elif isinstance(value, str):
                output.data[kind] = _without(names, value)
    return copy


def machine_names() -> dict[str, str]:
    """What tells of this machine and its user, and what a copy has in its place: the folders of the
    project, its clusters, Python's environment and the user, the names of host and user."""
    home = Path.home()
    host = socket.gethostname()
    names = {
        str(ROOT): ".",
        # Where pdsh cannot take the project's path, this folder lies elsewhere.
        str(files.home()): "./.zeropods",
        sys.prefix: ".venv",
        str(home): "~",
        host: "localhost",
        host.partition(".")[0]: "localhost",
        home.name: "user",
    }
    return {name: other for name, other in names.items() if name not in COMMON_NAMES}


def _without(names: Mapping[str, str], text: str) -> str:
    """The text with each name, where it is a whole word, replaced; the longest names first."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", names[name], text)
    return text


def _with_few_colors(png: str) -> str:
    """The same picture, as base64, with at most `COLORS` colours; unchanged if that is smaller."""
    content = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    smaller = base64.b64encode(content.getvalue()).decode()
    return min(png, smaller, key=len)


def _checked_text(name: str, copy: NotebookNode) -> str:
    """The text of a copy's file, once it is clear that a code host may show it."""
    for output in _outputs(copy):
        words = {**output.get("data", {}), "": output.get("text", "")}
        for kind, text in words.items():
            place = None
            if kind != "image/png":
                place = PLACE.search(str(text))
            if place is not None:
                remedy = "execute it with data and runs below the project's folder"
                raise UserError(f"{name}: its outputs name {place[0]}, of this machine; {remedy}")
    text = nbformat.writes(copy) + "\n"
    size = len(text.encode())
    if size > MOST_BYTES:
        remedy = "let it show less"
        raise UserError(f"{name}: {size:,} bytes; expected at most {MOST_BYTES:,}; {remedy}")
    return text


def _index_text(copies: Notebooks) -> str:
    """The page that lists the copies, each with its title and what can be seen there."""
    text = INDEX_TEXT
    for name, copy in copies.items():
        title, paragraph = _first_words(copy)
        item = f"* [{title or name}]({name}.ipynb): {paragraph}"
        text += textwrap.fill(
            item,
            INDEX_COLUMNS,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        text += "\n"
    return text.rstrip() + "\n"


# Pages.


@dataclass(frozen=True)
class Card:
    """What the index of the pages says about a notebook."""

    name: str
    title: str
    text: str
    """The notebook's first paragraph, in Markdown."""
    picture: bytes | None
    """The notebook's last plot, as PNG; None where it draws none."""
    faulty: bool
    """Whether one of its cells ended with an error."""


def write_pages(executed: Notebooks, out: Path) -> Path:
    """Write a page for each executed notebook and return the index.

    The folder appears whole, and replaces older pages. A `UserError` is raised where `out` holds
    something else.
    """
    _check_replaceable(out)
    cards = [card(name, notebook) for name, notebook in executed.items()]
    with new_folder(out) as folder:
        for notebook_card in cards:
            _write_page(folder, notebook_card, executed[notebook_card.name])
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


def _write_page(folder: Path, notebook_card: Card, notebook: NotebookNode) -> None:
    exporter = HTMLExporter(extra_template_paths=[str(TOOLS)], template_file="gallery.html.j2")
    notebook.metadata["title"] = notebook_card.title
    body, _ = exporter.from_notebook_node(notebook)
    (folder / f"{notebook_card.name}.html").write_text(body, encoding="utf-8")
    if notebook_card.picture is not None:
        (folder / f"{notebook_card.name}.png").write_bytes(notebook_card.picture)


def card(name: str, notebook: NotebookNode) -> Card:
    """A notebook's title and first paragraph as written there, its last plot, and whether it
    failed."""
    title, text = _first_words(notebook)
    pictures = []
    for output in _outputs(notebook):
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
        faulty=_has_failed(notebook),
    )


def _first_words(notebook: NotebookNode) -> tuple[str, str]:
    """The title and the first paragraph of a notebook; both empty where it has no prose."""
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    if not prose:
        return "", ""
    title, _, rest = prose[0].partition("\n")
    paragraph, _, _ = rest.strip().partition("\n\n")
    return title.lstrip("# ").strip(), paragraph


if __name__ == "__main__":
    sys.exit(guarded(main))
