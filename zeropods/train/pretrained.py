"""Loading the weights of a saved model: from safetensors files only, and all of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
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
from zeropods.train.flags import RunArguments

FAULTS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
"""Exceptions that loading a model raises."""
NOT_OF_SHAPE = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "use_cache",
    "prompt",
}
"""Keys of a configuration that say nothing about the model's tensors and operations."""


def configuration_of(model: PreTrainedModel) -> dict[str, object]:
    """The configuration that is recorded, from which a plan later knows the model's shape.

    Whether its head and its embeddings are tied is read from the model itself, since transformers
    may tie them whatever is configured.
    """
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    are_tied = head is not None and head.weight is embeddings.weight
    values = {}
    for name, value in model.config.to_dict().items():
        if name not in NOT_OF_SHAPE:
            values[name] = value
    # Some families have infinite bounds, which a record cannot hold as numbers.
    finite: dict[str, object] = json.loads(json.dumps(values, default=str), parse_constant=str)
    return {**finite, "tie_word_embeddings": are_tied}


def load_weights(
    model_class: Any, name: str, *, flag: str = "", dtype: str = "float32", **options: Any
) -> Any:
    """Load a model of the class, with the weights of `name`, on the CPU.

    Args:
        model_class: a model's class, or one of transformers' `Auto` classes.
        name: a local folder or a hub id.
        flag: the flag that named a model to train, for the message where it cannot be loaded; empty
            for other models.
        dtype: type of the weights, by PyTorch's name.
        options: arguments of `from_pretrained`, including those of `source_options`.

    Raises:
        UserError: it cannot be read, or a tensor is missing or of another size; transformers would
            draw it at random.
    """
    model = None
    fault = None
    level = logging.get_verbosity()
    # transformers prints a table of what is missing; here that is a one-line error.
    logging.set_verbosity_error()
    try:
        with loading(name, flag):
            model, information = model_class.from_pretrained(
                name,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                # They are reported below, in one line.
                ignore_mismatched_sizes=True,
                **options,
            )
            fault = _fault_of_tensors(information["missing_keys"], information["mismatched_keys"])
    except RuntimeError as error:
        # This is how ZeRO-3 reports a tensor of another size.
        mismatches = [line for line in str(error).split("\n") if "size mismatch" in line]
        if not mismatches:
            raise
        fault = mismatches[0].strip().rstrip(".")
    finally:
        logging.set_verbosity(level)
    if is_deepspeed_zero3_enabled():
        # Only rank 0 has read the tensors, so it may be the only one that knows of a fault.
        fault = next(filter(None, processes.gathered(fault)), None)
    if fault is not None and flag:
        remedy = "save the model again, or train it with --init random"
        raise UserError(f"{flag} {name!r}: {fault}; {remedy}")
    if fault is not None:
        raise UserError(f"{name}: {fault}; save the model again")
    return model


def _fault_of_tensors(
    missing: Collection[str], mismatched: Collection[tuple[str, Any, Any]]
) -> str | None:
    """What is wrong with a model's weights; None where nothing is.

    Args:
        missing: names of tensors that the weights do not have.
        mismatched: names of tensors of another size, with that size and the expected one.
    """
    if missing:
        return f"its weights have no tensor {min(missing)!r}"
    if mismatched:
        name, saved, expected = min(mismatched)
        size = list(saved)
        expected_size = list(expected)
        return f"its tensor {name!r} has size {size}, but its config.json says {expected_size}"
    return None


def source_options(name: str) -> dict[str, Any]:
    """Options with which `from_pretrained` finds a model.

    Raises:
        UserError: `name` is a folder whose weights are missing or wrong.
    """
    check_weights(Path(name))
    check_digests(Path(name))
    return hub_options(name)


def check_source(arguments: RunArguments) -> PreTrainedConfig | None:
    """Check the model that a run names, and return its configuration; None for random weights.

    The hub is asked where the name is no folder; no weights are read.

    Raises:
        UserError: the configuration, or the headers of the model's files, show that it is unusable.
    """
    if arguments.init == "random":
        return None
    name = arguments.source
    with loading(name, arguments.model_flag):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **hub_options(name))
        for path in Path(name).glob(f"*{SUFFIX}"):
            # Opening a file reads its header.
            with safe_open(path, "pt"):
                pass
    return config


@contextlib.contextmanager
def loading(name: str, flag: str = "") -> Iterator[None]:
    """Say in one line why a model, its configuration or its tokenizer cannot be loaded.

    Args:
        name: the folder or hub id.
        flag: the flag that named a model to train; empty for other models.

    Raises:
        UserError: the block has raised one of `FAULTS`; but a `RuntimeError` passes as it is where
            there is a flag.
    """
    try:
        yield
    except FAULTS as error:
        if flag and isinstance(error, RuntimeError):
            # Running out of memory is a RuntimeError too, and must stay one to be recorded as such.
            raise
        reason = first_line(error)
        if isinstance(error, StrictDataclassError):
            # Its first line names a field; what is wrong with it comes after that.
            reason = " ".join(str(error).split())[:200]
        subject = name
        remedy = "expected a run, a model folder or a hub id"
        if flag:
            subject = f"{flag} {name!r}"
            remedy = (
                "give a hub id that can be reached, a local folder, "
                "or --init random with a known shape"
            )
        raise UserError(f"{subject}: cannot be loaded ({reason}); {remedy}") from None
