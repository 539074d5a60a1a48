"""Say how much of what pip is about to download serves GPUs alone, where there is no GPU.

    .venv/bin/python tools/torch_build.py

It prints nothing where there is a GPU, where the pinned torch is installed already, or where pip
would take a CPU build of it. It reads lists of versions, downloads no package, and needs pip alone.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
PINNED = re.compile(r"^torch==(\S+)$", re.MULTILINE)
DRIVER = Path("/proc/driver/nvidia/version")
GIGABYTES = {"2.13.0": 2.2}
"""What the packages for GPUs weigh that the usual build for Linux on x86-64 depends on (`nvidia-*`,
`cuda-*` and `triton`), in 10^9 bytes, by the version of torch: the sum of what pip resolves them to
on PyPI. That build itself has 0.5, a CPU build 0.2."""
LOOK_SECONDS = 30
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Print what comes, and how to avoid it."""
    (pinned,) = PINNED.findall(REQUIREMENTS.read_text(encoding="utf-8"))
    if platform.machine() != "x86_64" or has_gpu():
        return
    if is_installed(pinned) or has_cpu_build(pinned):
        return
    size = f"{GIGABYTES[pinned]} GB"
    remedy = f"make setup TORCH_WHEELS={CPU_INDEX}"
    print(f"setup: there is no GPU here, but torch {pinned} brings {size} of libraries for GPUs;")
    print(f"setup: to do without, press Ctrl-C and name an index or folder: {remedy}")


def has_gpu() -> bool:
    """Whether this machine has NVIDIA's driver."""
    return DRIVER.exists() or shutil.which("nvidia-smi") is not None


def is_installed(pinned: str) -> bool:
    """Whether this environment has the pinned torch, in whatever build."""
    try:
        public, _, _build = version("torch").partition("+")
    except PackageNotFoundError:
        return False
    return public == pinned


def has_cpu_build(pinned: str) -> bool:
    """Whether pip finds a CPU build of the pinned torch, which it prefers: it counts as newer.

    It is also True where pip finds nothing, since it will say so itself.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index"]
    try:
        listed = subprocess.run(
            [*command, "versions", "torch"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=LOOK_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return True
    versions = re.split(r"[\s,]+", listed.stdout)
    return f"{pinned}+cpu" in versions or pinned not in versions


if __name__ == "__main__":
    main()
