"""A real browser, as a person has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.chromium import opened_chromium


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Of a module, so that those of other modules may run an event loop."""
    with opened_chromium() as browser:
        yield browser
