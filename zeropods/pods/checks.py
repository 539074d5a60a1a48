"""Has a pod what a run needs, and is its software the master's? Each check judges a pod's facts in one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from zeropods.measure.environment import versions
from zeropods.pods.probe import CML_NAMES, CPU_ADAM, PROGRAMS, Facts, digest
from zeropods.tables import GIB

PACKAGES = ("zeropods", "torch", "transformers", "deepspeed", "accelerate")
ROOMY_DISK_BYTES = 10 * GIB
"""A checkpoint of t5-large with its optimizer takes 9 GiB."""
DISK_BYTES = GIB
"""With less free space the project folder is full."""
TEMPORARY_BYTES = GIB // 4
MEMORY_BYTES = 2 * GIB
GPU_FREE_FRACTION = 0.9
"""Of a GPU's memory; less is free where somebody else uses it."""
CLOCK_WARNING_SECONDS, CLOCK_FAILED_SECONDS = 5.0, 60.0

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """What was found where one thing was looked at."""

    check: str
    """The thing, as a heading."""
    verdict: Verdict
    value: str
    """What was found, short enough for a cell of a table."""
    remedy: str = ""
    """What to do about it; empty where all is well."""


@dataclass(frozen=True, kw_only=True)
class PodChecks:
    """What was found on one pod."""

    pod: str
    address: str
    checks: tuple[Check, ...]

    def not_ok(self) -> list[Check]:
        """Failures, then warnings."""
        return sorted((c for c in self.checks if c.verdict != "ok"), key=lambda c: c.verdict != "failed")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was found on all pods, in the order of the hostfile."""

    pods: tuple[PodChecks, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings are let pass."""
        return all(check.verdict != "failed" for pod in self.pods for check in pod.checks)

    def to_json(self) -> dict[str, Any]:
        """As `zeropods pods check --json` prints it."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What every pod must have."""

    project: Path
    """The folder that the run starts in, absolute."""
    versions: dict[str, str | None]
    """The master's."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """The master's SHA-256 of files that all pods must see the same, by path relative to the project or absolute."""
    master_port: int | None = None
    """Must be free on the first pod."""
    offload: bool | None = None
    """Whether the run needs CPU Adam; None where no run is planned yet."""
    cml: bool = False
    """Whether the pods are CML's."""

    @classmethod
    def of_this_machine(cls, project: Path, files: tuple[str, ...] = (), **run: Any) -> Expectation:
        """That the pods be like this machine.

        Args:
            files: such as the training script, relative to the project or absolute.
            run: the other fields.
        """
        folder = project.absolute()
        return cls(project=folder, versions=versions(), digests={f: digest(folder / f) for f in files}, **run)


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """What a pod was asked for, and when."""

    expected: Expectation
    slots: int
    address: str | None = None
    """None for this machine itself."""
    asked_seconds: float
    """The master's clock before the pod looked at its own."""
    answered_seconds: float
    """The master's clock after that."""


def check_python(facts: Facts, asked: CheckContext) -> Check:
    """The same release of Python; another patch release is let pass."""
    found, wanted = facts.versions["python"] or "", asked.expected.versions["python"] or ""
    if found == wanted:
        return Check("python", "ok", found)
    same_release = found.split(".")[:2] == wanted.split(".")[:2]
    remedy = f"the master has {wanted}; use the same interpreter on all pods"
    return Check("python", "warning" if same_release else "failed", found, remedy)


def check_package(name: str, facts: Facts, asked: CheckContext) -> Check:
    """The master's version of a package."""
    found, wanted = facts.versions.get(name), asked.expected.versions.get(name)
    if found is not None and found == wanted:
        return Check(name, "ok", found)
    if wanted is None:
        remedy = f"the master has no {name}; install requirements.txt there"
    else:
        remedy = f"the master has {wanted}; on the pod: pip install {name}=={wanted.partition('+')[0]}"
    return Check(name, "failed", found or "missing", remedy)


def check_operations(facts: Facts, asked: CheckContext) -> Check:
    """The operation that optimizer offload needs can be loaded."""
    offload = asked.expected.offload
    kind, _, detail = facts.cpu_adam.partition(": ")
    if offload is False:
        return Check("ops", "ok", "none needed")
    if kind == "compiled":
        return Check("ops", "ok", kind)
    if kind == "compilable":
        remedy = "the first run compiles it, a minute or so; or run 'python tools/compile_ops.py' on the pod"
        return Check("ops", "warning", f"{CPU_ADAM} not compiled", remedy)
    if kind == "compiling":
        return Check("ops", "warning", f"{CPU_ADAM} being compiled", "wait a minute; the run would wait for it")
    remedy = "on the pod: apt-get install g++ python3-dev, pip install ninja; without it no optimizer offload"
    return Check("ops", "failed" if offload else "warning", f"{CPU_ADAM}: {detail}", remedy)


def check_project(facts: Facts, asked: CheckContext) -> Check:
    """The project folder is there, and its files are the master's."""
    project, digests = asked.expected.project, asked.expected.digests
    if not facts.project:
        return Check("project", "failed", "missing", f"make {project} visible on the pod: one folder for all")
    for name, wanted in digests.items():
        found = facts.digests.get(name)
        if wanted is None:
            return Check("project", "failed", f"no {name}", f"name a file of {project} on the master")
        if found != wanted:
            value = f"another {name}" if found else f"no {name}"
            return Check("project", "failed", value, f"{project} is not the master's folder; share or copy it")
    return Check("project", "ok", "same files" if digests else "there")


