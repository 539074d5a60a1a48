"""How far plans were from runs on GPUs: fitted to finished runs, kept in a file, and shown as
intervals of later plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.planned_runs import PlannedRun, planned_run
from zeropods.measure.record import RECORD, STRICT, Record, read_record
from zeropods.plan.estimate import Span
from zeropods.plan.workload import Workload

CALIBRATION = "calibration.json"
"""Name of the calibration's file, in the folder of all clusters."""
FIT_AGAIN = "run zeropods plan --fit again"
QUANTITIES = ("memory", "time")
"""What is planned and measured of a run: bytes, and seconds of a step."""
HELD = 0.8
"""Share of runs that an interval should contain."""
ENOUGH_FOR = 0.95
"""Share of runs that the required memory should be enough for."""
FEWEST_RUNS = 9
"""Fewest runs on a GPU for a fit, so that an interval can contain `HELD`."""
FEWEST_OF_KIND = 19
"""Fewest residuals of a technique, or of a family in it, for an interval of its own, so that it can
reach `ENOUGH_FOR`: with fewer, those of the wider kind count."""
PULL = 0.01
"""Weight of a factor's squared distance from 1, next to the squared relative errors of the runs: a
factor about which the runs say little stays near 1, the value that arithmetic gives."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What one run measured, divided by what a fit to the other runs plans for it; None for a
    quantity that is not known."""

    __pydantic_config__ = STRICT

    technique: str
    device: str
    """The name of its GPU."""
    family: str
    memory: float | None
    time: float | None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors by GPU and quantity, by which plans are multiplied, and the residuals of runs."""

    __pydantic_config__ = STRICT

    source: str
    """What the calibration was fitted to, in a few words."""
    factors: dict[str, dict[str, float]]
    residuals: list[Residual]

    def span(self, gpu: str, work: Workload, quantity: str, planned: float) -> Span | None:
        """The range in which `HELD` of the runs of a workload's kind lie, and the value that
        `ENOUGH_FOR` of them do not exceed; None if too few runs on this GPU are known.

        The ends are quantiles of the residuals, with half of the remaining share beyond each, as
        for a further run of the same kind (Vovk et al. 2005, conformal prediction): the k-th of n
        with k = (n + 1) x share, interpolated.

        Args:
            quantity: `memory` or `time`.
            planned: the planned value of this quantity, in bytes or seconds of a step.
        """
        residuals = self._residuals_of_kind(gpu, work, quantity)
        if residuals is None:
            return None
        scale = self.factors.get(gpu, {}).get(quantity, 1.0) * planned
        # `quantiles` cuts into n equal parts: at 0.8 into ten, so that a tenth lies below the first
        # cut and a tenth above the last one; at 0.95 into twenty, with a twentieth above the last.
        low, *_, high = quantiles(residuals, n=round(2 / (1 - HELD)))
        *_, most = quantiles(residuals, n=round(1 / (1 - ENOUGH_FOR)))
        return Span(low=low * scale, high=high * scale, most=most * scale)

    def _residuals_of_kind(self, gpu: str, work: Workload, quantity: str) -> list[float] | None:
        """The residuals of a quantity for runs with the same GPU, technique and family; where too
        few are known, for those with the same GPU and technique, then for all on the same GPU; None
        where these are too few as well."""
        of_gpu = [residual for residual in self.residuals if residual.device == gpu]
        of_technique = [
            residual for residual in of_gpu if residual.technique == work.technique.name
        ]
        of_family = [residual for residual in of_technique if residual.family == work.shape.family]
        kinds = (
            (of_family, FEWEST_OF_KIND),
            (of_technique, FEWEST_OF_KIND),
            (of_gpu, FEWEST_RUNS),
        )
        for residuals, fewest in kinds:
            values = _known_values(residuals, quantity)
            if len(values) >= fewest:
                return values
        return None


def _known_values(residuals: Iterable[Residual], quantity: str) -> list[float]:
    """The residuals of one quantity, as far as they are known."""
    values = (getattr(residual, quantity) for residual in residuals)
    return [value for value in values if value is not None]


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file; `UserError` says what is wrong with it."""
    return files.validated(Calibration, path, path.read_bytes(), FIT_AGAIN)


def kept_calibration(folder: Path) -> Calibration | None:
    """The calibration that is kept in this folder; None where nothing was fitted yet."""
    path = folder / CALIBRATION
    return read_calibration(path) if path.is_file() else None


# Fitting.


def fit_runs(folders: Iterable[Path], named: str) -> dict[str, object]:
    """Fit to the finished runs on GPUs among these run folders, and write the result into the
    calibration's file in the folder of all clusters.

    Args:
        named: what the folders are, in words, for the calibration's source.

    Returns:
        What the calibration was fitted to; the number of runs, without those that were left out;
        the file; and by quantity the median distance of a run from its plan, corrected by what the
        other runs showed, as a share of that plan.

    Raises:
        UserError: too few runs can be planned, or a record cannot be read.
    """
    runs = []
    for folder in folders:
        if (folder / RECORD).is_file():
            run = planned_run(read_record(folder))
            if run is not None:
                runs.append(run)
    calibration = fitted(runs, f"{len(runs)} runs of {named}")
    path = files.home() / CALIBRATION
    files.write_json(path, asdict(calibration))
    errors = {}
    for quantity in QUANTITIES:
        # Of a perfect plan they are 1.
        values = _known_values(calibration.residuals, quantity)
        errors[quantity] = median(abs(value - 1) for value in values)
    return {
        "fitted_to": calibration.source,
        "runs": len(calibration.residuals),
        "error": errors,
        "file": str(path),
    }


