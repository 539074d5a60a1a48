"""`make lab`: what a person meets who opens JupyterLab on the notebooks for the first time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page

from tests.browser.lab import lab
from tests.browser.notebook import PROMPTS, Seen, accept, await_end, look, menu, open_lab, open_notebook
from tests.full.clusters import processes_of
from tests.full.launches import until

PLAN, PODS = "00_plan", "two_of_them"
CELLS = ("from zeropods import pods\ncluster = pods.up(2, name='menu')",)
END_SECONDS = 10.0


@dataclass
class Visit:
    """What the person met, in the order of the visit."""

    greetings: int
    """Dialogs and notices before anything was done."""
    kernel: list[str]
    """The command of the notebook's kernel."""
    unchanged: bool
    """Whether opening and closing a notebook left its file as it was."""
    rerun: Seen
    """After Restart Kernel and Run All Cells."""
    pods_seconds: float
    """From Shut Down Kernel to the end of the last process of its pods."""
    status: int | None
    said: str
    """On the terminal, after Ctrl-C."""
    left: list[int]
    """Processes, after that."""


@pytest.fixture(scope="module")
def visit(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    folder = tmp_path_factory.mktemp("lab")
    with lab(folder) as server:
        add_notebook(folder / "notebooks" / f"{PODS}.ipynb")
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        open_lab(page, server.address)
        page.wait_for_timeout(1000)
        greetings = page.locator(".jp-Dialog, .Toastify__toast").count()
        kernel, unchanged = opened(page, folder)
        rerun = run_again(page, folder / "notebooks" / f"{PLAN}.ipynb")
        pods_seconds = pods_ended(page, folder)
        page.close()
        said = server.interrupt()
        left = left_after(END_SECONDS, folder)
    yield Visit(greetings, kernel, unchanged, rerun, pods_seconds, server.process.returncode, said, left)


def left_after(seconds: float, folder: Path) -> list[int]:
    """Processes that are still there after so long: a kernel may take a moment to see that its server has gone."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder / "home")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def add_notebook(path: Path) -> None:
    """One with two pods."""
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)


def opened(page: Page, folder: Path) -> tuple[list[str], bool]:
    """The command of a kernel that opening a notebook has started, and whether the notebook's file is what it was."""
    file = folder / "notebooks" / f"{PLAN}.ipynb"
    before = file.read_bytes()
    open_notebook(page, PLAN)
    (kernel,) = [command for command in commands(folder) if "ipykernel_launcher" in command]
    return kernel, file.read_bytes() == before


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
    began = time.monotonic()
    until(lambda: not any("worker_p.py" in " ".join(command) for command in commands(folder)), 60.0)
    return time.monotonic() - began


def test_it_greets_with_no_dialog_and_no_notice(visit: Visit) -> None:
    assert visit.greetings == 0


def test_kernels_are_of_the_python_that_started_it(visit: Visit) -> None:
    assert visit.kernel[0] == sys.executable


def test_a_notebook_that_is_only_opened_stays_as_it_was(visit: Visit) -> None:
    assert visit.unchanged


def test_restart_and_run_all_begins_anew_and_ends_without_an_error(visit: Visit) -> None:
    seen = visit.rerun
    assert seen.prompts == [f"[{number + 1}]:" for number in range(len(seen.prompts))] and not seen.errors


def test_pods_end_with_a_kernel_that_is_shut_down_from_the_menu(visit: Visit) -> None:
    assert visit.pods_seconds < END_SECONDS


def test_ctrl_c_ends_it_with_status_0_and_no_traceback(visit: Visit) -> None:
    assert visit.status == 0 and "Traceback" not in visit.said, visit.said


def test_ctrl_c_leaves_no_process(visit: Visit) -> None:
    assert visit.left == []
