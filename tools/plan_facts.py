"""Trace the models that `zeropods plan` knows by name, in all ways of training, and save the facts
that ship with it.

.venv/bin/python -m tools.plan_facts
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from zeropods.plan.facts import FACTS
from zeropods.plan.known_models import known_models
from zeropods.plan.meta_model import facts, saved
from zeropods.plan.methods import ALL_LINEAR
from zeropods.plan.workload import EAGER, FUSED, MASKED, PLAIN


def fresh(name: str) -> dict[str, Any]:
    """Facts about a model with a known name, as `facts.json` has them."""
    config = json.dumps(known_models()[name])
    document = facts(config, None)
    untraced = ways(document["facts"]) - document["saved"].keys()
    for way in sorted(untraced):
        document["saved"][way] = saved(config, None, way)
    return document


def ways(of: dict[str, Any]) -> set[str]:
    """The ways in which a model is usually planned: precision, kernel, dropout; with adapters of
    all linear layers, the usual kernel."""
    precisions = ["fp32", "bf16"]
    if of["is_decoder_only"]:
        precisions.append("autocast")
    dropouts = [""]
    if of["drops"]:
        dropouts.append("dropout")
    names = set[str]()
    for precision, kernel, dropout in product(precisions, _kernels(of), dropouts):
        names.add(f"{precision} {kernel} {dropout}".strip())
    if of["is_decoder_only"] and "sdpa" in of["attentions"]:
        for dropout in dropouts:
            names.add(f"lora {FUSED} {ALL_LINEAR} {dropout}".strip())
    return names


def _kernels(of: dict[str, Any]) -> list[str]:
    """The kernels of attention that a model can be planned with."""
    kernels = []
    if "eager" in of["attentions"]:
        kernels.append(EAGER)
    if "sdpa" in of["attentions"]:
        kernels.append(FUSED)
        if of["kv_heads"] < of["heads"]:
            kernels.append(PLAIN)
        if of["window"] is not None:
            kernels.append(MASKED)
    return kernels


def main() -> None:
    """Trace all models, and save what they tell, a model a line."""
    lines = []
    for name in known_models():
        lines.append(f"  {json.dumps(name)}: {json.dumps(fresh(name))}")
    text = ",\n".join(lines)
    FACTS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
