"""Fixtures of both lanes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from zeropods.extension_cache import use_own_cache
from zeropods.threads import wait_passively

wait_passively()
use_own_cache()
ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Let SIGINT be heard: a script that starts the tests in the background has them, and all they start, ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; skips where there is none."""
    folder = Path(os.environ.get("ZEROPODS_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "wikisql" / "train.jsonl").is_file():
        pytest.skip(f"no real data at {folder}; set ZEROPODS_TEST_DATA")
    return folder
