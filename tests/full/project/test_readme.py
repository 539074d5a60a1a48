"""The README's first block as it is printed: from the embedded data to a question asked in a browser."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.full.demo.test_demo_page import WAIT, ask, opened
from tests.full.demo_page import ADDRESS, Served
from tests.full.launches import ROOT, until
from tests.pages import blocks

LEAST_ACCURACY = 0.75
"""Least share of the test split's questions that the block's model answers right, by execution."""
SECONDS = 1_500.0
TRAINING = re.compile(
    r"^train: [\d,]+ of [\d,]+ steps, loss [\d.]+, (eval_loss [\d.]+, )?speed [\d,.]+ samples/s, \S+ (s|min) left "
    r"\(\d+ s\)$",
    re.MULTILINE,
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone after its set-up."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in sorted({line.split("/")[0] for line in tracked.splitlines()}):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@contextmanager
def typed_in_shell(block: str, folder: Path) -> Iterator[Served]:
    """A shell in which a block was typed, whose last line serves a page; it has got Ctrl-C in the end."""
    log = folder / "terminal"
    with log.open("w", encoding="utf-8") as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", block], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: shell.poll() is not None or ADDRESS.search(log.read_text()), SECONDS)
        address = ADDRESS.search(log.read_text())
        assert address is not None, log.read_text()[-4000:]
        yield Served(shell, address[0], log)
        os.killpg(shell.pid, signal.SIGINT)
        assert shell.wait(SECONDS) in (0, 130)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_the_first_block_ends_with_a_model_that_can_be_asked(project: Path, chromium: Browser) -> None:
    block, *_ = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(block.splitlines()) == 6
    with typed_in_shell(block, project) as served:
        context = chromium.new_context()
        context.set_default_timeout(WAIT)
        page = opened(context, served)
        question = page.inner_text("#zp-examples tbody tr:first-child td:first-child")
        assert "SELECT" in ask(page, question)
        context.close()
    said = served.log.read_text()
    assert TRAINING.search(said), said
    assert "The page has ended, as requested." in said
    (scored,) = project.glob("runs/*/score.test.json")
    assert json.loads(scored.read_text())["execution_accuracy"] >= LEAST_ACCURACY, said
