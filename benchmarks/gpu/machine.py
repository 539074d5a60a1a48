"""What this machine has: the GPU, as torch sees it, and the packages that cells need.

Run as a program, it prints the GPU as JSON, and leaves no CUDA context behind.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import PROMPTS, Cell
from zeropods.errors import UserError
from zeropods.plan.gpus import memory_bandwidth, published_flops
from zeropods.train.flags import PROJECT

OTHER_BANDWIDTH = 2.0e12
"""Bytes per second between a GPU and its memory, where they are not published here."""
CPU_FLOPS, GPU_FLOPS = 1e11, 3e14
"""FLOP/s of a CPU, and of a GPU that is not known here: they only choose a batch; no rate is predicted from them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that the cells run on."""

    device: str
    """`cuda` or `cpu`."""
    gpu: str | None
    memory_bytes: int
    """Bytes that tensors and CUDA may take."""

    def peak(self, precision: str) -> float | None:
        """Published dense FLOP/s; None where they are not known."""
        return None if self.gpu is None else published_flops(self.gpu, precision)

    @property
    def unknown_flops(self) -> float:
        """FLOP/s where no published peak is known."""
        return CPU_FLOPS if self.device == "cpu" else GPU_FLOPS

    @property
    def bandwidth(self) -> float:
        """Bytes per second between the GPU and its memory."""
        return memory_bandwidth(self.gpu or "") or OTHER_BANDWIDTH


def said_of_gpu(said: str) -> dict[str, Any] | None:
    """What this module printed as a program, found among other output; None without a GPU."""
    for line in reversed(said.splitlines()):
        if line.startswith('{"gpu"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


PROBE_SECONDS = 300.0
OTHER_MAKE = "is a build for AMD's GPUs"


def machine_here(device: str, memory_bytes: int | None) -> Machine:
    """The machine that this process runs on; its other GPUs are hidden from this process's children.

    Args:
        device: `cuda`, or `cpu` to see whether everything works at tiny shapes.
        memory_bytes: bytes that the plan may use, in place of the GPU's own.

    Raises:
        UserError: no GPU of NVIDIA's that torch can use is there.
    """
    if device == "cpu":
        return Machine(device="cpu", gpu=None, memory_bytes=memory_bytes or 1 << 30)
    from benchmarks.gpu.jobs import call

    see_one_gpu()
    status, output = call("benchmarks.gpu.machine", [], PROBE_SECONDS)
    gpu = nvidia_gpu(output if status == 0 else "", output)
    return Machine(device="cuda", gpu=gpu["gpu"], memory_bytes=memory_bytes or gpu["memory_bytes"])


def nvidia_gpu(answer: str, output: str) -> dict[str, Any]:
    """The GPU in this module's answer as a program.

    Args:
        answer: what it printed, empty where it failed.
        output: all that it printed, which may say why torch has no GPU: a driver that is too old, say.

    Raises:
        UserError: torch has no GPU, or one of another make.
    """
    remedy = "--device cpu tries the command at tiny shapes"
    gpu = said_of_gpu(answer)
    if gpu is None:
        lines = [line.strip() for line in output.splitlines()]
        reasons = [line for line in lines if line not in ("", "null")]
        why = f" ({reasons[-1]})" if reasons else ""
        raise UserError(f"--device cuda: torch finds no GPU here{why}; {remedy}")
    if gpu["cuda"] is None:
        raise UserError(f"--device cuda: this torch {OTHER_MAKE}; only NVIDIA's are measured here; {remedy}")
    return gpu


def see_one_gpu() -> None:
    """Hide all GPUs but the first one from this process's children: the control's trainer would take them all."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if seen is None else seen.split(",")[0]


# Packages that cells need, and how to bring the missing ones to a machine without a network.

REQUIREMENTS = PROJECT / "requirements.txt"
NEEDED = (
    "torch", "transformers", "accelerate", "tokenizers", "sentencepiece", "safetensors", "protobuf", "tensorboard",
    "numpy", "scipy", "pyarrow", "pydantic", "nvidia-ml-py",
)  # fmt: skip
"""Packages that every cell needs."""
PREPARING = "datasets"
"""Package that making a set from raw data also needs; training reads a set without it."""
DEEPSPEED = "deepspeed"
BELOW_DEEPSPEED = ("einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo")
"""Packages that only DeepSpeed needs; DeepSpeed itself is published as source, and a wheel is built from it."""
ON_TORCH = ("accelerate", "deepspeed")
"""Packages that depend on torch: pip would fetch another torch, gigabytes for a CUDA that the driver may not run."""


