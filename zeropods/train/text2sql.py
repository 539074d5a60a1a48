"""The task of `textsql_train.py`: T5, and a source and a target in each row.

The loss is over label positions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import Seq2SeqLMOutput

from zeropods.data.tokenizers import load_tokenizer
from zeropods.errors import UserError
from zeropods.plan.known_models import known_config
from zeropods.train.device import is_ampere, padding_multiple
from zeropods.train.flags import TextToSQLArguments, Vocabularies
from zeropods.train.job import Task
from zeropods.train.pretrained import check_source, load_weights, source_options
from zeropods.train.sampler import Prepared, Row, collate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

USUAL_DROPOUT = 0.1
"""Rate of dropout with which T5 was published."""


class TextToSQL(Task):
    """Text-to-SQL with T5.

    Nothing is scored here: `zeropods predict` makes predictions, with constrained decoding.
    """

    arguments: TextToSQLArguments

    def check_model(self) -> None:
        """Refuse flags that cannot run here, and a model that is missing.

        The flags are `--compile` where the engine cannot run what is compiled, and `--tf32` where
        no GPU has TF32.
        """
        self.engine.check_compiled()
        if self.arguments.tf32 and not is_ampere():
            raise UserError("--tf32 True: no GPU here has TF32 (Ampere or later); leave it out")
        check_source(self.arguments)

    @cached_property
    def multiple(self) -> int:
        """The multiple of tokens that rows are padded to: the flag's, or that of this device."""
        is_compiled = self.arguments.compile != "off"
        return padding_multiple(self.arguments.pad_to_multiple_of, compiled=is_compiled)

    @cached_property
    def data(self) -> Prepared:
        """The prepared set at `--dataset_path`."""
        return Prepared.read(Path(self.arguments.dataset_path))

    def settings(self) -> dict[str, object]:
        """The flags, with the multiple that holds on this device.

        The data's content key is in place of their path.
        """
        resolved = replace(self.arguments, pad_to_multiple_of=self.multiple)
        return {**resolved.comparable(), "dataset_path": self.data.manifest.content_key}

    def model(self) -> PreTrainedModel:
        """A T5: pretrained weights from safetensors, or random ones of a known shape.

        Its configuration carries the prompt, so that a saved model says which prompt it was trained
        with.
        """
        tokenizer = self.data.tokenizer
        if self.arguments.init == "random":
            model = self._random_model(tokenizer)
        else:
            model = self._pretrained_model(tokenizer)
        model.config.prompt = self.data.manifest.prompt
        generation = model.generation_config
        generation.max_length = None
        generation.max_new_tokens = self.arguments.generation_max_length
        generation.num_beams = self.arguments.generation_num_beams
        return model

    def _random_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A T5 of a known shape, with random weights, checked against the data's tokenizer."""
        name = self.arguments.model_id
        dropout = self.arguments.dropout
        if dropout is None:
            dropout = USUAL_DROPOUT
        model = random_t5(known_config(name, "t5"), self.arguments.seed, dropout)
        self.arguments.check_fit(name, model.config.vocab_size, len(tokenizer), None)
        return model

    def _pretrained_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A T5 with pretrained weights, checked against the data's tokenizer."""
        name = self.arguments.source
        options = dict(source_options(name))
        if self.arguments.dropout is not None:
            options["dropout_rate"] = self.arguments.dropout
        model = load_weights(T5ForTextToSQL, name, flag=self.arguments.model_flag, **options)
        # The tokenizer of a hub id is not fetched for this check alone.
        vocabularies = None
        if _has_tokenizer(Path(name)):
            vocabularies = Vocabularies(
                model=load_tokenizer(name, complete=False).get_vocab(),
                data=tokenizer.get_vocab(),
            )
        self.arguments.check_fit(name, model.config.vocab_size, len(tokenizer), vocabularies)
        return model

    def batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """Sources and targets, padded to the longest of each.

        The longest is rounded up to a multiple of `--pad_to_multiple_of`.
        """
        return collate(rows, multiple=self.multiple)


def _has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder brings a tokenizer of T5's kind; a hub id is no folder."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model"))


# T5 with a loss that is right on any number of processes. Logits are computed at label positions
# only.


class T5ForTextToSQL(T5ForConditionalGeneration):
    """`T5ForConditionalGeneration` whose loss is the sum over label tokens / `num_items_in_batch`.

    transformers' T5 takes a plain mean and ignores `num_items_in_batch`, while `Trainer` assumes
    that it does not and multiplies the loss by the process count. Here the assumption holds. Logits
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

        Returns:
            With `labels` the loss alone, in nats; without them what transformers' T5 returns.
        """
        if labels is None:
            return super().forward(*args, **kwargs)
        if label_positions is None:
            label_positions = (labels.flatten() != -100).nonzero().squeeze(1)
        decoder_input_ids = self._shift_right(labels)
        hidden = self._decode(decoder_input_ids, *args, **kwargs).flatten(0, 1)
        scale = 1.0
        if self.config.scale_decoder_outputs:
            scale = self.model_dim**-0.5
        logits = self.lm_head(hidden.index_select(0, label_positions) * scale)
        label_ids = labels.flatten().index_select(0, label_positions)
        total = nn.functional.cross_entropy(logits.float(), label_ids, reduction="sum")
        count = num_items_in_batch
        if count is None:
            count = label_ids.numel()
        return Seq2SeqLMOutput(loss=total / count)

    def _decode(
        self, decoder_input_ids: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """The decoder's last hidden states, (rows, target tokens, hidden)."""
        encoder_mask = attention_mask
        cross_mask = attention_mask
        uses_sdpa = self.config._attn_implementation == "sdpa"
        if attention_mask is not None and attention_mask.is_cuda and uses_sdpa:
            encoder_mask, cross_mask = whole_masks(attention_mask, decoder_input_ids.shape[1])
        encoded = self.encoder(input_ids=input_ids, attention_mask=encoder_mask)
        decoded = self.decoder(
            input_ids=decoder_input_ids,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=cross_mask,
            use_cache=False,
        )
        return decoded.last_hidden_state


def whole_masks(mask: Tensor, targets: int) -> tuple[Tensor, Tensor]:
    """The masks of attention to sources, made from a mask of source tokens.

    One is for what sources attend to, one for what targets attend to. transformers makes the same
    masks, but first checks whether any token is masked, for which a GPU would have to finish all
    its work. Source: transformers/masking_utils.py, `_ignore_bidirectional_mask_sdpa`.

    Args:
        mask: (rows, source tokens), 0 where there is padding.
        targets: number of tokens of a target.

    Returns:
        (rows, 1, source tokens, source tokens) and (rows, 1, targets, source tokens), True where
        attended to.
    """
    sources = mask.shape[1]
    attended = mask.bool()[:, None, None, :]
    from_sources = attended.expand(-1, -1, sources, -1)
    from_targets = attended.expand(-1, -1, targets, -1)
    return from_sources, from_targets


def random_t5(sizes: Mapping[str, Any], seed: int, dropout: float = 0.1) -> T5ForTextToSQL:
    """A model of these sizes with T5's own initialisation; the same seed gives the same weights.

    Args:
        sizes: fields of `T5Config`, as `plan.known_models.known_config` gives them.
    """
    fields = {"decoder_start_token_id": 0, **sizes, "dropout_rate": dropout}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return T5ForTextToSQL(T5Config(**fields))
