"""T5 with a loss that is right on any number of processes, projected over label positions only."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import Seq2SeqLMOutput

from zeropods.plan.shapes import T5Shape


class T5ForTextToSQL(T5ForConditionalGeneration):
    """`T5ForConditionalGeneration` whose loss is the sum over label tokens / `num_items_in_batch`.

    transformers' T5 takes a plain mean and ignores `num_items_in_batch`, while `Trainer` believes
    that it does not and multiplies the loss by the process count. Here the promise is kept. Logits
    are computed where there is a label and nowhere else, so they are not returned with a loss.
    """

    def forward(
        self,
        *args: Any,
        labels: Tensor | None = None,
        label_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Loss of a batch, or logits where no labels are given.

        Args:
            labels: (rows, target tokens), -100 where there is no label.
            label_positions: (n,) indices into the flattened labels that are not -100. Given by the
                collator, they spare the device a synchronisation.
            num_items_in_batch: label tokens of the whole optimizer step, over all ranks; the
                batch's own count if None.
        """
        if labels is None:
            return super().forward(*args, **kwargs)
        if label_positions is None:
            label_positions = label_indices(labels)
        decoder_input_ids = self._shift_right(labels)
        hidden = self._decode(decoder_input_ids, *args, **kwargs).flatten(0, 1)
        logits = self.lm_head(hidden.index_select(0, label_positions) * self._scale())
        wanted = labels.flatten().index_select(0, label_positions)
        total = nn.functional.cross_entropy(logits.float(), wanted, reduction="sum")
        count = wanted.numel() if num_items_in_batch is None else num_items_in_batch
        return Seq2SeqLMOutput(loss=total / count)

    def _decode(self, decoder_input_ids: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        own, cross = attention_mask, attention_mask
        if attention_mask is not None and attention_mask.is_cuda and self.config._attn_implementation == "sdpa":
            own, cross = whole_masks(attention_mask, decoder_input_ids.shape[1])
        encoded = self.encoder(input_ids=input_ids, attention_mask=own).last_hidden_state
        return self.decoder(
            input_ids=decoder_input_ids,
            encoder_hidden_states=encoded,
            encoder_attention_mask=cross,
            use_cache=False,
        ).last_hidden_state

    def _scale(self) -> float:
        return self.model_dim**-0.5 if self.config.scale_decoder_outputs else 1.0


def label_indices(labels: Tensor) -> Tensor:
    """Flat positions of the labels that carry a loss: (n,) int64."""
    return (labels.flatten() != -100).nonzero().squeeze(1)


def whole_masks(mask: Tensor, targets: int) -> tuple[Tensor, Tensor]:
    """A mask of source tokens, as attention uses it: of sources to sources, and of targets to sources.

    transformers makes the same of it, but asks first whether any token is masked; a GPU would have to end all its work
    to answer. Source: transformers/masking_utils.py, `_ignore_bidirectional_mask_sdpa`.

    Args:
        mask: (rows, source tokens), 0 where there is padding.
        targets: tokens of a target.

    Returns:
        (rows, 1, source tokens, source tokens) and (rows, 1, targets, source tokens), True where attended to.
    """
    attended = mask.bool()[:, None, None, :]
    return attended.expand(-1, -1, mask.shape[1], -1), attended.expand(-1, -1, targets, -1)


def t5_config(shape: T5Shape, dropout: float = 0.1) -> T5Config:
    """transformers' configuration of a shape."""
    return T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.d_model,
        d_kv=shape.d_kv,
        d_ff=shape.d_ff,
        num_layers=shape.layers,
        num_decoder_layers=shape.layers,
        num_heads=shape.heads,
        dropout_rate=dropout,
        feed_forward_proj="relu",
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        scale_decoder_outputs=True,
    )


def shape_of(config: T5Config) -> dict[str, int] | None:
    """The numbers of `plan.shapes.T5Shape`; None for a variant that it does not describe (T5 v1.1, untied weights)."""
    plain = config.feed_forward_proj == "relu" and config.tie_word_embeddings
    if not plain or config.num_layers != config.num_decoder_layers:
        return None
    return asdict(
        T5Shape(
            d_model=config.d_model,
            d_kv=config.d_kv,
            d_ff=config.d_ff,
            layers=config.num_layers,
            heads=config.num_heads,
            vocabulary=config.vocab_size,
        )
    )


def random_t5(shape: T5Shape, seed: int, dropout: float = 0.1) -> T5ForTextToSQL:
    """A model of the shape with T5's own initialisation; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return T5ForTextToSQL(t5_config(shape, dropout))
