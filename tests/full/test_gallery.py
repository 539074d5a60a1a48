"""The gallery of executed notebooks, looked at in a real browser."""

import base64
import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from zeropods.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
MODULE = runpy.run_path(str(ROOT / "tools" / "gallery.py"))
TABLE = "<table><tr>" + "".join(f"<th>a wide heading {n}</th>" for n in range(30)) + "</tr></table>"
HOSTILE = (
    "<script src='http://127.0.0.1:9/script.js'></script><script>document.title = 'taken'</script>"
    "<img src='http://127.0.0.1:9/picture.png'><link rel='stylesheet' href='http://127.0.0.1:9/style.css'>"
)


def picture() -> str:
    from matplotlib.figure import Figure

    figure, file = Figure(figsize=(2, 1)), io.BytesIO()
    figure.subplots().plot([1, 2])
    figure.savefig(file)
    return base64.b64encode(file.getvalue()).decode()


def shown(**data: str) -> Any:
    return v4.new_output("display_data", data={name.replace("_", "/"): value for name, value in data.items()})


def notebook(title: str, outputs: list[Any]) -> str:
    prose = v4.new_markdown_cell(f"# {title}\n\nYou will see <b>something</b> with `code`.\n\nMore.")
    return nbformat.writes(v4.new_notebook(cells=[prose, v4.new_code_cell("1 + 1", outputs=outputs)]))


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages of three executed notebooks, and of one that was not."""
    notebooks = tmp_path_factory.mktemp("notebooks")
    error = v4.new_output("error", ename="UserError", evalue="no run there", traceback=["UserError: no run there"])
    hostile = shown(text_html=HOSTILE)
    for name, title, outputs in (
        ("00_plot", "0. A plot", [shown(image_png=picture()), shown(text_html=TABLE)]),
        ("01_hostile", "1. <i>Hostile</i>", [hostile]),
        ("02_failed", "2. Failed", [error]),
        ("03_not_run", "3. Not run", []),
    ):
        (notebooks / f"{name}.ipynb").write_text(notebook(title, outputs))
    index: Path = MODULE["write_gallery"](notebooks, tmp_path_factory.mktemp("out") / "gallery")
    return index.parent


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A tab of a wide window."""
    opened = chromium.new_page(viewport={"width": 1280, "height": 800})
    yield opened
    opened.close()


def test_the_index_leads_to_each_executed_notebook(page: Any, gallery: Path) -> None:
    page.goto((gallery / "index.html").as_uri())
    assert page.locator("h2").all_inner_texts() == ["0. A plot", "1. <i>Hostile</i>", "2. Failed"]
    assert page.locator(".fault").count() == 1
    page.get_by_text("0. A plot").click()
    page.wait_for_url("**/00_plot.html", timeout=10_000)
    assert page.locator("h1").inner_text().startswith("0. A plot")


@pytest.mark.parametrize("name", ["index", "00_plot"])
def test_a_page_fits_a_narrow_window_and_its_plot_is_drawn(page: Any, gallery: Path, name: str) -> None:
    page.set_viewport_size({"width": 480, "height": 800})
    page.goto((gallery / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("img").evaluate_all("all => all.map(img => img.naturalWidth > 0)") == [True]


def test_an_output_runs_no_script_and_asks_no_server(page: Any, gallery: Path) -> None:
    asked: list[str] = []
    page.route("http://**", lambda route: asked.append(route.request.url))
    page.goto((gallery / "01_hostile.html").as_uri())
    page.wait_for_load_state("networkidle", timeout=10_000)
    assert asked == [] and page.title() != "taken"
    assert not re.search("<script|cdn", (gallery / "00_plot.html").read_text(encoding="utf-8"))


def test_nothing_executed_or_a_folder_of_something_else_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no executed notebook there; `make demo` executes them"):
        MODULE["write_gallery"](tmp_path / "notebooks", tmp_path / "gallery")
    (tmp_path / "letter.txt").touch()
    (tmp_path / "00.ipynb").write_text(notebook("0. A plot", [shown(text_html=TABLE)]))
    with pytest.raises(UserError, match="not a gallery"):
        MODULE["write_gallery"](tmp_path, tmp_path)
