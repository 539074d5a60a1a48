"""The models that are known by name: their configurations, and tiny ones that stand for them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from zeropods.errors import UserError

MODELS = Path(__file__).with_name("models.json")
"""File with the configurations of the known names.

The `-tiny` models are ours, for tests, the embedded job and trials of what is run with larger
models. The others are the published ones: T5 v1.0 (Raffel et al. 2020, arXiv:1910.10683;
`t5-efficient-mini` Tay et al. 2021, arXiv:2109.10686), and those of `ON_HUB`."""
ON_HUB = {
    "t5-efficient-mini": "google/t5-efficient-mini",
    "t5-small": "google-t5/t5-small",
    "t5-base": "google-t5/t5-base",
    "t5-large": "google-t5/t5-large",
    "t5-3b": "google-t5/t5-3b",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
    "opt-125m": "facebook/opt-125m",
    "opt-1.3b": "facebook/opt-1.3b",
    "opt-2.7b": "facebook/opt-2.7b",
    "opt-6.7b": "facebook/opt-6.7b",
    "bloom-560m": "bigscience/bloom-560m",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "llama-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
}
"""Hub ids of the published models by their known names."""
PUBLISHED_AS = {
    "mistral-7b-v0.1": "mistral-7b",
    "meta-llama-3-8b": "llama-8b",
    "llama-3-8b": "llama-8b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
}
"""Known names by other names of the same model, as on the hub."""
TUNED = ("-instruct", "-chat")
"""Ends of the names of models that were tuned further, and have the shape of those without."""
T5_TINY = ("t5-tiny", "t5-large-tiny", "t5-3b-tiny")
CAUSAL_TINY = ("gpt-tiny", "bloom-tiny", "llama-tiny", "qwen3-tiny")
"""Names of our own models: they have no pretrained weights, and their tokenizer is trained on the
data."""

TINY_OF_FAMILIES = {
    "gpt2": "gpt-tiny",
    "opt": "gpt-tiny",
    "mistral": "llama-tiny",
    "qwen2": "qwen3-tiny",
}
"""Our own models by the type of those that they stand for, where they are not called as it is."""


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """The configurations of the known names, as their `config.json` has them."""
    return json.loads(MODELS.read_text(encoding="utf-8"))


def known_names(kind: str | None = None) -> list[str]:
    """All known names, or those of one kind: `t5` or `causal`."""
    names = []
    for name, config in known_models().items():
        kind_of_model = "t5" if config["model_type"] == "t5" else "causal"
        if kind in (None, kind_of_model):
            names.append(name)
    return names


def known_name(model: str, kind: str | None = None) -> str:
    """The known name of a model, with or without an organisation before it: `google-t5/t5-small`.

    Args:
        kind: `t5` or `causal`, where only such models are allowed.

    Raises:
        UserError: the model has no known name.
    """
    last_part = model.rsplit("/", 1)[-1].lower()
    for end in TUNED:
        last_part = last_part.removesuffix(end)
    name = PUBLISHED_AS.get(last_part, last_part)
    names = known_names(kind)
    if name not in names:
        raise UserError(f"model {model!r} is unknown; expected one of {', '.join(names)}")
    return name


def hub_id(model: str) -> str | None:
    """The hub id of a model by its known name, or that name for one of our own; a name with an
    organisation stays. None for a tuned model without its organisation: how the hub calls it is not
    known here. `UserError` where the name is unknown."""
    name = known_name(model)
    if "/" in model:
        return model
    if model.lower().endswith(TUNED):
        return None
    return ON_HUB.get(name, name)


def known_config(model: str, kind: str | None = None) -> dict[str, Any]:
    """The configuration of a known name; `UserError` where the name is unknown."""
    return known_models()[known_name(model, kind)]


def tiny_name(model: str) -> str:
    """Name of our tiny model that stands for a known one in a trial; `UserError` where the model is
    unknown. A tiny model stands for itself."""
    name = known_name(model)
    family = known_models()[name]["model_type"]
    if family != "t5":
        return TINY_OF_FAMILIES.get(family, f"{family}-tiny")
    for tiny in (name, f"{name}-tiny"):
        if tiny in T5_TINY:
            return tiny
    return "t5-tiny"
