"""What is asked of a plan, checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from zeropods.errors import UserError
from zeropods.plan.machines import GIGA, TERA, Machines, is_before_ampere
from zeropods.plan.shapes import ATTENTIONS, CausalShape, Shape, T5Shape, shape_named
from zeropods.plan.workload import Workload
from zeropods.tables import GIB
from zeropods.techniques import TECHNIQUES, Technique, ZeroSettings, technique_named

BOTH, ALL = "both", "all"
DEFAULTS: dict[type[Shape], dict[str, int | None]] = {
    T5Shape: {"batch_size": 32, "source_length": 96, "target_length": 96},
    CausalShape: {"batch_size": 4, "seq_length": 512, "label_length": None, "attention": None, "dropout": None},
}
"""Fields that differ between models, and their defaults: a field that is missing here is refused for such a model."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, a batch, machines; of a causal model attention and checkpointing may be compared.

    `request_for` makes one with the defaults of its model. Memory is in bytes, rates are a second.
    """

    model: str
    """A known shape, with or without an organisation before it."""
    batch_size: int
    """Rows of one process."""
    gradient_accumulation: int = 1
    """Passes of a step."""
    precision: str = "fp32"
    machines: Machines = field(default_factory=Machines)
    gpu_memory_bytes: int = 40 * GIB
    host_memory_bytes: int | None = None
    """Memory of a pod, for all its processes; None: not checked."""
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    techniques: tuple[str, ...] = ()
    """Techniques by name; all if there are none."""
    price_per_hour: float | None = None
    """Price of one pod, in any currency."""
    steps: int | None = None
    """Optimizer steps of the whole training."""
    samples: int | None = None
    """Rows of the training set; with `epochs` in place of `steps`."""
    epochs: float = 1.0
    gradient_checkpointing: bool | str = False
    """True, False, or of a causal model `both`."""
    source_length: int | None = None
    """T5: tokens per row, padding included."""
    target_length: int | None = None
    seq_length: int | None = None
    """Causal: tokens per row, padding included."""
    label_length: int | None = None
    """Causal: tokens per row that carry a loss; all but the first if not given."""
    attention: str | None = None
    """Causal: one of `plan.shapes.ATTENTIONS`, or `all` that the family has at this precision on this GPU; if not given
    `sdpa`, and `eager` for a family without it."""
    dropout: bool | None = None
    """Causal: whether there is dropout; as the family was published if not given: GPT-2 has it."""

    def __post_init__(self) -> None:
        fault = next(self._faults(), None)
        if fault is not None:
            raise UserError(fault)

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return shape_named(self.model)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens per row, and how many of them carry a loss; of a T5 source and target."""
        if self.seq_length is None:
            return self.source_length or 0, self.target_length or 0
        return self.seq_length, max(1, self.seq_length - 1) if self.label_length is None else self.label_length

    @property
    def tokens(self) -> int:
        """Tokens per row, both sides, padding included."""
        return sum(self.lengths) if self.seq_length is None else self.seq_length

    @property
    def remark(self) -> str | None:
        """What a reader has to know about what was asked, in one line."""
        shape = self.shape
        if not isinstance(shape, CausalShape) or self.tokens <= shape.positions:
            return None
        return f"{self.model} was trained at {shape.positions} tokens; planned as if it were at {self.tokens}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the fields of other models."""
        return {name: value for name, value in asdict(self).items() if name not in _foreign(self.shape)}

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques to plan, in their own order."""
        asked = {technique_named(name).name for name in self.techniques}
        return tuple(technique for technique in TECHNIQUES if not asked or technique.name in asked)

    def variants(self) -> list[tuple[Workload, dict[str, Any]]]:
        """The ways of training to compare: each attention with each checkpointing; and what tells them apart.

        Raises:
            UserError: a way that the model cannot be trained in.
        """
        again = (False, True) if self.gradient_checkpointing == BOTH else (self.gradient_checkpointing is True,)
        return [self._variant(attention, each) for attention in self._attentions() for each in again]

    def _variant(self, attention: str, checkpointing: bool) -> tuple[Workload, dict[str, Any]]:
        tokens, labels = self.lengths
        work = Workload(
            shape=self.shape,
            rows=self.batch_size,
            tokens=tokens,
            labels=labels,
            precision=self.precision,
            checkpointing=checkpointing,
            accumulates=self.gradient_accumulation > 1,
            attention=attention,
            before_ampere=is_before_ampere(self.machines.gpu),
            dropout=self.dropout,
        )
        labelled = "attention" in DEFAULTS[type(self.shape)]
        return work, {"attention": attention, "gradient_checkpointing": checkpointing} if labelled else {}

    def _attentions(self) -> list[str]:
        known, before_ampere = self.shape.attentions, is_before_ampere(self.machines.gpu)
        if self.attention == ALL:
            return [name for name in known if not attention_fault(self.shape, name, self.precision, before_ampere)]
        name = self.attention or ("sdpa" if "sdpa" in known else "eager")
        if fault := attention_fault(self.shape, name, self.precision, before_ampere):
            raise UserError(fault)
        return [name]

    def _faults(self) -> Iterator[str]:
        shape, precisions = self.shape, self.shape.PRECISIONS
        if self.precision not in precisions:
            yield f"--precision {self.precision}; expected {' or '.join(precisions)}"
        for flag, value in self._numbers():
            if value is not None and not value > 0:
                yield f"--{flag} {value:g}; expected more than 0"
        if self.machines.latency_seconds < 0:
            yield f"--latency {self.machines.latency_seconds:g}; expected 0 seconds or more"
        if self.samples is None and self.epochs != 1:
            yield f"--epochs {self.epochs:g} without --samples; give both, or --steps"
        if self.steps is not None and self.samples is not None:
            yield f"--steps {self.steps} and --samples {self.samples}; give one of them"
        if self.gradient_checkpointing not in (True, False, BOTH):
            yield f"--gradient-checkpointing {self.gradient_checkpointing}; expected True, False or {BOTH}"
        if isinstance(shape, CausalShape):
            yield from self._causal_faults(shape)
        elif self.gradient_checkpointing == BOTH:
            yield f"--gradient-checkpointing both: {self.model} is {shape.KIND}; give True or False"

    def _causal_faults(self, shape: CausalShape) -> Iterator[str]:
        tokens, labels = self.lengths
        if labels > tokens:
            yield f"--label-length {labels}; expected at most --seq-length {tokens}"
        if shape.family == "gpt2" and tokens > shape.positions:
            yield f"--seq-length {tokens}; {self.model} has {shape.positions} positions"
        if self.precision == "bf16" and is_before_ampere(self.machines.gpu):
            yield f"--precision bf16: {self.machines.gpu} has no BF16 arithmetic; give --precision fp16"

    def _numbers(self) -> Iterator[tuple[str, float | None]]:
        """What must be more than 0, by flag and in the unit of the flag."""
        machines = self.machines
        for name in ("pods", "slots"):
            yield name, getattr(machines, name)
        for name in ("batch_size", "gradient_accumulation", "price_per_hour", "steps", "samples", "epochs",
                     "source_length", "target_length", "seq_length", "label_length"):  # fmt: skip
            yield name.replace("_", "-"), getattr(self, name)
        for flag, value, unit in (
            ("gpu-memory", self.gpu_memory_bytes, GIB),
            ("host-memory", self.host_memory_bytes, GIB),
            ("bucket-size", self.zero.reduce_elements, 1),
            ("bandwidth", machines.bandwidth, GIGA),
            ("pcie-bandwidth", machines.pcie_bandwidth, GIGA),
            ("peer-bandwidth", machines.peer_bandwidth, GIGA),
            ("flops", machines.flops, TERA),
        ):
            yield flag, None if value is None else value / unit


def request_for(model: str, **asked: Any) -> Request:
    """The request with these fields and the defaults of its model.

    Raises:
        UserError: an unknown model, a field that is wrong, or one that is of the other kind of model.
    """
    shape = shape_named(model)
    own, foreign = DEFAULTS[type(shape)], _foreign(shape)
    known = {field.name for field in fields(Request)} - foreign
    wrong = next((name for name in asked if name not in known), None)
    if wrong is None:
        return Request(model=model, **{**own, **asked})
    lengths = " and ".join(f"--{name.replace('_', '-')}" for name in own if name.endswith("_length"))
    remedy = f"give {lengths}" if wrong in foreign and wrong.endswith("_length") else "leave it out"
    raise UserError(f"--{wrong.replace('_', '-')} {asked[wrong]}: {model} is {shape.KIND}; {remedy}")


def attention_fault(shape: Shape, attention: str, precision: str, before_ampere: bool) -> str | None:
    """Why a way of attention cannot run: another name, one that the family lacks, or FlashAttention-2 in FP32 or on an
    older GPU; None where it can."""
    if attention not in ATTENTIONS:
        return f"--attention {attention}; expected {', '.join(ATTENTIONS)} or all"
    if attention not in shape.attentions:
        family = getattr(shape, "family", shape.KIND)
        return (
            f"--attention {attention}: {family} has {shape.attentions[0]} only; give --attention {shape.attentions[0]}"
        )
    if attention == "flash_attention_2" and precision == "fp32":
        return "--attention flash_attention_2: it takes no fp32; give --precision bf16 or --attention sdpa"
    if attention == "flash_attention_2" and before_ampere:
        return "--attention flash_attention_2: it needs an Ampere GPU or a later one; give --attention sdpa"
    return None


def _foreign(shape: Shape) -> set[str]:
    """Fields that a model of this kind does not have."""
    return {name for defaults in DEFAULTS.values() for name in defaults} - DEFAULTS[type(shape)].keys()
