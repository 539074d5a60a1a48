"""The record of a run: what it holds, composed from what was asked and what each rank measured, read back strictly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from zeropods import files
from zeropods.errors import UserError
from zeropods.techniques import technique_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

# What one rank measures, and its parts: the rows of a record.

PHASES = ("load", "first_step", "steady", "evaluate", "save")
"""What a rank is doing: until its first step, in that one (allocators warm up), in later ones, and between them."""
REMEDY = "put the run folder aside"
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic reads these dataclasses: nothing unknown, nothing converted, no NaN."""


@dataclass(kw_only=True)
class Loss:
    """One point of a loss curve."""

    __pydantic_config__ = STRICT

    step: int
    loss: float
    """Nats a label token."""


@dataclass(kw_only=True)
class PhasePeak:
    """Time spent in a phase, and its true peaks: counters of kernel and allocator, reset when it begins."""

    __pydantic_config__ = STRICT

    seconds: float
    peak_resident_bytes: int | None
    """VmHWM; None where the kernel does not reset it."""
    peak_allocated_bytes: int | None
    """`torch.cuda.max_memory_allocated`; None without a GPU."""
    peak_reserved_bytes: int | None


@dataclass(kw_only=True)
class Sampled:
    """Statistics of one column of `memory/N.csv`, as a log of `nvidia-smi` would give them."""

    __pydantic_config__ = STRICT

    samples: int
    peak: float
    mean: float
    minimum: float
    p95: float | None = None
    """The 95th percentile; None in records from before it was kept."""


@dataclass(kw_only=True)
class LiveBytes:
    """Bytes of the model's tensors between a backward pass and the optimizer's step, on whatever device they lie."""

    __pydantic_config__ = STRICT

    parameters: int
    gradients: int
    optimizer: int
    """States, and master weights where there are any."""


@dataclass(kw_only=True)
class BatchShape:
    """A forward pass, padding included."""

    __pydantic_config__ = STRICT

    rows: int
    source_tokens: int
    """A row."""
    target_tokens: int
    """A row; 0 where a row is one text."""


@dataclass(kw_only=True)
class RankMeasurement:
    """What one rank measured of its own attempt. Absent is None, never 0."""

    __pydantic_config__ = STRICT

    rank: int
    host: str
    machine: str | None = None
    """Differs between machines, not between pods of one: the kernel's boot id."""
    gpu: str | None = None
    """Name of its GPU; None on a CPU."""
    status: str = "failed"
    reason: str | None = None
    step: int = 0
    """Optimizer step that the run has reached, earlier attempts included."""
    first_step: int = 0
    """Optimizer step from which this attempt went on."""
    stopped_by: str | None = None
    """`steps`, `time` or `early_stopping`."""
    wall_seconds: float | None = None
    """From the process's start to the end of the attempt: start-up, steps, evaluation and saving."""
    start_seconds: float | None = None
    """From the process's start to its first step."""
    step_seconds: list[float] = field(default_factory=list)
    """Wall time of each optimizer step, data loading included, evaluation and saving not."""
    warmup_steps: int = 1
    """How many of the first steps a rate leaves out."""
    evaluate_seconds: list[float] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)
    source_tokens: int = 0
    """Real tokens that were read, over the steps that were timed."""
    target_tokens: int = 0
    """Tokens that carry a loss; in the tasks of `ONE_TEXT` they are among those that were read."""
    padded_tokens: int = 0
    """Tokens of both sides with padding, over the same steps."""
    largest_batch: BatchShape | None = None
    """The forward pass with the most tokens."""
    losses: list[Loss] = field(default_factory=list)
    """Mean loss a label token over all ranks, since the entry before."""
    eval_losses: list[Loss] = field(default_factory=list)
    parameters: int | None = None
    """Of the whole model, each counted once."""
    shape: dict[str, int | str | bool] | None = None
    """Its architecture as `plan.shapes` has it; None for one that the project does not know."""
    matmul_flops_per_second: float | None = None
    """The best matrix multiplication of this rank's machine at the run's precision, measured before training by
    rank 0; None on other ranks."""
    phases: dict[str, PhasePeak] = field(default_factory=dict)
    """By name, of those in `PHASES` that were reached."""
    sampled: dict[str, Sampled] = field(default_factory=dict)
    """By column of `memory/N.csv`, of those that hold numbers."""
    live_bytes: LiveBytes | None = None
    energy_joules: float | None = None
    """Of its GPU from start to end, by NVML's own counter."""
    ended_unix_seconds: float | None = None
    """When this attempt ended, by this pod's clock."""
    peak_resident_bytes: int | None = None
    """The kernel's own peak of the process (VmHWM), over all phases."""
    peak_allocated_bytes: int | None = None
    """`torch.cuda.max_memory_allocated` over all phases; None where there is no GPU."""
    peak_reserved_bytes: int | None = None

    def write(self, folder: Path) -> None:
        """Write `ranks/N.json` of a run folder."""
        files.write_json(folder / "ranks" / f"{self.rank}.json", asdict(self))


