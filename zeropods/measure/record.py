"""The record of a run: its fields, its composition from the request and the ranks' measurements,
its strict reading."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar

from annotated_types import Ge

from zeropods import files
from zeropods.errors import UserError
from zeropods.tables import counted, digits
from zeropods.tasks import task_or_unknown
from zeropods.techniques import technique_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# Files of a run folder that other modules look for.

CONFIG = "config.json"
RECORD = "record.json"
LOCK = "run.lock"
"""Lock that rank 0 holds while the ranks run."""
LAUNCH_LOCK = "launch.lock"
"""Lock that the supervisor, where there is one, holds from before the first rank until the record
is written."""

Count = Annotated[int, Ge(1)]
T = TypeVar("T")

# What one rank measures, and its parts: the rows of a record.

PHASES = ("load", "first_step", "steady", "evaluate", "save")
"""Phases of a rank: until its first step, in that step (allocators warm up), in later steps, and
between steps."""
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic reads these dataclasses: no unknown keys, no conversions, no NaN."""


class StrictPart:
    """Base class of the parts of a record."""

    __pydantic_config__ = STRICT


@dataclass(kw_only=True)
class Loss(StrictPart):
    """One point of a loss curve."""

    step: int
    loss: float
    """Loss in nats per label token."""


@dataclass(kw_only=True)
class PhasePeak(StrictPart):
    """Time spent in a phase, and its true peaks, by counters of kernel and allocator that are reset
    when it begins."""

    seconds: float
    peak_resident_bytes: int | None
    """VmHWM; None where the kernel does not reset it."""
    peak_allocated_bytes: int | None
    """`torch.cuda.max_memory_allocated`; None without a GPU."""
    peak_reserved_bytes: int | None


@dataclass(kw_only=True)
class Statistics(StrictPart):
    """Statistics of many figures of one kind: samples of a column of `memory/N.csv`, or durations
    in seconds."""

    samples: int
    peak: float
    mean: float
    minimum: float
    p95: float
    """The 95th percentile."""
    median: float

    @property
    def total(self) -> float:
        """Sum of the figures, where all have the same weight."""
        return self.mean * self.samples

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> Statistics | None:
        """Statistics of figures; None where there are none. The median is the smallest figure that
        50 % of all figures, by weight, do not exceed; `p95` is the same for 95 %.

        Args:
            weights: weights of the figures in the mean, the median and `p95`, such as seconds; all
                the same if not given.
        """
        import numpy as np

        figures = np.asarray(values, dtype=float)
        if not figures.size:
            return None
        weight_array = None if weights is None else np.asarray(weights, dtype=float)
        quantiles = np.quantile(figures, (0.5, 0.95), weights=weight_array, method="inverted_cdf")
        median, p95 = quantiles.tolist()
        return cls(
            samples=figures.size,
            peak=float(figures.max()),
            mean=float(np.average(figures, weights=weight_array)),
            minimum=float(figures.min()),
            p95=p95,
            median=median,
        )


