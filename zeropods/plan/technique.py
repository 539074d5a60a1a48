"""The techniques that a plan compares, by what they share out and what they put into host memory."""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Technique:
    """How the memory of training is divided among processes."""

    name: str
    stage: int = 0
    """ZeRO's: 1 shares optimizer states, 2 gradients too, 3 parameters too; 0 is no DeepSpeed at all."""
    offloads: bool = False
    """Optimizer states, and with stage 3 the parameters too, lie in host memory; the processor steps."""

    @property
    def is_alone(self) -> bool:
        """Whether it is one process, however many pods there are."""
        return self.name == "none"


TECHNIQUES = (
    Technique(name="none"),
    Technique(name="ddp"),
    Technique(name="zero1", stage=1),
    Technique(name="zero1_offload", stage=1, offloads=True),
    Technique(name="zero2", stage=2),
    Technique(name="zero2_offload", stage=2, offloads=True),
    Technique(name="zero3", stage=3),
    Technique(name="zero3_offload", stage=3, offloads=True),
)


def technique_named(name: str) -> Technique:
    """The technique of that name; `UserError` where there is none."""
    found = next((technique for technique in TECHNIQUES if technique.name == name), None)
    if found is None:
        raise UserError(f"technique {name!r}; expected one of {', '.join(t.name for t in TECHNIQUES)}")
    return found
