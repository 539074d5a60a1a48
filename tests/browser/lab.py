"""JupyterLab as `make lab` starts it, over a folder with a copy of the notebooks."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tools" / "jupyterlab" / "config.py"
START_SECONDS, END_SECONDS = 60, 30
ADDRESS = re.compile(rb"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+")


@dataclass
class Lab:
    """A JupyterLab that runs."""

    process: subprocess.Popen[bytes]
    folder: Path
    """What the person sees: `notebooks/` below it."""
    address: str = ""
    said: bytes = b""

    def await_address(self) -> None:
        """Read on until the address stands on the terminal."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        while not (found := ADDRESS.search(self.said)):
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            more = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert more, self.said.decode(errors="replace")
            self.said += more
        self.address = found[0].decode()

    def interrupt(self) -> str:
        """Ctrl-C; returns all that stood on the terminal."""
        self.process.send_signal(signal.SIGINT)
        self.said += self.process.communicate(timeout=END_SECONDS)[0]
        return self.said.decode(errors="replace")


@contextmanager
def lab(folder: Path, **settings: str) -> Iterator[Lab]:
    """A JupyterLab on a port of its own; nothing of it is left.

    Args:
        settings: what its environment, and so that of its kernels, says beside PATH and the like.
    """
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    own = {f"JUPYTER_{name}_DIR": str(folder / f".jupyter-{name.lower()}") for name in ("CONFIG", "DATA", "RUNTIME")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZEROPODS_", "JUPYTER_"))}
    command = [sys.executable, "-m", "jupyterlab", "--config", str(CONFIG), "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        [*command, f"--ServerApp.root_dir={folder}"],
        env={**kept, **own, "ZEROPODS_HOME": str(folder / "home"), **settings},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        found = Lab(process, folder)
        found.await_address()
        yield found
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
