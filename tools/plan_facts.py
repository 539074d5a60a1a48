"""Trace the models that `zeropods plan` knows by name, in all ways of training, and save the facts
that ship with it.

Layers of a causal model are all alike, unless some have a window: it is traced with two and with
three of them then, whose difference is a layer. tests/full/plan/test_plan_measured.py holds what is
shipped against whole models.

.venv/bin/python -m tools.plan_facts
.venv/bin/python -m tools.plan_facts gpt2 opt-1.3b    # these alone; the others stay
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from zeropods.plan.facts import FACTS
from zeropods.plan.known_models import known_models
from zeropods.plan.meta_model import facts, saved
from zeropods.plan.methods import ALL_LINEAR, LORA
from zeropods.plan.workload import EAGER, FUSED, MASKED, PLAIN

NUMBER_OF_LAYERS = ("n_layer", "num_hidden_layers")
"""Keys of causal models' configurations for their number of layers."""
FEW_LAYERS = 2


def fresh(name: str) -> dict[str, Any]:
    """Facts about a model with a known name, as `facts.json` has them."""
    config = known_models()[name]
    key = next((key for key in NUMBER_OF_LAYERS if key in config), None)
    if key is None or config.get("sliding_window") or config[key] <= FEW_LAYERS:
        return traced(json.dumps(config))
    shallow = traced(json.dumps({**config, key: FEW_LAYERS}))
    deeper = traced(json.dumps({**config, key: FEW_LAYERS + 1}))
    return with_layers(shallow, deeper, config[key])


def traced(config: str) -> dict[str, Any]:
    """Facts about the model of a configuration, in all ways of training."""
    document = facts(config, None)
    untraced = ways(document["facts"]) - document["saved"].keys()
    for way in sorted(untraced):
        document["saved"][way] = saved(config, None, way)
    return document


def with_layers(shallow: dict[str, Any], deeper: dict[str, Any], layers: int) -> dict[str, Any]:
    """The facts of a causal model with so many layers, by those of the same with `FEW_LAYERS` and
    with one more."""

    def grown(few: int, more: int) -> int:
        return few + (layers - FEW_LAYERS) * (more - few)

    few_facts = shallow["facts"]
    more_facts = deeper["facts"]
    passes = {}
    for way, kept in shallow["saved"].items():
        more_kept = deeper["saved"][way]
        (few,) = kept["layers"]
        (more,) = more_kept["layers"]
        # What all layers share, such as their rotations, is saved once.
        many = {powers: grown(factor, more[powers]) for powers, factor in few.items()}
        passes[way] = {**kept, "layers": [many]}
        if "adapter" in kept:
            passes[way]["adapter"] = grown(kept["adapter"], more_kept["adapter"])
            (few_adapted,) = kept["adapted"]
            (more_adapted,) = more_kept["adapted"]
            passes[way]["adapted"] = [grown(few_adapted, more_adapted)]
    (few_parameters,) = few_facts["layer_parameters"]
    (more_parameters,) = more_facts["layer_parameters"]
    products = {}
    for powers, factor in few_facts["products"].items():
        products[powers] = grown(factor, more_facts["products"][powers])
    block = more_parameters - few_parameters
    return {
        "facts": {
            **few_facts,
            "layers": [layers],
            "layer_parameters": [grown(few_parameters, more_parameters)],
            "weights": _with_blocks(few_facts["weights"], block, layers),
            "products": products,
        },
        "saved": passes,
    }


def _with_blocks(weights: list[Any], parameters: int, layers: int) -> list[Any]:
    """The weights of a model with `FEW_LAYERS` layers of so many parameters, with as many layers as
    are asked for."""
    for start in range(len(weights)):
        end = start
        size = 0
        while size < parameters and end < len(weights):
            size += weights[end][0]
            end += 1
        block = weights[start:end]
        after = start + FEW_LAYERS * len(block)
        if size == parameters and weights[start:after] == FEW_LAYERS * block:
            return weights[:start] + layers * block + weights[after:]
    raise ValueError("its layers are not alike")


def ways(of: dict[str, Any]) -> set[str]:
    """The ways in which a model is usually planned: precision, kernel, dropout; and, if it is
    causal, with adapters beside all linear layers, with its usual kernels."""
    precisions = ["fp32", "bf16"]
    if of["is_decoder_only"]:
        precisions.append("autocast")
    dropouts = [""]
    if of["drops"]:
        dropouts.append("dropout")
    names = set[str]()
    for precision, kernel, dropout in product(precisions, _kernels(of), dropouts):
        names.add(f"{precision} {kernel} {dropout}".strip())
    if of["is_decoder_only"]:
        usual = {EAGER} if of["attentions"] == ["eager"] else {FUSED, MASKED}
        for kernel, dropout in product(usual.intersection(_kernels(of)), dropouts):
            names.add(f"{LORA} {kernel} {ALL_LINEAR} {dropout}".strip())
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


def main(names: Sequence[str]) -> None:
    """Trace these models, or all, and save what they tell, a model a line."""
    shipped: dict[str, Any] = {}
    if names:
        shipped = json.loads(FACTS.read_text(encoding="utf-8"))
    lines = []
    for name in known_models():
        if name in names or name not in shipped:
            shipped[name] = fresh(name)
        lines.append(f"  {json.dumps(name)}: {json.dumps(shipped[name])}")
    text = ",\n".join(lines)
    FACTS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
