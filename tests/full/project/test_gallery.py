"""The gallery of executed notebooks: its pages, looked at in a real browser, and its copies."""

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
from PIL import Image

from zeropods.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
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


def a_notebook(title: str, outputs: list[Any]) -> Any:
    """A notebook of two cells; the second was executed, if it has outputs."""
    prose = v4.new_markdown_cell(f"# {title}\n\nYou will see <b>something</b> with `code`.\n\nMore.")
    code = v4.new_code_cell("1 + 1", outputs=outputs, execution_count=1 if outputs else None)
    return v4.new_notebook(cells=[prose, code])


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
        nbformat.write(a_notebook(title, outputs), notebooks / f"{name}.ipynb")
    executed = MODULE["executions"](MODULE["read_notebooks"](notebooks), notebooks)
    index: Path = MODULE["write_pages"](executed, tmp_path_factory.mktemp("out") / "gallery")
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


def test_pages_replace_no_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(UserError, match=r"holds letter.txt, not a gallery; name another folder"):
        MODULE["write_pages"]({"00": a_notebook("0. A plot", [shown(text_html=TABLE)])}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


# Copies, which a code host shows.

NAME = "15_plan_8b"
"""A notebook that needs no other, no data and a few seconds."""
MACHINE = {"/home/ann/zeropods": ".", "/home/ann": "~", "tower": "localhost", "ann": "user"}


def said(text: str, name: str = "stdout") -> Any:
    return v4.new_output("stream", name=name, text=text)


def test_a_copy_says_nothing_of_the_machine_and_has_smaller_pictures() -> None:
    execution = a_notebook(
        "0. A plot",
        [
            said("/home/ann/zeropods/runs/a and /home/ann/zeropods2: annual\n"),
            shown(text_html="<td>tower</td><td>towers</td>", text_plain="hostname='tower'"),
            shown(image_png=picture(), text_plain="a plot of ann"),
        ],
    )
    execution.cells[1].metadata = {"tags": ["parameters"], "execution": {"iopub.execute_input": "2026-01-02"}}
    execution.metadata = {"kernelspec": {"name": "python3"}, "language_info": {"version": "3.11.7"}}
    copy = MODULE["copy_of"](execution, MACHINE)
    text, table, plot = copy.cells[1].outputs
    assert text.text == "./runs/a and ~/zeropods2: annual\n"
    assert table.data == {"text/html": "<td>localhost</td><td>towers</td>"}
    assert plot.data["text/plain"] == "a plot of user"
    drawn, smaller = (Image.open(io.BytesIO(base64.b64decode(png))) for png in (picture(), plot.data["image/png"]))
    assert drawn.size == smaller.size and len(plot.data["image/png"]) < len(picture())
    assert copy.metadata == {"kernelspec": {"name": "python3"}} and copy.cells[1].metadata == {"tags": ["parameters"]}
    assert execution.cells[1].outputs[1].data["text/plain"] == "hostname='tower'"


def test_the_folder_of_clusters_is_of_this_machine_too_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "clusters"))
    copy = MODULE["copy_of"](
        a_notebook("0. A", [said(f"{tmp_path}/clusters/one/hostfile\n")]), MODULE["machine_names"]()
    )
    (text,) = copy.cells[1].outputs
    assert text.text == "./.zeropods/one/hostfile\n"


def test_a_place_elsewhere_and_too_large_a_copy_are_one_line_and_no_copy(tmp_path: Path) -> None:
    for output, line in (
        (said("/scratch/ann/runs/a"), r"its outputs name /scratch/ann, of this machine; execute it with data and runs"),
        (shown(text_html="<td>/scratch/ann/runs</td>"), "its outputs name /scratch/ann"),
        (said("long " * 100_000), r"500,\d\d\d bytes; expected at most 400,000"),
    ):
        notebooks = write(tmp_path / "executed", a=a_notebook("0. A", [output]))
        with pytest.raises(UserError, match=line):
            MODULE["write_copies"](notebooks, tmp_path / "executed", tmp_path / "copies")
        assert not (tmp_path / "copies").exists()


