"""What `zeropods probe` found out about a machine, and the file in which it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.environment import hardware
from zeropods.measure.record import STRICT

MACHINE = "machine.json"
"""Name of the probe's file, in the folder of all clusters."""
PROBE_AGAIN = "run zeropods probe again"
ALIKE = ("cpu", "instructions", "cores", "gpus")
"""Keys of the hardware that must be equal for two machines to be of one kind."""


@dataclass(frozen=True, kw_only=True)
class MachineProbe:
    """Measurements of one machine, and of collectives on it or between pods that were up. Bytes,
    seconds, FLOP/s."""

    __pydantic_config__ = STRICT

    measured_at: str
    """Time of the measurement, ISO 8601, UTC."""
    hardware: dict[str, str | int | list[str] | None]
    versions: dict[str, str | None]
    matmul_flops_per_second: dict[str, dict[str, float]]
    """FLOP/s of matrix multiplications by precision and side of the square matrices, with all cores
    or on the GPU."""
    processes: int
    """Number of processes that took part in the collectives."""
    machines: int
    """Number of machines on which these processes ran."""
    bandwidth: float
    """Bytes per second through a process's link in an all-reduce, counted as for a ring."""
    latency_seconds: float
    """Latency of one message of an all-reduce."""
    pcie_bandwidth: float | None = None
    """Bytes per second from host to GPU, from pinned memory; None without a GPU."""
    launch_seconds: float | None = None
    """Seconds in which the host launches one operation of PyTorch, its part of autograd included;
    None without a GPU, which would not wait for it."""
    gpu_memory_bytes: int | None = None
    """Bytes of memory of the smallest GPU of the processes, as NVML shows them; None without a GPU,
    and where NVML does not know it."""

    def flops(self, precision: str) -> float:
        """The best FLOP/s at a precision that was probed; `KeyError` for any other."""
        return max(self.matmul_flops_per_second[precision].values())

    def is_of(self, machine: Mapping[str, object]) -> bool:
        """Whether a machine is of the same kind as the probed one.

        Args:
            machine: its hardware, by the keys of `environment.hardware`, and its `gpus`.
        """
        for key in ALIKE:
            # A machine without a GPU has an empty list of them, or no such key.
            probed = self.hardware.get(key) or None
            given = machine.get(key) or None
            if probed != given:
                return False
        return True

    @property
    def name(self) -> str:
        """A short description of the machine: its first GPU, or its cores and processor."""
        if self.gpus:
            return self.gpus[0]
        return f"{self.hardware.get('cores') or 1} cores of {self.hardware['cpu']}"

    @property
    def gpus(self) -> list[str]:
        """Names of the machine's GPUs."""
        names = self.hardware.get("gpus")
        return names if isinstance(names, list) else []


def read_probe(path: Path) -> MachineProbe:
    """The probe in a file; `UserError` where there is none, or where something is wrong with it."""
    if not path.is_file():
        reason = files.no_file(path)
        raise UserError(f"{path}: {reason}; create it with zeropods probe --out {path}")
    probe = files.validated(MachineProbe, path, path.read_bytes(), PROBE_AGAIN)
    # Plans divide by them.
    for name, value in asdict(probe).items():
        if isinstance(value, int | float) and value <= 0:
            raise UserError(f"{path}: {name} {value}; expected more than 0: {PROBE_AGAIN}")
    return probe


def kept_probe(folder: Path) -> MachineProbe | None:
    """The probe that is kept in this folder; None if there is none, or if it is of a machine of
    another kind than this one."""
    path = folder / MACHINE
    if not path.is_file():
        return None
    probe = read_probe(path)
    # Which GPUs are here now is not looked up, since that would take longer than the plan: they are
    # taken to be those of the probe.
    this_machine = hardware() | {"gpus": probe.hardware.get("gpus")}
    return probe if probe.is_of(this_machine) else None