OLDEST = {"torch": "2.11", "transformers": "5.17"}
"""The oldest versions that cells were tried with."""
TRIED = {"torch": "2.11 to 2.13", "transformers": "5.17 to 5.23"}
"""The versions that cells were tried with."""
SUSPECTS = ("torch", "transformers", "accelerate", "tokenizers", "huggingface_hub", "deepspeed")
"""Packages whose versions are named where training cannot start."""
TRIAL_SECONDS = 120.0


def missing(*packages: str) -> list[str]:
    """Return those of the packages that are not installed."""
    return [package for package in packages if not any(Distribution.discover(name=package))]


def check_versions() -> None:
    """Refuse packages that are older than the oldest that cells were tried with, before anything is imported."""
    for package, oldest in OLDEST.items():
        here = version(package)
        # A build's own suffix, as in 2.11.0+cu130, says nothing about age.
        numbers = re.findall(r"\d+", here.partition("+")[0])
        wanted = oldest.split(".")
        if [int(part) for part in numbers[: len(wanted)]] < [int(part) for part in wanted]:
            remedy = " ".join(how_to_bring([package]))
            raise UserError(f"{package} {here}: too old; use {oldest} or later, tried {TRIED[package]}; {remedy}")


def check_start(*, deepspeed: bool) -> None:
    """Refuse packages with which a training run or a prediction cannot start: a process of its own tries it.

    Args:
        deepspeed: whether to try DeepSpeed too.

    Raises:
        UserError: with the fault, and the versions that are here.
    """
    from benchmarks.gpu.jobs import call

    status, output = call("benchmarks.gpu.trial", [DEEPSPEED] if deepspeed else [], TRIAL_SECONDS)
    if status == 0:
        return
    lines = output.splitlines() or [f"status {status}"]
    # An error may have further lines, such as advice.
    faults = [line for line in lines if re.match(r"[\w.]*Error: ", line)]
    fault = (faults or lines)[-1].strip()
    packages = [package for package in SUSPECTS if not missing(package)]
    here = ", ".join(f"{package} {version(package)}" for package in packages)
    tried = ", ".join(f"{package} {versions}" for package, versions in TRIED.items())
    raise UserError(f"training cannot start here ({fault}) with {here}; use {tried}, or requirements.txt")


def runnable(cells: Sequence[Cell], *, prepares: bool) -> tuple[list[Cell], list[str]]:
    """The cells that can run here, and remarks about the packages that the others need.

    Args:
        prepares: whether sets have to be made from raw data first.

    Raises:
        UserError: a package that every cell needs is missing or too old, or training cannot start with those here.
    """
    basic = missing(*NEEDED, *([PREPARING] if prepares else []))
    if basic:
        raise UserError(f"missing: {', '.join(basic)}; every cell needs them; {' '.join(how_to_bring(basic))}")
    check_versions()
    ready = list(cells)
    remarks = []
    if missing(DEEPSPEED):
        ready = [cell for cell in cells if not cell.needs_deepspeed]
        left_out = [cell.name for cell in cells if cell.needs_deepspeed]
        if left_out:
            remarks.append(f"missing: deepspeed; without it these cells wait: {', '.join(left_out)}")
            remarks.extend(how_to_bring([DEEPSPEED]))
    if ready:
        check_start(deepspeed=any(cell.needs_deepspeed for cell in ready))
    return ready, remarks


def sets_to_prepare(place: Path, out: Path) -> list[str]:
    """The prompts for which neither folder holds a set."""
    return [
        prompt
        for prompt in PROMPTS
        if not any((folder / prompt / "manifest.json").is_file() for folder in (place, out / "data"))
    ]


def how_to_bring(packages: Sequence[str]) -> list[str]:
    """Commands that fetch packages on a machine with a network and the same Python, and install them on this one."""
    alone = [required(package) for package in packages if package in ON_TORCH]
    wanted = [required(package) for package in packages if package not in ON_TORCH]
    wanted += BELOW_DEEPSPEED if DEEPSPEED in packages else ()
    fetch = [f"`python -m pip wheel --no-deps -w wheels {' '.join(alone)}`"] if alone else []
    fetch += [f"`python -m pip download -d wheels {' '.join(wanted)}`"] if wanted else []
    install = [f"`python -m pip install --no-index --find-links wheels {' '.join(wanted)}`"] if wanted else []
    install += [f"`python -m pip install --no-index --find-links wheels --no-deps {' '.join(alone)}`"] if alone else []
    return ["with a network, the same Python and system:", *fetch, "then here:", *install]


def required(package: str) -> str:
    """The package's line in requirements.txt, such as `datasets==5.2.0`; its name if there is no such line."""
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if re.split(r"[\[=]", line)[0] == package:
            return line.strip()
    return package


def main() -> None:
    """Print the GPU's name, its memory in bytes and the CUDA version; `null` without a GPU."""
    import torch

    found = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found = {"gpu": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
