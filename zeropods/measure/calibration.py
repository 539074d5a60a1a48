"""The inputs of plans for a machine: what `zeropods probe` found out about it, and how far plans were from runs.

Without a GPU, every plan is based on runs; with one, runs only say how far off the arithmetic is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from zeropods import files
from zeropods.errors import UserError
from zeropods.measure.environment import hardware
from zeropods.measure.record import RECORD, STRICT, Record, read_record
from zeropods.plan.cpu import CPU, resident_parts, step_parts
from zeropods.plan.facts import shape_recorded
from zeropods.plan.gpus import is_before_ampere, published_flops, workspace_bytes
from zeropods.plan.machines import Machines, step_time
from zeropods.plan.memory import CONTEXT_BYTES, PlannedMemory, plan_memory
from zeropods.plan.terms import total
from zeropods.plan.workload import Workload, ZeroSettings, read_zero_settings
from zeropods.techniques import technique_named

USED = "device_used_bytes"
MACHINE = "machine.json"
"""Name of the probe's file, in the folder of all clusters."""
PROBE_AGAIN = "run zeropods probe again"
ALIKE = ("cpu", "instructions", "cores", "gpus")
"""Keys of the hardware that must be equal for two machines to be of one kind."""


@dataclass(frozen=True, kw_only=True)
class MachineProbe:
    """Measurements of one machine, and of collectives on it or between pods that were up. Bytes, seconds, FLOP/s."""

    __pydantic_config__ = STRICT

    measured_at: str
    """Time of the measurement, ISO 8601, UTC."""
    hardware: dict[str, str | int | list[str] | None]
    versions: dict[str, str | None]
    matmul_flops_per_second: dict[str, dict[str, float]]
    """FLOP/s of matrix multiplications by precision and side of the square matrices, with all cores or on the GPU."""
    one_core_flops_per_second: dict[str, float]
    """The best such rate of one core alone, by precision."""
    memory_bandwidth: float
    """Bytes per second that an optimizer's step reads and writes with all cores."""
    one_core_bandwidth: float
    """The same with one core."""
    processes: int
    """Number of processes that took part in the collectives."""
    machines: int
    """Number of machines on which these processes ran."""
    bandwidth: float
    """Bytes per second through a process's link in an all-reduce, counted as for a ring."""
    latency_seconds: float
    """Latency of one message of an all-reduce."""
    python_seconds: float
    """Time that one small operation and its gradient take on top of their arithmetic."""
    process_bytes: int
    """Resident memory of a training process before it has a model."""
    new_memory_bandwidth: float = 2.1e9
    """Bytes per second that one core writes to memory newly obtained from the system; the default, for an older probe,
    is the rate of the shipped grid's machine."""
    pcie_bandwidth: float | None = None
    """Bytes per second from host to GPU, from pinned memory; None without a GPU."""
    gpu_memory_bytes: int | None = None
    """Bytes of memory of the smallest GPU of the processes, as NVML shows them; None without a GPU,
    where NVML does not know it, and in an older probe."""

    def flops(self, precision: str, busy: float | None = None) -> float:
        """The best FLOP/s at this precision, with all cores or with `busy` cores."""
        rates = self.matmul_flops_per_second.get(precision)
        if not rates:
            known = ", ".join(self.matmul_flops_per_second)
            raise UserError(f"--precision {precision}: {self.name} was probed with {known}; give one of them")
        most = max(rates.values())
        return self._of_cores(self.one_core_flops_per_second.get(precision, most), most, busy)

    def bandwidth_of(self, busy: float) -> float:
        """Bytes per second of `busy` cores together."""
        return self._of_cores(self.one_core_bandwidth, self.memory_bandwidth, busy)

    def _of_cores(self, one: float, most: float, busy: float | None) -> float:
        """A rate between that of one core and that of all: cores that are busy at once share caches and their clock."""
        if busy is None or self.cores == 1:
            return most
        # On a machine that was not idle, one core alone may have been faster than all of them.
        return one + max(0.0, most - one) * (min(busy, self.cores) - 1) / (self.cores - 1)

    @property
    def cores(self) -> int:
        """Number of cores that a process may use."""
        return int(self.hardware.get("cores") or 1)  # type: ignore[arg-type]

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of the machine."""
        return int(self.hardware["memory_bytes"])  # type: ignore[arg-type]

    def is_of(self, machine: Mapping[str, object]) -> bool:
        """Whether a machine is of the same kind as the probed one."""
        return all((self.hardware.get(key) or None) == (machine.get(key) or None) for key in ALIKE)

    @property
    def name(self) -> str:
        """A short description of the machine."""
        return self.gpus[0] if self.gpus else f"{self.cores} cores of {self.hardware['cpu']}"

    @property
    def gpus(self) -> list[str]:
        """Names of the machine's GPUs."""
        found = self.hardware.get("gpus")
        return found if isinstance(found, list) else []


