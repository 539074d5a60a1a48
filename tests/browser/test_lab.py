"""`make lab`: what a person meets who opens JupyterLab on the notebooks for the first time."""

import signal
import sys
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Page

from tests.browser.notebook import PROMPTS, Seen, accept, await_end, lab, look, menu, open_lab, open_notebook
from tests.full.clusters import processes_of
from tests.full.launches import until

PLAN, PODS = "00_plan", "two_of_them"
CELLS = ("from zeropods import pods\ncluster = pods.up(2, name='menu')",)
END_SECONDS = 10.0


def test_a_first_visit(chromium: Browser, tmp_path: Path) -> None:
    with lab(tmp_path) as server:
        add_notebook(tmp_path / "notebooks" / f"{PODS}.ipynb")
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        open_lab(page, server.address)
        page.wait_for_timeout(1000)
        assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0, "it greets with a dialog or a notice"
        file = tmp_path / "notebooks" / f"{PLAN}.ipynb"
        before = file.read_bytes()
        open_notebook(page, PLAN)
        (kernel,) = [command for command in commands(tmp_path) if "ipykernel_launcher" in command]
        assert kernel[0] == sys.executable
        assert file.read_bytes() == before, "opening a notebook changed it"
        again = run_again(page, file)
        assert again.prompts == [f"[{number + 1}]:" for number in range(len(again.prompts))] and not again.errors
        assert pods_ended(page, tmp_path) < END_SECONDS
        page.close()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=30) == 0
        # A kernel may take a moment to see that its server has gone.
        until(lambda: not processes_of(tmp_path / "home"), END_SECONDS)
    assert "Traceback" not in server.log.read_text()


def add_notebook(path: Path) -> None:
    """One with two pods."""
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)


def commands(folder: Path) -> list[list[str]]:
    found = (Path(f"/proc/{pid}/cmdline") for pid in processes_of(folder / "home"))
    return [path.read_text(errors="replace").split("\0") for path in found]


def run_again(page: Page, file: Path) -> Seen:
    """Run all cells, then from the menu once more on a fresh kernel."""
    menu(page, "Run", "Run All Cells")
    await_end(page)
    menu(page, "Kernel", "Restart Kernel and Run All Cells")
    accept(page)
    page.wait_for_function(f"() => ({PROMPTS})().some(prompt => !/\\d/.test(prompt))")
    await_end(page)
    return look(page, file)


def pods_ended(page: Page, folder: Path) -> float:
    """How long pods live on after their kernel was shut down from the menu."""
    open_notebook(page, PODS)
    menu(page, "Run", "Run All Cells")
    await_end(page)
    assert sum("worker_p.py" in " ".join(command) for command in commands(folder)) >= 2
    menu(page, "Kernel", "Shut Down Kernel")
    return until(lambda: not any("worker_p.py" in " ".join(command) for command in commands(folder)), 60.0)
