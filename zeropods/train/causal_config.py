"""Configurations of causal models: from a known shape, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from transformers import BloomConfig, GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from zeropods.errors import UserError
from zeropods.plan.causal_shapes import CausalShape

DROPOUTS = (
    "attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "emb_pdrop", "embed_dropout",
    "embedding_dropout", "residual_dropout", "activation_dropout", "dropout", "attention_probs_dropout_prob",
    "hidden_dropout_prob",
)  # fmt: skip
"""What configurations of transformers call the rates of their dropouts."""
OTHER_PARTS = ("add_cross_attention", "attention_bias", "mlp_bias")
"""Switches that give a model parameters of which a shape knows nothing."""
BLOOM_POSITIONS = 2_048
"""The length that BLOOM was trained at; its configuration need not say so."""


def causal_config(shape: CausalShape, dropout: float | None = None) -> PreTrainedConfig:
    """transformers' configuration of a shape, with the constants that its family was published with.

    Args:
        dropout: rate of every dropout that the family has; the family's own if None (0.1 for GPT-2, else 0).
    """
    config = CONFIGS[shape.family](shape)
    if dropout is not None:
        set_dropout(config, dropout)
    return config


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout rate of a configuration.

    Raises:
        UserError: a rate above 0 for a family without dropout.
    """
    names = [name for name in DROPOUTS if isinstance(getattr(config, name, None), int | float)]
    if rate and not names:
        raise UserError(f"--dropout {rate}: {config.model_type} has no dropout; leave it out")
    for name in names:
        setattr(config, name, rate)


def positions_of(config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model: learned positions, or those that it was trained at; None if it does not say."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def shape_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The fields of `plan.causal_shapes.CausalShape`; None for a model that it does not describe."""
    if config.model_type not in CONFIGS or any(getattr(config, name, False) for name in OTHER_PARTS):
        return None
    hidden, heads = config.hidden_size, config.num_attention_heads
    return asdict(
        CausalShape(
            family=config.model_type,
            hidden=hidden,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or hidden // heads,
            ffn=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden,
            vocabulary=config.vocab_size,
            positions=positions_of(config) or BLOOM_POSITIONS,
            tied=bool(config.tie_word_embeddings),
        )
    )


def _gpt2(shape: CausalShape) -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.ffn,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def _bloom(shape: CausalShape) -> PreTrainedConfig:
    if shape.ffn != 4 * shape.hidden:
        raise UserError(f"shape: ffn {shape.ffn}; BLOOM's is 4 x hidden = {4 * shape.hidden}")
    return BloomConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        seq_length=shape.positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def _llama(shape: CausalShape) -> PreTrainedConfig:
    return LlamaConfig(**_rotary(shape, theta=500_000.0, epsilon=1e-5))


def _mistral(shape: CausalShape) -> PreTrainedConfig:
    return MistralConfig(**_rotary(shape, theta=10_000.0, epsilon=1e-5), sliding_window=4_096)


def _qwen3(shape: CausalShape) -> PreTrainedConfig:
    return Qwen3Config(**_rotary(shape, theta=1_000_000.0, epsilon=1e-6))


def _rotary(shape: CausalShape, *, theta: float, epsilon: float) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


CONFIGS: dict[str, Callable[[CausalShape], PreTrainedConfig]] = {
    "gpt2": _gpt2,
    "bloom": _bloom,
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
}