def read_probe(path: Path) -> MachineProbe:
    """The probe in a file; `UserError` says what is wrong with it."""
    if not path.is_file():
        raise UserError(f"{path}: {files.no_file(path)}; create it with zeropods probe --out {path}")
    found = files.validated(MachineProbe, path, path.read_bytes(), PROBE_AGAIN)
    for name, value in asdict(found).items():
        if isinstance(value, int | float) and value <= 0:
            raise UserError(f"{path}: {name} {value}; expected more than 0: {PROBE_AGAIN}")
    return found


def kept_probe(folder: Path) -> MachineProbe | None:
    """The probe that is kept in this folder if it is of this machine, else None."""
    path = folder / MACHINE
    found = read_probe(path) if path.is_file() else None
    return found if found is not None and found.is_of(hardware() | {"gpus": found.hardware.get("gpus")}) else None


# Factors of a plan's parts, fitted to runs, and the errors that remain.

SHIPPED = Path(__file__).with_name("calibration.json")
"""The shipped calibration, fitted to one half of the grid of `make bench-plan`."""
CALIBRATION = "calibration.json"
"""Name of the user's own calibration, in the folder of all clusters."""
FIT_AGAIN = "run zeropods plan --fit again"
QUANTITIES = ("memory", "time")
HELD, FITTING = 0.8, 0.95
"""Share of runs that an interval should contain, and share of runs that the required memory should be enough for."""
FEWEST, FEWEST_OF_KIND = 9, 19
"""Fewest runs of a device for a fit, so that an interval can contain `HELD`; fewest residuals of a technique, or of a
family in it, for an interval of its own, so that it can reach `FITTING`: with fewer, those of the wider kind count."""
PULL = 0.01
"""Weight of a factor's squared distance from 1, next to the squared relative errors of the runs."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What one run measured, divided by what a fit without that run plans for it."""

    __pydantic_config__ = STRICT

    technique: str
    device: str
    """`cpu`, or the name of a GPU."""
    family: str
    memory: float | None
    time: float | None


@dataclass(frozen=True)
class Sample:
    """A run to fit: the parts of its plan, and its measured values, None where a value was not measured."""

    technique: str
    device: str
    family: str
    parts: dict[str, tuple[float, ...]]
    """Parts of the plan by quantity, in the plan's own order."""
    measured: dict[str, float | None]


class Span(NamedTuple):
    """The range in which runs of a kind lie, relative to the plan or as amounts."""

    low: float
    high: float
    most: float
    """The value that a share `FITTING` of the runs of the kind does not exceed."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors by device and quantity, one for each part of a plan, and the residuals of runs."""

    __pydantic_config__ = STRICT

    source: str
    """What the calibration was fitted to, in a few words."""
    factors: dict[str, dict[str, list[float]]]
    residuals: list[Residual]
    machine: MachineProbe
    """Probe of the machine on which the runs were made; it is used where a plan's own machine was not probed."""

    def planned(self, device: str, quantity: str, parts: Sequence[float]) -> float:
        """The sum of a plan's parts, each times its factor; the factors are 1 on a device without known runs."""
        factors = self.factors.get(device, {}).get(quantity) or [1.0] * len(parts)
        return math.fsum(factor * part for factor, part in zip(factors, parts, strict=True))

    def interval(self, device: str, technique: str, family: str, quantity: str) -> Span | None:
        """The range, relative to a plan, that `HELD` of such runs lie in; None if too few runs of the device are known.

        The ends are quantiles of the residuals, with half of the remaining share beyond each, as for a further run of
        the same kind (Vovk et al. 2005, conformal prediction): the k-th of n with k = (n + 1) x share, interpolated.
        """
        of_device = [each for each in self.residuals if each.device == device]
        same = [each for each in of_device if each.technique == technique]
        for group in ([each for each in same if each.family == family], same, of_device):
            known = [value for each in group if (value := getattr(each, quantity)) is not None]
            if len(known) >= (FEWEST if group is of_device else FEWEST_OF_KIND):
                inner = quantiles(known, n=round(2 / (1 - HELD)))
                return Span(inner[0], inner[-1], quantiles(known, n=round(1 / (1 - FITTING)))[-1])
        return None


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file; `UserError` says what is wrong with it."""
    found = files.validated(Calibration, path, path.read_bytes(), FIT_AGAIN)
    if path != SHIPPED:
        shipped, own = (each.factors.get(CPU, {}) for each in (read_calibration(SHIPPED), found))
        if any(len(own.get(quantity, ())) != len(shipped[quantity]) for quantity in QUANTITIES):
            raise UserError(f"{path}: was fitted by another version of zeropods; {FIT_AGAIN}")
    return found


def kept_calibration(folder: Path) -> Calibration:
    """The user's own calibration if there is one in this folder, else the shipped one."""
    return read_calibration(folder / CALIBRATION if (folder / CALIBRATION).is_file() else SHIPPED)


