"""Has a pod what a run needs, and is its software the master's? Each check judges the facts in one function."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from zeropods.measure.environment import versions
from zeropods.pods.probe import CML_NAMES, CPU_ADAM, PROGRAMS, Facts, digest

# What was found on a pod: one check, the checks of one pod, those of all pods.

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

    def __post_init__(self) -> None:
        if (self.verdict == "ok") == bool(self.remedy):
            raise ValueError(f"{self.check}: a remedy belongs to what is not ok, and to nothing else")


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


# What every pod must have: what this machine has, and what a run is going to need.

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What every pod must have."""

    project: Path
    """The folder that the run starts in, absolute."""
    versions: dict[str, str | None]
    """The master's."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """The master's SHA-256 of files that all pods must see the same."""
    master_port: int | None = None
    """Must be free on the first pod."""
    offload: bool | None = None
    """Whether the run needs CPU Adam; None where no run is planned yet."""
    cml: bool = False
    """Whether the pods are CML's."""
    disk_bytes: int = GIB
    """Free space without which the project folder is full."""
    gpu_free_fraction: float = 0.9
    """Of a GPU's memory; less is free where somebody else uses it."""

    @classmethod
    def of_this_machine(
        cls,
        project: Path,
        files: tuple[str, ...] = (),
        *,
        master_port: int | None = None,
        offload: bool | None = None,
        cml: bool = False,
    ) -> Expectation:
        """That the pods be like this machine.

        Args:
            files: such as the training script, relative to the project or absolute.
        """
        folder = project.absolute()
        digests = {name: digest(folder / name) for name in files}
        return cls(
            project=folder,
            versions=versions(),
            digests=digests,
            master_port=master_port,
            offload=offload,
            cml=cml,
        )


# Has a pod what a run needs: room, GPUs, a port, the right time? Each check judges the facts in one function.

ROOMY_DISK_BYTES = 10 * GIB
"""A checkpoint of t5-large with its optimizer takes 9 GiB."""
TEMPORARY_BYTES = 256 * 2**20
MEMORY_BYTES = 2 * GIB
CLOCK_WARNING_SECONDS = 5.0
CLOCK_FAILED_SECONDS = 60.0


def disk(facts: Facts, expected: Expectation) -> Check:
    """Room for checkpoints in the project folder, for compilers in /tmp, for shared tensors in /dev/shm."""
    free = facts.free_bytes
    room = free["project"]
    if room is None:
        return Check("disk", "failed", "unknown", f"{expected.project} cannot be read on the pod")
    if room < expected.disk_bytes:
        return Check("disk", "failed", _gib(room), f"make {_gib(expected.disk_bytes)} free below {expected.project}")
    for place in ("/tmp", "/dev/shm"):
        if (free[place] or 0) < TEMPORARY_BYTES:
            value = f"{place} {_gib(free[place] or 0)}"
            return Check("disk", "warning", value, f"make {_gib(TEMPORARY_BYTES)} free in {place} of the pod")
    if room < ROOMY_DISK_BYTES:
        return Check("disk", "warning", _gib(room), f"a large model's checkpoint may not fit below {expected.project}")
    return Check("disk", "ok", _gib(room))


def memory(facts: Facts) -> Check:
    """Main memory that could be used at once."""
    free = facts.memory_available_bytes
    if free is not None and free < MEMORY_BYTES:
        return Check("memory", "warning", _gib(free), "end other programs on the pod, or give it more memory")
    return Check("memory", "ok", "unknown" if free is None else _gib(free))


def gpu_memory(facts: Facts, expected: Expectation) -> Check:
    """Nobody else uses the GPUs."""
    if not facts.gpus:
        return Check("GPU memory", "ok", "no GPU")
    shares = [gpu["free_bytes"] / gpu["total_bytes"] for gpu in facts.gpus]
    least = min(range(len(shares)), key=shares.__getitem__)
    value = f"{_gib(facts.gpus[least]['free_bytes'])} of {_gib(facts.gpus[least]['total_bytes'])}"
    if shares[least] < expected.gpu_free_fraction:
        return Check("GPU memory", "warning", value, f"see 'nvidia-smi' on the pod: GPU {least} is in use")
    return Check("GPU memory", "ok", value)


def slots(facts: Facts, wanted: int) -> Check:
    """A process has a GPU of its own; without GPUs, a core."""
    gpus = len(facts.gpus or ())
    if gpus:
        value = f"{wanted} of {gpus} GPU"
        if wanted > gpus:
            return Check("slots", "failed", value, f"say slots={gpus} in the hostfile, or fewer")
        return Check("slots", "ok", value)
    value = f"{wanted} on {facts.cores} cores"
    if wanted > facts.cores:
        return Check("slots", "warning", value, f"no GPU there; processes will share cores: say slots={facts.cores}")
    return Check("slots", "ok", value)


