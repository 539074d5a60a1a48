"""The TensorBoard application in the browser: a loss curve, a run that begins meanwhile, and its end by Ctrl-C."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page
from tensorboard.summary import Writer

from tests.full.clusters import listens, processes_naming
from tests.full.demo_page import ROOT
from tests.full.launches import until
from zeropods.programs import free_port

SECONDS = 60
CURVES = """() => [...document.querySelectorAll('line-chart svg path, line-chart canvas')]
    .filter(curve => curve.getBoundingClientRect().width > 0).length"""


def write_run(folder: Path) -> None:
    """The training loss of a run, as far as it has come."""
    writer = Writer(str(folder / "tensorboard" / "train"))
    for step, loss in enumerate((4.0, 2.0, 1.0)):
        writer.add_scalar("loss", loss, step)
    writer.close()


def has_come(page: Page) -> bool:
    """Whether the page, loaded again, shows the second run."""
    page.reload()
    page.get_by_text("first/tensorboard/train").first.wait_for(timeout=SECONDS * 1000)
    return "second/tensorboard/train" in page.inner_text("body")


def test_curves_are_drawn_of_runs_that_begin_meanwhile_too_until_ctrl_c(chromium: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    port = free_port("127.0.0.1")
    command = [sys.executable, str(ROOT / "cml" / "run_tensorboard.py"), "--runs", str(tmp_path), "--port", str(port)]
    application = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: listens("127.0.0.1", port))
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/#timeseries")
        page.get_by_text("first/tensorboard/train").first.wait_for(timeout=SECONDS * 1000)
        page.wait_for_function(f"() => ({CURVES})() > 0", timeout=SECONDS * 1000)
        assert re.search(r"\bloss\b", page.inner_text("body")) and not has_come(page)
        write_run(tmp_path / "second")
        until(lambda: has_come(page), SECONDS)
        page.close()
        application.send_signal(signal.SIGINT)
        said, _ = application.communicate(timeout=30)
    finally:
        application.kill()
        application.wait()
    assert application.returncode == 0 and "Traceback" not in said, said
    assert not listens("127.0.0.1", port) and not processes_naming(tmp_path)
