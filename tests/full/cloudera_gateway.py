"""The kernel gateway with which Cloudera's workbench starts every session, job, application and worker, and a client.

Its packages are downloaded, some 30 MB.
"""

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.full.launches import ROOT

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
SHOWN = ("stream", "display_data", "execute_result", "error")
"""Kinds of messages that are what a cell shows."""


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


def made_runtime(folder: Path) -> Path:
    """An interpreter with Cloudera's packages, and then with ours, in a folder that is made."""
    run(sys.executable, "-m", "venv", folder)
    made = folder / "bin" / "python"
    pip = (made, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    run(*pip, *CLOUDERA)
    run(*pip, *pinned())
    return made


def gateway_argv(python: object, port: int) -> list[str]:
    """The command of the gateway on a port of this machine."""
    return [str(python), "-m", "kernel_gateway", "--ip=127.0.0.1", f"--port={port}", "--port_retries=0"]


class Kernel:
    """A kernel of the gateway at a port, as a client of the gateway's sees it."""

    def __init__(self, port: int) -> None:
        self._kernels = f"127.0.0.1:{port}/api/kernels"
        request = urllib.request.Request(f"http://{self._kernels}", data=b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=FALLBACK_SECONDS) as made:
            self._id = json.load(made)["id"]

    def end(self) -> None:
        """Shut it down."""
        request = urllib.request.Request(f"http://{self._kernels}/{self._id}", method="DELETE")
        with urllib.request.urlopen(request, timeout=FALLBACK_SECONDS):
            pass

    def answer(self, kind: str, content: dict[str, object], seconds: float) -> dict[str, object]:
        """Connect, ask on the shell channel, and return the content of the reply."""
        return asyncio.run(asyncio.wait_for(self._answer(kind, content), seconds))

    def outputs(self, cells: Sequence[str], seconds: float) -> list[dict[str, Any]]:
        """What these cells show, as in a notebook's file; the last one is the error that ended them, if one did.

        Args:
            seconds: of all cells together.
        """
        return asyncio.run(asyncio.wait_for(self._outputs(cells), seconds))

    async def _connected(self) -> WebSocketClientConnection:
        patience = 2 * FALLBACK_SECONDS
        address = f"ws://{self._kernels}/{self._id}/channels"
        return await websocket_connect(HTTPRequest(address, connect_timeout=patience, request_timeout=patience))

    async def _answer(self, kind: str, content: dict[str, object]) -> dict[str, object]:
        connection = await self._connected()
        request = await _ask(connection, kind, content)
        while True:
            message = await _message(connection)
            if message["msg_type"] == f"{kind}_reply" and message["parent_header"]["msg_id"] == request:
                connection.close()
                return dict(message["content"])

    async def _outputs(self, cells: Sequence[str]) -> list[dict[str, Any]]:
        connection = await self._connected()
        shown: list[dict[str, Any]] = []
        for cell in cells:
            of_cell = await _run_cell(connection, cell)
            shown += of_cell
            if any(output["output_type"] == "error" for output in of_cell):
                break
        connection.close()
        return shown


async def _run_cell(connection: WebSocketClientConnection, cell: str) -> list[dict[str, Any]]:
    """What a cell shows until it has ended."""
    request = await _ask(connection, "execute", {"code": cell, "silent": False, "store_history": True})
    shown: list[dict[str, Any]] = []
    # The reply and the messages about what is shown come on different channels.
    has_reply, is_idle = False, False
    while not (has_reply and is_idle):
        message = await _message(connection)
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind in SHOWN:
            _add(shown, {"output_type": kind, **content})
        elif kind == "execute_reply":
            has_reply = True
        elif kind == "status" and content["execution_state"] == "idle":
            is_idle = True
    return shown


def _add(shown: list[dict[str, Any]], output: dict[str, Any]) -> None:
    """Add an output; text is joined with the text before it on the same stream, which may end within a line."""
    is_stream = output["output_type"] == "stream"
    if is_stream and shown and shown[-1].get("name") == output["name"]:
        shown[-1]["text"] += output["text"]
    else:
        shown.append(output)


async def _ask(connection: WebSocketClientConnection, kind: str, content: dict[str, object]) -> str:
    """Send a request on the shell channel; return its id."""
    sender = {"session": "s", "username": "u", "version": "5.3"}
    header = {"msg_id": uuid.uuid4().hex, "msg_type": f"{kind}_request", **sender}
    message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
    await connection.write_message(json.dumps(message))
    return header["msg_id"]


async def _message(connection: WebSocketClientConnection) -> dict[str, Any]:
    text = await connection.read_message()
    assert isinstance(text, str), "the gateway closed the connection"
    return dict(json.loads(text))
