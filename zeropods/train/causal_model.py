"""The model of a causal run: pretrained weights from safetensors, or random ones of a known shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from zeropods.data.hub import hub_options
from zeropods.errors import UserError
from zeropods.plan.causal_shapes import CausalShape, causal_shape
from zeropods.train.attention import attention_for, check_attention
from zeropods.train.causal_config import causal_config, positions_of, set_dropout, shape_of
from zeropods.train.causal_loss import with_causal_loss
from zeropods.train.pretrained import check_folder, check_same_ids, load_weights, loading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zeropods.train.causal_arguments import CausalArguments

__all__ = ["load_causal", "random_causal", "shape_of"]
FLAG = "--model_name_or_path"
SEES_AHEAD = ("xlnet",)
"""In transformers' list of causal models, yet without a mask of its own a token sees those after it."""


def load_causal(
    arguments: CausalArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    precision: str,
) -> PreTrainedModel:
    """The model that the arguments name, in FP32, with `causal_loss`'s loss, checked against data and tokenizer.

    Args:
        arguments: `max_seq_length` is that of the data.
        precision: what the run trains in; it decides which attention can run.

    Raises:
        UserError: what the arguments name cannot be had, is no causal model, or does not fit the data.
    """
    check_attention(arguments.attn_implementation, precision)
    name = arguments.model_name_or_path
    options: dict[str, Any] = {}
    if arguments.init == "random":
        config = causal_config(causal_shape(name), arguments.dropout)
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    else:
        config, options = _published(name, arguments.dropout)
        _check_own_tokenizer(name, tokenizer)
    model_class = _class_of(name, config)
    _check_vocabulary(arguments, config.get_text_config(), tokenizer)
    _check_length(name, config.get_text_config(), arguments.max_seq_length)
    config._attn_implementation = attention_for(model_class, config, arguments.attn_implementation)
    if arguments.init == "random":
        model = _drawn(model_class, config, arguments.seed)
    else:
        model = load_weights(with_causal_loss(model_class), name, flag=FLAG, config=config, **options)
    return _ends_as(model, tokenizer)


def random_causal(
    shape: CausalShape, seed: int, dropout: float | None = None, attention: str = "sdpa"
) -> PreTrainedModel:
    """A model of the shape with its family's own initialisation; the same seed gives the same weights.

    They are drawn whole on every rank, in FP32, also where ZeRO-3 divides them later: so that they are the same
    weights on any number of processes and in any precision.
    """
    config = causal_config(shape, dropout)
    model_class = _class_of(shape.family, config)
    config._attn_implementation = attention_for(model_class, config, attention)
    return _drawn(model_class, config, seed)


def _drawn(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return with_causal_loss(model_class)(config)


def _published(name: str, dropout: float | None) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The configuration that a folder or the hub has, and options with which its weights are then found."""
    check_folder(name)
    options = {} if Path(name).is_dir() else hub_options(name)
    with loading(name, FLAG):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    if dropout is not None:
        set_dropout(config, dropout)
    return config, options


def _class_of(name: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' class, where it is one that predicts each token from those before it."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind = config.model_type
    # Encoders are in both lists; unless they are told to be decoders, a token sees those after it.
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if found is None or encoder or kind in SEES_AHEAD or getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{FLAG} {name!r}: {kind!r} is no causal language model; expected one such as gpt2, bloom, llama"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{FLAG} {name!r}: its weights are quantized and cannot be trained; name the original model")
    if getattr(config, "output_router_logits", False):
        raise UserError(f"{FLAG} {name!r}: output_router_logits is not supported; set it to false in its config.json")
    return found


def _check_vocabulary(arguments: CausalArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"{arguments.data}: its tokenizer has {len(tokenizer)} tokens, {arguments.model_name_or_path} has "
            f"{config.vocab_size} embedding rows; prepare the data with the model's own tokenizer"
        )


def _check_length(name: str, config: PreTrainedConfig, length: int | None) -> None:
    positions = positions_of(config)
    if positions is not None and length is not None and length > positions:
        raise UserError(f"--max_seq_length {length}: {name} has {positions} positions; give at most {positions}")


def _check_own_tokenizer(name: str, prepared: PreTrainedTokenizerBase) -> None:
    if any((Path(name) / file).is_file() for file in ("tokenizer.json", "vocab.json")):
        from zeropods.data.causal_tokenizer import load_causal_tokenizer

        check_same_ids(FLAG, name, load_causal_tokenizer(name).get_vocab(), prepared)


def _ends_as(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model, told where generated text ends: where the texts that it is trained on do."""
    generation = model.generation_config
    ends = generation.eos_token_id
    known = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id not in known:
        generation.eos_token_id = [tokenizer.eos_token_id, *(end for end in known if end is not None)]
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    return model
