"""Our Jupyter packages beside those with which Cloudera's workbench starts every session, job, application and worker.

`make soak` runs this, since it downloads some 30 MB.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.full.clusters import listens
from tests.full.launches import ROOT, until
from zeropods.programs import free_port

CLOUDERA = (
    "jupyter-kernel-gateway==2.5.2",
    "jupyter_client==7.4.9",
    "ipykernel==6.29.5",
    "ipython==8.30.0",
    "jupyter_server==2.14.2",
)
"""From Cloudera's public Dockerfiles of its runtimes."""
OURS = ("jupyterlab", "ipykernel", "jupyter_client", "nbclient", "nbconvert", "papermill")
FALLBACK_SECONDS = 60.0
"""Seconds after which jupyter_client and jupyter_server go on without a kernel that does not answer (issue 926)."""
LIMIT_SECONDS = 20.0
"""Seconds after which clients of Cloudera's give up; on a quiet machine a kernel connects in well under 2."""

pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROPODS_SOAK") != "1", reason="downloads packages; see make soak"),
    pytest.mark.timeout(900),
]


def pinned() -> list[str]:
    """The lines of our requirements that are about Jupyter."""
    texts = [(ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt")]
    lines = "\n".join(texts).split("\n")
    return [line for line in lines if re.split(r"[=\[]", line)[0] in OURS]


def run(*words: object) -> str:
    """What a command prints."""
    argv = [str(word) for word in words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with Cloudera's packages, and then with ours."""
    folder = tmp_path_factory.mktemp("cloudera") / "venv"
    run(sys.executable, "-m", "venv", folder)
    made = folder / "bin" / "python"
    pip = (made, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    run(*pip, *CLOUDERA)
    run(*pip, *pinned())
    return made


@pytest.fixture
def gateway(python: Path, tmp_path: Path) -> Iterator[int]:
    """The port of Cloudera's gateway."""
    port = free_port("127.0.0.1")
    argv = [str(python), "-m", "kernel_gateway", "--ip=127.0.0.1", f"--port={port}", "--port_retries=0"]
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        until(lambda: listens("127.0.0.1", port) or process.poll() is not None, FALLBACK_SECONDS)
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(600)


async def answer(address: str, kind: str, content: dict[str, object]) -> dict[str, object]:
    """Connect to a kernel's channels, ask it something on the shell channel, and return the content of its reply."""
    patience = 2 * FALLBACK_SECONDS
    connection = await websocket_connect(HTTPRequest(address, connect_timeout=patience, request_timeout=patience))
    sender = {"session": "s", "username": "u", "version": "5.3"}
    header = {"msg_id": uuid.uuid4().hex, "msg_type": f"{kind}_request", **sender}
    message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
    await connection.write_message(json.dumps(message))
    while True:
        text = await connection.read_message()
        assert isinstance(text, str), "the gateway closed the connection"
        reply = json.loads(text)
        if reply["msg_type"] == f"{kind}_reply" and reply["parent_header"]["msg_id"] == header["msg_id"]:
            connection.close()
            return dict(reply["content"])


def test_our_requirements_go_with_cloudera_s_packages(python: Path) -> None:
    assert len(pinned()) == len(OURS)
    assert "No broken requirements found." in run(python, "-m", "pip", "check")


def test_a_kernel_of_cloudera_s_gateway_connects_at_once_and_computes(gateway: int) -> None:
    began = time.monotonic()
    request = urllib.request.Request(f"http://127.0.0.1:{gateway}/api/kernels", data=b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=FALLBACK_SECONDS) as made:
        kernel = json.load(made)["id"]
    created = time.monotonic()
    address = f"ws://127.0.0.1:{gateway}/api/kernels/{kernel}/channels"
    info = asyncio.run(asyncio.wait_for(answer(address, "kernel_info", {}), 2 * FALLBACK_SECONDS))
    connected = time.monotonic()
    print(f"created in {created - began:.2f} s, connected in {connected - created:.2f} s")
    assert info["status"] == "ok" and info["implementation"] == "ipython"
    assert connected - began < LIMIT_SECONDS
    code = {"code": "1 / 0", "silent": True}
    computed = asyncio.run(asyncio.wait_for(answer(address, "execute", code), FALLBACK_SECONDS))
    assert computed["ename"] == "ZeroDivisionError"
