"""JupyterLab as `make lab` starts it; a notebook in it, opened, run from the menu, read, saved and closed by mouse."""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.full.demo_page import ROOT, Served, start

CONFIG = ROOT / "tools" / "jupyterlab" / "config.py"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+")
RUN_SECONDS = 3_600
"""A notebook takes a minute on quiet cores, and twenty beside six busy processes."""
SAVE_SECONDS = 240
NARROW = 480
"""Of a window, in CSS pixels."""
SHOWN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
ACCEPT = ".jp-Dialog .jp-mod-accept"
"""Says yes to the dialog that is open."""
KERNEL_SECONDS = 600
PROMPTS = f"""() => [...document.querySelectorAll('{SHOWN} .jp-CodeCell')]
    .map(cell => cell.querySelector('.jp-InputPrompt').textContent.trim())"""
PLOTS = f"""() => [...document.querySelectorAll('{SHOWN} .jp-OutputArea-output img')]
    .map(image => [image.naturalWidth, image.naturalHeight, image.getBoundingClientRect().width])"""
TABLES = f"""() => [...document.querySelectorAll('{SHOWN} .jp-OutputArea-output table')]
    .map(table => [...table.querySelectorAll('th')].map(cell => cell.textContent))"""
CUT = f"""() => [...document.querySelectorAll('{SHOWN} .jp-OutputArea-output')].filter(output => {{
    const own = getComputedStyle(output).overflowX
    return output.scrollWidth > output.clientWidth + 1 && own !== 'auto' && own !== 'scroll'
}}).map(output => output.textContent.slice(0, 80))"""


@contextmanager
def lab(folder: Path, **settings: str) -> Iterator[Served]:
    """A JupyterLab on a port of its own; nothing of it is left.

    Args:
        settings: what its environment, and so that of its kernels, says beside this process's.
    """
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    own = {f"JUPYTER_{name}_DIR": str(folder / f".jupyter-{name.lower()}") for name in ("CONFIG", "DATA", "RUNTIME")}
    command = ["-m", "jupyterlab", "--config", CONFIG, "--no-browser", "--port", "0", f"--ServerApp.root_dir={folder}"]
    own |= {"ZEROPODS_HOME": str(folder / "home"), **settings}
    served = start(command, folder / "terminal", said=ADDRESS, **own)
    try:
        yield served
    finally:
        served.end()


@dataclass
class Seen:
    """What a person has seen of an executed notebook."""

    prompts: list[str]
    """Beside each code cell."""
    plots: list[tuple[float, float, float]]
    """Each picture's own width and height, and the width that it is shown with."""
    tables: list[list[str]]
    """Each table's header."""
    cut: list[str]
    """Where an output is wider than its place and does not scroll."""
    outputs: list[dict[str, Any]]
    """As saved."""

    @property
    def errors(self) -> list[str]:
        return [str(out["evalue"]) for out in self.outputs if out["output_type"] == "error"]

    @property
    def streams(self) -> str:
        """What the cells wrote beside their results."""
        return "".join("".join(out["text"]) for out in self.outputs if out["output_type"] == "stream")


def open_lab(page: Page, address: str) -> None:
    """JupyterLab's page, until its file browser is there."""
    page.goto(address)
    page.locator(".jp-DirListing-item").first.wait_for(timeout=KERNEL_SECONDS * 1000)
    page.wait_for_timeout(500)
    if page.locator(".jp-Dialog", has_text="Error Loading Theme").count():
        # A browser that is short of time may give up on a style sheet; a person loads the page again.
        page.reload()
        page.locator(".jp-DirListing-item").first.wait_for(timeout=KERNEL_SECONDS * 1000)


def open_notebook(page: Page, name: str) -> None:
    """Double-click it in the file browser; its kernel has answered when this returns."""
    with page.expect_websocket(lambda socket: "/channels" in socket.url, timeout=KERNEL_SECONDS * 1000):
        page.locator(f'.jp-DirListing-itemText:has-text("{name}")').dblclick()
        page.locator(f"{SHOWN} .jp-CodeCell").first.wait_for()
    await_kernel(page)