@dataclass(kw_only=True)
class LiveBytes(StrictPart):
    """Bytes of the model's tensors between a backward pass and the optimizer's step, on whatever
    device they are."""

    parameters: int
    gradients: int
    optimizer: int
    """Bytes of optimizer states, and of master weights where there are any."""

    @property
    def total(self) -> int:
        """Sum of all three."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(kw_only=True)
class MeasuredPrecision(StrictPart):
    """The number formats that the first step of an attempt ran in, as seen in its tensors: `fp32`,
    `bf16` or `fp16`.

    Where tensors of a kind have several formats, all are named: `bf16 and fp32`. None for what was
    not measured.
    """

    weights: str | None
    master_weights: str | None
    """Of the weights that the optimizer updates: FP32 masters of BF16 weights, or the weights
    themselves."""
    optimizer_states: str | None
    """Of both moments of AdamW."""
    gradients_sent: str | None
    """Of the gradients that a collective operation reduces over the ranks; None where there is only
    one rank."""
    linear_output: str | None
    """Of what the linear layers return."""

    @property
    def text(self) -> str:
        """The formats for people: that of the arithmetic, then those that differ from it, such as
        `bf16; master weights in fp32`."""
        main = self.linear_output or self.weights
        parts_by_format: dict[str, list[str]] = {}
        for part, number_format in vars(self).items():
            if number_format is not None and number_format != main:
                parts_by_format.setdefault(number_format, []).append(part.replace("_", " "))
        texts = [main or "not measured"]
        for number_format, parts in parts_by_format.items():
            texts.append(f"{', '.join(parts)} in {number_format}")
        return "; ".join(texts)


PRECISION_PARTS = tuple(part.name for part in fields(MeasuredPrecision))
"""Kinds of tensors whose format is measured."""


@dataclass(kw_only=True)
class BatchShape(StrictPart):
    """Size of a forward pass, padding included."""

    rows: int
    source_tokens: int
    """Number of tokens per row."""
    target_tokens: int
    """Number of tokens per row; 0 where a row is one text."""
    label_tokens: int
    """Number of tokens of all rows that carry a loss, padding left out."""


@dataclass(kw_only=True)
class RankMeasurement(StrictPart):
    """What one rank measured of its own attempt. A value that was not measured is None, never 0."""

    rank: int
    host: str
    machine: str | None = None
    """The kernel's boot id: it differs between machines, not between pods on one machine."""
    gpu: str | None = None
    """Name of its GPU; None on a CPU."""
    status: str = "failed"
    reason: str | None = None
    step: int = 0
    """Optimizer step that the run has reached, earlier attempts included."""
    first_step: int = 0
    """Optimizer step from which this attempt continued."""
    stopped_by: str | None = None
    """What ended the training: `steps`, `time` or `early_stopping`."""
    wall_seconds: float | None = None
    """Time from the process's start to the end of the attempt: start-up, steps, evaluation and
    saving."""
    start_seconds: float | None = None
    """Time from the process's start to the beginning of its first step."""
    warmup_steps: int = 1
    """Number of first steps that rates leave out."""
    warmup_seconds: float = 0.0
    """Wall time of those steps together."""
    step_seconds: Statistics | None = None
    """Wall time of each later optimizer step, including data loading but not evaluation and saving.
    `steps/N.npy` of the run folder has the wall time of every step."""
    evaluate_seconds: Statistics | None = None
    save_seconds: Statistics | None = None
    source_tokens: int = 0
    """Number of real tokens that were read, over all steps of this attempt, warm-up included."""
    target_tokens: int = 0
    """Number of tokens that carry a loss; in tasks whose rows are one text they are among those
    that were read."""
    padded_tokens: int = 0
    """Number of tokens of both sides, padding included, over the same steps."""
    largest_batch: BatchShape | None = None
    """The forward pass with the most tokens."""
    losses: list[Loss] = field(default_factory=list)
    """Mean loss per label token over all ranks, since the previous entry."""
    eval_losses: list[Loss] = field(default_factory=list)
    parameters: int | None = None
    """Number of parameters of the whole model, each counted once."""
    shape: dict[str, object] | None = None
    """The model's configuration as transformers writes it, by which a plan knows the model."""
    matmul_flops_per_second: float | None = None
    """FLOP/s of the best matrix multiplication on this rank's machine at the run's precision,
    measured before training by rank 0; None on other ranks."""
    phases: dict[str, PhasePeak] = field(default_factory=dict)
    """Time and peaks by phase, for those in `PHASES` that were reached."""
    sampled: dict[str, Statistics] = field(default_factory=dict)
    """Statistics by column of `memory/N.csv`, for the columns that contain numbers."""
    live_bytes: LiveBytes | None = None
    measured_precision: MeasuredPrecision | None = None
    """None where the first step was not finished."""
    energy_joules: float | None = None
    """Energy of its GPU from start to end, by NVML's own counter."""
    ended_unix_seconds: float | None = None
    """When this attempt ended, by this pod's clock."""
    peak_resident_bytes: int | None = None
    """The kernel's own peak of the process (VmHWM), over all phases."""
    peak_allocated_bytes: int | None = None
    """`torch.cuda.max_memory_allocated` over all phases; None where there is no GPU."""
    peak_reserved_bytes: int | None = None

    @property
    def steps(self) -> int:
        """Number of optimizer steps of this attempt."""
        return self.step - self.first_step

    @property
    def began_unix_seconds(self) -> float | None:
        """When the process of this attempt began, by this pod's clock; None where it did not reach
        its end."""
        if self.ended_unix_seconds is None or self.wall_seconds is None:
            return None
        return self.ended_unix_seconds - self.wall_seconds

    @property
    def train_seconds(self) -> float:
        """Seconds of the steps of this attempt."""
        later_seconds = self.step_seconds.total if self.step_seconds else 0.0
        return self.warmup_seconds + later_seconds

    def seconds_of_first(self, steps: int) -> float:
        """Seconds of the first `steps` steps of this attempt, of all where it did fewer, 0 where
        `steps` is below 0. A warm-up step takes the mean of those, a later one the mean of the
        later ones."""
        first_steps = min(steps, self.steps)
        warmup_steps = min(self.steps, self.warmup_steps)
        if first_steps <= warmup_steps:
            return self.warmup_seconds * max(0, first_steps) / max(1, warmup_steps)
        mean_seconds = self.step_seconds.mean if self.step_seconds else 0.0
        return self.warmup_seconds + (first_steps - warmup_steps) * mean_seconds

    def write(self, folder: Path) -> None:
        """Write `ranks/N.json` of a run folder."""
        files.write_json(folder / "ranks" / f"{self.rank}.json", asdict(self))


