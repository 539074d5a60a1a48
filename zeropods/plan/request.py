"""What is asked of a plan, checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from zeropods.errors import UserError
from zeropods.plan.job import Job
from zeropods.plan.machines import GIGA, TERA, Machines
from zeropods.plan.parameters import BYTES
from zeropods.plan.shapes import t5_shape
from zeropods.plan.technique import TECHNIQUES, Technique, technique_named
from zeropods.plan.workload import Workload
from zeropods.plan.zero_settings import ZeroSettings

GIB = 1 << 30


@dataclass(frozen=True)
class Variant:
    """One way of training among those that a request compares."""

    work: Workload
    """Of one process, with the batch that was asked for."""
    labels: dict[str, Any] = field(default_factory=dict)
    """What tells it from the others, by name; nothing where there is one."""


@dataclass(frozen=True, kw_only=True)
class AnyRequest(ABC):
    """A batch and machines, for any model. Memory is in bytes, rates are a second."""

    PRECISIONS: ClassVar[tuple[str, ...]] = tuple(BYTES)

    model: str
    """A known shape, with or without an organisation before it."""
    batch_size: int = 32
    """Rows of one process."""
    gradient_accumulation: int = 1
    """Passes of a step."""
    precision: str = "fp32"
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

    @abstractmethod
    def variants(self) -> tuple[Variant, ...]:
        """The ways of training to compare.

        Raises:
            UserError: an unknown model, or a way that it cannot be trained in.
        """

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of a row, padding included."""

    @property
    def remark(self) -> str | None:
        """What a reader has to know about what was asked, in one line."""
        return None

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques to plan, in their own order."""
        asked = {technique_named(name).name for name in self.techniques}
        return tuple(technique for technique in TECHNIQUES if not asked or technique.name in asked)

    def _faults(self) -> Iterator[str]:
        if self.precision not in self.PRECISIONS:
            yield f"--precision {self.precision}; expected {' or '.join(self.PRECISIONS)}"
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
        peers = None if machines.peer_bandwidth is None else machines.peer_bandwidth / GIGA
        yield from (("pods", machines.pods), ("slots", machines.slots), ("batch-size", self.batch_size))
        yield "gradient-accumulation", self.gradient_accumulation
        yield from (("gpu-memory", self.gpu_memory_bytes / GIB), ("host-memory", host))
        yield from (("bucket-size", self.zero.reduce_elements), ("bandwidth", machines.bandwidth / GIGA))
        yield from (("pcie-bandwidth", machines.pcie_bandwidth / GIGA), ("peer-bandwidth", peers), ("flops", flops))
        yield from (("price-per-hour", self.price_per_hour), ("steps", self.steps))
        yield from (("samples", self.samples), ("epochs", self.epochs))


@dataclass(frozen=True, kw_only=True)
class Request(AnyRequest):
    """A T5, a batch, machines."""

    source_length: int = 96
    """Tokens a row, padding included."""
    target_length: int = 96
    gradient_checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a row, both sides."""
        return self.source_length + self.target_length

    def variants(self) -> tuple[Variant, ...]:
        """The one way that is asked for."""
        return (Variant(self.job()),)

    def job(self) -> Job:
        """What one process trains on."""
        return Job(
            shape=t5_shape(self.model),
            rows=self.batch_size,
            source_tokens=self.source_length,
            target_tokens=self.target_length,
            precision=self.precision,
            checkpointing=self.gradient_checkpointing,
            accumulates=self.gradient_accumulation > 1,
        )

    def _numbers(self) -> Iterator[tuple[str, float | None]]:
        yield from super()._numbers()
        yield from (("source-length", self.source_length), ("target-length", self.target_length))
