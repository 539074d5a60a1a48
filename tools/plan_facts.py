"""Trace the models that `zeropods plan` knows by name, in all ways of training, and save the facts that ship with it.

.venv/bin/python -m tools.plan_facts
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from zeropods.plan.facts import FACTS
from zeropods.plan.known_models import known_models
from zeropods.plan.meta_model import facts, saved
from zeropods.plan.workload import EAGER, FUSED, MASKED, PLAIN


def fresh(name: str) -> dict[str, Any]:
    """Facts about a model with a known name, as `facts.json` has them."""
    config = json.dumps(known_models()[name])
    found = facts(config, None)
    for way in sorted(ways(found["facts"]) - found["saved"].keys()):
        found["saved"][way] = saved(config, None, way)
    return found


def ways(of: dict[str, Any]) -> set[str]:
    """All ways in which a model can be planned: precision, kernel, dropout."""
    kernels = {
        EAGER: "eager" in of["attentions"],
        FUSED: "sdpa" in of["attentions"],
        PLAIN: "sdpa" in of["attentions"] and of["kv_heads"] < of["heads"],
        MASKED: "sdpa" in of["attentions"] and of["window"] is not None,
    }
    precisions = ["fp32", "bf16", *["autocast"] * of["is_decoder_only"]]
    run = [kernel for kernel, has in kernels.items() if has]
    return {" ".join(way).strip() for way in product(precisions, run, ["", "dropout"][: 1 + of["drops"]])}


if __name__ == "__main__":
    lines = (f"  {json.dumps(name)}: {json.dumps(fresh(name))}" for name in known_models())
    FACTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