def write(folder: Path, **notebooks: Any) -> Any:
    """Write notebooks into a folder, and return them as read."""
    folder.mkdir(exist_ok=True)
    for name, written in notebooks.items():
        nbformat.write(written, folder / f"{name}.ipynb")
    return MODULE["read_notebooks"](folder)


def test_what_is_not_executed_to_its_end_or_in_other_cells_is_executed_again(tmp_path: Path) -> None:
    error = v4.new_output("error", ename="UserError", evalue="no run there", traceback=[])
    half = a_notebook("2", [said("1")])
    half.cells.append(v4.new_code_cell("2 + 2"))
    made = {"whole": a_notebook("0", [said("1")]), "failed": a_notebook("1", [error]), "half": half}
    notebooks = write(tmp_path / "executed", **made, changed=a_notebook("3", [said("1")]))
    notebooks["changed"].cells[0].source = "# Another title"
    nowhere = tmp_path / "nowhere"
    assert MODULE["to_execute"](notebooks, tmp_path / "executed", nowhere) == ["changed", "failed", "half"]
    # A copy that is valid makes an execution unnecessary, and stays as it is beside a later one.
    write(tmp_path / "copies", half=a_notebook("2", [said("1")]), gone=a_notebook("4", [said("1")]))
    notebooks["half"] = a_notebook("2", [])
    assert MODULE["to_execute"](notebooks, tmp_path / "executed", tmp_path / "copies") == ["changed", "failed"]
    before = (tmp_path / "copies" / "half.ipynb").read_bytes()
    MODULE["write_copies"](notebooks, tmp_path / "executed", tmp_path / "copies")
    names = sorted(path.name for path in (tmp_path / "copies").iterdir())
    assert names == ["README.md", "half.ipynb", "whole.ipynb"]
    assert (tmp_path / "copies" / "half.ipynb").read_bytes() == before
    text = (tmp_path / "copies" / "README.md").read_text()
    assert re.findall(r"^\* \[(\d)\]\((\w+).ipynb\): You will see", text, re.MULTILINE) == [
        ("2", "half"),
        ("0", "whole"),
    ]


def test_a_notebook_is_executed_and_its_copy_is_of_its_cells(tmp_path: Path) -> None:
    notebooks = {NAME: MODULE["read_notebooks"](ROOT / "notebooks")[NAME]}
    executed, copies = tmp_path / "executed", tmp_path / "copies"
    MODULE["execute"](MODULE["to_execute"](notebooks, executed, copies), executed)
    MODULE["write_copies"](notebooks, executed, copies)
    copy = nbformat.read(copies / f"{NAME}.ipynb", as_version=4)
    nbformat.validate(copy)
    assert MODULE["cells"](copy) == MODULE["cells"](notebooks[NAME])
    assert [output for cell in copy.cells if cell.cell_type == "code" for output in cell.outputs]
    assert MODULE["to_execute"](notebooks, tmp_path / "nowhere", copies) == []


def test_a_call_where_all_was_executed_executes_nothing_and_writes_pages_and_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebooks = MODULE["read_notebooks"](ROOT / "notebooks")
    for notebook in notebooks.values():
        for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.execution_count, cell.outputs = number + 1, [said("42")]
    write(tmp_path / "executed", **notebooks)
    folders = {f"--{name}": str(tmp_path / name) for name in ("copies", "out")}
    words = [word for pair in folders.items() for word in pair]
    monkeypatch.setattr("sys.argv", ["gallery.py", "--notebooks", str(tmp_path / "executed"), *words])
    MODULE["main"]()
    assert capsys.readouterr().out == f"gallery: {tmp_path}/out/index.html, {tmp_path}/copies/README.md\n"
    for folder, suffix in (("out", "html"), ("copies", "ipynb")):
        names = {path.stem for path in (tmp_path / folder).glob(f"*.{suffix}")} - {"index"}
        assert names == set(notebooks)