# The record: what was asked for, how it ended, and what every rank measured.

SCHEMA_VERSION = 2
NO_NUMBERS = {"family": str, "tied": bool}
"""Fields of a shape that are no whole numbers."""
PARTS: tuple[tuple[str, str, type], ...] = (
    ("deepspeed", "zero_optimization", dict),
    ("deepspeed", "flops_profiler", dict),
    ("hardware", "gpus", list),
)
"""Parts by which runs are compared, and their types."""
Status = Literal["ok", "oom", "failed", "timeout", "interrupted", "pod_lost"]


@dataclass(kw_only=True)
class RunConfig:
    """`config.json`: what was asked for, and on what it runs."""

    __pydantic_config__ = STRICT

    schema_version: Literal[2]
    run_id: str
    attempt: int
    """Number of earlier attempts."""
    started_at: str
    """Start of the last attempt, ISO 8601, UTC."""
    task: str
    model_id: str
    init: str
    """`pretrained`, `random`, or the name of the run whose model it began with."""
    technique: str
    pods: int
    slots: int
    world_size: int
    precision: str
    prompt: str | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    gradient_checkpointing: bool
    train_rows: int
    dev_rows: int | None
    dataset: dict[str, str]
    deepspeed: dict[str, Any] | None
    """The effective configuration."""
    identity: dict[str, Any]
    """What must be equal for two calls to mean the same run."""
    argv: list[str]
    hosts: list[str]
    """Pods in the order of their ranks, each once."""
    versions: dict[str, str | None]
    git_revision: str | None
    hardware: dict[str, Any]

    @property
    def technique_text(self) -> str:
        """The technique for people: of a custom one with the keys of its configuration that make it so."""
        return technique_text(self.technique, self.deepspeed)


@dataclass(kw_only=True)
class Record(RunConfig):
    """`record.json`: what was asked for, how it ended, and what every rank measured."""

    restarts: int = 0
    """How many times the last launch had gone on by itself."""
    status: Status
    reason: str | None
    pod: str | None
    last_lines: list[str]
    steps: int
    train_seconds: float | None
    samples_per_second: float | None
    losses: list[Loss]
    eval_losses: list[Loss]
    ranks: list[RankMeasurement]

    def to_json(self) -> dict[str, object]:
        """The document of `record.json`."""
        return asdict(self)


def read_record(folder: Path, attempt: int | None = None) -> Record:
    """The record of a run folder, its form and its arithmetic checked.

    Args:
        attempt: number of an earlier attempt, whose record was put aside; the last one if not given.

    Raises:
        UserError: there is none, or what is wrong with it: file, key, value, remedy.
    """
    path = Path(folder) / ("record.json" if attempt is None else f"attempts/{attempt}.json")
    if not path.is_file():
        raise UserError(f"{folder}: no {path.name}: no run there, or one that is running or was killed")
    record = _read_as(Record, path)
    fault = next(_contradictions(record), None)
    if fault is not None:
        raise UserError(f"{path}: {fault}; it was changed after the run, or written by something else: run it again")
    return record


def read_config(folder: Path) -> RunConfig:
    """What was asked for, also of a run that has no record yet; `UserError` says what is wrong with it."""
    return _read_as(RunConfig, Path(folder) / "config.json")


