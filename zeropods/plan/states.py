"""The model's states under each technique, wherever they lie: what a plan without a GPU says.

`memory.py` computes them; this lists them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from zeropods.plan.estimate import Request, requested_techniques, zero_of
from zeropods.plan.memory import LOADING, plan_memory
from zeropods.plan.terms import STATES, Term, total
from zeropods.plan.workload import Workload
from zeropods.techniques import Technique


@dataclass(frozen=True, kw_only=True)
class PlannedStates:
    """Parameters, gradients and optimizer states of one process under a technique, on the GPU and
    in host memory."""

    technique: Technique
    pods: int
    """Number of pods that it uses: `none` is one process on one pod, however many there are."""
    slots: int
    terms: tuple[Term, ...]

    def parts(self) -> dict[str, int]:
        """Bytes by part, and `total`, their sum."""
        by_part = {part: total(self.terms, part) for part in STATES}
        return {**by_part, "total": total(self.terms)}

    def to_json(self) -> dict[str, object]:
        """The states as plain values."""
        return {
            "technique": self.technique.name,
            "pods": self.pods,
            "slots": self.slots,
            "bytes": self.parts(),
            "terms": [asdict(term) for term in self.terms],
        }


def plan_states(request: Request) -> tuple[PlannedStates, ...]:
    """The states of a request under each of its techniques.

    Raises:
        UserError: a technique is unknown, or cannot train with the request's method.
    """
    tokens, labels = request.lengths
    planned = []
    for technique in requested_techniques(request):
        pods = 1 if technique.is_alone else request.machines.pods
        slots = 1 if technique.is_alone else request.machines.slots
        work = Workload(
            shape=request.shape,
            batch_size=request.batch_size,
            tokens=tokens,
            labels=labels,
            precision=request.precision,
            # States are the same with any.
            attention=request.attentions[0],
            technique=technique,
            ranks=pods * slots,
            zero=zero_of(request, technique),
            gradient_accumulation=request.passes_of(pods * slots),
            method=request.method,
        )
        memory = plan_memory(work, context_bytes=0)
        terms = []
        for term in (*memory.terms, *memory.host_terms):
            # What loading takes is given back before the first step.
            if term.part in STATES and term.name != LOADING:
                terms.append(term)
        states = PlannedStates(technique=technique, pods=pods, slots=slots, terms=tuple(terms))
        planned.append(states)
    return tuple(planned)
