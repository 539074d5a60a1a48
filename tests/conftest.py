"""Fixtures of all lanes, and settings that hold for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.chromium import opened_chromium
from tests.order import FilesTogether, dearest_first
from tests.watch import Watch
from zeropods.programs import prepare_compiling, wait_passively

if TYPE_CHECKING:
    from playwright.sync_api import Browser

wait_passively()
prepare_compiling()
# A shared machine is slow now and then.
settings.register_profile(
    "shared", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("shared")
ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Heed SIGINT: if a script starts the tests in the background, they and all that they start would ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tables in a pipe follow it; a test that looks at them sets it itself.
    os.environ.pop("COLUMNS", None)
    if is_worker():
        # Several processes share the cores; torch would start a thread for each core in each of them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # With this, a rank that is ended by SIGABRT says where it was.
        os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    else:
        config.pluginmanager.register(Watch())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_data)
    if is_worker():
        items.sort(key=dearest_first)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Keep the tests of a file in one process, as with `--dist loadfile`, and those of some files together."""
    return FilesTogether(config, log)


def is_worker() -> bool:
    """Whether this process is one of several that share the tests."""
    return "PYTEST_XDIST_WORKER" in os.environ


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; the test is skipped where there is none."""
    folder = Path(os.environ.get("ZEROPODS_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "wikisql" / "train.jsonl").is_file():
        pytest.skip(f"no real data at {folder}; set ZEROPODS_TEST_DATA")
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A real browser, as a person has it; it ends with the module, so that other modules may run an event loop."""
    with opened_chromium() as browser:
        yield browser
