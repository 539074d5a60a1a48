"""Published claims about large models, and what is right, as a table."""

from __future__ import annotations

from typing import Any

from zeropods.plan.claims import GIGA, Claim, claims
from zeropods.report.table import Table


def claims_table(model: str = "llama-8b", tokens: int = 16_384, rows: int = 1) -> Table:
    """A line for each figure; `UserError` for a model without FlashAttention."""
    return Table.of([_line(claim) for claim in claims(model, tokens, rows)], f"{model}: {tokens} tokens, {rows} rows")


def _line(claim: Claim) -> dict[str, Any]:
    return {
        "what": claim.what,
        "GB": f"{claim.bytes / GIGA:,.1f}",
        "from": claim.formula,
        "verdict": claim.verdict,
    }
