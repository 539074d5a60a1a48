"""The task of `causal_train.py`: a causal language model on questions or text, one text per row.

Its loss is here too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from zeropods import files
from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.prepare import Preparation, key_of_preparation, prepare
from zeropods.data.tokenizers import GPT_TINY, load_causal_tokenizer
from zeropods.errors import UserError
from zeropods.measure.score_json import text_score
from zeropods.plan.known_models import CAUSAL_TINY, known_config
from zeropods.tables import progress
from zeropods.tasks import task_or_unknown
from zeropods.train import processes
from zeropods.train.device import is_ampere
from zeropods.train.flags import MAX_SEQ_LENGTH, OWN, CausalArguments, Vocabularies
from zeropods.train.job import SummedLoss, Task
from zeropods.train.pretrained import check_source, load_weights, loading, source_options
from zeropods.train.sampler import Prepared, Row, TokenizedSplit, load_split, padded
from zeropods.train.saved_models import sample_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATED = "generated.json"
"""File in the run folder with what the trained model generates after `--generation_prompt`."""
FLAG = "--model_name_or_path"
SEES_AHEAD = ("xlnet",)
"""Model types that transformers lists as causal, but in which tokens see later ones.

They would need a special mask.
"""
DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "emb_pdrop",
    "embed_dropout",
    "embedding_dropout",
    "residual_dropout",
    "activation_dropout",
    "dropout",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
)
"""Names of dropout rates in transformers' configurations."""
log = logging.getLogger(__name__)