@dataclass(kw_only=True)
class RankExit(StrictPart):
    """How the process of a rank ended, as the process that started it saw it.

    A rank that is killed leaves no measurement; this is what is known of it (`measure/exits.py`).
    """

    rank: int
    host: str
    """The pod on which it ran, as in `RankMeasurement`."""
    pid: int
    status: int | None = None
    """Exit status, negative for a signal; None as long as the process runs."""
    ended_unix_seconds: float | None = None
    """When it ended, by its pod's clock."""


# The record: what was asked for, how it ended, and what every rank measured.

SCHEMA_VERSION: Final = 3
Status = Literal["ok", "oom", "failed", "timeout", "interrupted", "pod_lost"]


@dataclass(kw_only=True)
class RunConfig(StrictPart):
    """`config.json`: what was asked for, and what it runs on."""

    schema_version: Literal[3]
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
    slots: Count
    world_size: Count
    precision: str
    """The precision that was asked for; `Record.measured_precision` is the one that ran."""
    prompt: str | None
    per_device_train_batch_size: Count
    gradient_accumulation_steps: Count
    effective_batch_size: int
    gradient_checkpointing: bool
    train_rows: int
    dev_rows: int | None
    dataset: dict[str, str]
    deepspeed: dict[str, Any] | None
    """The effective DeepSpeed configuration."""
    identity: dict[str, Any]
    """What must be equal for two calls to mean the same run."""
    argv: list[str]
    hosts: list[str]
    """Pods in the order of their ranks, each once."""
    versions: dict[str, str | None]
    git_revision: str | None
    hardware: dict[str, Any]
    device: Literal["cuda", "cpu"] | None
    """What the ranks trained on; None where they had not come so far as to say it."""

    @property
    def technique_text(self) -> str:
        """The technique for people; a custom one with the keys of its configuration that make it
        custom."""
        return technique_text(self.technique, self.deepspeed)


@dataclass(kw_only=True)
class Record(RunConfig):
    """`record.json`: what was asked for, how it ended, and what every rank measured."""

    restarts: int = 0
    """How many times the last launch had restarted by itself."""
    status: Status
    reason: str | None
    pod: str | None
    rank: int | None = None
    """The rank that began the end; None where all ended well, or where it was not a rank."""
    last_lines: list[str]
    """The last lines that this rank wrote; those of its pod, or of the run, where they are not
    known."""
    exits: list[RankExit] = field(default_factory=list)
    """How the ranks' processes ended, in the order of their ends, as far as it was seen."""
    steps: int
    train_seconds: float | None
    samples_per_second: float | None
    losses: list[Loss]
    eval_losses: list[Loss]
    ranks: list[RankMeasurement]
    measured_precision: MeasuredPrecision | None = None
    """The number formats that ran. Where ranks differ in one, it names them: `bf16 on rank 0; fp32
    on rank 1`."""

    __hash__ = object.__hash__
    """Hash by identity, so that what was planned last for a record can be cached."""

    @property
    def rank_0(self) -> RankMeasurement | None:
        """What rank 0 measured; None where it left nothing."""
        for rank in self.ranks:
            if rank.rank == 0:
                return rank
        return None

    @property
    def matmul_flops_per_second(self) -> float | None:
        """FLOP/s of the best matrix multiplication that rank 0 measured, on its one device."""
        rank = self.rank_0
        return None if rank is None else rank.matmul_flops_per_second

    def to_json(self) -> dict[str, object]:
        """The document of `record.json`."""
        return asdict(self)


