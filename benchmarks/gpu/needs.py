"""Packages that cells need, and how the missing ones are brought to a machine without a network."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.cells import PROMPTS, Cell
from zeropods.errors import UserError

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
MODULES = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
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
PREPARING = {"datasets": "datasets"}
"""What making a set of raw data needs besides; training reads a set without it."""
DEEPSPEED = {"deepspeed": "deepspeed"}
BELOW_DEEPSPEED = ("einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo")
"""What it needs of its own; it is published as source, and a wheel is made of it."""
ON_TORCH = ("accelerate", "deepspeed")
"""They depend on torch: pip would fetch another one, gigabytes, and of a CUDA that the driver may not run."""


def missing(modules: dict[str, str]) -> list[str]:
    """Packages of which Python finds no module."""
    return [package for package, module in modules.items() if not _is_there(module)]


def runnable(cells: Sequence[Cell], *, prepares: bool) -> tuple[list[Cell], list[str]]:
    """The cells that can run here, and what to say of the packages that the others need.

    Args:
        prepares: whether sets are to be made of raw data first.

    Raises:
        UserError: what every cell needs is missing.
    """
    basic = missing(MODULES | (PREPARING if prepares else {}))
    if basic:
        raise UserError(f"missing: {', '.join(basic)}; every cell needs them; {' '.join(how_to_bring(basic))}")
    if not missing(DEEPSPEED):
        return list(cells), []
    left_out = [cell.name for cell in cells if cell.needs_deepspeed]
    said = [f"missing: deepspeed; without it these cells wait: {', '.join(left_out)}", *how_to_bring(["deepspeed"])]
    return [cell for cell in cells if not cell.needs_deepspeed], said if left_out else []


def sets_to_prepare(place: Path, out: Path) -> list[str]:
    """The prompts of which neither folder holds a set."""
    return [
        prompt
        for prompt in PROMPTS
        if not any((folder / prompt / "manifest.json").is_file() for folder in (place, out / "data"))
    ]


def how_to_bring(packages: Sequence[str]) -> list[str]:
    """Commands, for a machine with a network and the same Python, and for this one."""
    alone = [required(package) for package in packages if package in ON_TORCH]
    wanted = [required(package) for package in packages if package not in ON_TORCH]
    wanted += BELOW_DEEPSPEED if "deepspeed" in packages else ()
    fetch = [f"`python -m pip wheel --no-deps -w wheels {' '.join(alone)}`"] if alone else []
    fetch += [f"`python -m pip download -d wheels {' '.join(wanted)}`"] if wanted else []
    install = [f"`python -m pip install --no-index --find-links wheels {' '.join(wanted)}`"] if wanted else []
    install += [f"`python -m pip install --no-index --find-links wheels --no-deps {' '.join(alone)}`"] if alone else []
    return ["with a network, the same Python and system:", *fetch, "then here:", *install]


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
