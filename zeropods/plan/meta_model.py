"""A model as transformers builds it, without weights: the facts of it that a plan needs.

What one of its passes saves and multiplies, `plan.tracing` finds out.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import logging

from zeropods.errors import UserError
from zeropods.plan.tracing import Pass, is_of_experts, parameters_of, stacks_of
from zeropods.plan.workload import ATTENTIONS, EAGER, FUSED, PLAIN

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Parameter names that transformers' Trainer leaves out of weight decay."""
ACTIVE_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
"""Names that configurations use for the number of experts of a token."""
POSITIONS = ("max_position_embeddings", "n_positions", "seq_length")
"""Names that they use for the tokens of the longest row."""
ROPES_BY_VALUES = ("dynamic", "longrope", "su")
"""Kinds of rotation that beyond the trained length depend on values, of which the meta device has
none."""
BUILDING = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""Exceptions that transformers raises for a configuration that makes no model."""

# The model without weights.


@contextlib.contextmanager
def _loading(failure: str) -> Iterator[None]:
    """Turn what transformers raises in the block into a `UserError` that begins with `failure`."""
    try:
        yield
    except BUILDING as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{failure} ({reason[:160]}); give another configuration, or a known name"
        ) from None


@lru_cache(maxsize=1)
def _built(config: str, folder: str | None) -> PreTrainedModel:
    """The model on the meta device, with what a trace cannot run replaced.

    The last one is kept, for several passes. `Pass` changes its attention and precision.

    Args:
        config: text of a `config.json`.
        folder: as in `facts`; of a model that comes with code, whose configuration is taken as it
            is.

    Raises:
        UserError: transformers cannot build the model.
    """
    values = json.loads(config)
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ROPES_BY_VALUES:
            # The default rotation takes as much memory and time.
            values[name] = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    # Each pass shall go through each layer.
    values |= {name: 0.0 for name in values if "layerdrop" in name}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with _loading(f"{values['model_type']}: transformers cannot build this model"):
            model = _from_config(values, folder)
    finally:
        logging.set_verbosity(verbosity)
    head = model.get_output_embeddings()
    table = model.get_input_embeddings()
    must_untie = values.get("tie_word_embeddings") is False
    if must_untie and head is not None and head.weight is table.weight:
        # transformers ties a T5's head and table whatever is configured, until it loads a
        # checkpoint that has both.
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight))
    return model


def _from_config(values: dict[str, Any], folder: str | None) -> PreTrainedModel:
    """The model of a configuration, in FP32 on the meta device.

    Args:
        values: the configuration; not used with a folder, which has its own.
        folder: as in `facts`. With one, code of the model is run.
    """
    has_own_code = folder is not None
    if has_own_code:
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    else:
        settings = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    if _is_encoder_only(settings):
        auto_class = AutoModelForSequenceClassification
    elif settings.is_encoder_decoder:
        auto_class = AutoModelForSeq2SeqLM
    else:
        auto_class = AutoModelForCausalLM
    with torch.device("meta"):
        return auto_class.from_config(settings, trust_remote_code=has_own_code, dtype=torch.float32)


def _is_encoder_only(settings: Any) -> bool:
    """Whether a configuration is of a model that sees whole rows and generates no text."""
    is_decoder = settings.is_encoder_decoder or getattr(settings, "is_decoder", False)
    return settings.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder


def _window(model: PreTrainedModel) -> tuple[int | None, int]:
    """Number of tokens that a layer with a window sees, and number of layers with one; None and 0
    for a model without them, and for an encoder-decoder.

    Raises:
        ValueError: a layer has something else than attention.
    """
    settings = model.config.get_text_config(decoder=True)
    kinds = getattr(settings, "layer_types", None) or ()
    other_kinds = set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}
    if other_kinds:
        names = " and ".join(sorted(other_kinds))
        raise ValueError(f"it has layers of type {names}; only attention can be planned")
    window = None
    if getattr(settings, "use_sliding_window", True):
        window = getattr(settings, "sliding_window", None)
    if kinds:
        layers = sum("sliding" in kind for kind in kinds)
    else:
        layers = len(stacks_of(model)[0])
    if window and layers and not model.config.is_encoder_decoder:
        return window, layers
    return None, 0


@_loading("the model cannot be traced")
def facts(config: str, folder: str | None) -> dict[str, Any]:
    """The facts of a `Shape`, by its fields, and what a pass in its default way of training saves:
    `facts` and `saved`, as they are shipped and cached (`plan.facts`).

    Args:
        config: text of a `config.json`.
        folder: folder or hub id whose own code may run, if any.

    Raises:
        UserError: the configuration makes no model that can be trained, or traced.
    """
    model = _built(config, folder)
    settings = model.config.get_text_config(decoder=True)
    is_causal = not model.config.is_encoder_decoder
    stacks = stacks_of(model)
    width = int(model.get_input_embeddings().weight.shape[1])
    heads, kv_heads, head_size = _heads(settings, width)
    active, experts = _experts(settings, stacks[-1])
    attentions = _attentions(model, settings, is_causal)
    window, windowed = _window(model)
    drops = _has_dropout(settings)

    pass_name = _default_pass(attentions, is_causal, kv_heads < heads, drops)
    traced = Pass(model, window, pass_name, 1.0 if experts is None else active / experts)
    saved_by_pass = traced.run()

    # Only a model of this kind has the field.
    of_kind = {"is_encoder_only": True} if _is_encoder_only(model.config) else {}
    shape = {
        **of_kind,
        "family": model.config.model_type,
        "is_decoder_only": is_causal,
        "layers": [len(stack) for stack in stacks],
        "layer_parameters": [parameters_of(stack) for stack in stacks],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "inner": traced.inner,
        "vocabulary": _vocabulary(model),
        "positions": _positions(settings),
        "window": window,
        "windowed": windowed,
        "drops": drops,
        "attentions": attentions,
        "tied": _is_tied(model),
        "experts": None if experts is None else f"{active} of {experts}",
        "weights": _weights(model),
        "products": dict(traced.products),
    }
    return {"facts": shape, "saved": {pass_name: saved_by_pass}}


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's matrix is the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _vocabulary(model: PreTrainedModel) -> int:
    """Number of outputs of the head: words, or the classes of an encoder-only model."""
    if _is_encoder_only(model.config):
        return int(model.config.num_labels)
    head = model.get_output_embeddings()
    if head is None:
        return int(model.get_input_embeddings().weight.shape[0])
    return int(head.weight.shape[0])


def _heads(settings: Any, width: int) -> tuple[int, int, int]:
    """Number of heads of queries, number of those of keys and values, and the size of a head.

    Args:
        width: width of the embedding, for a configuration that does not name the model's.
    """
    heads = int(getattr(settings, "num_attention_heads", 0) or 1)
    kv_heads = int(getattr(settings, "num_key_value_heads", None) or heads)
    latent = getattr(settings, "qk_nope_head_dim", None)
    if latent:
        # Latent attention: queries and keys are wider than values, and `head_dim` is the width of
        # their rotated part.
        size = (latent + settings.qk_rope_head_dim + settings.v_head_dim) // 2
    else:
        hidden = int(getattr(settings, "hidden_size", 0) or width)
        size = (
            getattr(settings, "head_dim", None)
            or getattr(settings, "d_kv", None)
            or hidden // heads
        )
    return heads, kv_heads, int(size)


def _experts(settings: Any, layers: nn.ModuleList) -> tuple[int, int | None]:
    """Number of experts that a token uses, and of all experts of a layer.

    They are 0 and None for a model without experts. The second is None too where no tensor holds
    the matrices of all experts.
    """
    numbers = [getattr(settings, name, None) for name in ACTIVE_EXPERTS]
    active = next((number for number in numbers if number), 0)
    if active == 0:
        return 0, None
    for parameter in layers.parameters():
        if is_of_experts(parameter):
            return active, parameter.shape[0]
    return active, None


def _attentions(model: PreTrainedModel, settings: Any, is_causal: bool) -> list[str]:
    """Those of `ATTENTIONS` that transformers has for the model."""
    # transformers tells this of a model only in private attributes.
    has_sdpa = model._supports_sdpa
    # Only the model's own code caps scores.
    is_soft_capped = getattr(settings, "attn_logit_softcapping", None) is not None
    can_use_sdpa = has_sdpa and not is_soft_capped
    is_available = {
        "eager": True,
        "sdpa": can_use_sdpa,
        "flash_attention_2": can_use_sdpa and is_causal and model._supports_flash_attn,
    }
    return [name for name in ATTENTIONS if is_available[name]]


def _default_pass(
    attentions: Sequence[str], is_causal: bool, shares_keys: bool, drops: bool
) -> str:
    """Name of a pass in FP32 with the default attention, as `Workload.saved` names it.

    Args:
        shares_keys: whether several heads share keys and values.
        drops: whether the model has dropout.
    """
    if "sdpa" not in attentions:
        kernel = EAGER
    elif is_causal and shares_keys:
        kernel = PLAIN
    else:
        kernel = FUSED
    return f"fp32 {kernel} dropout" if drops else f"fp32 {kernel}"


def _has_dropout(settings: Any) -> bool:
    """Whether any of the model's rates of dropout is above 0."""
    for name, rate in vars(settings).items():
        if "drop" in name and isinstance(rate, float) and rate > 0:
            return True
    return False


