"""How far plans were from finished runs: factors of a plan's parts, fitted to runs, and the error that they leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.probe import MachineProbe
from zeropods.measure.record import STRICT

SHIPPED = Path(__file__).with_name("calibration.json")
"""Fitted to one half of the grid of `make bench-plan`."""
FILE = "calibration.json"
"""The user's own, in the folder of all clusters."""
REMEDY = "run zeropods plan --fit again"
QUANTITIES = ("memory", "time")
HELD = 0.8
"""Share of runs that an interval is to hold."""
FEWEST = 9
"""Residuals of which an interval is made, the fewest whose ends can hold `HELD`; fewer of a kind are joined by those of
wider kinds."""
PULL = 0.01
"""Weight of a factor's distance from 1, squared, beside the relative errors of the runs."""
LEAST_RUNS = FEWEST
"""Runs that a fit needs of a device."""


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
        found = next((each for each in self._kinds(device, technique, family, quantity) if len(each) >= FEWEST), None)
        return None if found is None else (_quantile(found, (1 - HELD) / 2), _quantile(found, (1 + HELD) / 2))

    def _kinds(self, device: str, technique: str, family: str, quantity: str) -> Iterator[list[float]]:
        """Residuals of the same kind, then of the same technique, then of the same device."""
        of_device = [each for each in self.residuals if each.device == device]
        same = [each for each in of_device if each.technique == technique]
        for group in ([each for each in same if each.family == family], same, of_device):
            yield sorted(value for each in group if (value := getattr(each, quantity)) is not None)

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
    found = files.validated(Calibration, path, path.read_bytes(), REMEDY)
    if path != SHIPPED and _sizes(found) != (_sizes(found) | _sizes(read_calibration(SHIPPED))):
        raise UserError(f"{path}: was fitted by another version of zeropods; {REMEDY}")
    return found


def _sizes(calibration: Calibration) -> dict[tuple[str, str], int]:
    """How many parts a plan has, by device and quantity."""
    return {(device, each): len(of[each]) for device, of in calibration.factors.items() for each in of}


def kept_calibration(folder: Path) -> Calibration:
    """The user's own if there is one in this folder, else the one that is shipped."""
    return read_calibration(folder / FILE if (folder / FILE).is_file() else SHIPPED)


def fitted(samples: Sequence[Sample], source: str, machine: MachineProbe) -> Calibration:
    """Factors, none below 0, that make the squares of relative errors least; residuals by leaving out a run at a time.

    Raises:
        UserError: of no device are there runs enough.
    """
    devices = sorted({sample.device for sample in samples})
    whole = [sample for sample in samples if all(sample.measured.values())]
    groups = {device: [sample for sample in whole if sample.device == device] for device in devices}
    enough = {device: group for device, group in groups.items() if len(group) >= LEAST_RUNS}
    if not enough:
        raise UserError(
            f"{source}: too few runs to fit; expected at least {LEAST_RUNS} of one device whose memory was sampled"
        )
    factors = {device: {each: _factors(group, each) for each in QUANTITIES} for device, group in enough.items()}
    residuals = [_residual(group, left_out) for group in enough.values() for left_out in range(len(group))]
    return Calibration(source=source, factors=factors, residuals=residuals, machine=machine)


def _factors(samples: Sequence[Sample], quantity: str) -> list[float]:
    from numpy import array, concatenate, eye, ones, sqrt
    from scipy.optimize import nnls

    known = [(sample.parts[quantity], value) for sample in samples if (value := sample.measured[quantity])]
    if not known:
        return []
    relative = array([[part / value for part in parts] for parts, value in known])
    # A factor of which the runs say little stays near 1, what arithmetic says.
    pull = sqrt(PULL) * eye(relative.shape[1])
    wanted = concatenate([ones(len(known)), pull.sum(axis=1)])
    return [float(factor) for factor in nnls(concatenate([relative, pull]), wanted)[0]]


def _residual(samples: Sequence[Sample], left_out: int) -> Residual:
    one, others = samples[left_out], [*samples[:left_out], *samples[left_out + 1 :]]
    found: dict[str, float | None] = {}
    for quantity in QUANTITIES:
        factors, measured = _factors(others, quantity), one.measured[quantity]
        planned = math.fsum(a * b for a, b in zip(factors, one.parts[quantity], strict=True)) if factors else 0.0
        found[quantity] = measured / planned if measured and planned else None
    return Residual(technique=one.technique, device=one.device, family=one.family, **found)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = min(max((len(ordered) + 1) * share - 1, 0.0), len(ordered) - 1.0)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
