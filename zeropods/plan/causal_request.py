"""What is asked of a plan of a causal language model, checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zeropods.errors import UserError
from zeropods.plan.attention import attentions, check_attention_of
from zeropods.plan.causal_job import CausalJob
from zeropods.plan.causal_shapes import CausalShape, causal_shape
from zeropods.plan.peaks import is_before_ampere
from zeropods.plan.request import AnyRequest, Variant
from zeropods.plan.workload import ELEMENT_BYTES

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
