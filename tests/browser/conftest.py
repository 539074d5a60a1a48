"""A real browser, as a person has it; skips where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without a display. Of a module: while it lives, nothing else may run an event loop here."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on PATH; install it with: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()