def _positions(settings: Any) -> int | None:
    """Tokens of the longest row; None where the configuration names none."""
    for name in POSITIONS:
        positions = getattr(settings, name, None)
        if isinstance(positions, int):
            return positions
    return None


def _weights(model: PreTrainedModel) -> list[list[int | str]]:
    """Number of elements and kind (see `Weight`) of each parameter tensor, in the model's order;
    the head's is an `embedding` too."""
    head = model.get_output_embeddings()
    embeddings = [model.get_input_embeddings().weight]
    if head is not None:
        embeddings.append(head.weight)
    weights: list[list[int | str]] = []
    for name, weight in model.named_parameters():
        # `in` would compare the tensors' elements.
        if any(weight is embedding for embedding in embeddings):
            kind = "embedding"
        elif "bias" in name:
            kind = "bias"
        elif weight.dim() < 2 or NOT_DECAYED.search(name.lower()):
            kind = "norm"
        else:
            kind = "matrix"
        weights.append([weight.numel(), kind])
    return weights


def saved(config: str, folder: str | None, pass_name: str) -> dict[str, Any]:
    """The fields of `Saved` for a pass that is named as in `Workload.saved`; the other arguments
    are those of `facts`.

    Raises:
        UserError: the configuration makes no model, or the pass cannot be traced.
    """
    model = _built(config, folder)
    with _loading(f"{model.config.model_type}: what it saves cannot be traced"):
        window, _ = _window(model)
        return Pass(model, window, pass_name).run()
