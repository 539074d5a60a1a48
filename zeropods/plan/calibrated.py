"""Plans by what runs have shown: factors of a plan's parts, and how far off it was; without a GPU there is no other.

A calibration (`measure.calibration`) holds both. Parts without a GPU are bytes of resident memory above the bare
process, and seconds at the machine's own rates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zeropods.errors import UserError
from zeropods.files import home
from zeropods.measure.calibration import (
    CALIBRATION,
    MACHINE,
    SHIPPED,
    Calibration,
    MachineProbe,
    Sample,
    fitted,
    kept_calibration,
    kept_probe,
    read_calibration,
)
from zeropods.measure.record import RECORD, Record, read_record
from zeropods.plan.facts import shape_recorded
from zeropods.plan.machines import ADAM_BYTES, Machines, StepTime, is_before_ampere, step_time, traffic
from zeropods.plan.memory import CONTEXT_BYTES, LOADING, Activations, PlannedMemory, Term, plan_memory, total
from zeropods.plan.workload import MASTER, Workload, ZeroSettings, read_zero_settings, share
from zeropods.tables import MIB
from zeropods.techniques import keys_beyond, technique_named

CPU = "cpu"
STATES = ("parameters", "gradients", "optimizer")
USED = "device_used_bytes"
UNIT = 100 * MIB
"""Of parts that are constant."""
STEPPED = 5
"""Place of the optimizer's part of a step; before it are those of arithmetic and Python, after it memory's and the
network's."""
TENSOR_OPERATIONS, HOOKS = 50, 6
"""Small operations that are one unit of what a tensor costs in a step; how many units ZeRO-3 takes, which gathers it
and gives it back. Units are near what runs show, since a factor is held near 1."""
CLIPPING_BYTES = 12
"""Bytes per parameter to clip gradients: they are read, then read and written, FP32."""
KEPT_BLOCK = 32 << 20
"""Larger blocks are new memory each time (glibc 2.36, `DEFAULT_MMAP_THRESHOLD_MAX`)."""
NEW_COPIES = 3
"""Copies of all gradients that ZeRO makes in new memory, FP32: in buckets, for a rank's share, as one flat tensor.
By page faults (`ru_minflt` of ranks from step to step) it is 2.5 to 4.2 in most of 14 runs, 1.7 at least."""


@dataclass(frozen=True)
class Calibrated:
    """A plan on one device, and its error."""

    calibration: Calibration
    device: str
    """`cpu`, or a GPU's name, whose plans are arithmetic still: runs say only how far off they are."""
    probe: MachineProbe

    def memory(self, work: Workload) -> PlannedMemory:
        """Of one process; without a GPU resident memory: the plan's terms, and what comes to them by the runs."""
        if self.device != CPU:
            return plan_memory(work)
        bare = Term("interpreter and libraries", self.probe.process_bytes, "measured", "context")
        terms = (
            replace(term, bytes=round(factor * term.bytes), formula=f"{factor:.3g} by runs x {term.formula}")
            for factor, part in zip(self.calibration.factors[CPU]["memory"], resident_parts(work), strict=True)
            for term in part
        )
        return replace(plan_memory(work, 0), terms=(*terms, bare), host_terms=())

    def time(self, work: Workload, machines: Machines) -> StepTime:
        """Of a step; without a GPU nothing hides behind anything: all of it takes the same cores."""
        if self.device != CPU:
            return step_time(work, machines)
        factors, parts = self.calibration.factors[CPU]["time"], step_parts(work, machines, self.probe)
        seconds = [factor * part for factor, part in zip(factors, parts, strict=True)]
        network = sum(seconds[STEPPED + 2 :])
        return StepTime(
            compute_seconds=sum(seconds[:STEPPED]),
            communication_seconds=network,
            exposed_communication_seconds=network,
            offload_seconds=0.0,
            processor_seconds=sum(seconds[STEPPED : STEPPED + 2]),
        )

    def interval(self, work: Workload, quantity: str, planned: float) -> tuple[float, float] | None:
        """Where runs lie of which so much `memory` or `time` is planned; None where it is not known.

        By runs of the same technique, device and family; of wider kinds where too few of that are known.
        """
        span = self.calibration.interval(self.device, work.technique.name, work.shape.family, quantity)
        bare = self.probe.process_bytes if quantity == "memory" and self.device == CPU else 0
        above = planned - bare if self.device == CPU else self.calibration.planned(self.device, quantity, [planned])
        return span and (bare + span[0] * above, bare + span[1] * above)