def fitted(runs: Sequence[PlannedRun], source: str) -> Calibration:
    """Fit a factor for each GPU and quantity by least squares of relative errors, and compute the
    residual of each run by a fit without the runs of its plan.

    Runs of which something was not measured are left out, and so are GPUs with fewer than
    `FEWEST_RUNS` of the others.

    Args:
        source: what the runs are, in words.

    Raises:
        UserError: on no GPU are there enough runs.
    """
    by_gpu: dict[str, list[PlannedRun]] = {}
    for run in sorted(runs, key=lambda run: run.gpu):
        if all(run.measured.values()):
            by_gpu.setdefault(run.gpu, []).append(run)
    factors = {}
    residuals = []
    for gpu, group in by_gpu.items():
        if len(group) < FEWEST_RUNS:
            continue
        factors[gpu] = {quantity: _factor(group, quantity) for quantity in QUANTITIES}
        residuals += [_residual(run, group) for run in group]
    if not factors:
        expected = f"at least {FEWEST_RUNS} runs with sampled memory on one kind of GPU"
        raise UserError(f"{source}: too few runs to fit; expected {expected}")
    return Calibration(source=source, factors=factors, residuals=residuals)


def _residual(run: PlannedRun, group: Sequence[PlannedRun]) -> Residual:
    """What a run measured, divided by what the other runs of its group lead to expect.

    Args:
        group: all runs on the same GPU, this one among them.
    """
    # Runs of the same plan, repeated or made on another machine, must not vouch for each other,
    # unless there are no others. Equal planned bytes tell that the plan is the same.
    others = [other for other in group if other.planned["memory"] != run.planned["memory"]]
    values = dict[str, float | None]()
    for quantity in QUANTITIES:
        measured = run.measured[quantity]
        planned = run.planned[quantity]
        # Runs that did not measure both quantities are left out by `fitted`, and a time without a
        # plan counts as not measured: None is only for the type checker.
        if measured is None or not planned:
            values[quantity] = None
        else:
            values[quantity] = measured / (_factor(others or group, quantity) * planned)
    technique = run.work.technique.name
    family = run.work.shape.family
    return Residual(technique=technique, device=run.gpu, family=family, **values)


def _factor(runs: Sequence[PlannedRun], quantity: str) -> float:
    """The factor f that minimises the sum of (f x planned / measured - 1)^2 over all runs, plus
    `PULL` x (f - 1)^2."""
    numerator = PULL
    denominator = PULL
    for run in runs:
        planned = run.planned[quantity]
        measured = run.measured[quantity]
        if planned is not None and measured:
            numerator += planned / measured
            denominator += (planned / measured) ** 2
    return numerator / denominator


# The plan of a finished run next to what it measured: peak memory and the time of a step.


class Judged(NamedTuple):
    """One quantity of one run: bytes of memory, or seconds of a step."""

    planned: float
    low: float | None
    high: float | None
    """The interval's ends; None where too few runs of the kind are known."""
    measured: float


KEYS = {"memory": ("plan_peak", "bytes"), "time": ("plan_step", "seconds")}
"""Beginning and end of the figures' names, by quantity."""
WHAT = Judged._fields
"""Middle part of the figures' names, such as `planned` in `plan_peak_planned_bytes`."""
PLAN_KEYS = tuple(f"{name}_{what}_{unit}" for name, unit in KEYS.values() for what in WHAT)


def plan_figures(record: Record) -> dict[str, float | None]:
    """Peak memory and step time of a run on GPUs, by the names in `PLAN_KEYS`: what a plan says,
    the interval of runs of its kind by the kept calibration, and what the run measured. None where
    not known; all None for a run without a GPU, or that cannot be planned."""
    figures: dict[str, float | None] = dict.fromkeys(PLAN_KEYS)
    run = planned_run(record)
    if run is None:
        return figures
    calibration = _kept_for_summaries(files.home())
    for quantity, (name, unit) in KEYS.items():
        planned = run.planned[quantity]
        measured = run.measured[quantity]
        if planned is None or measured is None:
            continue
        span = None
        if calibration is not None:
            span = calibration.span(run.gpu, run.work, quantity, planned)
        judged = Judged(
            planned=planned,
            low=None if span is None else span.low,
            high=None if span is None else span.high,
            measured=measured,
        )
        for what, value in judged._asdict().items():
            figures[f"{name}_{what}_{unit}"] = value
    return figures


def _kept_for_summaries(folder: Path) -> Calibration | None:
    """The calibration that is kept in this folder, read once unless its file changes; None where
    there is none, or where it cannot be read."""
    path = folder / CALIBRATION
    changed_ns = path.stat().st_mtime_ns if path.is_file() else 0
    return _read_once(folder, changed_ns)


@lru_cache(maxsize=1)
def _read_once(folder: Path, changed_ns: int) -> Calibration | None:
    """Read the kept calibration; `changed_ns`, the time of the file's last change, only makes the
    cache forget it then."""
    # A file that cannot be read stops no summary; `zeropods plan` names it.
    with suppress(UserError):
        return kept_calibration(folder)
    return None
