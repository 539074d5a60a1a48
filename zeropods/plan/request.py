"""What is asked of a plan, checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zeropods.errors import UserError
from zeropods.plan.job import Job
from zeropods.plan.machines import GIGA, TERA, Machines
from zeropods.plan.parameters import BYTES
from zeropods.plan.shapes import t5_shape
from zeropods.plan.technique import TECHNIQUES, Technique, technique_named
from zeropods.plan.zero_settings import ZeroSettings

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, a batch, machines. Memory is in bytes, rates are a second."""

    model: str
    """A known shape, with or without an organisation before it."""
    batch_size: int = 32
    """Rows of one process."""
    source_length: int = 96
    """Tokens a row, padding included."""
    target_length: int = 96
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    machines: Machines = field(default_factory=Machines)
    gpu_memory_bytes: int = 40 * GIB
    host_memory_bytes: int | None = None
    """Of a pod, for all its processes; None: not checked."""
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    techniques: tuple[str, ...] = ()
    """By name; all if there are none."""
    price_per_hour: float | None = None
    """Of one pod, in any currency."""
    steps: int | None = None
    """Optimizer steps of the whole training."""
    samples: int | None = None
    """Of the training set; with `epochs` in place of `steps`."""
    epochs: float = 1.0

    def __post_init__(self) -> None:
        fault = next(self._faults(), None)
        if fault is not None:
            raise UserError(fault)

    def job(self, batch_size: int | None = None) -> Job:
        """What one process trains on, with this batch or another."""
        return Job(
            shape=t5_shape(self.model),
            rows=batch_size or self.batch_size,
            source_tokens=self.source_length,
            target_tokens=self.target_length,
            precision=self.precision,
            checkpointing=self.gradient_checkpointing,
        )

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques to plan, in their own order."""
        asked = {technique_named(name).name for name in self.techniques}
        return tuple(technique for technique in TECHNIQUES if not asked or technique.name in asked)

    def _faults(self) -> Iterator[str]:
        if self.precision not in BYTES:
            yield f"--precision {self.precision}; expected {' or '.join(BYTES)}"
        for flag, value in self._numbers():
            if value is not None and not value > 0:
                yield f"--{flag} {value:g}; expected more than 0"
        if self.machines.latency_seconds < 0:
            yield f"--latency {self.machines.latency_seconds:g}; expected 0 seconds or more"
        if self.samples is None and self.epochs != 1:
            yield f"--epochs {self.epochs:g} without --samples; give both, or --steps"
        if self.steps is not None and self.samples is not None:
            yield f"--steps {self.steps} and --samples {self.samples}; give one of them"

    def _numbers(self) -> Iterator[tuple[str, float | None]]:
        """By flag, in the unit of the flag."""
        machines = self.machines
        flops = None if machines.flops is None else machines.flops / TERA
        host = None if self.host_memory_bytes is None else self.host_memory_bytes / GIB
        yield from (("pods", machines.pods), ("slots", machines.slots), ("batch-size", self.batch_size))
        yield from (("source-length", self.source_length), ("target-length", self.target_length))
        yield from (("gpu-memory", self.gpu_memory_bytes / GIB), ("host-memory", host))
        yield from (("bucket-size", self.zero.reduce_elements), ("bandwidth", machines.bandwidth / GIGA))
        yield from (("pcie-bandwidth", machines.pcie_bandwidth / GIGA), ("flops", flops))
        yield from (("price-per-hour", self.price_per_hour), ("steps", self.steps))
        yield from (("samples", self.samples), ("epochs", self.epochs))
