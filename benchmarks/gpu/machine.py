"""What this machine has: the GPU, as torch sees it, and the packages that cells need.

Run as a program, it prints the GPU as JSON, and leaves no CUDA context behind.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import PROMPTS, Cell
from zeropods.data.manifest import FILE
from zeropods.errors import UserError
from zeropods.measure.machine_probe import MachineProbe
from zeropods.plan.gpus import memory_bandwidth, published_flops
from zeropods.plan.machines import ACHIEVED, LAUNCH_SECONDS
from zeropods.train.flags import PROJECT

OTHER_BANDWIDTH = 2.0e12
"""Bytes per second between a GPU and its memory, where they are not published here."""
CPU_FLOPS = 1e11
GPU_FLOPS = 3e14
"""FLOP/s of a CPU, and of a GPU that is not known here: they only choose a batch; no rate is
predicted from them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that the cells run on."""

    device: str
    """`cuda` or `cpu`."""
    gpu: str | None
    memory_bytes: int
    """Bytes that tensors and CUDA may take."""
    flops_by_precision: Mapping[str, float] | None = None
    """FLOP/s of matrix products by a probe; None without one, as the link."""
    host_link: float | None = None
    """Bytes per second between host and GPU."""
    launch_seconds: float = LAUNCH_SECONDS
    """Seconds in which the host launches an operation of PyTorch: as a plan has them without a
    probe."""

    def as_probed(self, probe: MachineProbe) -> Machine:
        """This machine with what a probe measured of it; without, where that had another GPU."""
        if self.gpu not in probe.gpus:
            return self
        return replace(
            self,
            flops_by_precision={name: probe.flops(name) for name in probe.matmul_flops_per_second},
            host_link=probe.pcie_bandwidth,
            launch_seconds=probe.launch_seconds or self.launch_seconds,
        )

    def training_flops(self, precision: str) -> float:
        """FLOP/s that a plan expects of training: a share of what a probe measured or, without one,
        of the published peak."""
        if self.flops_by_precision is not None and precision in self.flops_by_precision:
            return ACHIEVED[precision] * self.flops_by_precision[precision]
        peak = self.peak(precision)
        if peak is not None:
            return ACHIEVED[precision] * peak
        return self.unknown_flops

    def peak(self, precision: str) -> float | None:
        """Published dense FLOP/s; None where they are not known."""
        if self.gpu is None:
            return None
        return published_flops(self.gpu, precision)

    @property
    def unknown_flops(self) -> float:
        """FLOP/s where no published peak is known."""
        return CPU_FLOPS if self.device == "cpu" else GPU_FLOPS

    @property
    def bandwidth(self) -> float:
        """Bytes per second between the GPU and its memory."""
        return memory_bandwidth(self.gpu or "") or OTHER_BANDWIDTH


def gpu_in_output(output: str) -> dict[str, Any] | None:
    """What this module printed as a program, found among other output; None without a GPU."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"gpu"'):
            gpu: dict[str, Any] = json.loads(line)
            return gpu
    return None


PROBE_SECONDS = 300.0
OTHER_MAKE = "is a build for AMD's GPUs"


