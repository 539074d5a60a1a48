"""What is asked of a plan, checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from zeropods.errors import UserError
from zeropods.plan.jobs import CausalJob, Job
from zeropods.plan.machines import GIGA, TERA, Machines, is_before_ampere
from zeropods.plan.parameters import BYTES
from zeropods.plan.shapes import CAUSAL_SHAPES, T5_SHAPES, CausalShape, causal_shape, is_causal, is_t5, t5_shape
from zeropods.plan.workload import ELEMENT_BYTES, Workload, attentions, check_attention_of
from zeropods.techniques import TECHNIQUES, Technique, ZeroSettings, technique_named

# What is asked of a plan, checked.

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


# What is asked of a plan of a causal language model, checked.

BOTH = "both"
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class CausalRequest(AnyRequest):
    """A causal language model, a batch, machines; attention and checkpointing may be compared."""

    PRECISIONS: ClassVar[tuple[str, ...]] = tuple(ELEMENT_BYTES)

    batch_size: int = 4
    """Rows of one process."""
    seq_length: int = 512
    """Tokens a row, padding included."""
    label_length: int | None = None
    """Tokens a row that carry a loss; all but the first if not given."""
    attention: str | None = None
    """One of `plan.attention.ATTENTIONS`, or `all` that the family has at this precision on this GPU; if not given
    `sdpa`, and `eager` for a family without it."""
    gradient_checkpointing: bool | str = False
    """True, False or `both`."""
    dropout: bool | None = None
    """Whether there is dropout; as the family was published if not given: GPT-2 has it."""

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return self.seq_length

    @property
    def remark(self) -> str | None:
        """What a reader has to know about this length."""
        shape = causal_shape(self.model)
        if self.seq_length <= shape.positions:
            return None
        return f"{self.model} was trained at {shape.positions} tokens; planned as if it were at {self.seq_length}"

    def variants(self) -> tuple[Variant, ...]:
        """Each attention with each checkpointing."""
        shape = causal_shape(self.model)
        both = (False, True) if self.gradient_checkpointing == BOTH else (self.gradient_checkpointing is True,)
        return tuple(self._variant(shape, name, again) for name in self._attentions(shape) for again in both)

    def _attentions(self, shape: CausalShape) -> tuple[str, ...]:
        own = "sdpa" if "sdpa" in attentions(shape) else "eager"
        asked = attentions(shape) if self.attention == ALL else (self.attention or own,)
        found = []
        for name in asked:
            try:
                check_attention_of(shape, name, self.precision, self._before_ampere)
            except UserError:
                if self.attention != ALL:
                    raise
            else:
                found.append(name)
        return tuple(found)

    def _variant(self, shape: CausalShape, attention: str, checkpointing: bool) -> Variant:
        job = CausalJob(
            shape=shape,
            rows=self.batch_size,
            tokens=self.seq_length,
            labels=max(1, self.seq_length - 1) if self.label_length is None else self.label_length,
            precision=self.precision,
            checkpointing=checkpointing,
            accumulates=self.gradient_accumulation > 1,
            attention=attention,
            before_ampere=self._before_ampere,
            dropout=shape.family == "gpt2" if self.dropout is None else self.dropout,
        )
        return Variant(job, {"attention": attention, "gradient_checkpointing": checkpointing})

    @property
    def _before_ampere(self) -> bool:
        return is_before_ampere(self.machines.gpu)

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        shape = causal_shape(self.model)
        if self.gradient_checkpointing not in (True, False, BOTH):
            yield f"--gradient-checkpointing {self.gradient_checkpointing}; expected True, False or {BOTH}"
        if (self.label_length or 0) > self.seq_length:
            yield f"--label-length {self.label_length}; expected at most --seq-length {self.seq_length}"
        if shape.family == "gpt2" and self.seq_length > shape.positions:
            yield f"--seq-length {self.seq_length}; {self.model} has {shape.positions} positions"
        if self.precision == "bf16" and self._before_ampere:
            yield f"--precision bf16: {self.machines.gpu} has no BF16 arithmetic; give --precision fp16"

    def _numbers(self) -> Iterator[tuple[str, float | None]]:
        yield from super()._numbers()
        yield from (("seq-length", self.seq_length), ("label-length", self.label_length))


# The request for a model of any kind, from what was asked by name.

INSTEAD = {Request: "--source-length and --target-length", CausalRequest: "--seq-length and --label-length"}
"""What says how long rows are."""


def request_for(model: str, **asked: Any) -> AnyRequest:
    """The request with these fields, those of a T5 or of a causal model.

    Raises:
        UserError: an unknown model, a field that is wrong, or one that is of the other kind.
    """
    if not is_causal(model) and not is_t5(model):
        raise UserError(f"model {model!r} has no shape known here; expected one of {_names()}")
    kind, other = (CausalRequest, Request) if is_causal(model) else (Request, CausalRequest)
    known = {field.name for field in fields(kind)}
    foreign = next((name for name in asked if name not in known), None)
    if foreign is not None:
        what = "a causal model" if kind is CausalRequest else "a T5"
        remedy = f"give {INSTEAD[kind]}" if foreign in _lengths(other) else "leave it out"
        raise UserError(f"--{foreign.replace('_', '-')} {asked[foreign]}: {model} is {what}; {remedy}")
    if kind is Request and asked.get("gradient_checkpointing") == BOTH:
        raise UserError(f"--gradient-checkpointing both: {model} is a T5; give True or False")
    return kind(model=model, **asked)


def _lengths(kind: type[AnyRequest]) -> set[str]:
    return {field.name for field in fields(kind) if field.name.endswith("_length")}


def _names() -> str:
    return ", ".join((*T5_SHAPES, *CAUSAL_SHAPES))