def read_record(folder: Path, attempt: int | None = None) -> Record:
    """The record of a run folder, validated.

    Args:
        attempt: number of an earlier attempt, whose record was put aside; the last attempt if not
            given.

    Raises:
        UserError: there is no record, or something is wrong with it; the message has file, key,
            value and remedy.
    """
    name = RECORD if attempt is None else f"attempts/{attempt}.json"
    path = Path(folder) / name
    if not path.is_file():
        raise UserError(
            f"{folder}: no {path.name}: there is no run, or it is still running or was killed"
        )
    return _read_as(Record, path)


def read_config(folder: Path) -> RunConfig:
    """The configuration of a run, also of one that has no record yet; `UserError` says what is
    wrong with it."""
    return _read_as(RunConfig, Path(folder) / CONFIG)


def read_rank(path: Path) -> RankMeasurement:
    """The measurement that a rank wrote into `ranks/N.json`; `UserError` says what is wrong with
    it."""
    return _read_as(RankMeasurement, path)


def _read_as(kind: type[T], path: Path) -> T:
    """A document of a run folder, validated strictly; `UserError` says what is wrong with it."""
    content = path.read_bytes()
    try:
        return files.validated(kind, path, content, "run it again")
    except UserError:
        # Of a file that is not even a JSON object this says so, and running again would not help.
        document = files.validated(dict[str, Any], path, content, "move the run folder away")
        version = document.get("schema_version")
        if issubclass(kind, RunConfig) and version != SCHEMA_VERSION:
            # Any field may differ in another version, so the version says more than the first
            # field that does.
            raise UserError(
                f"{path}: schema_version {version!r}; this version reads {SCHEMA_VERSION}: "
                "run it again"
            ) from None
        raise


def closing_line(folder: Path, record: Record, scored: str = "", *, ends_here: bool = False) -> str:
    """The results of a run that ended well, in one line, and the command to call next.

    Args:
        scored: the score of the run's answers, in words; empty where there is none yet.
        ends_here: leave out the next command.
    """
    results = [counted(record.steps, "step")]
    if record.losses:
        results.append(f"loss {record.losses[-1].loss:.4g}")
    if record.eval_losses:
        results.append(f"dev loss {record.eval_losses[-1].loss:.4g}")
    if scored:
        results.append(scored)
    rate = record.samples_per_second
    if rate is None:
        results.append(no_rate(record))
    else:
        results.append(f"{digits(rate)} samples/s")
    line = f"{record.status}: {', '.join(results)}; {folder}"
    if ends_here:
        return line
    run = shlex.quote(str(folder))
    if scored or not task_or_unknown(record.task).has_answers:
        summary = shlex.quote(f"{folder}-summary")
        return f"{line}; next: zeropods summary {run} --out {summary}"
    return f"{line}; next: zeropods predict --model {run} --score"


def no_rate(record: Record) -> str:
    """Why a run that ended well has no samples/s, in a few words, with the remedy."""
    warmup = max((rank.warmup_steps for rank in record.ranks), default=1)
    steps = max((rank.steps for rank in record.ranks), default=0)
    # With the profiler, all steps up to the profiled one are warm-up; without it, the first one is.
    last_warmup = "" if warmup == 1 else " up to the profiled one"
    remedy = f"{warmup + 1} or more give samples/s"
    return f"only {counted(steps, 'step')}, all warm-up{last_warmup}: {remedy}"


def reason_with_pod(record: Record) -> str:
    """Why a run did not end well, with the pod's name first unless the reason begins with it."""
    reason = record.reason or ""
    if record.pod is None or reason.startswith(record.pod):
        return reason
    return f"{record.pod}: {reason}"


