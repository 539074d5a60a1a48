"""What a module's class says of itself behind its figures: `in_features=128, out_features=512, bias=False`."""

from __future__ import annotations

import re

Detail = str | int | float | bool | tuple[int, ...]
POSITIONS: dict[str, tuple[str, ...]] = {
    "Embedding": ("rows", "dimension"),
    "LayerNorm": ("normalized_shape",),
}
"""Names of what a class prints without one."""
PART = re.compile(r"(?:[^,(\[]|\([^)]*\)|\[[^\]]*\])+")

WHOLE = re.compile(r"-?[0-9]{1,18}")
REAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,2})?")
SIZES = re.compile(r"\([0-9]{1,18}(?:, ?[0-9]{1,18})*,?\)")


def read_details(class_name: str, text: str) -> dict[str, Detail]:
    """The details by name; what has none is numbered from 0."""
    details: dict[str, Detail] = {}
    names = POSITIONS.get(class_name.rpartition(".")[2], ())
    for position, part in enumerate(part.strip() for part in PART.findall(text)):
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            details[name] = _value(value)
        else:
            details[names[position] if position < len(names) else str(position)] = _value(part)
    return details


def _value(text: str) -> Detail:
    if text in ("True", "False"):
        return text == "True"
    if SIZES.fullmatch(text):
        return tuple(int(size) for size in text.strip("(),").split(","))
    if WHOLE.fullmatch(text):
        return int(text)
    return float(text) if REAL.fullmatch(text) else text
