"""Whether weights are those they should be: bit by bit on the disk, and as a model that was loaded from there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.export.weights import Weights, stored
from zeropods.export.write import cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def difference(weights: Weights, others: Weights, dtype: torch.dtype | None = None) -> str | None:
    """The first tensor that is not the same bit by bit, and how; None where all are.

    Args:
        weights: what is expected.
        others: what is compared with them.
        dtype: what the expected ones are converted to before.
    """
    for name in sorted(weights.keys() ^ others.keys()):
        return f"{name} is in one of them only"
    for name, weight in weights.items():
        expected = weight.read() if dtype is None else cast(name, weight, dtype)
        found = others[name].read()
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            return f"{name} is {found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        if not same_bits(expected, found):
            return f"{name} has other values"
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape are the same, NaN and the sign of zero included."""
    import torch

    return bool(torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)))


def check_export(weights: Weights, folder: Path, dtype: torch.dtype) -> int:
    """Read an exported folder back, as files and as a model; returns the model's parameters, tied ones once.

    Raises:
        UserError: something is missing, or is not what was exported.
    """
    files = stored(folder)
    different = difference(weights, files, dtype)
    if different is not None:
        raise UserError(f"{folder}: {different} when read back; see to the disk, then export again")
    model = _loaded(folder)
    state = model.state_dict(keep_vars=True)
    for name, weight in files.items():
        expected = weight.read()
        # transformers keeps some weights of some models in FP32 whatever their files hold.
        if name not in state or not same_bits(state[name].detach().to(expected.dtype), expected):
            raise UserError(f"{folder}: {name} is another once the model is loaded; this model cannot be exported")
    _check_ties(model, state, files, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _loaded(folder: Path) -> PreTrainedModel:
    """The model, by the class that its configuration asks for; every weight must come from the files or be tied."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    logging.disable_progress_bar()
    model, about = kind.from_pretrained(folder, use_safetensors=True, dtype="auto", output_loading_info=True)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if about.get(fault):
            named = ", ".join(sorted(map(str, about[fault]))[:3])
            raise UserError(f"{folder}: {fault.replace('_', ' ')} when loaded as a model: {named}")
    return model


def _check_ties(model: PreTrainedModel, state: dict[str, torch.Tensor], files: Weights, folder: Path) -> None:
    """What has no weight of its own must be one with a weight that has."""
    own = {state[name].data_ptr() for name in files}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if state[name].data_ptr() not in own:
            raise UserError(f"{folder}: {name} is in no file, and tied to nothing that is")