def write_record(folder: Path, record: Record) -> None:
    """Write `record.json`: the last thing that a run does."""
    files.write_json(folder / RECORD, record.to_json())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder; `UserError` if the file is damaged."""
    return files.read_object(path, "move the run folder away")


# How a record is composed, from config.json and ranks/N.json.

CAUSES = ("oom", "failed", "timeout", "pod_lost", "interrupted", "ok")
"""Statuses, from those that end a run by themselves to those that follow from another rank's
end."""


def compose_record(
    folder: Path,
    *,
    status: str | None = None,
    reason: str | None = None,
    pod: str | None = None,
    rank: int | None = None,
    last_lines: Sequence[str] = (),
    exits: Sequence[RankExit] = (),
    restarts: int = 0,
) -> Record:
    """Compose the record of the last attempt of a run folder, and write nothing; this is the only
    place where a record is made.

    Args:
        status: one of `CAUSES`; overrules what the ranks say (a supervisor knows that a pod was
            lost).
        reason: the reason, where `status` is given.
        pod: the pod that the reason is about.
        rank: the rank that the reason is about, where `status` is given.
        last_lines: the last lines of that rank or of the log, where the run did not end well.
        exits: how the ranks' processes ended, as far as it was seen.
        restarts: how many times the launch had restarted by itself.

    Raises:
        UserError: `config.json` or a rank's measurement cannot be read.
    """
    config = read_config(folder)
    files_of_ranks = sorted((folder / "ranks").glob("*.json"), key=lambda path: int(path.stem))
    ranks = [read_rank(path) for path in files_of_ranks]
    if status is None:
        status, reason, rank = _outcome_of(ranks, config.world_size)
    return Record(
        **vars(config),
        restarts=restarts,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        pod=pod,
        rank=rank,
        last_lines=list(last_lines),
        exits=list(exits),
        steps=max((measured.step for measured in ranks), default=0),
        train_seconds=train_seconds(ranks),
        samples_per_second=samples_per_second(ranks, config.effective_batch_size),
        # All ranks have the same losses: the record has them once.
        losses=ranks[0].losses if ranks else [],
        eval_losses=ranks[0].eval_losses if ranks else [],
        ranks=[replace(measured, losses=[], eval_losses=[]) for measured in ranks],
        measured_precision=precision_of_ranks(ranks),
    )


class _Outcome(NamedTuple):
    """How a run ended."""

    status: str
    reason: str | None
    rank: int | None
    """The rank that the reason is about."""


def _outcome_of(ranks: Sequence[RankMeasurement], world_size: int) -> _Outcome:
    """How a run of `world_size` ranks ended, judging by the measurements that its ranks left and
    by nothing else."""
    missing_ranks = sorted(set(range(world_size)) - {measured.rank for measured in ranks})
    first_failed = first_failure(ranks)
    if missing_ranks and first_failed is not None and lost_connection(first_failed.reason):
        # All that failed lost a connection, so a rank that left nothing ended before them.
        reason = f"rank {missing_ranks[0]} left no measurement: {UNSAID}"
        return _Outcome("failed", reason, missing_ranks[0])
    if first_failed is not None:
        who = f"rank {first_failed.rank} on {first_failed.host}: " if world_size > 1 else ""
        return _Outcome(first_failed.status, f"{who}{first_failed.reason}", first_failed.rank)
    if missing_ranks:
        reason = f"{len(missing_ranks)} of {world_size} ranks left no measurement"
        return _Outcome("failed", reason, missing_ranks[0])
    return _Outcome("ok", None, None)


def first_failure(ranks: Sequence[RankMeasurement]) -> RankMeasurement | None:
    """The rank that began the end: others fail because it is gone, or are stopped. None where all
    ended well."""

    def order(rank: RankMeasurement) -> tuple[bool, int, float]:
        # Clocks of pods may differ, so times only decide between ranks with the same status.
        ended = rank.ended_unix_seconds or 0.0
        return lost_connection(rank.reason), CAUSES.index(rank.status), ended

    failed = [rank for rank in ranks if rank.status != "ok"]
    return min(failed, key=order, default=None)


UNSAID = "it was killed, or ended without saying why"
"""What is said of a rank of which nothing is known but that it is gone."""
LOST_CONNECTION = re.compile(
    r"""^(?:\[rank\d+\]:\ )?(?:[\w.]*\.)?(?:RuntimeError:|Dist\w*Error:|\s*what\(\):)\ .*(?:
        # gloo (gloo/transport/tcp/pair.cc)
        Connection\ closed\ by\ peer
        | Connection\ reset\ by\ peer
        | Connection\ refused
        | Connection\ timed\ out
        | Broken\ pipe
        | Application\ timeout\ caused\ pair\ closure
        | Timed\ out\ waiting
        | Socket\ Timeout
        | No\ route\ to\ host
        | Network\ is\ unreachable
        # torch's key-value store (TCPStore.cpp, socket.cpp)
        | Connection\ was\ likely\ closed
        | recvValue\ failed
        | sendBytes\ failed
        | wait\ timeout\ after
        | client\ socket\ has\ (?:timed\ out|failed\ to\ connect)
        # NCCL
        | remote\ process\ exited
        | closed\ by\ remote\ peer
        | NCCL\ communicator\ (?:was\ aborted|encountered)
        | ncclRemoteError
        | Watchdog\ caught\ collective\ operation\ timeout
    )""",
    re.VERBOSE | re.DOTALL,
)
"""Matches what torch (2.13) says where a rank lost its connection to another one: the other one's
end came first.

