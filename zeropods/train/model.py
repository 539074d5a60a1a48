"""The model of a run: pretrained weights from safetensors, or random ones of a known shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.data.hub import hub_options
from zeropods.data.tokenizer import load_tokenizer
from zeropods.errors import UserError
from zeropods.plan.shapes import t5_shape
from zeropods.safe_weights import has_weights, refuse_other_weights
from zeropods.train.arguments import TextToSQLArguments
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
    import torch

    folder = Path(name)
    if folder.is_dir() and not has_weights(folder):
        raise UserError(
            f"{name}: no weights (*.safetensors) in this folder; a model folder has them beside config.json"
        )
    refuse_other_weights(folder)
    options = {} if dropout is None else {"dropout_rate": dropout}
    if not folder.is_dir():
        options |= hub_options(name)
    try:
        return T5ForTextToSQL.from_pretrained(name, dtype=torch.float32, use_safetensors=True, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(
            f"--model_id {name!r}: cannot be loaded ({reason}); "
            "give a hub id that can be reached, a local folder, or --init random with a known shape"
        ) from None


def _check_own_tokenizer(name: str, prepared: PreTrainedTokenizerBase) -> None:
    """A folder's own tokenizer must give the ids that the prepared set was made with."""
    if not any((Path(name) / file).is_file() for file in ("tokenizer.json", "spiece.model")):
        return
    own = load_tokenizer(name, complete=False).get_vocab()
    ids = prepared.get_vocab()
    wrong = next((token for token, index in own.items() if ids.get(token) != index), None)
    if wrong is not None:
        raise UserError(
            f"--model_id {name}: its tokenizer gives {wrong!r} id {own[wrong]}, the prepared set's gives "
            f"{ids.get(wrong)}; prepare the data with --tokenizer {name}"
        )