def fitted(samples: Sequence[Sample], source: str, machine: MachineProbe) -> Calibration:
    """Fit factors, none below 0, by least squares of relative errors; residuals leave out one plan at a time.

    Raises:
        UserError: no device has enough runs.
    """
    whole = [sample for sample in samples if all(sample.measured.values())]
    devices = sorted({sample.device for sample in whole})
    groups = {device: [sample for sample in whole if sample.device == device] for device in devices}
    enough = {device: group for device, group in groups.items() if len(group) >= FEWEST}
    if not enough:
        raise UserError(
            f"{source}: too few runs to fit; expected at least {FEWEST} runs with sampled memory on one device"
        )
    factors = {device: {each: _factors(group, each) for each in QUANTITIES} for device, group in enough.items()}
    residuals = []
    for group in enough.values():
        for one in group:
            # Runs of the same plan, repeated or made on another machine, must not vouch for each other.
            others = [each for each in group if each.parts["memory"] != one.parts["memory"]]
            found = dict[str, float | None]()
            for each in QUANTITIES:
                left = _factors(others or group, each)
                planned = math.fsum(a * b for a, b in zip(left, one.parts[each], strict=True))
                found[each] = (one.measured[each] or 0.0) / planned if planned else None
            residuals.append(Residual(technique=one.technique, device=one.device, family=one.family, **found))
    return Calibration(source=source, factors=factors, residuals=residuals, machine=machine)


def _factors(samples: Sequence[Sample], quantity: str) -> list[float]:
    from numpy import array, concatenate, eye, ones, sqrt
    from scipy.optimize import nnls

    known = [(sample.parts[quantity], value) for sample in samples if (value := sample.measured[quantity])]
    relative = array([[part / value for part in parts] for parts, value in known])
    # A factor about which the runs say little stays near 1, the value that arithmetic gives.
    pull = sqrt(PULL) * eye(relative.shape[1])
    wanted = concatenate([ones(len(known)), pull.sum(axis=1)])
    return [float(factor) for factor in nnls(concatenate([relative, pull]), wanted)[0]]


# A recorded run: what is planned for it, and what it measured.


def planned(record: Record) -> PlannedMemory | None:
    """Planned memory of one process of a recorded run, from its largest batch, shape and DeepSpeed configuration.

    None where it cannot be planned. Without a GPU, nothing is counted for CUDA and cuBLAS.
    """
    work = recorded_work(record)
    if work is None:
        return None
    gpu = next((rank.gpu for rank in record.ranks if rank.gpu), None)
    return plan_memory(work, 0) if gpu is None else _on_gpu(work, gpu)


def _on_gpu(work: Workload, gpu: str) -> PlannedMemory:
    """The memory of one process on a GPU, with what CUDA and cuBLAS take of it."""
    return plan_memory(work, CONTEXT_BYTES, workspace_bytes(gpu))


