"""How fast this machine's host launches operations of PyTorch: what the steps of small models wait
for."""

from __future__ import annotations

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, T5Config

from zeropods.train.device import device_type, fastest_seconds

LAYERS = 6
"""Layers of each of the two stacks, as t5-small has them."""
ROWS = 2
TOKENS = 16
VOCABULARY = 512


def host_bound_pass_seconds(seconds: float) -> float:
    """Seconds of a forward and a backward pass of a T5 whose tensors are so small that a GPU waits
    for the host in all of it.

    It is a T5 of `2 x LAYERS` layers in training, with dropout, attention by SDPA and FP32 weights;
    the fastest of many passes counts.

    Args:
        seconds: how long to repeat the pass.
    """
    model = _tiny_model()
    tokens = torch.ones(ROWS, TOKENS, dtype=torch.long, device=device_type())

    def one_pass() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad(set_to_none=True)

    return fastest_seconds(one_pass, seconds)


def _tiny_model() -> PreTrainedModel:
    """A T5 with many operations and little arithmetic."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_heads=2,
        num_layers=LAYERS,
        decoder_start_token_id=0,
    )
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa")
    model.to(device_type())
    return model.train()
