"""What one rank measures, and its parts: the rows of a record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from zeropods import atomic

PHASES = ("load", "first_step", "steady", "evaluate", "save")
"""What a rank is doing: until its first step, in that one (allocators warm up), in later ones, and between them."""
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
    """Tokens that carry a loss; in the tasks of `measure.tokens.ONE_TEXT` they are among those that were read."""
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
    """Its architecture as `plan.shapes` has it, or with a `family` `plan.causal_shapes`; None for one that the project
    does not know."""
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
        atomic.write_json(folder / "ranks" / f"{self.rank}.json", asdict(self))