@lru_cache(maxsize=1024)
def resident_parts(work: Workload) -> list[list[Term]]:
    """Terms above the bare process by what a factor is fitted for; the second to the fourth are constants.

    Small blocks stay in the C library's heap once they were needed, so that states, gradients and layers add up. Large
    ones are given back: the loss comes before the embedding's gradients, and before the buffers of stages 1 and 2.
    """
    plan, shape, stage, together = plan_memory(work, 0), work.shape, work.technique.stage, work.ranks > 1
    kept = [term for term in (*plan.terms, *plan.host_terms) if term.part in STATES and term.name != LOADING]
    # No more of a buffer is resident than is written to: a model's gradients may leave most of it empty.
    whole = MASTER * shape.parameters
    buffers = [replace(term, bytes=min(term.bytes, whole)) for term in plan.terms if term.part == "buffers"]
    saved, later = Activations(work), total(buffers) if stage in (1, 2) else 0
    layers = Term("layers, and gradients of the one at work", saved.in_layers(), "as on a GPU", "activations")
    if stage == 0 and work.passes == 1:
        later = work.element_bytes * shape.embedding
    most = max(3 * saved.head - later, saved.tied_gradients)
    large = Term("the loss, or gradients of the embedding", most, "the larger of both", "activations")
    group = Term("process group", UNIT // 2, "a constant")
    # Each rank draws or loads the whole model first; what is large of it is given back.
    loaded = Term.of("what a load leaves, FP32", MASTER, shape.parameters - shape.embedding)
    return [
        [*kept, layers, *buffers, large],
        [Term("libraries that work has touched", UNIT, "a constant")],
        [group] if together else [],
        [replace(group, name="further groups of DeepSpeed")] if together and stage else [],
        [loaded] if stage == 3 else [],
    ]


def step_parts(work: Workload, machines: Machines, probe: MachineProbe) -> tuple[float, ...]:
    """Seconds at the machine's own rates, of processes that share its cores.

    Returns:
        Arithmetic of a T5; of a causal model; Python for each tensor; what DDP or ZeRO adds to it; what ZeRO-3 adds;
        the optimizer; new memory; the collectives' volume; their messages.
    """
    ranks, cores, passes, technique = work.ranks, probe.cores, work.passes, work.technique
    sharing = math.ceil(ranks / machines.hosts)
    busy, waits = min(cores, sharing * (machines.threads or cores)), max(1.0, sharing / cores)
    arithmetic = passes * sum(work.flops()) * sharing / probe.flops(work.precision, busy)
    once = passes * TENSOR_OPERATIONS * len(work.shape.weights) * probe.python_seconds * waits
    tensors = (1 + work.checkpointing) * once
    own = share(work.shape.parameters, ranks if technique.stage else 1)
    one_each = replace(machines, pods=ranks, slots=1, bandwidth=probe.bandwidth)
    latencies = (0.0, probe.latency_seconds)
    network = [traffic(work, replace(one_each, latency_seconds=each)) for each in latencies]
    reducing = passes if technique.stage in (2, 3) else 1
    volume, both = (passes * forward + reducing * backward + after for forward, backward, after in network)
    has_encoder = not work.shape.joint
    return (
        arithmetic * has_encoder,
        arithmetic * (not has_encoder),
        tensors,
        once * (technique.stage > 0 or ranks > 1),
        HOOKS * tensors * (technique.stage == 3),
        (ADAM_BYTES + CLIPPING_BYTES) * own * sharing / probe.bandwidth_of(busy),
        new_bytes(work) * waits / probe.new_memory_bandwidth,
        volume,
        max(0.0, both - volume),
    )


def new_bytes(work: Workload) -> int:
    """Bytes that a step without a GPU takes from the system anew; each of their pages costs a fault.

    They are the gradients of a large embedding, one for each use and their sum, and the loss's tensors; under DDP the
    other gradients; under ZeRO its copies of all gradients.
    """
    shape, tables = work.shape, 2 - work.shape.tied
    table, uses = work.element_bytes * shape.embedding // tables, 2 if shape.joint else 3
    # A head of its own has its own gradient, beside those of the table.
    summed = uses + 1 if shape.tied else uses + (uses > 2)
    head = Activations(work).head
    made = summed * table * (table > KEPT_BLOCK) + 3 * head * (head > KEPT_BLOCK)
    if work.technique.stage:
        return work.passes * made + NEW_COPIES * MASTER * shape.parameters
    others = work.element_bytes * (shape.parameters - shape.embedding)
    return work.passes * made + others * (work.ranks > 1)


# A recorded run: what is planned of it, and what it measured.


def planned(record: Record) -> PlannedMemory | None:
    """Memory of one process of a recorded run, by its largest batch, its shape and its DeepSpeed configuration.

    None where it cannot be planned. Without a GPU nothing is counted for CUDA.
    """
    work = recorded_work(record)
    context = CONTEXT_BYTES if any(rank.gpu for rank in record.ranks) else 0
    return None if work is None else plan_memory(work, context)


@lru_cache(maxsize=1)
def recorded_work(record: Record) -> Workload | None:
    """The largest batch of a recorded run, and how it was divided.

    None where that cannot be planned: another technique than `TECHNIQUES` (`custom`), a precision or a shape that is
    not known here, a configuration whose sizes are no numbers, a model that cannot be traced, or no rank that
    measured a batch.
    """
    measured = [(rank, rank.largest_batch) for rank in record.ranks if rank.shape and rank.largest_batch]
    # Older records give NVMe offload and ZeRO++ the name of the technique that they come from.
    if not measured or keys_beyond(record.deepspeed or {}):
        return None
    rank, batch = max(measured, key=lambda each: each[1].rows * (each[1].source_tokens + each[1].target_tokens))
    shape = shape_recorded(json.dumps(rank.shape))
    if shape is None or record.precision not in shape.precisions:
        return None
    tokens, labels = batch.source_tokens, batch.target_tokens
    if shape.joint:
        # Labels of the largest batch were not counted: they are taken to be as frequent in it as in all batches.
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
    """A finished run, to be fitted or judged; None for one that cannot be planned.

    Args:
        probe: that of its machine, for a run without a GPU.
    """
    largest = recorded_work(record)
    if largest is None or record.status != "ok":
        return None
    gpu, mean = record.ranks[0].gpu, mean_workload(record, largest)
    if gpu is None:
        hosts = len({rank.machine for rank in record.ranks})
        machines = Machines(pods=record.world_size, hosts=hosts, threads=record.identity.get("threads") or None)
        memory = tuple(map(total, resident_parts(largest)))
        time = step_parts(mean, machines, probe)
    else:
        machines = Machines(pods=record.pods, slots=record.slots, gpu=gpu)
        memory = (plan_memory(largest).device_bytes,)
        time = (step_time(mean, machines).seconds,)
    return Sample(
        technique=largest.technique.name,
        device=gpu or CPU,
        family=largest.shape.family,
        parts={"memory": memory, "time": time},
        measured={"memory": measured_memory(record), "time": measured_step(record)},
    )


def measured_memory(record: Record) -> float | None:
    """Peak of what a GPU had in use, of the fullest; without a GPU of resident memory, of the rank that needed most,
    above what it had when its process had loaded libraries."""
    if record.ranks[0].gpu is not None:
        return max((rank.sampled[USED].peak for rank in record.ranks if USED in rank.sampled), default=None)
    sampled = [(rank.peak_resident_bytes, rank.sampled.get("resident_bytes")) for rank in record.ranks]
    above = [peak - found.minimum for peak, found in sampled if peak is not None and found is not None]
    return max(above) if above and len(above) == len(sampled) else None


def measured_step(record: Record) -> float | None:
    """Median seconds of a step after warm-up, of the slowest rank."""
    medians = [rank.step_seconds.median for rank in record.ranks if rank.step_seconds and rank.step_seconds.median]
    return max(medians) if medians and len(medians) == len(record.ranks) else None


def mean_workload(record: Record, largest: Workload) -> Workload:
    """The mean batch of a run, by its tokens with padding."""
    batches = sum(rank.steps for rank in record.ranks) * record.gradient_accumulation_steps
    padded = sum(rank.padded_tokens for rank in record.ranks) / max(1, batches * largest.rows)
    whole = largest.tokens + (largest.labels if not largest.shape.joint else 0)
    tokens, labels = (max(1, round(padded / whole * each)) for each in (largest.tokens, largest.labels))
    return replace(largest, tokens=tokens, labels=labels) if padded else largest


# The plan of a finished run beside what it measured: peak memory and the time of a step.


class Judged(NamedTuple):
    """One quantity of one run: bytes of memory, or seconds of a step."""

    planned: float
    low: float | None
    high: float | None
    """The interval's ends; None where too few runs of the kind are known."""
    measured: float


KEYS = {"memory": ("plan_peak", "bytes"), "time": ("plan_step", "seconds")}
WHAT = Judged._fields
"""How the figures are called: `plan_peak_planned_bytes`."""
PLAN_KEYS = tuple(f"{name}_{what}_{unit}" for name, unit in KEYS.values() for what in WHAT)


def plan_figures(record: Record) -> dict[str, float | None]:
    """What a plan says of a run's peak memory and step, between which values runs of its kind lie, what it measured."""
    calibration, probe = kept(home())
    sample = sample_of(record, probe_for(record, probe or calibration.machine))
    found: dict[str, float | None] = dict.fromkeys(PLAN_KEYS)
    for quantity, (name, unit) in KEYS.items():
        measured = None if sample is None else sample.measured[quantity]
        if sample is not None and measured is not None:
            one = judge(sample, quantity, measured, calibration)
            found |= {f"{name}_{what}_{unit}": value for what, value in zip(WHAT, one, strict=True)}
    return found


def judge(sample: Sample, quantity: str, measured: float, calibration: Calibration) -> Judged:
    """A sample by a calibration that it may not be part of."""
    parts = sample.parts[quantity]
    by_runs = calibration.planned(sample.device, quantity, parts)
    low, high = calibration.interval(sample.device, sample.technique, sample.family, quantity) or (None, None)
    planned = by_runs if sample.device == CPU else sum(parts)
    return Judged(planned, low and low * by_runs, high and high * by_runs, measured)


def probe_for(record: Record, probe: MachineProbe) -> MachineProbe:
    """A probe as it is of the machine of a run: where that is another one, with the rates that the run measured."""
    first = record.rank_0
    if probe.is_of(record.hardware) or first is None or first.matmul_flops_per_second is None:
        return probe
    rate, precision = first.matmul_flops_per_second, record.precision
    # A record of before does not tell what one core does.
    is_known = precision in probe.matmul_flops_per_second
    alone = probe.flops(precision, 1) / probe.flops(precision) if is_known else 1.0
    return replace(
        probe,
        hardware=record.hardware,
        matmul_flops_per_second={precision: {"run": rate}},
        one_core_flops_per_second={precision: first.one_core_flops_per_second or alone * rate},
        python_seconds=first.python_seconds or probe.python_seconds,
    )


def fit_runs(folders: Iterable[Path], named: str, machine: MachineProbe | None) -> Calibration:
    """Fit to the finished runs among these run folders.

    Args:
        machine: that of the runs without a GPU; the kept one if not given.

    Raises:
        UserError: too few runs of which a plan can be made.
    """
    records = [read_record(folder) for folder in folders if (folder / RECORD).is_file()]
    calibration, kept_here = kept(home())
    probe = machine or kept_here or calibration.machine
    samples = [sample for record in records if (sample := sample_of(record, probe_for(record, probe)))]
    return fitted(samples, f"{len(samples)} runs of {named}", probe)


def kept(folder: Path) -> tuple[Calibration, MachineProbe | None]:
    """What is known of runs, and of this machine if it has no GPU; each file is read once, unless it changes."""
    paths = (folder / CALIBRATION, folder / MACHINE)
    return _kept(folder, tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths))


@lru_cache(maxsize=1)
def _kept(folder: Path, changed: tuple[int, ...]) -> tuple[Calibration, MachineProbe | None]:
    # A file that cannot be read, or of an earlier version, stops no summary and no new fit; `zeropods plan` names it.
    calibration, probe = read_calibration(SHIPPED), None
    with suppress(UserError):
        calibration = kept_calibration(folder)
    with suppress(UserError):
        probe = kept_probe(folder)
    return calibration, None if probe and probe.gpus else probe
