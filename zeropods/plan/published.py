"""Published runs and claims, beside a plan of them."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.plan.activations import activations
from zeropods.plan.estimate import Plan, attention_fault, step_time
from zeropods.plan.machines import GIGA, TERA, Machines
from zeropods.plan.memory import plan_memory
from zeropods.plan.shapes import CausalShape, causal_shape, t5_shape
from zeropods.plan.workload import Workload, total
from zeropods.tables import GIB
from zeropods.techniques import ZeroSettings, technique_named

# The published runs that this project's original reports: A100-40GB pods, batch 32, FP32, 3 epochs of WikiSQL.

FILE = Path(__file__).with_name("published.csv")
WIKISQL_STEPS = {1: 5_286, 2: 2_643, 3: 1_764}
"""Optimizer steps by pods: 3 x ceil(56,355 / (32 x pods))."""
TOLERANCE = 0.15
"""Share of the published memory, which is read off a screenshot."""
ROWS, TOKENS = 32, 96
"""Rows of a process; tokens of source and of target."""
STAGE_1 = ZeroSettings(reduce_elements=500_000_000, overlap=False, contiguous=False, multi_rank_all_reduce=False)
STAGE_3 = ZeroSettings(live_elements=1_000_000_000, overlap=False)
"""What the published configurations and DeepSpeed's defaults of then were, as far as they are known."""
BANDWIDTH = 2 * 2 / 3 * 4 * 60_506_624 / (0.2877 - 2 * 0.060 + 0.1399)
"""Bytes per second through a pod's link, by the published profiler report of t5-small under ZeRO-1 on three pods:
gradients are reduced to their owners and parameters gathered, each 2/3 of 4 B x P round the ring, in what is left of
backward (287.7 ms) and step (139.9 ms) when a backward pass of twice the forward one (60 ms) is taken away."""


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
        """Bytes of a GPU and seconds of a step for its settings: 32 rows of 96 + 96 tokens in FP32, its network."""
        technique, checkpointing = technique_named(self.technique), self.gradient_checkpointing
        shape, machines = t5_shape(self.model), Machines(pods=self.pods, bandwidth=BANDWIDTH)
        work = Workload(shape=shape, rows=ROWS, tokens=TOKENS, labels=TOKENS, checkpointing=checkpointing)
        zero = STAGE_3 if technique.stage == 3 else STAGE_1
        memory = plan_memory(work, technique, self.pods, zero).device_bytes
        return memory, step_time(work, technique, machines, zero).seconds

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
    from pydantic import TypeAdapter

    with FILE.open(encoding="utf-8", newline="") as file:
        lines = [{name: text or None for name, text in line.items()} for line in csv.DictReader(file)]
    return tuple(row for row in TypeAdapter(list[Published]).validate_python(lines) if model in (None, row.model))


def beside(plan: Plan) -> tuple[Published, ...]:
    """Published runs of the model, technique and pods of a plan; none for a model that none was published of."""
    keys = {(estimate.technique.name, estimate.pods) for estimate in plan.estimates}
    rows = published(plan.request.model.rsplit("/", 1)[-1])
    return tuple(row for row in rows if (row.technique, row.pods) in keys)


# Published claims about training 8B parameters, worked out again: how they come about, and what is right.
#
# The claims are of a template for an 8B model with ZeRO-3 and FlashAttention-2: "16 GB weights + 16 GB gradients + 64
# GB Adam = 96 GB", and "1.35 TB of activations" at batch 1, 16k tokens and 32 layers without FlashAttention.

PRECISION = "bf16"


@dataclass(frozen=True)
class Claim:
    """One figure: what was said, or what there is in place of it."""

    what: str
    bytes: float
    formula: str
    verdict: str
    """Why it is so, and whether it is right."""


def claims(model: str = "llama-8b", tokens: int = 16_384, rows: int = 1) -> tuple[Claim, ...]:
    """The two claims, how each comes about, and what a model of that size needs with each attention.

    Raises:
        UserError: an unknown model, or one without FlashAttention.
    """
    shape = causal_shape(model)
    fault = attention_fault(shape, "flash_attention_2", PRECISION, before_ampere=False)
    if fault is not None:
        raise UserError(fault)
    return (*_states(shape), *_activations(shape, tokens, rows))


def _states(shape: CausalShape) -> tuple[Claim, ...]:
    """Weights, gradients and optimizer states of mixed precision training with Adam."""
    return (
        Claim("states, as claimed", 96 * GIGA, "8 G x (2 + 2 + 8) B",
              "leaves out the FP32 master, without which half precision does not learn"),
        Claim("states of 8 G parameters", 8 * GIGA * (2 + 2 + 4 + 8), "8 G x (2 + 2 + 4 + 8) B",
              "with the master: 16 bytes per parameter, as DeepSpeed keeps them"),
        Claim("the same, gradients added up in FP32", 8 * GIGA * (2 + 4 + 4 + 8), "8 G x (2 + 4 + 4 + 8) B",
              "18 bytes per parameter: what some trainings choose"),
        Claim("states of this model", shape.parameters * (2 + 2 + 4 + 8), f"{shape.parameters:,} x 16 B",
              "over all processes of ZeRO-3 together, not on each GPU"),
    )  # fmt: skip


def _activations(shape: CausalShape, tokens: int, rows: int) -> tuple[Claim, ...]:
    by_formula = shape.layers * layer_bytes_by_formula(rows=rows, tokens=tokens, hidden=shape.hidden, heads=shape.heads)
    sizes = f"{shape.layers} x {tokens} x {rows} x {shape.hidden}"
    formula = f"{sizes} x (34 + 5 x {shape.heads} x {tokens} / {shape.hidden})"
    work = Workload(shape=shape, rows=rows, tokens=tokens, labels=tokens - 1, precision=PRECISION, dropout=False)

    def planned(what: str, verdict: str, attention: str, checkpointing: bool = False) -> Claim:
        terms = activations(replace(work, attention=attention, checkpointing=checkpointing)).terms()
        return Claim(what, total(terms), "; ".join(f"{t.name} {t.bytes / GIB:.4g} GiB" for t in terms), verdict)

    return (
        Claim("activations, as claimed", 1.35 * TERA, "",
              "the formula for 8 B parameters at 16,384 tokens gives 1,348 GiB, a thousand of which were called a TB"),
        Claim("activations of a GPT of this size", by_formula, formula, "the formula's own bytes"),
        planned("activations here, eager", "scores are kept: the softmax in FP32, and again in BF16", "eager"),
        planned("activations here, FlashAttention",
                "no score is kept: what is left grows with the length, not with its square", "flash_attention_2"),
        planned("and with checkpointing", "inputs of layers, and the larger of one layer and the loss",
                "flash_attention_2", checkpointing=True),
    )  # fmt: skip


def layer_bytes_by_formula(*, rows: int, tokens: int, hidden: int, heads: int) -> float:
    """Activations of one layer in half precision by s b h (34 + 5 a s / h), scores of attention kept.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), equation 1, of a GPT: GELU, dropout, as many keys as queries.
    """
    return tokens * rows * hidden * (34 + 5 * heads * tokens / hidden)
