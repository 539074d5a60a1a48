"""Published runs, beside a plan of them."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from pathlib import Path

from zeropods.plan.estimate import Plan, plan, request_for
from zeropods.plan.machines import GIGA, Machines
from zeropods.tables import GIB
from zeropods.techniques import ZeroSettings

# The published runs that this project's original reports: A100-40GB pods, batch 32, FP32, 3 epochs of WikiSQL.

FILE = Path(__file__).with_name("published.csv")
WIKISQL_STEPS = {1: 5_286, 2: 2_643, 3: 1_764}
"""Optimizer steps by pods: 3 x ceil(56,355 / (32 x pods))."""
TOLERANCE = 0.10
"""Share of the published memory, which is read off a screenshot."""
ROWS, TOKENS = 32, 96
"""Rows of a process; tokens of source and of target."""
STAGE_1 = ZeroSettings(reduce_elements=500_000_000, overlap=False, contiguous=False, multi_rank_all_reduce=False)
STAGE_3 = ZeroSettings(live_elements=1_000_000_000, overlap=False)
"""What the published configurations and DeepSpeed's defaults of then were, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the published table; None where it says nothing."""

    model: str
    technique: str
    pods: int
    train_seconds: float | None
    samples_per_second: float | None
    gigabytes_a_pod_low: float
    """As `nvidia-smi` showed it: CUDA's own memory and the allocator's cache included."""
    gigabytes_a_pod_high: float
    gradient_checkpointing: bool
    effective_batch_size: int
    confounders: str
    """What makes it hard to compare, in words."""

    @property
    def step_seconds(self) -> float | None:
        """Duration over optimizer steps, evaluation and saving included."""
        return None if self.train_seconds is None else self.train_seconds / WIKISQL_STEPS[self.pods]

    def planned(self) -> tuple[int, float]:
        """Bytes of a GPU and seconds of a step for its settings: 32 rows of 96 + 96 tokens in FP32."""
        request = request_for(
            self.model,
            machines=Machines(pods=self.pods),
            techniques=(self.technique,),
            zero=STAGE_3 if self.technique.startswith("zero3") else STAGE_1,
            gradient_checkpointing=self.gradient_checkpointing,
            batch_size=ROWS,
            source_length=TOKENS,
            target_length=TOKENS,
        )
        (found,) = plan(request).estimates
        return found.memory.device_bytes, found.time.seconds

    def to_json(self) -> dict[str, object]:
        """The row, what is planned, and how the memory differs, and why."""
        device_bytes, seconds = self.planned()
        return asdict(self) | {
            "planned_gigabytes": device_bytes / GIGA,
            "published_step_seconds": self.step_seconds,
            "planned_step_seconds": seconds,
            "remark": self._remark(device_bytes / GIGA),
        }

    def _remark(self, planned: float) -> str:
        low, high = self.gigabytes_a_pod_low, self.gigabytes_a_pod_high
        if planned < (1 - TOLERANCE) * low:
            more = f"{GIGA * (low - planned) / GIB:.1f} GiB more were published"
            return f"{more}: the allocator's cache, which nvidia-smi counts as used"
        if planned > (1 + TOLERANCE) * high:
            return f"{GIGA * (planned - high) / GIB:.1f} GiB fewer were published: this plan is too high there"
        return f"within {TOLERANCE:.0%}"


def published(model: str | None = None) -> tuple[Published, ...]:
    """All rows, or those of a model."""
    with FILE.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if model in (None, line["model"])]
    if not lines:
        return ()
    from pydantic import TypeAdapter

    values = [{name: text or None for name, text in line.items()} for line in lines]
    return tuple(TypeAdapter(list[Published]).validate_python(values))


def beside(made: Plan) -> tuple[Published, ...]:
    """Published runs of the model, technique and pods of a plan; none for a model that none was published of."""
    keys = {(estimate.technique.name, estimate.pods) for estimate in made.estimates}
    rows = published(made.request.model.rsplit("/", 1)[-1])
    return tuple(row for row in rows if (row.technique, row.pods) in keys)
