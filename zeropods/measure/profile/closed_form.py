"""Forward MACs by arithmetic: sizes of layers x tokens, without what the profiler has summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeropods.measure.profile.attention import attentions
from zeropods.measure.profile.counts import linear_size, shared_size, tokens_through
from zeropods.measure.profile.report import Module

if TYPE_CHECKING:
    from zeropods.plan.shapes import T5Shape


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """Multiply-adds of a forward pass on one GPU."""

    linear_macs: float
    """Sum over linear layers of in x out x tokens."""
    attention_macs: float
    """Sum over attention modules of 2 x rows x T x S x inner."""
    planned_macs: float | None
    """The linear part for this T5 by `zeropods.plan`, where its shape is known there."""
    model: str | None
    """That shape's name."""

    @property
    def macs(self) -> float:
        return (self.linear_macs if self.planned_macs is None else self.planned_macs) + self.attention_macs


def closed_form(root: Module, rows: int) -> ClosedForm | None:
    """The count for a tree whose linear layers are counted once; None where other layers compute too (`Conv2d`).

    Tokens are whole numbers: a layer's MACs / (in x out), rounded.
    """
    leaves = [module for _, module in root.walk() if not module.children]
    if any(module.macs and linear_size(module) is None for module in leaves):
        return None
    linear = sum(round(tokens_through(leaf) or 0) * size[0] * size[1] for leaf in leaves if (size := linear_size(leaf)))
    known = _known_t5(root)
    return ClosedForm(
        linear_macs=linear,
        attention_macs=sum(each.products(rows) for each in attentions(root)),
        planned_macs=_planned(root, known[1]) if known else None,
        model=known[0] if known else None,
    )


def _planned(root: Module, shape: T5Shape) -> float | None:
    """A third of a training step's FLOPs are forward, and two make a MAC.

    The plan lets every target token through the output layer. Here only those with a label go through it, so the
    others are taken off again.
    """
    from zeropods.plan.flops import training_flops

    modules = dict(root.walk())
    source = _tokens(modules, "encoder.block.0.layer.0.SelfAttention.q")
    target = _tokens(modules, "decoder.block.0.layer.0.SelfAttention.q")
    labels = _tokens(modules, "lm_head")
    if source is None or target is None or labels is None:
        return None
    return training_flops(shape, source, target) / 6 - shape.vocabulary * shape.d_model * (target - labels)


def _tokens(modules: dict[str, Module], path: str) -> int | None:
    tokens = tokens_through(modules[path]) if path in modules else None
    return None if tokens is None else round(tokens)


def _known_t5(root: Module) -> tuple[str, T5Shape] | None:
    """The T5 of `zeropods.plan` with this tree's sizes."""
    from zeropods.plan.shapes import T5_SHAPES

    modules = dict(root.walk())
    paths = ("encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.1.DenseReluDense.wi")
    layers = len([path for path in modules if path.startswith("encoder.block.") and path.count(".") == 2])
    seen = (*(linear_size(modules[path]) for path in paths if path in modules), shared_size(root), layers)
    for name, shape in T5_SHAPES.items():
        inner, rows = shape.heads * shape.d_kv, shape.vocabulary
        if seen == ((shape.d_model, inner), (shape.d_model, shape.d_ff), (rows, shape.d_model), shape.layers):
            return name, shape
    return None
