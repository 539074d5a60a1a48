"""The model of a run: pretrained weights from safetensors, or random ones of a known shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.data.hub import hub_options
from zeropods.data.tokenizer import load_tokenizer
from zeropods.errors import UserError
from zeropods.plan.shapes import t5_shape
from zeropods.train.arguments import TextToSQLArguments
from zeropods.train.pretrained import check_folder, check_same_ids, load_weights
from zeropods.train.t5 import T5ForTextToSQL, random_t5

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def load_model(arguments: TextToSQLArguments, tokenizer: PreTrainedTokenizerBase, prompt: str) -> T5ForTextToSQL:
    """The model that the arguments name, in FP32, checked against the prepared set's tokenizer.

    Its configuration carries the prompt, so that a saved model knows how it wants to be asked.
    """
    if arguments.init == "random":
        rate = 0.1 if arguments.dropout is None else arguments.dropout
        model = random_t5(t5_shape(arguments.model_id), arguments.seed, rate)
    else:
        model = _pretrained(arguments.model_id, arguments.dropout)
        _check_own_tokenizer(arguments.model_id, tokenizer)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{arguments.dataset_path}: its tokenizer has {len(tokenizer)} tokens, {arguments.model_id} has "
            f"{model.config.vocab_size} embedding rows; prepare the data with the model's own tokenizer"
        )
    model.config.prompt = prompt
    model.generation_config.max_length = None
    model.generation_config.max_new_tokens = arguments.generation_max_length
    model.generation_config.num_beams = arguments.generation_num_beams
    return model


def parameters_of(model: nn.Module) -> int:
    """How many parameters a model has: tied ones once, and one that ZeRO-3 has divided whole."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def _pretrained(name: str, dropout: float | None) -> T5ForTextToSQL:
    check_folder(name)
    options: dict[str, Any] = {} if dropout is None else {"dropout_rate": dropout}
    if not Path(name).is_dir():
        options |= hub_options(name)
    return load_weights(T5ForTextToSQL, name, flag="--model_id", **options)


def _check_own_tokenizer(name: str, prepared: PreTrainedTokenizerBase) -> None:
    if any((Path(name) / file).is_file() for file in ("tokenizer.json", "spiece.model")):
        check_same_ids("--model_id", name, load_tokenizer(name, complete=False).get_vocab(), prepared)
