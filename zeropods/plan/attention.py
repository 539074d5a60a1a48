"""How attention is computed: by name, by what really runs, and the bytes that it saves for its backward pass.

Source: transformers 5.23 (`integrations/sdpa_attention.py`, `masking_utils.py` and each family's
`eager_attention_forward`); PyTorch 2.13's choice of a kernel (`sdp_utils.cpp`): FlashAttention takes FP16 and BF16 on
GPUs from Ampere on, without a mask; the memory-efficient kernel takes FP32, older GPUs and a mask too, but no keys that
several heads share, and then the plain formula runs, in FP32. Behind a mask transformers repeats the keys itself.
"""

from __future__ import annotations

from zeropods.errors import UserError
from zeropods.plan.causal_shapes import CausalShape, window

ATTENTIONS = ("eager", "sdpa", "flash_attention_2")
FUSED, MASKED, PLAIN, EAGER = "fused", "masked", "plain", "eager"
"""What runs: a kernel that keeps no score, the same behind a window's mask, PyTorch's formula in FP32, the family's."""
FLOAT, MASK = 4, 1


def attentions(shape: CausalShape) -> tuple[str, ...]:
    """Those that transformers has for a family: BLOOM's position biases are in its own only."""
    return ("eager",) if shape.family == "bloom" else ATTENTIONS


def check_attention_of(shape: CausalShape, attention: str, precision: str, before_ampere: bool) -> None:
    """Refuse what cannot run.

    Raises:
        UserError: another name, one that the family lacks, or FlashAttention-2 in FP32 or on an older GPU.
    """
    if attention not in ATTENTIONS:
        raise UserError(f"--attention {attention}; expected {', '.join(ATTENTIONS)} or all")
    if attention not in attentions(shape):
        raise UserError(f"--attention {attention}: {shape.family} has eager only; give --attention eager")
    if attention == "flash_attention_2" and precision == "fp32":
        raise UserError("--attention flash_attention_2: it takes no fp32; give --precision bf16 or --attention sdpa")
    if attention == "flash_attention_2" and before_ampere:
        raise UserError("--attention flash_attention_2: it needs an Ampere GPU or a later one; give --attention sdpa")


def kernel(shape: CausalShape, attention: str, tokens: int, precision: str, before_ampere: bool) -> str:
    """What runs over rows of so many tokens: `FUSED`, `MASKED`, `PLAIN` or `EAGER`."""
    if attention == "eager":
        return EAGER
    if attention == "sdpa" and tokens >= (window(shape) or tokens + 1):
        return MASKED
    shares_keys = shape.kv_heads < shape.heads
    return PLAIN if shares_keys and (precision == "fp32" or before_ampere) else FUSED


def attention_bytes(shape: CausalShape, running: str, size: int, dropout: bool, rows: int, length: int) -> int:
    """Saved by one layer: queries, keys, values and, where scores are kept, probabilities; its output is not in it.

    Args:
        running: of `kernel`.
        size: bytes of an element.
        length: tokens a row.
    """
    tokens, scores = rows * length, rows * shape.heads * length * length
    queries, keys = tokens * shape.heads * shape.head_size, tokens * shape.kv_heads * shape.head_size
    if running == FUSED:
        return size * (queries + 2 * keys) + FLOAT * tokens * shape.heads
    # Keys and values are repeated for each head of queries.
    each = FLOAT if running == PLAIN else size
    if running == MASKED:
        return 3 * each * queries + FLOAT * tokens * shape.heads + size * rows * length * length
    return 3 * each * queries + score_bytes(shape, running, size, dropout) * scores


def score_bytes(shape: CausalShape, running: str, size: int, dropout: bool) -> int:
    """Saved for each score: the softmax's output, what the values are multiplied with if that is another, a mask."""
    softmax = softmax_bytes(shape, running, size)
    if dropout:
        return softmax + MASK + (softmax if running == PLAIN else size)
    return softmax if running == PLAIN or softmax == size else softmax + size


def softmax_bytes(shape: CausalShape, running: str, size: int) -> int:
    """Of one score in the softmax, which all but GPT-2's computes in FP32."""
    if running in (FUSED, MASKED):
        return 0
    return size if running == EAGER and shape.family == "gpt2" else FLOAT
