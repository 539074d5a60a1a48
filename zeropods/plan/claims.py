"""Published claims about training 8B parameters, worked out again: how they come about, and what is right.

The claims are of a template for an 8B model with ZeRO-3 and FlashAttention-2: "16 GB weights + 16 GB gradients + 64 GB
Adam = 96 GB", and "1.35 TB of activations" at batch 1, 16k tokens and 32 layers without FlashAttention.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeropods.plan.attention import check_attention_of
from zeropods.plan.causal_job import CausalJob
from zeropods.plan.causal_parameters import causal_parameters
from zeropods.plan.causal_shapes import CausalShape, causal_shape
from zeropods.plan.term import total

GIGA, TERA = 1e9, 1e12
GIB = 1 << 30
PRECISION = "bf16"
ROUND_PARAMETERS = 8_000_000_000
CLAIMED_STATES, CLAIMED_ACTIVATIONS = 96 * GIGA, 1.35 * TERA
HALF, MASTER, MOMENTS = 2, 4, 8
"""Bytes a parameter: FP16 or BF16 weights, and gradients; an FP32 master; Adam's two moments, FP32."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One figure: what was said, or what there is in place of it."""

    what: str
    bytes: float
    formula: str
    verdict: str
    """Why it is so, and whether it is right."""


def state_bytes(parameters: int, *, master: bool = True, fp32_gradients: bool = False) -> int:
    """Weights, gradients and optimizer states of mixed precision training with Adam."""
    gradients = MASTER if fp32_gradients else HALF
    return parameters * (HALF + gradients + MOMENTS + (MASTER if master else 0))


def layer_bytes_by_formula(*, rows: int, tokens: int, hidden: int, heads: int) -> float:
    """Activations of one layer in half precision by s b h (34 + 5 a s / h), scores of attention kept.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), equation 1, of a GPT: GELU, dropout, as many keys as queries.
    """
    return tokens * rows * hidden * (34 + 5 * heads * tokens / hidden)


def claims(model: str = "llama-8b", tokens: int = 16_384, rows: int = 1) -> tuple[Claim, ...]:
    """The two claims, how each comes about, and what a model of that size needs with each attention.

    Raises:
        UserError: an unknown model, or one without FlashAttention.
    """
    shape = causal_shape(model)
    check_attention_of(shape, "flash_attention_2", PRECISION, before_ampere=False)
    return (*_states(shape), *_activations(shape, tokens, rows))


def _states(shape: CausalShape) -> tuple[Claim, ...]:
    parameters = causal_parameters(shape)
    return (
        _claim("states, as claimed", CLAIMED_STATES, "8 G x (2 + 2 + 8) B",
               "leaves out the FP32 master, without which half precision does not learn"),
        _claim("states of 8 G parameters", state_bytes(ROUND_PARAMETERS), "8 G x (2 + 2 + 4 + 8) B",
               "with the master: 16 bytes a parameter, as DeepSpeed keeps them"),
        _claim("the same, gradients added up in FP32", state_bytes(ROUND_PARAMETERS, fp32_gradients=True),
               "8 G x (2 + 4 + 4 + 8) B", "18 bytes a parameter: what some trainings choose"),
        _claim("states of this model", state_bytes(parameters), f"{parameters:,} x 16 B",
               "over all processes of ZeRO-3 together, not on each GPU"),
    )  # fmt: skip


def _activations(shape: CausalShape, tokens: int, rows: int) -> tuple[Claim, ...]:
    by_formula = shape.layers * layer_bytes_by_formula(rows=rows, tokens=tokens, hidden=shape.hidden, heads=shape.heads)
    formula = (
        f"{shape.layers} x {tokens} x {rows} x {shape.hidden} x (34 + 5 x {shape.heads} x {tokens} / {shape.hidden})"
    )
    return (
        _claim("activations, as claimed", CLAIMED_ACTIVATIONS, "", _reading(by_formula)),
        _claim("activations of a GPT of this size", by_formula, formula, "the formula's own bytes"),
        _planned("activations here, eager", _job(shape, tokens, rows, "eager"),
                 "scores are kept: the softmax in FP32, and again in BF16"),
        _planned("activations here, FlashAttention", _job(shape, tokens, rows, "flash_attention_2"),
                 "no score is kept: what is left grows with the length, not with its square"),
        _planned("and with checkpointing", _job(shape, tokens, rows, "flash_attention_2", checkpointing=True),
                 "inputs of layers, and the larger of one layer and the loss"),
    )  # fmt: skip


def _reading(by_formula: float) -> str:
    gibibytes = by_formula / GIB
    if abs(gibibytes / 1_000 - CLAIMED_ACTIVATIONS / TERA) < 0.005:
        return f"{gibibytes:,.0f} GiB by the formula, a thousand of which were called a TB"
    return "not what the formula gives for these sizes"


def _job(shape: CausalShape, tokens: int, rows: int, attention: str, *, checkpointing: bool = False) -> CausalJob:
    return CausalJob(
        shape=shape,
        rows=rows,
        tokens=tokens,
        labels=tokens - 1,
        attention=attention,
        precision=PRECISION,
        checkpointing=checkpointing,
    )


def _planned(what: str, job: CausalJob, verdict: str) -> Claim:
    terms = job.activation_terms()
    formula = "; ".join(f"{term.name} {term.bytes / GIGA:.4g} GB" for term in terms)
    return _claim(what, total(terms), formula, verdict)


def _claim(what: str, size: float, formula: str, verdict: str) -> Claim:
    return Claim(what=what, bytes=size, formula=formula, verdict=verdict)