def read_rank(path: Path) -> RankMeasurement:
    """What a rank has written into `ranks/N.json`; `UserError` says what is wrong with it."""
    return _read_as(RankMeasurement, path)


def write_record(folder: Path, record: Record) -> None:
    """Write `record.json`: the last thing that a run does."""
    files.write_json(folder / "record.json", record.to_json())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder; `UserError` if the file is damaged."""
    return files.read_object(path, REMEDY)


def _read_as(kind: type[T], path: Path) -> T:
    """A document of a run folder, validated strictly."""
    content = path.read_bytes()
    document = files.json_object(str(path), content, REMEDY)
    version = document.get("schema_version")
    if issubclass(kind, RunConfig) and version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version {version!r}; this version reads {SCHEMA_VERSION}: run it again")
    found = validated(kind, path, content, "run it again")
    fault = next(_faults(document), None)
    if fault is not None:
        raise UserError(f"{path}: {fault}: run it again")
    return found


def validated(kind: type[T], path: Path, content: bytes, remedy: str) -> T:
    """A dataclass of the JSON in a file, by pydantic; `UserError` says the first fault: file, key, value, remedy."""
    from pydantic import ValidationError

    try:
        # JSON, since a strict dataclass takes no dictionary from Python.
        found: T = _adapter(kind).validate_json(content)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or path.name
        shown = "" if first["type"] in ("missing", "json_invalid") else f" is {first['input']!r:.60}"
        raise UserError(f"{path}: {place}{shown}: {first['msg']}; {remedy}") from None
    return found


def _faults(document: dict[str, Any]) -> Iterator[str]:
    """What the types do not say: keys that a rank must have although they have a default; parts of dictionaries."""
    for place, name, kind in PARTS:
        value = (document.get(place) or {}).get(name)
        if value is not None and not isinstance(value, kind):
            yield f"{place}.{name} is {value!r:.60}; expected {kind.__name__}"
    for rank in document.get("ranks", ()):
        for name in sorted({each.name for each in fields(RankMeasurement)} - rank.keys()):
            yield f"ranks.{rank['rank']}.{name}: missing"
        for name, value in (rank["shape"] or {}).items():
            if type(value) is not NO_NUMBERS.get(name, int):
                yield f"ranks.{rank['rank']}.shape.{name} is {value!r:.60}"


@cache
def _adapter(kind: type[object]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# How a record is composed, from config.json and ranks/N.json.

CAUSES = ("oom", "failed", "timeout", "pod_lost", "interrupted", "ok")
"""Statuses from what ends a run by itself to what follows from it."""


def compose_record(
    folder: Path,
    *,
    status: str | None = None,
    reason: str | None = None,
    pod: str | None = None,
    last_lines: Sequence[str] = (),
    restarts: int = 0,
) -> Record:
    """The record of the last attempt of a run folder; the one place where a record is made.

    Args:
        status: overrules what the ranks say (a supervisor knows that a pod was lost).
        reason: why, where `status` is given.
        pod: the pod that it is about.
        last_lines: what was written last, where the run did not end well.
        restarts: how many times the launch had gone on by itself.
    """
    config = read_config(folder)
    ranks = [read_rank(path) for path in sorted((folder / "ranks").glob("*.json"), key=lambda p: int(p.stem))]
    if status is None:
        status, reason = _status(ranks, config.world_size)
    return Record(
        **vars(config),
        restarts=restarts,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        pod=pod,
        last_lines=list(last_lines),
        steps=max((rank.step for rank in ranks), default=0),
        train_seconds=train_seconds(ranks),
        samples_per_second=samples_per_second(ranks, config.effective_batch_size),
        losses=ranks[0].losses if ranks else [],
        eval_losses=ranks[0].eval_losses if ranks else [],
        ranks=ranks,
    )


def first_failure(ranks: Sequence[RankMeasurement]) -> RankMeasurement | None:
    """The rank that began the end: the others fail because it is gone, or are stopped. None where all went well."""
    ended = [rank for rank in ranks if rank.status != "ok"]
    return min(ended, key=lambda rank: (CAUSES.index(rank.status), rank.ended_unix_seconds or 0.0), default=None)


def _status(ranks: Sequence[RankMeasurement], world_size: int) -> tuple[str, str | None]:
    first = first_failure(ranks)
    if first is not None:
        place = f"rank {first.rank} on {first.host}: " if world_size > 1 else ""
        return first.status, f"{place}{first.reason}"
    if len(ranks) < world_size:
        return "failed", f"{world_size - len(ranks)} of {world_size} ranks left no measurement"
    return "ok", None


# Figures that a record holds although they follow from what its ranks measured.

ONE_TEXT = ("squad", "lm")
"""Tasks whose row is one text: the tokens that carry a loss are among those that were read."""


def train_seconds(ranks: Sequence[RankMeasurement]) -> float | None:
    """Seconds of all optimizer steps of the slowest rank, evaluation and saving left out; None without a step."""
    return max((sum(rank.step_seconds) for rank in ranks), default=0.0) or None


def samples_per_second(ranks: Sequence[RankMeasurement], effective_batch_size: int) -> float | None:
    """Training samples per second of all ranks together, over the steps after warm-up, by the slowest rank's clock."""
    timed = [rank.step_seconds[rank.warmup_steps :] for rank in ranks]
    if not timed or not min(map(len, timed)):
        return None
    return min(effective_batch_size * len(steps) / sum(steps) for steps in timed)