class Causal(Task):
    """Causal language modelling."""

    is_one_text = True
    arguments: CausalArguments

    def __init__(self, arguments: CausalArguments) -> None:
        super().__init__(arguments)
        data = Path(arguments.data)
        self.is_prepared = (data / FILE).is_file()
        """Whether `--data` is a prepared set."""
        self.set_folder = self.folder / OWN
        """The folder where the prepared set is, or will be."""
        if self.is_prepared:
            self.set_folder = data

    def check_model(self) -> None:
        """Refuse an attention implementation that cannot run here.

        A model that is missing, not causal, or cannot be trained is refused too.
        """
        attention = self.arguments.attn_implementation
        if attention == "flash_attention_2" and not _has_flash_attention(self.precision):
            raise UserError(
                f"--attn_implementation {attention}: needs --precision bf16 or fp16, "
                "a GPU of compute capability 8.0 and the package flash-attn; "
                "use --attn_implementation sdpa"
            )
        config = check_source(self.arguments)
        # With random weights there is none: the shapes that are known are all causal.
        if config is not None:
            # For what it refuses; the class itself is needed later.
            _class_of(self.arguments.source, config)

    def prepare(self) -> None:
        """Prepare raw data into `data/` of the run folder, unless an earlier attempt has done so.

        Raises:
            UserError: `data/` was made from other data or with other settings; it is never
                replaced.
        """
        if self.is_prepared:
            return
        preparation = self._preparation()
        if (self.set_folder / FILE).is_file():
            manifest = read_manifest(self.set_folder)
            if manifest.content_key != key_of_preparation(preparation, manifest):
                raise UserError(
                    f"{self.set_folder}: was prepared from data or with settings that differ from "
                    f"this call's (--data {self.arguments.data}); choose another --outputdir"
                )
            return
        remedy = "free some space on the disk, then run again"
        in_one_line = files.said_in_one_line(self.set_folder, "the prepared data", remedy)
        with progress("prepare", "rows") as bar, in_one_line:
            prepare(preparation, self.set_folder, bar.update)

    def _preparation(self) -> Preparation:
        """How the raw data at `--data` are to be prepared."""
        arguments = self.arguments
        task = arguments.task_of_raw_data
        data: Path | str = arguments.data
        # What is no folder may be a hub id of text.
        if Path(data).is_dir() or not task.reads_hub:
            data = Path(data)
        return Preparation(
            task=task.name,
            data=data,
            tokenizer=self._tokenizer_name(),
            max_seq_length=arguments.max_seq_length or MAX_SEQ_LENGTH,
            loss_on=arguments.loss_on,
            limit=arguments.subset,
            dataset_config=arguments.dataset_config,
            text_field=arguments.text_field or "text",
        )

    def _tokenizer_name(self) -> str:
        """The tokenizer that raw data are prepared with: the flag's, or the model's own."""
        arguments = self.arguments
        if arguments.tokenizer_name:
            return arguments.tokenizer_name
        is_tiny = arguments.init == "random" and arguments.model_id in CAUSAL_TINY
        if is_tiny:
            # The project's small models have a tokenizer that is trained on the data.
            return GPT_TINY
        return arguments.model_id

    @cached_property
    def data(self) -> Prepared:
        """The set at `--data`, or the one that was made from it, cut to what the flags ask for.

        Raises:
            UserError: the set cannot be read, or its tokenizer has no padding token.
        """
        arguments = self.arguments
        whole = Prepared.read(self.set_folder)
        if whole.tokenizer.pad_token_id is None:
            raise UserError(
                f"{self.set_folder}: its tokenizer has no padding token; prepare the data again"
            )
        subset = None
        if self.is_prepared:
            # From raw data only the subset was prepared.
            subset = arguments.subset
        train = whole.train.first(subset)
        dev = whole.dev
        if dev is not None:
            most_dev_rows = None
            if arguments.max_eval_steps is not None:
                most_dev_rows = arguments.max_eval_steps * arguments.per_device_eval_batch_size
            dev = dev.first(subset).first(most_dev_rows)
        return replace(whole, train=train, dev=dev)

    def _complete_arguments(self) -> CausalArguments:
        """The flags, with the values that a prepared set decides filled in."""
        manifest = self.data.manifest
        return replace(
            self.arguments,
            task=manifest.task,
            max_seq_length=manifest.max_seq_length,
            loss_on=manifest.loss_on,
        )

    def settings(self) -> dict[str, object]:
        """The flags that two calls of the same run share, with the prepared set's values where it
        decides.

        The set's content key is in place of `--data`.
        """
        return {**self._complete_arguments().comparable(), "data": self.data.manifest.content_key}

    def model(self) -> PreTrainedModel:
        """The causal model that the flags name.

        One for questions carries the prompt, so that the saved model says how to prompt it.

        Raises:
            UserError: as for `load_causal`; or the model could not continue `--generation_prompt`.
        """
        manifest = self.data.manifest
        model = load_causal(self._complete_arguments(), self.data.tokenizer)
        if self.arguments.generation_prompt is not None:
            self._check_prompt(self.arguments.generation_prompt, positions_of(model.config))
        if task_or_unknown(manifest.task).has_answers:
            model.config.prompt = manifest.prompt
        return model

    def _check_prompt(self, prompt: str, positions: int | None) -> None:
        """Refuse, before training, a prompt that the model could not continue.

        Args:
            positions: tokens of the model's longest sequence; None where it does not say.
        """
        tokens = len(self.data.tokenizer(prompt).input_ids)
        if not prompt.strip() or tokens == 0:
            raise UserError(
                f"--generation_prompt {prompt!r}: contains no words; give some to continue"
            )
        if positions is not None and tokens >= positions:
            fault = f"{tokens} tokens, but the model has only {positions} positions"
            raise UserError(f"--generation_prompt: {fault}; shorten it")

    def batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """A batch of rows, padded to the longest."""
        return collate_causal(rows, self.data.tokenizer.pad_token_id)

    def score(
        self, dev_loss: SummedLoss | None, summed_loss: Callable[[TokenizedSplit], SummedLoss]
    ) -> str:
        """Write the perplexity of text over all ranks, and the model's continuation of the prompt.

        Arguments and result are those of `Task.score`. Each is written only where the run has it:
        the result is empty where there is no perplexity.
        """
        losses: dict[str, SummedLoss] = {}
        """Loss by split."""
        has_answers = task_or_unknown(self.data.manifest.task).has_answers
        is_whole_evaluation = self.arguments.max_eval_steps is None
        # Answers are scored by `zeropods score`; of a part of a split there is no perplexity.
        if not has_answers and is_whole_evaluation:
            if dev_loss is not None:
                losses["dev"] = dev_loss
            test = load_split(self.data.folder, "test")
            if test is not None:
                losses["test"] = summed_loss(test)

        def write_scores() -> str:
            """Write all scores, and return the last perplexity in words."""
            text = ""
            for split, loss in losses.items():
                score = text_score(loss.nats, loss.tokens)
                score.write(self.folder, split)
                text = f"perplexity {score.perplexity:.4g} ({split})"
            prompt = self.arguments.generation_prompt
            if prompt is not None:
                sample = sample_text(self.folder / "model", prompt)
                files.write_json(self.folder / GENERATED, asdict(sample))
            return text

        return str(processes.on_rank_zero(write_scores))