@lru_cache(maxsize=1)
def recorded_work(record: Record) -> Workload | None:
    """The workload of a recorded run: its largest batch, and how the work was divided.

    None where it cannot be planned: a technique that is not in `TECHNIQUES` (`custom`), a precision or a shape that is
    not known here, a configuration whose sizes are not numbers, a model that cannot be traced, or no rank that
    measured a batch.
    """
    measured = [(rank, rank.largest_batch) for rank in record.ranks if rank.shape and rank.largest_batch]
    if not measured:
        return None
    rank, batch = max(measured, key=lambda each: each[1].rows * (each[1].source_tokens + each[1].target_tokens))
    shape = shape_recorded(json.dumps(rank.shape))
    if shape is None or record.precision not in shape.precisions:
        return None
    tokens, labels = batch.source_tokens, batch.target_tokens
    if shape.joint:
        # Labels of the largest batch were not counted: they are assumed to be as frequent in it as in all batches.
        of_all = rank.target_tokens / rank.source_tokens if rank.source_tokens else 1.0
        labels = max(1, round(of_all * tokens))
    if min(batch.rows, tokens, labels) < 1:
        return None
    attention, dropout = (record.identity.get(name) for name in ("attn_implementation", "dropout"))
    try:
        work = Workload(
            shape=shape,
            rows=batch.rows,
            tokens=tokens,
            labels=labels,
            # On an H200 the plan with these met what T5 took to 0.2 %; plans without a GPU were fitted to whole rows.
            label_tokens=batch.label_tokens if rank.gpu else None,
            precision=record.precision,
            checkpointing=record.gradient_checkpointing,
            own_rates=bool(record.identity.get("scaled_rates")) and not shape.joint,
            technique=technique_named(record.technique),
            ranks=record.world_size,
            zero=read_zero_settings(record.deepspeed) if record.deepspeed else ZeroSettings(),
            passes=record.gradient_accumulation_steps,
            attention=attention if attention in shape.attentions else shape.attentions[0],
            before_ampere=is_before_ampere(rank.gpu or ""),
            dropout=dropout > 0 if isinstance(dropout, int | float) else None,
        )
        work.saved()
    except UserError:
        return None
    return work


def sample_of(record: Record, probe: MachineProbe) -> Sample | None:
    """A finished run as a sample to fit or judge; None for one that did not end well or cannot be planned.

    Where no peak FLOP/s of its GPU are known, its time is not planned, and counts as not measured.

    Args:
        probe: the probe of its machine, for a run without a GPU.
    """
    largest = recorded_work(record)
    if largest is None or record.status != "ok":
        return None
    gpu, mean = record.ranks[0].gpu, largest
    # The time is planned for the run's mean batch, by its tokens including padding.
    batches = sum(rank.steps for rank in record.ranks) * record.gradient_accumulation_steps
    if padded := sum(rank.padded_tokens for rank in record.ranks) / max(1, batches * largest.rows):
        whole = largest.tokens + (largest.labels if not largest.shape.joint else 0)
        tokens, labels = (max(1, round(padded / whole * each)) for each in (largest.tokens, largest.labels))
        mean = replace(largest, tokens=tokens, labels=labels)
    if gpu is None:
        hosts = len({rank.machine for rank in record.ranks})
        machines = Machines(pods=record.world_size, hosts=hosts, threads=record.identity.get("threads") or None)
        memory, time = tuple(map(total, resident_parts(largest))), step_parts(mean, machines, probe)
    else:
        machines = Machines(pods=record.pods, slots=record.slots, gpu=gpu)
        memory, is_known = (_on_gpu(largest, gpu).device_bytes,), published_flops(gpu, mean.precision) is not None
        time = (step_time(mean, machines).seconds,) if is_known else ()
    return Sample(
        technique=largest.technique.name,
        device=gpu or CPU,
        family=largest.shape.family,
        parts={"memory": memory, "time": time},
        measured={"memory": measured_memory(record), "time": measured_step(record) if time else None},
    )


def measured_memory(record: Record) -> float | None:
    """Peak bytes in use on the fullest GPU; without a GPU, peak resident bytes of the rank that needed most, above what
    its process had when it had loaded its libraries."""
    if record.ranks[0].gpu is not None:
        return max((rank.sampled[USED].peak for rank in record.ranks if USED in rank.sampled), default=None)
    sampled = [(rank.peak_resident_bytes, rank.sampled.get("resident_bytes")) for rank in record.ranks]
    above = [peak - found.minimum for peak, found in sampled if peak is not None and found is not None]
    return max(above) if above and len(above) == len(sampled) else None


def measured_step(record: Record) -> float | None:
    """Median seconds of a step after warm-up, of the slowest rank."""
    medians = [rank.step_seconds.median for rank in record.ranks if rank.step_seconds and rank.step_seconds.median]
    return max(medians) if medians and len(medians) == len(record.ranks) else None


# The plan of a finished run next to what it measured: peak memory and the time of a step.


class Judged(NamedTuple):
    """One quantity of one run: bytes of memory, or seconds of a step."""

    planned: float
    low: float | None
    high: float | None
    """The interval's ends; None where too few runs of the kind are known."""
    measured: float


