"""Packages that cells need, and how the missing ones are brought to a machine without a network."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.cells import Cell
from zeropods.errors import UserError

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
MODULES = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "datasets": "datasets",
    "tokenizers": "tokenizers",
    "sentencepiece": "sentencepiece",
    "safetensors": "safetensors",
    "protobuf": "google.protobuf",
    "tensorboard": "tensorboard",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic",
    "nvidia-ml-py": "pynvml",
}
"""Package and module: what every cell needs."""
DEEPSPEED = {"deepspeed": "deepspeed"}
BELOW_DEEPSPEED = ("einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo")
"""What it needs of its own; it is published as source, and a wheel is made of it."""
LARGE = {"torch"}
"""A wheel of another CUDA version than the machine's driver would not run: the machine's own must do."""


def missing(modules: dict[str, str]) -> list[str]:
    """Packages of which Python finds no module."""
    return [package for package, module in modules.items() if not _is_there(module)]


def runnable(cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """The cells that can run here, and what to say of the packages that the others need.

    Raises:
        UserError: what every cell needs is missing.
    """
    basic = missing(MODULES)
    if basic:
        raise UserError(f"missing: {', '.join(basic)}; every cell needs them; {' '.join(how_to_bring(basic))}")
    if not missing(DEEPSPEED):
        return list(cells), []
    left_out = [cell.name for cell in cells if cell.needs_deepspeed]
    said = [f"missing: deepspeed; without it these cells wait: {', '.join(left_out)}", *how_to_bring(["deepspeed"])]
    return [cell for cell in cells if not cell.needs_deepspeed], said if left_out else []


def how_to_bring(packages: Sequence[str]) -> list[str]:
    """Commands, for a machine with a network and the same Python, and for this one."""
    wanted = [required(package) for package in packages if package != "deepspeed"]
    lines = ["with a network, the same Python and system:"]
    if "deepspeed" in packages:
        small = " ".join(BELOW_DEEPSPEED)
        lines.append(f"`python -m pip wheel --no-deps --no-build-isolation -w wheels {required('deepspeed')}`")
        lines.append(f"`python -m pip download --no-deps -d wheels {small}`")
    if wanted:
        # Without this bound pip would fetch another torch, gigabytes of it, for a package that depends on one.
        exclude = "" if LARGE.intersection(packages) else " --no-deps"
        lines.append(f"`python -m pip download{exclude} -d wheels {' '.join(wanted)}`")
    lines.append("then here: `python -m pip install --no-index --no-deps wheels/*.whl`")
    return lines


def required(package: str) -> str:
    """The line of requirements.txt, `datasets==5.2.0`."""
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if re.split(r"[\[=]", line)[0] == package:
            return line.strip()
    return package


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