def real_tokens(rank: RankMeasurement, task: str) -> int:
    """Tokens without padding, over the steps that were timed: source and target, or all of a text."""
    return rank.source_tokens + (0 if task in ONE_TEXT else rank.target_tokens)


# A record's figures against one another: what contradicts itself is not shown as a result.

RELATIVE = 1e-9


def _contradictions(record: Record) -> Iterator[str]:
    """Counts and rates that do not follow from what the ranks measured."""
    yield from _processes(record)
    yield from _steps(record)
    yield from _rates(record)


def _processes(record: Record) -> Iterator[str]:
    world, ranks = record.world_size, [rank.rank for rank in record.ranks]
    if world != record.pods * record.slots:
        yield f"world_size {world}, pods x slots {record.pods} x {record.slots}"
    batch = record.per_device_train_batch_size * record.gradient_accumulation_steps * world
    if record.effective_batch_size != batch:
        yield f"effective_batch_size {record.effective_batch_size}, rows x passes x processes give {batch}"
    if ranks != sorted(set(ranks) & set(range(world))):
        yield f"ranks {ranks}, world_size {world}"
    if record.status == "ok" and len(ranks) != world:
        yield f"status ok with {len(ranks)} of {world} ranks"
    for rank in record.ranks:
        if record.status == "ok" != rank.status:
            yield f"status ok, rank {rank.rank} says {rank.status}"


def _steps(record: Record) -> Iterator[str]:
    for rank in record.ranks:
        timed, shortest = len(rank.step_seconds), min(rank.step_seconds, default=0.0)
        if shortest < 0:
            yield f"rank {rank.rank}: a step took {shortest} s"
        if rank.step - rank.first_step != timed:
            yield f"rank {rank.rank}: steps {rank.first_step} to {rank.step}, {timed} times"
        if rank.padded_tokens < real_tokens(rank, record.task):
            yield f"rank {rank.rank}: padded_tokens {rank.padded_tokens}, fewer than the real ones"
    reached = max((rank.step for rank in record.ranks), default=0)
    if record.steps != reached:
        yield f"steps {record.steps}, its ranks reached {reached}"
    for key, losses in (("losses", record.losses), ("eval_losses", record.eval_losses)):
        steps = [loss.step for loss in losses]
        if any(later < earlier for earlier, later in pairwise(steps)) or any(step > reached for step in steps):
            yield f"{key}: steps {steps[:6]} do not rise to at most {reached}"


def _rates(record: Record) -> Iterator[str]:
    ranks = record.ranks
    for key, said, expected in (
        ("train_seconds", record.train_seconds, train_seconds(ranks)),
        ("samples_per_second", record.samples_per_second, samples_per_second(ranks, record.effective_batch_size)),
    ):
        if not _equal(said, expected):
            yield f"{key} {said}, its ranks' steps give {expected}"


def _equal(said: float | None, computed: float | None) -> bool:
    if said is None or computed is None:
        return said is computed
    return math.isclose(said, computed, rel_tol=RELATIVE)
