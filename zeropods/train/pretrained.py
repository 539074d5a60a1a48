"""Weights of a saved model: safetensors only, and all of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from zeropods.data.tokenizers import hub_options
from zeropods.errors import UserError
from zeropods.files import SUFFIX, check_digests, check_weights, first_line
from zeropods.train import processes
from zeropods.train.arguments import RunArguments

FAULTS = (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError, StrictDataclassError)
"""What loading raises."""
NO_SIZES = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache", "prompt"}
"""Keys of a configuration that say nothing of the model's tensors and operations."""


def configuration_of(model: PreTrainedModel) -> dict[str, object]:
    """Configuration of a model, by which a plan knows it; whether its head is its table is asked of the model."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    given = {name: said for name, said in model.config.to_dict().items() if name not in NO_SIZES}
    # Some families have bounds that are infinite, which no record holds as a number.
    finite: dict[str, object] = json.loads(json.dumps(given, default=str), parse_constant=str)
    return {**finite, "tie_word_embeddings": head is not None and head.weight is table.weight}


def load_weights(model_class: Any, name: str, *, flag: str = "", dtype: str = "float32", **options: Any) -> Any:
    """A model of the class with the weights that `name` has, on the CPU.

    Args:
        model_class: a model's class, or one of transformers' `Auto` classes.
        name: a local folder or a hub id.
        flag: the flag that gave the name of a model to train, for what is said when it cannot be loaded.
        dtype: of the weights, by PyTorch's name.
        options: for `from_pretrained`, those of `source_options` among them.

    Raises:
        UserError: it cannot be read, or a tensor is missing or of another size: transformers would draw that at random.
    """
    model, fault, level = None, None, logging.get_verbosity()
    # transformers prints a table of what is missing; here that is an error of one line.
    logging.set_verbosity_error()
    how = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with loading(name, flag):
            model, found = model_class.from_pretrained(name, **how, **options)
            for key in sorted(found["missing_keys"])[:1]:
                fault = f"its weights have no tensor {key!r}"
            for key, saved, expected in sorted(found["mismatched_keys"])[: fault is None]:
                fault = f"its tensor {key!r} is of size {list(saved)}, its config.json says {list(expected)}"
    except RuntimeError as error:
        # ZeRO-3's way to say it.
        unfit = next((line.strip() for line in str(error).split("\n") if "size mismatch" in line), None)
        if unfit is None:
            raise
        fault = unfit.rstrip(".")
    finally:
        logging.set_verbosity(level)
    if is_deepspeed_zero3_enabled():
        # Rank 0 alone has read the tensors, and may be the only one that knows.
        fault = next(filter(None, processes.gathered(fault)), None)
    if fault is not None:
        remedy = "save the model again" + ", or train it with --init random" * bool(flag)
        raise UserError(f"{flag} {name!r}: {fault}; {remedy}" if flag else f"{name}: {fault}; {remedy}")
    return model


def source_options(name: str) -> dict[str, Any]:
    """How `from_pretrained` is to look for a model; a local folder needs weights, and none of another format."""
    check_weights(Path(name))
    check_digests(Path(name))
    return hub_options(name)


def check_source(arguments: RunArguments) -> PreTrainedConfig | None:
    """The configuration of the model; refused as far as it and the heads of its files tell that it cannot be loaded."""
    if arguments.init == "random":
        return None
    name = arguments.source
    with loading(name, arguments.model_flag):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **hub_options(name))
        for path in Path(name).glob(f"*{SUFFIX}"):
            with safe_open(path, "pt"):
                pass
    return config


@contextlib.contextmanager
def loading(name: str, flag: str = "") -> Iterator[None]:
    """Say in one line why a model, its configuration or its tokenizer cannot be loaded."""
    try:
        yield
    except FAULTS as error:
        if flag and isinstance(error, RuntimeError):
            raise  # A run out of memory is recorded as such.
        # The first line of a `StrictDataclassError` names a field; what is wrong with it comes after that.
        reason = " ".join(str(error).split())[:200] if isinstance(error, StrictDataclassError) else first_line(error)
        place, remedy = name, "expected a run, a model folder or a hub id"
        if flag:
            place = f"{flag} {name!r}"
            remedy = "give a hub id that can be reached, a local folder, or --init random with a known shape"
        raise UserError(f"{place}: cannot be loaded ({reason}); {remedy}") from None
