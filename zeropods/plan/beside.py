"""Published runs beside a plan of them, with the settings that they had."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zeropods.plan.estimate import Plan
from zeropods.plan.fitted import PUBLISHED_REPORT, fitted_bandwidth
from zeropods.plan.job import Job
from zeropods.plan.machines import Machines
from zeropods.plan.memory import plan_memory
from zeropods.plan.parameters import t5_parameters
from zeropods.plan.published import Published, published_for
from zeropods.plan.shapes import t5_shape
from zeropods.plan.step_time import step_time
from zeropods.plan.technique import technique_named
from zeropods.plan.zero_settings import ZeroSettings

TOLERANCE = 0.15
"""Share of the published memory, which is read off a screenshot."""
GIGA = 1e9
ROWS, TOKENS = 32, 96
"""Of a process; of source and of target."""
STAGE_1 = ZeroSettings(reduce_elements=500_000_000, overlap=False, contiguous=False, multi_rank_all_reduce=False)
STAGE_3 = ZeroSettings(live_elements=1_000_000_000, overlap=False)
"""What the published configurations and DeepSpeed's defaults of then were, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A published run and what is planned for its settings."""

    row: Published
    device_bytes: int
    step_seconds: float

    @property
    def remark(self) -> str:
        """How the memory differs, and why."""
        planned, low, high = self.device_bytes / GIGA, self.row.gigabytes_a_pod_low, self.row.gigabytes_a_pod_high
        if planned < (1 - TOLERANCE) * low:
            return f"{low - planned:.1f} GB more were published: the allocator's cache, which nvidia-smi counts as used"
        if planned > (1 + TOLERANCE) * high:
            return f"{planned - high:.1f} GB fewer were published: this plan is too high there"
        return f"within {TOLERANCE:.0%}"

    def to_json(self) -> dict[str, Any]:
        """The published row, what is planned, and the remark."""
        planned = {
            "planned_gigabytes": self.device_bytes / GIGA,
            "published_step_seconds": self.row.step_seconds,
            "planned_step_seconds": self.step_seconds,
        }
        return {**asdict(self.row), **planned, "remark": self.remark}


def beside(plan: Plan) -> tuple[Beside, ...]:
    """Published runs of the model, technique and pods of a plan; none for a model that none was published of."""
    keys = {(estimate.technique.name, estimate.pods) for estimate in plan.estimates}
    rows = published_for(plan.request.model.rsplit("/", 1)[-1])
    return tuple(planned_as_published(row) for row in rows if (row.technique, row.pods) in keys)


def planned_as_published(row: Published) -> Beside:
    """What is planned for a published run: 32 rows of 96 + 96 tokens in FP32, an A100 and a network as it had."""
    technique = technique_named(row.technique)
    job = Job(
        shape=t5_shape(row.model),
        rows=ROWS,
        source_tokens=TOKENS,
        target_tokens=TOKENS,
        checkpointing=row.gradient_checkpointing,
    )
    zero = STAGE_3 if technique.stage == 3 else STAGE_1
    bandwidth = fitted_bandwidth(PUBLISHED_REPORT, t5_parameters(t5_shape("t5-small")), pods=3)
    return Beside(
        row=row,
        device_bytes=plan_memory(job, technique, row.pods, zero).device_bytes,
        step_seconds=step_time(job, technique, Machines(pods=row.pods, bandwidth=bandwidth), zero).seconds,
    )
