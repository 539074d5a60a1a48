"""What is planned of a finished run, beside what it measured: peak memory and the time of a step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from zeropods.errors import UserError
from zeropods.files import home
from zeropods.measure.calibration import FILE as CALIBRATION
from zeropods.measure.calibration import SHIPPED, Calibration, Sample, fitted, kept_calibration, read_calibration
from zeropods.measure.probe import FILE as PROBE
from zeropods.measure.probe import MachineProbe, kept_probe
from zeropods.measure.record import Record, read_record
from zeropods.plan.calibrated import CPU, Calibrated, sample_of

KEYS = {"memory": ("plan_peak", "bytes"), "time": ("plan_step", "seconds")}
WHAT = ("planned", "low", "high", "measured")
"""How the figures are called: `plan_peak_planned_bytes`."""
PLAN_KEYS = tuple(f"{name}_{what}_{unit}" for name, unit in KEYS.values() for what in WHAT)


@dataclass(frozen=True)
class Judged:
    """One quantity of one run: bytes of memory, or seconds of a step."""

    planned: float
    low: float | None
    high: float | None
    """The interval's ends; None where too few runs of the kind are known."""
    measured: float


def plan_figures(record: Record) -> dict[str, float | None]:
    """What a plan says of a run's peak memory and step, between which values runs of its kind lie, what it measured."""
    calibration, probe = kept(home())
    sample = sample_of(record, probe_for(record, probe or calibration.machine))
    found: dict[str, float | None] = dict.fromkeys(PLAN_KEYS)
    for quantity, (name, unit) in KEYS.items():
        measured = None if sample is None else sample.measured[quantity]
        if sample is not None and measured is not None:
            one = judge(sample, quantity, measured, calibration)
            found |= {f"{name}_{what}_{unit}": getattr(one, what) for what in WHAT}
    return found


def judge(sample: Sample, quantity: str, measured: float, calibration: Calibration) -> Judged:
    """A sample by a calibration that it may not be part of."""
    by, parts = Calibrated(calibration, sample.device, calibration.machine), sample.parts[quantity]
    planned = calibration.planned(CPU, quantity, parts) if sample.device == CPU else sum(parts)
    low, high = by.interval_of(sample.technique, sample.family, quantity) or (None, None)
    return Judged(planned, low and low * planned, high and high * planned, measured)


def probe_for(record: Record, probe: MachineProbe) -> MachineProbe:
    """A probe as it is of the machine of a run: where that is another one, with the rate that the run measured."""
    rate = next((rank.matmul_flops_per_second for rank in record.ranks if rank.rank == 0), None)
    if probe.is_of(record.hardware) or rate is None:
        return probe
    factor = rate / probe.flops(record.precision) if record.precision in probe.matmul_flops_per_second else 1.0
    one = {name: factor * value for name, value in probe.one_core_flops_per_second.items()}
    rates = {record.precision: {"run": rate}}
    return replace(probe, hardware=record.hardware, matmul_flops_per_second=rates, one_core_flops_per_second=one)


def fit_runs(folders: Iterable[Path], named: str, machine: MachineProbe | None) -> Calibration:
    """Fit to the finished runs among these run folders.

    Args:
        machine: that of the runs without a GPU; the kept one if not given.

    Raises:
        UserError: too few runs of which a plan can be made.
    """
    records = [read_record(folder) for folder in folders if (folder / "record.json").is_file()]
    calibration, kept_here = kept(home())
    probe = machine or kept_here or calibration.machine
    samples = [sample for record in records if (sample := sample_of(record, probe_for(record, probe)))]
    return fitted(samples, f"{len(samples)} runs of {named}", probe)


def kept(folder: Path) -> tuple[Calibration, MachineProbe | None]:
    """What is known of runs, and of this machine if it has no GPU; each file is read once, unless it changes."""
    return _kept(folder, tuple(_changed(folder / name) for name in (CALIBRATION, PROBE)))


@lru_cache(maxsize=1)
def _kept(folder: Path, changed: tuple[int, ...]) -> tuple[Calibration, MachineProbe | None]:
    # A file that cannot be read, or of an earlier version, stops no summary and no new fit; `zeropods plan` names it.
    calibration, probe = read_calibration(SHIPPED), None
    with suppress(UserError):
        calibration = kept_calibration(folder)
    with suppress(UserError):
        probe = kept_probe(folder)
    return calibration, None if probe and probe.gpus else probe


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0