An error of Python's own sockets, such as `ConnectionResetError`, is a rank's own, since torch
raises none.
"""


def lost_connection(reason: str | None) -> bool:
    """Whether a reason only says that a rank lost its connection to others."""
    return reason is not None and LOST_CONNECTION.search(reason) is not None


# Figures that a record contains although they follow from what its ranks measured.
#
# Seconds, rate and precision are stored, and so computed here, for those who read a record without
# a summary: the line with which a run ends, a sweep, whoever opens `record.json`. All other figures
# follow in `report/formulas.py`.


def precision_of_ranks(ranks: Sequence[RankMeasurement]) -> MeasuredPrecision | None:
    """The number formats that the ranks measured; None where no rank did. Where ranks differ in
    one, it names them: `bf16 on rank 0; fp32 on rank 1`."""
    precision_by_rank = {}
    for measured in ranks:
        if measured.measured_precision is not None:
            precision_by_rank[measured.rank] = measured.measured_precision
    if not precision_by_rank:
        return None
    formats = dict[str, str | None]()
    for part in PRECISION_PARTS:
        ranks_by_format: dict[str, list[int]] = {}
        for rank, precision in precision_by_rank.items():
            number_format = getattr(precision, part)
            if number_format is not None:
                ranks_by_format.setdefault(number_format, []).append(rank)
        formats[part] = _named_by_rank(ranks_by_format)
    return MeasuredPrecision(**formats)


def _named_by_rank(ranks_by_format: Mapping[str, Sequence[int]]) -> str | None:
    """The only format, or each format with its ranks; None for no format."""
    if len(ranks_by_format) <= 1:
        return next(iter(ranks_by_format), None)
    parts = []
    for number_format, numbers in ranks_by_format.items():
        word = "rank" if len(numbers) == 1 else "ranks"
        parts.append(f"{number_format} on {word} {', '.join(map(str, numbers))}")
    return "; ".join(parts)


def train_seconds(ranks: Sequence[RankMeasurement]) -> float | None:
    """Seconds of all optimizer steps of the slowest rank, evaluation and saving left out; None
    without a step."""
    return max((rank.train_seconds for rank in ranks), default=0.0) or None


def samples_per_second(ranks: Sequence[RankMeasurement], effective_batch_size: int) -> float | None:
    """Training samples per second of all ranks together, over the steps after warm-up, by the
    slowest rank's clock; None where not every rank timed a step."""
    means = [rank.step_seconds.mean for rank in ranks if rank.step_seconds]
    all_were_timed = len(means) == len(ranks)
    if not ranks or not all_were_timed:
        return None
    return effective_batch_size / max(means)


def real_tokens(rank: RankMeasurement, task: str) -> int:
    """Number of tokens without padding, over all steps of an attempt: source and target, or all of
    a text."""
    if task_or_unknown(task).is_one_text:
        # The tokens that carry a loss are among those that were read.
        return rank.source_tokens
    return rank.source_tokens + rank.target_tokens
