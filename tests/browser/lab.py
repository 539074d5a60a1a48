"""JupyterLab as `make lab` starts it, over a folder with a copy of the notebooks."""

from __future__ import annotations

import os
import re
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
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+")


@dataclass
class Lab:
    """A JupyterLab that runs."""

    process: subprocess.Popen[bytes]
    terminal: Path
    """What stands on the terminal, as a file."""
    address: str = ""

    def await_address(self) -> None:
        """Wait until the address stands on the terminal."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := ADDRESS.search(self.terminal.read_text())):
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, self.terminal.read_text()
            time.sleep(0.1)
        self.address = found[0]

    def interrupt(self) -> str:
        """Ctrl-C; returns all that stood on the terminal."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=END_SECONDS)
        return self.terminal.read_text()


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
    terminal = folder / "terminal"
    with open(terminal, "wb") as output:
        process = subprocess.Popen(
            [*command, f"--ServerApp.root_dir={folder}"],
            env={**kept, **own, "ZEROPODS_HOME": str(folder / "home"), **settings},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        found = Lab(process, terminal)
        found.await_address()
        yield found
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
