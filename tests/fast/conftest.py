"""The fast lane stays fast: no test in it may load torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_torch() -> Iterator[None]:
    loaded = "torch" in sys.modules
    yield
    assert loaded or "torch" not in sys.modules, "a test of the fast lane imported torch"