KEYS = {"memory": ("plan_peak", "bytes"), "time": ("plan_step", "seconds")}
WHAT = Judged._fields
"""Middle part of the figures' names, such as `planned` in `plan_peak_planned_bytes`."""
PLAN_KEYS = tuple(f"{name}_{what}_{unit}" for name, unit in KEYS.values() for what in WHAT)


def plan_figures(record: Record) -> dict[str, float | None]:
    """Peak memory and step time of a run: what a plan says, the interval of runs of its kind, and what it measured."""
    calibration, probe = kept(files.home())
    sample = sample_of(record, probe_for(record, probe or calibration.machine))
    found: dict[str, float | None] = dict.fromkeys(PLAN_KEYS)
    for quantity, (name, unit) in KEYS.items():
        if sample is not None and (measured := sample.measured[quantity]) is not None:
            one = judge(sample, quantity, measured, calibration)
            found |= {f"{name}_{what}_{unit}": value for what, value in one._asdict().items()}
    return found


def judge(sample: Sample, quantity: str, measured: float, calibration: Calibration) -> Judged:
    """Judge a sample by a calibration, which need not include it."""
    parts = sample.parts[quantity]
    by_runs = calibration.planned(sample.device, quantity, parts)
    low, high, _ = calibration.interval(sample.device, sample.technique, sample.family, quantity) or (None,) * 3
    planned = by_runs if sample.device == CPU else sum(parts)
    return Judged(planned, low and low * by_runs, high and high * by_runs, measured)


def probe_for(record: Record, probe: MachineProbe) -> MachineProbe:
    """Adapt a probe to the machine of a run: if that is another machine, with the rates that the run measured."""
    first = record.rank_0
    if probe.is_of(record.hardware) or first is None or first.matmul_flops_per_second is None:
        return probe
    rate, precision = first.matmul_flops_per_second, record.precision
    # An older record does not say how fast one core is.
    is_known = precision in probe.matmul_flops_per_second
    alone = probe.flops(precision, 1) / probe.flops(precision) if is_known else 1.0
    return replace(
        probe,
        hardware=record.hardware,
        matmul_flops_per_second={precision: {"run": rate}},
        one_core_flops_per_second={precision: first.one_core_flops_per_second or alone * rate},
        python_seconds=first.python_seconds or probe.python_seconds,
    )


def fit_runs(folders: Iterable[Path], named: str, machine: MachineProbe | None) -> dict[str, object]:
    """Fit to the finished runs among these run folders, and keep the result with what is shipped for other devices.

    Args:
        machine: probe of the machine of the runs without a GPU; the kept probe if not given.

    Returns:
        What the calibration was fitted to, the number of runs, the file, and by quantity the median distance of a
        plan from its run, as a share of the plan.

    Raises:
        UserError: too few runs can be planned.
    """
    records = [read_record(folder) for folder in folders if (folder / RECORD).is_file()]
    calibration, kept_here = kept(files.home())
    probe = machine or kept_here or calibration.machine
    samples = [sample for record in records if (sample := sample_of(record, probe_for(record, probe)))]
    found, shipped = fitted(samples, f"{len(samples)} runs of {named}", probe), read_calibration(SHIPPED)
    rest = [each for each in shipped.residuals if each.device not in found.factors]
    path, factors = files.home() / CALIBRATION, {**shipped.factors, **found.factors}
    files.write_json(path, asdict(replace(found, factors=factors, residuals=[*found.residuals, *rest])))
    error = {}
    for quantity in QUANTITIES:
        known = (getattr(each, quantity) for each in found.residuals)
        error[quantity] = median(abs(value - 1) for value in known if value is not None)
    return {"fitted_to": found.source, "runs": len(found.residuals), "error": error, "file": str(path)}


def kept(folder: Path) -> tuple[Calibration, MachineProbe | None]:
    """The calibration, and the probe of this machine if it has no GPU; each file is read once, unless it changes."""
    paths = (folder / CALIBRATION, folder / MACHINE)
    return _kept(folder, tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths))


@lru_cache(maxsize=1)
def _kept(folder: Path, changed: tuple[int, ...]) -> tuple[Calibration, MachineProbe | None]:
    # A file that is unreadable or of an earlier version stops no summary and no new fit; `zeropods plan` names it.
    calibration, probe = read_calibration(SHIPPED), None
    with suppress(UserError):
        calibration = kept_calibration(folder)
    with suppress(UserError):
        probe = kept_probe(folder)
    return calibration, None if probe and probe.gpus else probe