def check_disk(facts: Facts, asked: CheckContext) -> Check:
    """Room for checkpoints in the project folder, for compilers in /tmp, for shared tensors in /dev/shm."""
    free, project = facts.free_bytes, asked.expected.project
    room = free["project"]
    if room is None:
        return Check("disk", "failed", "unknown", f"{project} cannot be read on the pod")
    if room < DISK_BYTES:
        return Check("disk", "failed", _gib(room), f"make {_gib(DISK_BYTES)} free below {project}")
    for place in ("/tmp", "/dev/shm"):
        if (free[place] or 0) < TEMPORARY_BYTES:
            value = f"{place} {_gib(free[place] or 0)}"
            return Check("disk", "warning", value, f"make {_gib(TEMPORARY_BYTES)} free in {place} of the pod")
    if room < ROOMY_DISK_BYTES:
        return Check("disk", "warning", _gib(room), f"a large model's checkpoint may not fit below {project}")
    return Check("disk", "ok", _gib(room))


def check_memory(facts: Facts, asked: CheckContext) -> Check:
    """Main memory that could be used at once."""
    value = _gib(facts.memory_available_bytes)
    if facts.memory_available_bytes < MEMORY_BYTES:
        return Check("memory", "warning", value, "end other programs on the pod, or give it more memory")
    return Check("memory", "ok", value)


def check_gpu_memory(facts: Facts, asked: CheckContext) -> Check:
    """Nobody else uses the GPUs."""
    if not facts.gpus:
        return Check("GPU memory", "ok", "no GPU")
    shares = [gpu["free_bytes"] / gpu["total_bytes"] for gpu in facts.gpus]
    least = min(range(len(shares)), key=shares.__getitem__)
    value = f"{_gib(facts.gpus[least]['free_bytes'])} of {_gib(facts.gpus[least]['total_bytes'])}"
    if shares[least] < GPU_FREE_FRACTION:
        return Check("GPU memory", "warning", value, f"see 'nvidia-smi' on the pod: GPU {least} is in use")
    return Check("GPU memory", "ok", value)


def check_slots(facts: Facts, asked: CheckContext) -> Check:
    """A process has a GPU of its own; without GPUs, a core."""
    gpus, wanted = len(facts.gpus or ()), asked.slots
    if gpus:
        value = f"{wanted} of {gpus} GPU"
        if wanted > gpus:
            return Check("slots", "failed", value, f"say slots={gpus} in the hostfile, or fewer")
        return Check("slots", "ok", value)
    value = f"{wanted} on {facts.cores} cores"
    if wanted > facts.cores:
        return Check("slots", "warning", value, f"no GPU there; processes will share cores: say slots={facts.cores}")
    return Check("slots", "ok", value)


def check_clock(facts: Facts, asked: CheckContext) -> Check:
    """The pod's clock agrees with the master's."""
    ahead = max(facts.time_seconds - asked.answered_seconds, 0.0)
    behind = max(asked.asked_seconds - facts.time_seconds, 0.0)
    if max(ahead, behind) <= CLOCK_WARNING_SECONDS:
        return Check("clock", "ok", "same")
    value = f"{ahead:.0f} s ahead" if ahead else f"{behind:.0f} s behind"
    failed = max(ahead, behind) > CLOCK_FAILED_SECONDS
    return Check("clock", "failed" if failed else "warning", value, "set the pod's clock by NTP")


def check_port(facts: Facts, port: int) -> Check:
    """The run's port, on the pod where its first rank listens."""
    if facts.ports.get(str(port)):
        return Check("port", "ok", f"{port} free")
    return Check("port", "failed", f"{port} taken", "choose another --master_port, or end what listens there")


def check_programs(facts: Facts) -> Check:
    """What a pod that starts and serves others needs."""
    missing = [name for name in PROGRAMS if not facts.programs[name]]
    if missing:
        remedy = "apt-get install openssh-client openssh-server pdsh"
        return Check("programs", "failed", f"no {', no '.join(missing)}", remedy)
    return Check("programs", "ok", ", ".join(PROGRAMS))


def check_cml(facts: Facts, asked: CheckContext) -> Check:
    """CML says who the pod is, and it is the pod that was asked for."""
    missing = [name for name in CML_NAMES if name not in facts.cml]
    if missing:
        return Check("CML", "warning", f"no {', no '.join(missing)}", "start the pod as a CML session or worker")
    stated = facts.cml["CDSW_IP_ADDRESS"]
    if asked.address not in (None, stated):
        return Check("CML", "failed", f"is {stated}", f"another pod answers at {asked.address}; start the cluster anew")
    return Check("CML", "ok", facts.cml["CDSW_ENGINE_ID"])


MACHINE: tuple[Callable[[Facts, CheckContext], Check], ...] = (
    check_operations, check_project, check_disk, check_memory, check_gpu_memory, check_slots, check_clock,
)  # fmt: skip
"""Made of every pod, after Python and the packages."""


def judge(facts: Facts, asked: CheckContext) -> list[Check]:
    """All checks of a pod, in the order of the table's columns."""
    checks = [check_python(facts, asked), *(check_package(name, facts, asked) for name in PACKAGES)]
    checks += [check(facts, asked) for check in MACHINE]
    if asked.expected.master_port is not None:
        checks.append(check_port(facts, asked.expected.master_port))
    if asked.expected.cml:
        checks.append(check_cml(facts, asked))
    return checks if asked.address is not None else [check_programs(facts), *checks]


def _gib(value: int) -> str:
    return f"{value / GIB:.1f} GiB"
