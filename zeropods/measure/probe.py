"""What `zeropods probe` finds out about a kind of machine, as a file that plans read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.environment import hardware
from zeropods.measure.record import STRICT

FILE = "machine.json"
"""In the folder of all clusters."""
REMEDY = "run zeropods probe again"
ALIKE = ("cpu", "cores", "gpus")
"""What must be equal for two machines to be of one kind."""


@dataclass(frozen=True, kw_only=True)
class MachineProbe:
    """Rates and weights of one machine, and of the pods on it that were up. Bytes, seconds, FLOP/s."""

    __pydantic_config__ = STRICT

    measured_at: str
    """ISO 8601, UTC."""
    hardware: dict[str, str | int | list[str] | None]
    versions: dict[str, str | None]
    matmul_flops_per_second: dict[str, dict[str, float]]
    """By precision and side of square matrices, with all cores, or on the GPU."""
    one_core_flops_per_second: dict[str, float]
    """The best of them with one core, by precision."""
    memory_bandwidth: float
    """Bytes per second of an optimizer's step with all cores, read and written."""
    one_core_bandwidth: float
    """The same with one core."""
    processes: int
    """How many took part in the collectives."""
    machines: int
    """On how many machines they were."""
    bandwidth: float
    """Bytes per second through a process's link in an all-reduce, as a ring counts them."""
    latency_seconds: float
    """Of one message of an all-reduce."""
    python_seconds: float
    """What one small operation and its gradient cost beside their arithmetic."""
    process_bytes: int
    """Resident memory of a process of training before its model."""
    pcie_bandwidth: float | None = None
    """Bytes per second from host to GPU, of pinned memory; None without a GPU."""

    def flops(self, precision: str, busy: float | None = None) -> float:
        """The best rate at this precision, with all cores, or as many as are busy."""
        rates = self.matmul_flops_per_second.get(precision)
        if not rates:
            known = ", ".join(self.matmul_flops_per_second)
            raise UserError(f"--precision {precision}: {self.name} was probed with {known}; give one of them")
        most = max(rates.values())
        return self._of_cores(self.one_core_flops_per_second.get(precision, most), most, busy)

    def bandwidth_of(self, busy: float) -> float:
        """Bytes per second of so many busy cores together."""
        return self._of_cores(self.one_core_bandwidth, self.memory_bandwidth, busy)

    def _of_cores(self, one: float, most: float, busy: float | None) -> float:
        """A rate between that of one core and that of all: cores that work at once share caches and their clock."""
        if busy is None or self.cores == 1:
            return most
        # On a machine that was not idle one core alone may have been the faster.
        return one + max(0.0, most - one) * (min(busy, self.cores) - 1) / (self.cores - 1)

    @property
    def cores(self) -> int:
        """Cores that a process may use."""
        return int(self.hardware.get("cores") or 1)  # type: ignore[arg-type]

    @property
    def memory_bytes(self) -> int:
        """Memory of the machine."""
        return int(self.hardware["memory_bytes"])  # type: ignore[arg-type]

    def is_of(self, machine: Mapping[str, object]) -> bool:
        """Whether a machine is of this kind."""
        both = {self.hardware.get("instructions"), machine.get("instructions")}
        # What is older does not say its instructions.
        return (None in both or len(both) == 1) and all(
            (self.hardware.get(key) or None) == (machine.get(key) or None) for key in ALIKE
        )

    @property
    def name(self) -> str:
        """The machine in a few words."""
        return self.gpus[0] if self.gpus else f"{self.cores} cores of {self.hardware['cpu']}"

    @property
    def gpus(self) -> list[str]:
        """Names of its GPUs."""
        found = self.hardware.get("gpus")
        return found if isinstance(found, list) else []

    def write(self, path: Path) -> None:
        """Keep it; the file appears whole."""
        files.write_json(path, asdict(self))


def read_probe(path: Path) -> MachineProbe:
    """The probe in a file; `UserError` says what is wrong with it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; zeropods probe --out {path} writes it")
    found = files.validated(MachineProbe, path, path.read_bytes(), REMEDY)
    for name, value in asdict(found).items():
        if isinstance(value, int | float) and value <= 0:
            raise UserError(f"{path}: {name} {value}; expected more than 0: {REMEDY}")
    return found


def kept_probe(folder: Path) -> MachineProbe | None:
    """The one that is kept there, if it is of this machine."""
    path = folder / FILE
    found = read_probe(path) if path.is_file() else None
    return found if found is not None and found.is_of(hardware() | {"gpus": found.hardware.get("gpus")}) else None