def _has_flash_attention(precision: str) -> bool:
    """Whether FlashAttention 2 can run here at this precision."""
    is_suited = is_ampere() and precision != "fp32"
    return is_suited and importlib.util.find_spec("flash_attn") is not None


def collate_causal(rows: list[Row], pad: int) -> dict[str, Tensor]:
    """Pad rows of (token ids, labels) on the right, to the longest of the batch.

    Returns:
        input_ids: (rows, tokens) int64.
        attention_mask: the same shape, 1 for a token and 0 for a pad; left out where no row is
            padded.
        labels: the same shape, not shifted; -100 where there is no loss, and at first tokens, which
            no token predicts.
        label_positions: (n,) int64, flat positions p of the tokens that predict a label: the one at
            p + 1.
    """
    ids, is_token = padded([tokens for tokens, _ in rows], pad)
    labels, _ = padded([row_labels for _, row_labels in rows], -100)
    labels[:, 0] = -100
    has_label = labels.ravel() != -100
    # Entry p says whether the token at p + 1 has a label. Behind the last token of a row comes the
    # first one of the next row, which has none.
    next_has_label = has_label[1:]
    batch = {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "label_positions": torch.from_numpy(np.flatnonzero(next_has_label)),
    }
    if not is_token.all():
        batch["attention_mask"] = torch.from_numpy(is_token.astype(np.int64))
    return batch


# The model of a run: pretrained weights from safetensors, or random ones of a known shape.