def port(facts: Facts, wanted: int) -> Check:
    """The run's port, on the pod where its first rank listens."""
    if facts.ports.get(str(wanted)):
        return Check("port", "ok", f"{wanted} free")
    return Check("port", "failed", f"{wanted} taken", "choose another --master_port, or end what listens there")


def clock(facts: Facts, asked_seconds: float, answered_seconds: float) -> Check:
    """The pod's clock agrees with the master's.

    Args:
        asked_seconds: the master's clock before the pod looked at its own; `answered_seconds` after it.
    """
    ahead = max(facts.time_seconds - answered_seconds, 0.0)
    behind = max(asked_seconds - facts.time_seconds, 0.0)
    if max(ahead, behind) <= CLOCK_WARNING_SECONDS:
        return Check("clock", "ok", "same")
    value = f"{ahead:.0f} s ahead" if ahead else f"{behind:.0f} s behind"
    failed = max(ahead, behind) > CLOCK_FAILED_SECONDS
    return Check("clock", "failed" if failed else "warning", value, "set the pod's clock by NTP")


def _gib(value: int) -> str:
    return f"{value / GIB:.1f} GiB"


# Is a pod's software the master's? Each check judges the facts in one function.

PACKAGES = ("zeropods", "torch", "transformers", "deepspeed", "accelerate")
DEBIAN_PACKAGES = "openssh-client openssh-server pdsh"
COMPILE = "run 'python tools/compile_ops.py' on the pod"


def python(facts: Facts, expected: Expectation) -> Check:
    """The same release of Python; another patch release is let pass."""
    found, wanted = facts.versions["python"] or "", expected.versions["python"] or ""
    if found == wanted:
        return Check("python", "ok", found)
    same_release = found.split(".")[:2] == wanted.split(".")[:2]
    remedy = f"the master has {wanted}; use the same interpreter on all pods"
    return Check("python", "warning" if same_release else "failed", found, remedy)


def package(name: str, facts: Facts, expected: Expectation) -> Check:
    """The master's version of a package."""
    found, wanted = facts.versions.get(name), expected.versions.get(name)
    if found is not None and found == wanted:
        return Check(name, "ok", found)
    if wanted is None:
        return Check(name, "failed", found or "missing", f"the master has no {name}; install requirements.txt there")
    plain = wanted.partition("+")[0]
    return Check(
        name, "failed", found or "missing", f"the master has {wanted}; on the pod: pip install {name}=={plain}"
    )


def operations(facts: Facts, expected: Expectation) -> Check:
    """The operation that optimizer offload needs can be loaded."""
    if expected.offload is False:
        return Check("ops", "ok", "none needed")
    return _operation(CPU_ADAM, facts.operations[CPU_ADAM], expected)


def _operation(name: str, state: str, expected: Expectation) -> Check:
    if state == "compiled":
        return Check("ops", "ok", state)
    kind, _, detail = state.partition(": ")
    if kind == "compilable":
        return Check(
            "ops", "warning", f"{name} not compiled", f"the first run compiles it, a minute or so; or {COMPILE}"
        )
    if kind == "compiling":
        return Check("ops", "warning", f"{name} being compiled", "wait a minute; the run would wait for it")
    remedy = "on the pod: apt-get install g++ python3-dev, pip install ninja; without it no optimizer offload"
    return Check("ops", "failed" if expected.offload else "warning", f"{name}: {detail}", remedy)


def project(facts: Facts, expected: Expectation) -> Check:
    """The project folder is there, and its files are the master's."""
    if not facts.project:
        return Check("project", "failed", "missing", f"make {expected.project} visible on the pod: one folder for all")
    for name, wanted in expected.digests.items():
        found = facts.digests.get(name)
        if wanted is None:
            return Check("project", "failed", f"no {name}", f"name a file of {expected.project} on the master")
        if found != wanted:
            value = f"another {name}" if found else f"no {name}"
            return Check("project", "failed", value, f"{expected.project} is not the master's folder; share or copy it")
    return Check("project", "ok", "same files" if expected.digests else "there")


def programs(facts: Facts) -> Check:
    """What a pod that starts and serves others needs."""
    missing = [name for name in PROGRAMS if not facts.programs[name]]
    if missing:
        return Check("programs", "failed", f"no {', no '.join(missing)}", f"apt-get install {DEBIAN_PACKAGES}")
    return Check("programs", "ok", ", ".join(PROGRAMS))


def cml(facts: Facts, address: str | None) -> Check:
    """CML says who the pod is, and it is the pod that was asked for."""
    missing = [name for name in CML_NAMES if name not in facts.cml]
    if missing:
        return Check("CML", "warning", f"no {', no '.join(missing)}", "start the pod as a CML session or worker")
    stated = facts.cml["CDSW_IP_ADDRESS"]
    if address is not None and stated != address:
        return Check("CML", "failed", f"is {stated}", f"another pod answers at {address}; start the cluster anew")
    return Check("CML", "ok", facts.cml["CDSW_ENGINE_ID"])
