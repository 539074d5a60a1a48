"""The TensorBoard application in the browser: a loss curve, a run that begins meanwhile, and its end by Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from tensorboard.summary import Writer

from tests.browser.lab import ROOT
from tests.full.clusters import listens, processes_naming
from tests.full.launches import until
from zeropods.programs import free_port

SECONDS = 60
CURVES = """() => [...document.querySelectorAll('line-chart svg path, line-chart canvas')]
    .filter(curve => curve.getBoundingClientRect().width > 0).length"""


@dataclass
class Shown:
    """What the page showed, and how the application ended."""

    curves: int
    first: str
    later: str
    """The page's text before and after a second run had begun."""
    status: int
    said: str
    """On the terminal."""
    port: int
    left: list[int]
    """Processes of it, after its end."""


def write_run(folder: Path) -> None:
    """The training loss of a run, as far as it has come."""
    writer = Writer(str(folder / "tensorboard" / "train"))
    for step, loss in enumerate((4.0, 2.0, 1.0)):
        writer.add_scalar("loss", loss, step)
    writer.close()


@pytest.fixture(scope="module")
def shown(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / "first")
    port = free_port("127.0.0.1")
    command = [sys.executable, str(ROOT / "cml" / "run_tensorboard.py"), "--runs", str(runs), "--port", str(port)]
    application = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: listens("127.0.0.1", port))
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/#timeseries")
        page.get_by_text("first/tensorboard/train").first.wait_for(timeout=SECONDS * 1000)
        page.wait_for_function(f"() => ({CURVES})() > 0", timeout=SECONDS * 1000)
        curves, first = page.evaluate(CURVES), page.inner_text("body")
        write_run(runs / "second")
        until(lambda: has_come(page), SECONDS)
        later = page.inner_text("body")
        page.close()
        application.send_signal(signal.SIGINT)
        said, _ = application.communicate(timeout=30)
    finally:
        application.kill()
        application.wait()
    left = processes_naming(runs)
    yield Shown(curves, first, later, application.returncode, said, port, left)


def has_come(page: Page) -> bool:
    """Whether the page, loaded again, shows the second run."""
    page.reload()
    page.wait_for_timeout(3000)
    return "second/tensorboard/train" in page.inner_text("body")


def test_a_loss_curve_is_drawn(shown: Shown) -> None:
    assert shown.curves and re.search(r"\bloss\b", shown.first)


def test_a_run_that_begins_meanwhile_is_shown(shown: Shown) -> None:
    assert "second" not in shown.first and "second/tensorboard/train" in shown.later


def test_ctrl_c_ends_it_with_status_0_and_no_traceback(shown: Shown) -> None:
    assert shown.status == 0 and "Traceback" not in shown.said, shown.said


def test_its_port_is_free_and_no_process_is_left(shown: Shown) -> None:
    assert not listens("127.0.0.1", shown.port) and not shown.left