def load_causal(arguments: CausalArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model that the arguments name, in FP32, with the loss of `with_causal_loss`.

    It is checked against the data.

    Args:
        arguments: the flags; `max_seq_length` is that of the data.
        tokenizer: the data's tokenizer.

    Raises:
        UserError: the model that the arguments name cannot be loaded, is not causal, or does not
            fit the data.
    """
    is_random = arguments.init == "random"
    if is_random:
        # The name of a shape that is known here.
        name = arguments.model_id
        options = {}
    else:
        # A folder, or an id of the hub.
        name = arguments.source
        options = source_options(name)
    config = _configuration(arguments, tokenizer, options)
    if arguments.dropout is not None:
        set_dropout(config, arguments.dropout)
    # What the configuration shows is checked before any weight is made or read.
    model_class = _class_of(name, config)
    sizes = config.get_text_config()
    vocabularies = None
    if not is_random:
        vocabularies = _vocabularies(name, tokenizer)
    arguments.check_fit(name, sizes.vocab_size, len(tokenizer), vocabularies)
    _check_length(arguments, positions_of(sizes))
    config._attn_implementation = _attention(arguments.attn_implementation, config, model_class)
    if is_random:
        model = random_causal(config, arguments.seed)
    else:
        model = load_weights(
            with_causal_loss(model_class), name, flag=FLAG, config=config, **options
        )
    _end_like_the_data(model, tokenizer)
    return model


def _configuration(
    arguments: CausalArguments, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> PreTrainedConfig:
    """The configuration of the model that the arguments name.

    With random weights `model_id` is the name of a shape that is known here, and begin and end
    tokens are the tokenizer's.

    Args:
        options: options of `from_pretrained`, where the model has weights.
    """
    if arguments.init == "random":
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        return causal_config({**known_config(arguments.model_id, "causal"), **ends})
    with loading(arguments.source, FLAG):
        return AutoConfig.from_pretrained(arguments.source, trust_remote_code=False, **options)


def _vocabularies(name: str, tokenizer: PreTrainedTokenizerBase) -> Vocabularies | None:
    """The vocabularies of a local model and of the data.

    None where the model brings no tokenizer, or is at the hub: it is not fetched for this check.
    """
    tokenizer_files = (Path(name) / file for file in ("tokenizer.json", "vocab.json"))
    if not any(path.is_file() for path in tokenizer_files):
        return None
    return Vocabularies(model=load_causal_tokenizer(name).get_vocab(), data=tokenizer.get_vocab())


def _check_length(arguments: CausalArguments, positions: int | None) -> None:
    """Refuse rows that are longer than a model with so many positions can read."""
    length = arguments.max_seq_length
    if positions is not None and length is not None and length > positions:
        most = f"{arguments.model_id} has {positions} positions; give at most {positions}"
        raise UserError(f"--max_seq_length {length}: {most}")


def _attention(flag: str, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> str:
    """The attention implementation that a model runs: the flag's, or `eager` where the model's
    family has no SDPA, with a warning in the log.

    Raises:
        UserError: FlashAttention 2 for a family without it.
    """
    if flag == "flash_attention_2" and not model_class._supports_flash_attn:
        raise UserError(
            f"--attn_implementation {flag}: {config.model_type} does not support it; "
            "use --attn_implementation sdpa"
        )
    is_soft_capped = getattr(config, "attn_logit_softcapping", None) is not None
    has_sdpa = model_class._supports_sdpa and not is_soft_capped
    if flag == "sdpa" and not has_sdpa:
        log.warning(
            "%s: no SDPA for this family; its attention runs as --attn_implementation eager",
            config.model_type,
        )
        return "eager"
    return flag


def _end_like_the_data(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let generated text end with the token that ends the texts on which the model is trained.

    The model's own end tokens stay, behind that one. The model is changed in place.
    """
    generation = model.generation_config
    ends = generation.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    if tokenizer.eos_token_id not in ends:
        others = [end for end in ends if end is not None]
        generation.eos_token_id = [tokenizer.eos_token_id, *others]
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id


def random_causal(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model with its family's own initialisation; the same seed gives the same weights.

    The weights are drawn whole and in FP32 on every rank, even where ZeRO-3 divides them later, so
    that they are the same on any number of processes and in any precision.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return with_causal_loss(_class_of(config.model_type, config))(config)


def _class_of(name: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' class of a model.

    Raises:
        UserError: it does not predict each token from those before it, or cannot be trained.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or _sees_ahead(config):
        raise UserError(
            f"{FLAG} {name!r}: {config.model_type!r} is not a causal language model; "
            "expected one such as gpt2, bloom, llama"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{FLAG} {name!r}: its weights are quantized and cannot be trained; "
            "name the original model"
        )
    if getattr(config, "output_router_logits", False):
        # It adds a loss of the router, which the loss that is used here would leave out.
        raise UserError(
            f"{FLAG} {name!r}: output_router_logits is not supported; "
            "set it to false in its config.json"
        )
    return model_class


def _sees_ahead(config: PreTrainedConfig) -> bool:
    """Whether tokens of a model see those after them."""
    kind = config.model_type
    if kind in SEES_AHEAD or getattr(config, "is_encoder_decoder", False):
        return True
    # Encoders are among the causal models too, since they may be configured as decoders.
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return is_encoder and not getattr(config, "is_decoder", False)


# Configurations.


def causal_config(sizes: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' configuration of a model that is made here.

    It is without begin and end tokens unless `sizes` has them.

    Args:
        sizes: its `config.json`, as `plan.known_models.known_config` gives it.
    """
    fields = {"bos_token_id": None, "eos_token_id": None, **sizes}
    return CONFIG_MAPPING[sizes["model_type"]](**fields)


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout rate of a configuration, in place.

    Raises:
        UserError: a rate above 0 for a family without dropout.
    """
    names = [name for name in DROPOUTS if isinstance(getattr(config, name, None), int | float)]
    if rate and not names:
        raise UserError(f"--dropout {rate}: {config.model_type} has no dropout; leave it out")
    for name in names:
        setattr(config, name, rate)


def positions_of(config: PreTrainedConfig) -> int | None:
    """Tokens of a model's longest sequence: its learned positions, or the length it was trained on.

    None if its configuration does not say.
    """
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        positions = getattr(config, name, None)
        if isinstance(positions, int) and positions > 0:
            return positions
    return None


# The loss: correct on any number of processes, with logits only where there is a label.


def with_causal_loss(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class with another loss in its `forward`; everything else stays as it is, its name too.

    `forward` takes

    * `labels`, (rows, tokens), not shifted, -100 where there is no loss;
    * `label_positions`, (n,) flat positions p of tokens whose successor p + 1 has a label;
    * `num_items_in_batch`, the labels of the whole optimizer step, over all ranks; the batch's own
      count if None.

    It returns the sum of the token losses / `num_items_in_batch`, in nats, without logits. Without
    labels, or without their positions, the class's own `forward` runs.

    The model's own head and whatever it does to its logits (scale, soft cap) are used, on the
    positions that predict a label and no others: a loss on answers alone would otherwise spend most
    of its memory on logits that are never read. Submodules are called through the model's own
    `forward`, so hooks of DDP, ZeRO-3 and checkpointing see all of them.
    """
    forward_of_class = model_class.forward

    def forward(
        self: PreTrainedModel,
        *args: Any,
        labels: Tensor | None = None,
        label_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None or label_positions is None:
            return forward_of_class(self, *args, labels=labels, **kwargs)
        # Rows are padded on the right: no token that has a loss can see a pad. Without a mask,
        # attention may take its fast causal path.
        kwargs.pop("attention_mask", None)
        selection = _Selection(labels.shape, label_positions)
        with selection.before(self.get_output_embeddings()):
            output = forward_of_class(self, *args, **kwargs, use_cache=False, return_dict=True)
        logits = output.logits.flatten(0, 1)
        if not selection.is_made:
            logits = logits.index_select(0, label_positions)
        label_ids = labels.flatten().index_select(0, label_positions + 1)
        return CausalLMOutput(loss=_mean_loss(logits, label_ids, num_items_in_batch))

    # generate() looks up in the signature which arguments the model takes.
    forward.__signature__ = inspect.signature(forward_of_class)  # type: ignore[attr-defined]
    members = {
        "__module__": model_class.__module__,
        "forward": forward,
        "accepts_loss_kwargs": True,
    }
    return type(model_class.__name__, (model_class,), members)


def _mean_loss(logits: Tensor, label_ids: Tensor, count: Tensor | int | None) -> Tensor:
    """The sum of the losses of tokens, in nats, divided by a number.

    Args:
        logits: (n, vocabulary).
        label_ids: (n,) ids of the tokens.
        count: the number to divide by; n, or 1 without any token, if None.
    """
    total = nn.functional.cross_entropy(logits.float(), label_ids, reduction="sum")
    if count is None:
        count = max(label_ids.numel(), 1)
    return total / count


@dataclass(eq=False)
class _Selection:
    """Lets a model's head see the hidden states that predict a label, and no others."""

    shape: torch.Size
    """(rows, tokens) of the batch."""
    positions: Tensor
    """(n,) flat positions of these hidden states."""
    is_made: bool = False
    """Whether the head has seen these alone. Some families give it something else, all of which it
    then sees."""

    def before(self, head: nn.Module | None) -> contextlib.AbstractContextManager[Any]:
        """Select before a head whenever it is called within this context.

        Nothing is done where the model has no head.
        """
        if head is None:
            return contextlib.nullcontext()
        return head.register_forward_pre_hook(self._select)

    def _select(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a head with (1, n, hidden) in place of (rows, tokens, hidden).

        Inputs of another shape are returned as they are; otherwise it sets `is_made`.
        """
        hidden, *others = inputs
        if hidden.shape[:-1] != self.shape:
            return inputs
        self.is_made = True
        selected = hidden.flatten(0, 1).index_select(0, self.positions)[None]
        return selected, *others