def machine_here(device: str, memory_bytes: int | None) -> Machine:
    """The machine that this process runs on; its other GPUs are hidden from this process's
    children.

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
    answer = ""
    if status == 0:
        answer = output
    gpu = nvidia_gpu(answer, output)
    return Machine(
        device="cuda",
        gpu=gpu["gpu"],
        memory_bytes=memory_bytes or gpu["memory_bytes"],
    )


def nvidia_gpu(answer: str, output: str) -> dict[str, Any]:
    """The GPU in this module's answer as a program.

    Args:
        answer: what it printed, empty where it failed.
        output: all that it printed, which may say why torch has no GPU: a driver that is too old,
            say.

    Raises:
        UserError: torch has no GPU, or one of another make.
    """
    remedy = "--device cpu tries the command at tiny shapes"
    gpu = gpu_in_output(answer)
    if gpu is None:
        why = ""
        for line in output.splitlines():
            if line.strip() not in ("", "null"):
                why = f" ({line.strip()})"
        raise UserError(f"--device cuda: torch finds no GPU here{why}; {remedy}")
    if gpu["cuda"] is None:
        raise UserError(
            f"--device cuda: this torch {OTHER_MAKE}; only NVIDIA's are measured here; {remedy}"
        )
    return gpu


def see_one_gpu() -> None:
    """Hide all GPUs but the first one from this process's children: the control's trainer would
    take them all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first, _, _ = visible.partition(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = first


# Packages that cells need, and how to bring the missing ones to a machine without a network.

REQUIREMENTS = PROJECT / "requirements.txt"
NEEDED = (
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "sentencepiece",
    "safetensors",
    "protobuf",
    "tensorboard",
    "numpy",
    "scipy",
    "pyarrow",
    "pydantic",
    "nvidia-ml-py",
)
"""Packages that every cell needs."""
PREPARING = "datasets"
"""Package that making a set from raw data also needs; training reads a set without it."""
DEEPSPEED = "deepspeed"
BELOW_DEEPSPEED = ("einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo")
"""Packages that only DeepSpeed needs; DeepSpeed itself is published as source, and a wheel is built
from it."""
ON_TORCH = ("accelerate", "deepspeed")
"""Packages that depend on torch: pip would fetch another torch, gigabytes for a CUDA that the
driver may not run."""


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
    """Refuse packages that are older than the oldest that cells were tried with, before anything is
    imported."""
    for package, oldest in OLDEST.items():
        here = version(package)
        if _is_older(here, oldest):
            remedy = " ".join(how_to_bring([package]))
            raise UserError(
                f"{package} {here}: too old; use {oldest} or later, tried {TRIED[package]}; "
                f"{remedy}"
            )


def _is_older(here: str, oldest: str) -> bool:
    """Whether a version, such as 2.11.0+cu130, comes before another, such as 2.11."""
    wanted = [int(part) for part in oldest.split(".")]
    # A build's own suffix says nothing about age.
    release, _, _ = here.partition("+")
    numbers = [int(part) for part in re.findall(r"\d+", release)]
    return numbers[: len(wanted)] < wanted


def check_start(*, deepspeed: bool) -> None:
    """Refuse packages with which a training run or a prediction cannot start: a process of its own
    tries it.

    Args:
        deepspeed: whether to try DeepSpeed too.

    Raises:
        UserError: with the fault, and the versions that are here.
    """
    from benchmarks.gpu.jobs import call

    modules = []
    if deepspeed:
        modules.append(DEEPSPEED)
    status, output = call("benchmarks.gpu.trial", modules, TRIAL_SECONDS)
    if status == 0:
        return
    fault = _fault(output) or f"status {status}"
    packages = [package for package in SUSPECTS if not missing(package)]
    here = ", ".join(f"{package} {version(package)}" for package in packages)
    tried = ", ".join(f"{package} {versions}" for package, versions in TRIED.items())
    raise UserError(
        f"training cannot start here ({fault}) with {here}; use {tried}, or requirements.txt"
    )


def _fault(output: str) -> str:
    """The last error in a program's output, else its last line; empty where there is none."""
    lines = output.splitlines()
    # An error may have further lines, such as advice.
    errors = [line for line in lines if re.match(r"[\w.]*Error: ", line)]
    if errors:
        return errors[-1].strip()
    if lines:
        return lines[-1].strip()
    return ""


def runnable(cells: Sequence[Cell], *, prepares: bool) -> tuple[list[Cell], list[str]]:
    """The cells that can run here, and remarks about the packages that the others need.

    Args:
        prepares: whether sets have to be made from raw data first.

    Raises:
        UserError: a package that every cell needs is missing or too old, or training cannot start
            with those here.
    """
    needed = list(NEEDED)
    if prepares:
        needed.append(PREPARING)
    absent = missing(*needed)
    if absent:
        remedy = " ".join(how_to_bring(absent))
        raise UserError(f"missing: {', '.join(absent)}; every cell needs them; {remedy}")
    check_versions()
    ready = list(cells)
    remarks = []
    if missing(DEEPSPEED):
        ready = [cell for cell in cells if not cell.needs_deepspeed]
        left_out = [cell.name for cell in cells if cell.needs_deepspeed]
        if left_out:
            names = ", ".join(left_out)
            remarks.append(f"missing: deepspeed; without it these cells wait: {names}")
            remarks.extend(how_to_bring([DEEPSPEED]))
    if ready:
        check_start(deepspeed=any(cell.needs_deepspeed for cell in ready))
    return ready, remarks


def sets_to_prepare(place: Path, out: Path) -> list[str]:
    """The prompts for which neither folder holds a set."""
    unprepared = []
    for prompt in PROMPTS:
        is_there = (place / prompt / FILE).is_file()
        was_prepared = (out / "data" / prompt / FILE).is_file()
        if not is_there and not was_prepared:
            unprepared.append(prompt)
    return unprepared


def how_to_bring(packages: Sequence[str]) -> list[str]:
    """Commands that fetch packages on a machine with a network and the same Python, and install
    them on this one."""
    alone = [required(package) for package in packages if package in ON_TORCH]
    others = [required(package) for package in packages if package not in ON_TORCH]
    if DEEPSPEED in packages:
        others += BELOW_DEEPSPEED
    fetch = []
    install = []
    from_wheels = "python -m pip install --no-index --find-links wheels"
    if alone:
        fetch.append(f"`python -m pip wheel --no-deps -w wheels {' '.join(alone)}`")
    if others:
        fetch.append(f"`python -m pip download -d wheels {' '.join(others)}`")
        install.append(f"`{from_wheels} {' '.join(others)}`")
    if alone:
        install.append(f"`{from_wheels} --no-deps {' '.join(alone)}`")
    return ["with a network, the same Python and system:", *fetch, "then here:", *install]


def required(package: str) -> str:
    """The package's line in requirements.txt, such as `datasets==5.2.0`; its name if there is no
    such line."""
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if re.split(r"[\[=]", line)[0] == package:
            return line.strip()
    return package


def main() -> None:
    """Print the GPU's name, its memory in bytes and the CUDA version; `null` without a GPU."""
    import torch

    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    print(json.dumps(gpu))


if __name__ == "__main__":
    main()
