"""Weights into safetensors files, a file's worth in memory at a time, and what belongs beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods import atomic
from zeropods.checkpoints.shards import MANIFEST
from zeropods.errors import UserError
from zeropods.export.source import STATE
from zeropods.export.weights import Weight, Weights
from zeropods.measure.records import read_json

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 4 * 2**30
"""Most bytes of a weight file, as far as single tensors allow."""
TEXT = (".json", ".jinja", ".model", ".txt")
"""Endings of what a tokenizer and a configuration are made of."""
OTHERS = (CONFIG, MANIFEST, STATE)


def write_weights(
    weights: Weights, folder: Path, dtype: torch.dtype, done: Callable[[int], object], file_bytes: int = FILE_BYTES
) -> None:
    """Write all weights, floating-point ones as `dtype`, and an index where there is more than one file.

    Args:
        folder: where to write them.
        done: is told of each tensor.
    """
    from safetensors.torch import save_file

    groups = _groups(weights, dtype.itemsize, file_bytes)
    names = [_file_name(number, len(groups)) for number in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        tensors = {}
        for key in group:
            tensors[key] = cast(key, weights[key], dtype)
            done(1)
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(groups) > 1:
        where = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        size = sum((folder / name).stat().st_size for name in names)
        atomic.write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})


def cast(name: str, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """A weight as `dtype`, if it holds floating-point numbers; none may become infinite by that."""
    import torch

    tensor = weight.read()
    if not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()) and bool(torch.isfinite(tensor).all()):
        raise UserError(f"--dtype {str(dtype).removeprefix('torch.')}: {name} holds larger numbers; take bfloat16")
    # A view of a large vector would take all of it along.
    return converted.clone() if converted.untyped_storage().nbytes() > converted.nbytes else converted


def write_companions(source: Path, folder: Path, dtype: str) -> None:
    """Copy configuration and tokenizer; the configuration says the type that the weights have now."""
    if not (source / CONFIG).is_file():
        raise UserError(f"{source}: no {CONFIG} beside the weights; export another checkpoint")
    config = {**read_json(source / CONFIG), "dtype": dtype}
    config.pop("torch_dtype", None)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in sorted(source.iterdir()):
        if path.suffix in TEXT and path.name not in OTHERS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _groups(weights: Weights, item_bytes: int, file_bytes: int) -> list[list[str]]:
    """Names, in their order, such that a group fits into a file."""
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, weight in weights.items():
        size = item_bytes
        for length in weight.shape:
            size *= length
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    return groups


def _file_name(number: int, files: int) -> str:
    return "model.safetensors" if files == 1 else f"model-{number + 1:05}-of-{files:05}.safetensors"