def await_kernel(page: Page, seconds: float = KERNEL_SECONDS) -> None:
    """Wait until the status bar says that it waits for work."""
    page.locator("#jp-main-statusbar", has_text="(ipykernel) | Idle").wait_for(timeout=seconds * 1000)


def menu(page: Page, heading: str, item: str) -> None:
    """Choose an item of a menu."""
    page.locator(".lm-MenuBar-itemLabel", has_text=heading).first.click()
    page.locator(".lm-Menu-itemLabel", has_text=item).first.click()


def await_end(page: Page, seconds: float = RUN_SECONDS) -> None:
    """Wait until every code cell has run, or one has failed."""
    deadline = time.monotonic() + seconds
    while True:
        prompts = page.evaluate(PROMPTS)
        if "[*]:" not in prompts and any(map(is_done, prompts)):
            await_kernel(page, max(KERNEL_SECONDS, deadline - time.monotonic()))
            # On a busy machine the page may have had no time to mark the cells that wait.
            if "[*]:" not in page.evaluate(PROMPTS):
                return
        assert time.monotonic() < deadline, prompts
        page.wait_for_timeout(300)


def is_done(prompt: str) -> bool:
    """Whether it is `[N]:`."""
    return prompt[1:-2].isdigit()


def run_all(page: Page, file: Path) -> Seen:
    """Run all cells of the notebook that is open, save it, and look at it."""
    menu(page, "Run", "Run All Cells")
    await_end(page)
    return look(page, file)


def restart_and_run_all(page: Page, file: Path) -> Seen:
    """Run all cells of the notebook that is open on a fresh kernel, from the menu, save it, and look at it."""
    menu(page, "Kernel", "Restart Kernel and Run All Cells")
    page.locator(ACCEPT).click()
    page.wait_for_function(f"() => ({PROMPTS})().some(prompt => !/\\d/.test(prompt))")
    await_end(page)
    return look(page, file)


def look(page: Page, file: Path) -> Seen:
    """Save the notebook that is open, and read it; an output may be cut in a window as it is, or in a narrow one."""
    before, saved = file.stat().st_mtime_ns, None
    menu(page, "File", "Save Notebook")
    deadline = time.monotonic() + SAVE_SECONDS
    while saved is None:
        assert time.monotonic() < deadline, f"{file} was not saved"
        page.wait_for_timeout(100)
        with contextlib.suppress(json.JSONDecodeError):  # While it is being written.
            saved = json.loads(file.read_text()) if file.stat().st_mtime_ns != before else None
    outputs = [output for cell in saved["cells"] for output in cell.get("outputs", [])]
    await_pictures(page, outputs)
    prompts, plots, tables = page.evaluate(PROMPTS), page.evaluate(PLOTS), page.evaluate(TABLES)
    usual, found = page.viewport_size, page.evaluate(CUT)
    assert usual is not None
    page.set_viewport_size({**usual, "width": NARROW})
    page.wait_for_timeout(300)
    found += page.evaluate(CUT)
    page.set_viewport_size(usual)
    return Seen(prompts, [tuple(plot) for plot in plots], tables, found, outputs)


def await_pictures(page: Page, outputs: list[dict[str, Any]]) -> None:
    """Wait until the page shows every picture among the saved outputs: it draws them after their cells have ended."""
    number = sum(1 for output in outputs if "image/png" in output.get("data", {}))
    shown = f"number => ({PLOTS})().filter(plot => plot.every(size => size > 0)).length >= number"
    page.wait_for_function(shown, arg=number, timeout=SAVE_SECONDS * 1000)


def close(page: Page) -> None:
    """Close the notebook that is open, and end its kernel."""
    menu(page, "File", "Close and Shut Down Notebook")
    page.locator(ACCEPT).click()
    page.locator(SHOWN).wait_for(state="detached")
