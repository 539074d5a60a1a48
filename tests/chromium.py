"""Debian's Chromium without a display, in place of a person's browser; tests are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
"""Flags with which Chromium sends no requests of its own."""


@contextmanager
def opened_chromium() -> Iterator[Browser]:
    """A browser that lives until the block ends. Meanwhile nothing else may run an event loop in this process."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on PATH; install it with: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()
