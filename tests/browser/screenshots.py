"""Pictures of what the browser shows, to be looked at: with ZEROPODS_SCREENSHOTS=DIR in the environment, else none."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from playwright.sync_api import Page

WIDTHS = (1280, 480)
HEIGHT = 1600
SCROLL = """top => {
    const panel = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer')
    panel.scrollTop = top
    const last = [...panel.querySelectorAll('.jp-Cell')].pop().getBoundingClientRect().bottom
    return [panel.clientHeight, last <= panel.getBoundingClientRect().bottom]
}"""


def keep(page: Page, name: str) -> None:
    """The notebook that is open, from its top to its end, wide and narrow: there without the file browser."""
    folder = os.environ.get("ZEROPODS_SCREENSHOTS")
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    usual = page.viewport_size
    page.keyboard.press("Escape")
    page.keyboard.press("Control+b")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        top = 0
        for number in count():
            page.wait_for_timeout(500)
            shown, ended = page.evaluate(SCROLL, top)
            page.wait_for_timeout(500)
            page.screenshot(path=Path(folder) / f"{name}-{width}-{number}.png")
            if ended:
                break
            top += shown - 40
    page.keyboard.press("Control+b")
    if usual is not None:
        page.set_viewport_size(usual)
