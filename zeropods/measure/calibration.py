"""What plans of a machine are made of: what `zeropods probe` found out about it, and how far plans were from runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.environment import hardware
from zeropods.measure.record import STRICT

MACHINE = "machine.json"
"""In the folder of all clusters."""
PROBE_AGAIN = "run zeropods probe again"
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
    new_memory_bandwidth: float = 2.1e9
    """Bytes per second that one core writes to memory which the system gives it anew; an older probe has that of the
    shipped grid's machine."""
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
    found = files.validated(MachineProbe, path, path.read_bytes(), PROBE_AGAIN)
    for name, value in asdict(found).items():
        if isinstance(value, int | float) and value <= 0:
            raise UserError(f"{path}: {name} {value}; expected more than 0: {PROBE_AGAIN}")
    return found


def kept_probe(folder: Path) -> MachineProbe | None:
    """The one that is kept there, if it is of this machine."""
    path = folder / MACHINE
    found = read_probe(path) if path.is_file() else None
    return found if found is not None and found.is_of(hardware() | {"gpus": found.hardware.get("gpus")}) else None


# Factors of a plan's parts, fitted to runs, and the error that they leave.

SHIPPED = Path(__file__).with_name("calibration.json")
"""Fitted to one half of the grid of `make bench-plan`."""
CALIBRATION = "calibration.json"
"""The user's own, in the folder of all clusters."""
FIT_AGAIN = "run zeropods plan --fit again"
QUANTITIES = ("memory", "time")
HELD = 0.8
"""Share of runs that an interval is to hold."""
FEWEST = 9
"""Residuals of which an interval is made, the fewest whose ends can hold `HELD`; fewer of a kind are joined by those of
wider kinds. So many runs of a device a fit needs."""
PULL = 0.01
"""Weight of a factor's distance from 1, squared, beside the relative errors of the runs."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What one run measured, as a part of what a fit without that run says of it."""

    __pydantic_config__ = STRICT

    technique: str
    device: str
    """`cpu`, or the name of a GPU."""
    family: str
    memory: float | None
    time: float | None


@dataclass(frozen=True)
class Sample:
    """A run to fit: the parts of its plan, and what was measured; None where it was not."""

    technique: str
    device: str
    family: str
    parts: dict[str, tuple[float, ...]]
    """By quantity, in the plan's own order."""
    measured: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors by device and quantity, one for each part of a plan, and residuals."""

    __pydantic_config__ = STRICT

    source: str
    """What it was fitted to, in a few words."""
    factors: dict[str, dict[str, list[float]]]
    residuals: list[Residual]
    machine: MachineProbe
    """That on which the runs were made; it serves where a plan's own machine was not probed."""

    def planned(self, device: str, quantity: str, parts: Sequence[float]) -> float:
        """The sum of a plan's parts, each times its factor; times 1 on a device of which no run is known."""
        factors = self.factors.get(device, {}).get(quantity) or [1.0] * len(parts)
        return math.fsum(factor * part for factor, part in zip(factors, parts, strict=True))

    def interval(self, device: str, technique: str, family: str, quantity: str) -> tuple[float, float] | None:
        """Between which parts of what is planned `HELD` of such runs lie; None where too few are known of the device.

        Of residuals in order, the ends leave half of the others out on each side, as for a further run of the same kind
        (Vovk et al. 2005, conformal prediction): the k-th of n with k = (n + 1) x share, interpolated.
        """
        of_device = [each for each in self.residuals if each.device == device]
        same = [each for each in of_device if each.technique == technique]
        for group in ([each for each in same if each.family == family], same, of_device):
            known = [value for each in group if (value := getattr(each, quantity)) is not None]
            if len(known) >= FEWEST:
                inner = quantiles(known, n=round(2 / (1 - HELD)))
                return inner[0], inner[-1]
        return None

    def over(self, other: Calibration) -> Calibration:
        """This one, and of devices that it does not know the other one."""
        rest = [each for each in other.residuals if each.device not in self.factors]
        return replace(self, factors={**other.factors, **self.factors}, residuals=[*self.residuals, *rest])

    def errors(self) -> dict[str, float]:
        """Median of how far off a plan was, by quantity, as a share of it."""
        known = {each: [getattr(one, each) for one in self.residuals] for each in QUANTITIES}
        offs = {each: [abs(value - 1) for value in values if value is not None] for each, values in known.items()}
        return {each: median(values) for each, values in offs.items() if values}

    def write(self, path: Path) -> None:
        """Keep it; the file appears whole."""
        files.write_json(path, asdict(self))


def read_calibration(path: Path) -> Calibration:
    """That of a file; `UserError` says what is wrong with it."""
    found = files.validated(Calibration, path, path.read_bytes(), FIT_AGAIN)
    if path != SHIPPED and _sizes(found) != (_sizes(found) | _sizes(read_calibration(SHIPPED))):
        raise UserError(f"{path}: was fitted by another version of zeropods; {FIT_AGAIN}")
    return found


def _sizes(calibration: Calibration) -> dict[tuple[str, str], int]:
    """How many parts a plan has, by device and quantity."""
    return {(device, each): len(of[each]) for device, of in calibration.factors.items() for each in of}


def kept_calibration(folder: Path) -> Calibration:
    """The user's own if there is one in this folder, else the one that is shipped."""
    return read_calibration(folder / CALIBRATION if (folder / CALIBRATION).is_file() else SHIPPED)


def fitted(samples: Sequence[Sample], source: str, machine: MachineProbe) -> Calibration:
    """Factors, none below 0, that make the squares of relative errors least; residuals by leaving out a run at a time.

    Raises:
        UserError: of no device are there runs enough.
    """
    devices = sorted({sample.device for sample in samples})
    whole = [sample for sample in samples if all(sample.measured.values())]
    groups = {device: [sample for sample in whole if sample.device == device] for device in devices}
    enough = {device: group for device, group in groups.items() if len(group) >= FEWEST}
    if not enough:
        raise UserError(
            f"{source}: too few runs to fit; expected at least {FEWEST} of one device whose memory was sampled"
        )
    factors = {device: {each: _factors(group, each) for each in QUANTITIES} for device, group in enough.items()}
    residuals = [_residual(group, left_out) for group in enough.values() for left_out in range(len(group))]
    return Calibration(source=source, factors=factors, residuals=residuals, machine=machine)


def _factors(samples: Sequence[Sample], quantity: str) -> list[float]:
    from numpy import array, concatenate, eye, ones, sqrt
    from scipy.optimize import nnls

    known = [(sample.parts[quantity], value) for sample in samples if (value := sample.measured[quantity])]
    relative = array([[part / value for part in parts] for parts, value in known])
    # A factor of which the runs say little stays near 1, what arithmetic says.
    pull = sqrt(PULL) * eye(relative.shape[1])
    wanted = concatenate([ones(len(known)), pull.sum(axis=1)])
    return [float(factor) for factor in nnls(concatenate([relative, pull]), wanted)[0]]


def _residual(samples: Sequence[Sample], left_out: int) -> Residual:
    one, others = samples[left_out], [*samples[:left_out], *samples[left_out + 1 :]]
    found: dict[str, float | None] = {}
    for quantity in QUANTITIES:
        planned = math.fsum(a * b for a, b in zip(_factors(others, quantity), one.parts[quantity], strict=True))
        found[quantity] = (one.measured[quantity] or 0.0) / planned if planned else None
    return Residual(technique=one.technique, device=one.device, family=one.family, **found)
