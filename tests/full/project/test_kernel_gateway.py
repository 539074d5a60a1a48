"""Our Jupyter packages beside those with which Cloudera's workbench starts every session, job, application and worker.

`make soak` runs this, since it downloads some 30 MB.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full.cloudera_gateway import FALLBACK_SECONDS, OURS, Kernel, gateway_argv, made_runtime, pinned, run
from tests.full.clusters import listens
from tests.full.launches import until
from zeropods.programs import free_port

NO_FALLBACK = "--MappingKernelManager.kernel_info_timeout=3600"
"""Without it the gateway's loop wakes up after 60 s, where nothing else has woken it up, and connects all the same."""
PATIENCE_SECONDS = 2 * FALLBACK_SECONDS
"""Seconds to wait for a kernel; beside ten busy processes on two cores one is there after 2."""

pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROPODS_SOAK") != "1", reason="downloads packages; see make soak"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with Cloudera's packages, and then with ours."""
    return made_runtime(tmp_path_factory.mktemp("cloudera") / "venv")


@pytest.fixture
def gateway(python: Path, tmp_path: Path) -> Iterator[int]:
    """The port of Cloudera's gateway, which connects to a kernel only once the kernel has answered."""
    port = free_port("127.0.0.1")
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    with open(tmp_path / "log", "w") as log:
        argv = [*gateway_argv(python, port), NO_FALLBACK]
        process = subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        until(lambda: listens("127.0.0.1", port) or process.poll() is not None, FALLBACK_SECONDS)
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(600)


def test_our_requirements_go_with_cloudera_s_packages(python: Path) -> None:
    assert len(pinned()) == len(OURS)
    assert "No broken requirements found." in run(python, "-m", "pip", "check")


def test_a_kernel_of_cloudera_s_gateway_connects_by_its_answer_and_computes(gateway: int) -> None:
    began = time.monotonic()
    kernel = Kernel(gateway)
    created = time.monotonic()
    info = kernel.answer("kernel_info", {}, PATIENCE_SECONDS)
    connected = time.monotonic()
    print(f"created in {created - began:.2f} s, connected in {connected - created:.2f} s")
    assert info["status"] == "ok" and info["implementation"] == "ipython"
    computed = kernel.answer("execute", {"code": "1 / 0", "silent": True}, FALLBACK_SECONDS)
    assert computed["ename"] == "ZeroDivisionError"
