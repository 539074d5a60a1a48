"""The request for a model of any kind, from what was asked by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from zeropods.errors import UserError
from zeropods.plan.causal_request import BOTH, CausalRequest
from zeropods.plan.causal_shapes import CAUSAL_SHAPES, is_causal
from zeropods.plan.request import AnyRequest, Request
from zeropods.plan.shapes import T5_SHAPES, is_t5

INSTEAD = {Request: "--source-length and --target-length", CausalRequest: "--seq-length and --label-length"}
"""What says how long rows are."""


def request_for(model: str, **asked: Any) -> AnyRequest:
    """The request with these fields, those of a T5 or of a causal model.

    Raises:
        UserError: an unknown model, a field that is wrong, or one that is of the other kind.
    """
    if not is_causal(model) and not is_t5(model):
        raise UserError(f"model {model!r} has no shape known here; expected one of {_names()}")
    kind, other = (CausalRequest, Request) if is_causal(model) else (Request, CausalRequest)
    known = {field.name for field in fields(kind)}
    foreign = next((name for name in asked if name not in known), None)
    if foreign is not None:
        what = "a causal model" if kind is CausalRequest else "a T5"
        remedy = f"give {INSTEAD[kind]}" if foreign in _lengths(other) else "leave it out"
        raise UserError(f"--{foreign.replace('_', '-')} {asked[foreign]}: {model} is {what}; {remedy}")
    if kind is Request and asked.get("gradient_checkpointing") == BOTH:
        raise UserError(f"--gradient-checkpointing both: {model} is a T5; give True or False")
    return kind(model=model, **asked)


def _lengths(kind: type[AnyRequest]) -> set[str]:
    return {field.name for field in fields(kind) if field.name.endswith("_length")}


def _names() -> str:
    return ", ".join((*T5_SHAPES, *CAUSAL_SHAPES))
