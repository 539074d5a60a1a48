"""Attention's products of queries with keys: a second witness of how many tokens a layer saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from statistics import median

from zeropods.measure.profile.counts import linear_size, tokens_through
from zeropods.measure.profile.report import Module
from zeropods.measure.profile.units import rounding

CLEAR = 5
"""How many times the rounding of the figures the products must be: below it they drown in it."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A module whose own MACs are those of its products."""

    path: str
    inner: int
    """Width of the queries, all heads together."""
    query_tokens: float
    """Of the whole batch, by the first linear layer's MACs."""
    key_tokens: float
    """By the second one's."""
    macs: float
    """Of the products alone: what the linear layers leave."""

    def products(self, rows: int, times: float = 1.0) -> float:
        """MACs of queries x keys and weights x values, 2 x rows x T x S x inner.

        Args:
            rows: of the batch.
            times: how often the linear layers were counted.
        """
        return 2 * self.query_tokens * self.key_tokens / times**2 * self.inner / rows


def attentions(root: Module) -> list[Attention]:
    """Attention modules: linear layers (queries first, the output last), and more MACs than theirs."""
    found = ((path, module, _attention(path, module)) for path, module in root.walk())
    return [attention for _, _, attention in found if attention is not None]


def times_counted(root: Module, rows: int) -> float | None:
    """How often linear layers were counted, as attention's products have it: 1.0 as it should be, 2.0 under ZeRO-3.

    The products grow with the square of the tokens; the linear layers' MACs claim a number of tokens, and with it
    products. Their ratio to those reported is the square of the answer. The median over all attention modules;
    None where the model has none.
    """
    ratios = [sqrt(each.products(rows) / each.macs) for each in attentions(root)]
    return median(ratios) if ratios else None


def _attention(path: str, module: Module) -> Attention | None:
    layers = list(_linear_children(module))
    if len(layers) < 2 or module.macs is None:
        return None
    own = module.macs - sum(child.macs or 0.0 for child in module.children)
    unsure = rounding(module.macs) + sum(rounding(child.macs) for child in module.children)
    queries, keys = tokens_through(layers[0]), tokens_through(layers[1 if len(layers) > 2 else 0])
    output = linear_size(layers[-1])
    if not queries or not keys or output is None or own < CLEAR * unsure:
        return None
    return Attention(path=path, inner=output[0], query_tokens=queries, key_tokens=keys, macs=own)


def _linear_children(module: Module) -> Iterator[Module]:
    return (child for child in module.children if linear_size(child) is not None)
