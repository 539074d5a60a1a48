"""Say how much of what pip is about to download serves GPUs alone, where there is no GPU.

    .venv/bin/python tools/torch_build.py

It prints nothing where there is a GPU, where the pinned torch is installed already, where pip would
take a CPU build of it, or where pip cannot tell that by reading metadata. It needs pip alone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
PINNED = re.compile(r"^torch==(\S+)$", re.MULTILINE)
DRIVER = Path("/proc/driver/nvidia/version")
FOR_GPUS = re.compile(r"(nvidia|cuda|triton)([^a-z]|$)")
"""Matches the names of the packages that a build for GPUs depends on."""
GIGABYTES = {"2.13.0": 2.5}
"""What those packages weigh for Linux on x86-64, in 10^9 bytes, by the version of torch: the sum of
the wheels that PyPI's metadata of torch lead to."""
LOOK_SECONDS = 30
"""How long to wait for pip's answer: it may be that its index sends the whole wheel."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Print what comes, and how to avoid it."""
    (pinned,) = PINNED.findall(REQUIREMENTS.read_text(encoding="utf-8"))
    if has_gpu() or is_installed(pinned) or not needs_packages_for_gpus(pinned):
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


def needs_packages_for_gpus(pinned: str) -> bool:
    """Whether the build that pip would install depends on packages for GPUs.

    It is False where pip does not say so in time.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "--no-deps", "--no-input", "--report", "-"]
    # By this an index that has no metadata of its own sends the end of the wheel, not all of it.
    command += ["--use-feature=fast-deps"]
    try:
        run = subprocess.run(
            [*command, f"torch=={pinned}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LOOK_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    (torch,) = json.loads(run.stdout)["install"]
    requirements = torch["metadata"].get("requires_dist", [])
    return any(FOR_GPUS.match(requirement) for requirement in requirements)


if __name__ == "__main__":
    main()
