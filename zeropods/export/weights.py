"""Weights by name that are read one at a time: from safetensors, or from the shards that ZeRO's ranks have saved."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.export.source import Source
from zeropods.plain_pickles import first_line, foreign_object, plain_values_only
from zeropods.safe_weights import SUFFIX

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weight:
    """One tensor that is not in memory yet."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Gives it, contiguous, on the CPU."""


Weights = dict[str, Weight]


def weights_of(source: Source) -> Weights:
    """All tensors of a source, a tied one once."""
    return sharded(source.folder, source.shards) if source.shards is not None else stored(source.folder)


def stored(folder: Path) -> Weights:
    """The tensors of a folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    found: Weights = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path}: damaged ({error}); put it aside") from None
        names = file.keys()
        for name in names:
            found[name] = Weight(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name))
    if not found:
        raise UserError(f"{folder}: no weights (*{SUFFIX}) in this folder")
    return found


def sharded(checkpoint: Path, tag: str) -> Weights:
    """The FP32 weights that ZeRO has divided, put together by DeepSpeed's own functions.

    ZeRO-3's are gathered one at a time as they are read; ZeRO-1's and ZeRO-2's are in memory together. Whatever
    in the files is no plain value is refused, though their digests are known to be right.

    Args:
        checkpoint: a checkpoint that verifies.
        tag: the folder in it that holds the shards.
    """
    with _silent(), plain_values_only():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        try:
            state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag, lazy_mode=True)
        except pickle.UnpicklingError as error:
            what = foreign_object(error)
            raise UserError(f"{checkpoint / tag}: holds {what}, which is no plain value; it is not opened") from None
        except (ValueError, KeyError, RuntimeError, FileNotFoundError, NotImplementedError) as error:
            raise UserError(f"{checkpoint / tag}: cannot be put together ({first_line(error)})") from None
    found: Weights = {}
    known: set[int] = set()
    for name, tensor in state.items():
        # A tied weight is one object under several names, its own name first.
        if id(tensor) not in known:
            found[name] = Weight(tuple(tensor.shape), tensor.contiguous)
        known.add(id(tensor))
    return found


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What DeepSpeed tells on the way is no result of ours."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
