"""JupyterLab as `make lab` starts it, over a folder with a copy of the notebooks."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.full.demo_page import ROOT, Served, start

CONFIG = ROOT / "tools" / "jupyterlab" / "config.py"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+")


@contextmanager
def lab(folder: Path, **settings: str) -> Iterator[Served]:
    """A JupyterLab on a port of its own; nothing of it is left.

    Args:
        settings: what its environment, and so that of its kernels, says beside this process's.
    """
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    own = {f"JUPYTER_{name}_DIR": str(folder / f".jupyter-{name.lower()}") for name in ("CONFIG", "DATA", "RUNTIME")}
    command = ["-m", "jupyterlab", "--config", CONFIG, "--no-browser", "--port", "0", f"--ServerApp.root_dir={folder}"]
    own |= {"ZEROPODS_HOME": str(folder / "home"), **settings}
    served = start(command, folder / "terminal", said=ADDRESS, **own)
    try:
        yield served
    finally:
        served.end()
