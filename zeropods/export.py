"""A run's weights as a model folder that anyone can load.

Each checkpoint holds the weights whole and in FP32, also where ZeRO divides them: the ranks put them together as they
save (`train.trainer.whole_weights`).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import SUFFIX, has_weights
from zeropods.measure.record import read_config, read_json, read_record
from zeropods.measure.run_folder import CONFIG, RECORD
from zeropods.train.checkpoints import (
    MANIFEST,
    STATE,
    Origin,
    UnsoundError,
    name_of,
    newest_first,
    newest_good,
    step_of,
    verified,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
"""What exported numbers may be; those of a checkpoint are FP32."""
FILE_SIZE = "4GB"
"""The most of a file of weights, as far as single tensors allow."""
TEXT = (".json", ".jinja", ".model", ".txt")
"""Endings of what a tokenizer is made of."""
REMEDY = "free or repair the disk, then export again"
PARTS = 4
"""How often `export` tells its progress."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported."""

    out: str
    source: str
    """The folder that the weights were taken from."""
    checkpoint: int
    """Its step."""
    consolidated: bool
    """Whether ZeRO had divided them among ranks, which put them together as they saved."""
    parameters: int
    """Number of parameters, tied ones once."""
    bytes: int
    """Size of the weight files."""
    dtype: str
    equals_model: bool | None
    """Whether they are those of the finished run's `model/`; None where that is not of the same step."""


def export(
    run: Path,
    out: Path,
    *,
    checkpoint: int | None = None,
    dtype: str = "float32",
    progress: Callable[[int], object] = lambda parts: None,
) -> Exported:
    """Make a model folder of a run's weights: safetensors, configuration, tokenizer, generation settings.

    It appears whole, after it was read back and loaded.

    Args:
        run: a run folder.
        out: the folder to make; it may exist if it is empty.
        checkpoint: the step to take; the finished run's own, or the newest one, if not given.
        dtype: the type of the exported floating-point numbers.
        progress: is told of each part that is done: reading, comparing, writing, reading back.

    Raises:
        UserError: nothing to export, `out` holds something, or the weights are not what they should be.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r}; expected {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists; choose a new folder, or an empty one")
    source = find_source(run, checkpoint)
    model = _read(source.folder)
    progress(1)
    equals = _compared(source, model)
    progress(1)
    _cast(model, dtype)
    with files.new_folder(out) as built:
        with files.said_in_one_line(built.parent, str(out), REMEDY):
            _write(model, source.folder, built)
        progress(1)
        different = _difference(model, _read(built, dtype))
        if different is not None:
            raise UserError(f"{out}: {different} once it is read back; {REMEDY}")
        progress(1)
        size = sum(path.stat().st_size for path in built.glob(f"*{SUFFIX}"))
    return Exported(
        out=str(out),
        source=str(source.folder),
        checkpoint=source.step,
        consolidated=source.divided,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=size,
        dtype=dtype,
        equals_model=equals,
    )


# Which checkpoint of a run its weights are taken from, verified before anything of it is opened.


@dataclass(frozen=True)
class ExportSource:
    """Weights of a run, at one step."""

    folder: Path
    """The folder with safetensors, configuration and tokenizer."""
    step: int
    divided: bool = False
    """Whether it also holds what ZeRO had divided; those files are pickles, and are never opened."""
    final: Path | None = None
    """The finished run's `model/`, where it is of the same step."""
    asked: bool = False
    """Whether the step was asked for."""


def find_source(run: Path, asked: int | None) -> ExportSource:
    """The weights of a run: of the step asked for, else those it ended with, else of the newest checkpoint that counts.

    Raises:
        UserError: no run folder, nothing to export, or the checkpoint asked for does not verify.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run}: no {CONFIG} of a run; expected the run folder of a training script (--outputdir)")
    run_id, ended, saved, final = read_config(run).run_id, _ended_at(run), run / "checkpoints", run / "model"

    def refused(origin: Origin) -> str | None:
        return None if origin.run_id == run_id else f"of run {origin.run_id}"

    step = ended if asked is None else asked
    if step is None:
        newest = newest_good(saved, refused, _passed_over)
        if newest is None:
            remedy = "train on, with --save_steps above 0"
            raise UserError(f"{run}: not finished, and has no checkpoint that counts; {remedy}")
        place, manifest = newest
    else:
        place = saved / name_of(step)
        try:
            manifest = verified(place, refused)
        except UnsoundError as unsound:
            if asked is not None:
                there = ", ".join(str(step_of(name)) for name in newest_first(saved)) or "none"
                raise UserError(f"--checkpoint {asked}: {place}: {unsound}; there are: {there}") from None
            if place.is_dir():
                _passed_over(place, str(unsound))
            return ExportSource(final, step, final=final)
    same = final if ended == manifest.step else None
    return ExportSource(place, manifest.step, manifest.shards() is not None, same, asked is not None)


def _ended_at(run: Path) -> int | None:
    """The step of which a finished run's `model/` is; None where the run is not finished."""
    if not (run / RECORD).is_file() or not has_weights(run / "model"):
        return None
    record = read_record(run)
    if record.status != "ok":
        return None
    steps, identity = record.steps, record.identity
    state = run / "checkpoints" / name_of(steps) / STATE
    if (identity.get("load_best_model") or identity.get("early_stopping_patience")) and state.is_file():
        return int(read_json(state).get("best_global_step") or steps)
    return steps


def _passed_over(checkpoint: Path, why: str) -> None:
    print(f"{checkpoint}: passed over: {why}", file=sys.stderr)


# The weights, and whether they are those they should be.


def _read(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    """The model in a folder, every weight of it from the folder's safetensors files."""
    from transformers.utils import logging

    from zeropods.evaluate.models import is_t5, read_model
    from zeropods.train.pretrained import source_options

    logging.disable_progress_bar()
    return read_model(str(folder), dtype, causal=not is_t5(folder), **source_options(str(folder)))


def _compared(source: ExportSource, model: PreTrainedModel) -> bool | None:
    """Whether the weights are those of the finished model; None where there is none of that step."""
    if source.final is None:
        return None
    if source.final == source.folder:
        return True
    try:
        different = _difference(_read(source.final), model)
    except UserError:
        # What has become of it is no matter to who asks for the checkpoint.
        if not source.asked:
            raise
        return False
    if different is not None and not source.asked:
        raise UserError(
            f"{source.final}: {different} than in {source.folder.name}; "
            f"one of them was changed: --checkpoint {source.step} exports the checkpoint"
        )
    return different is None


def _difference(model: PreTrainedModel, other: PreTrainedModel) -> str | None:
    """The first tensor whose values differ; None where none does. Names and shapes are those of the configuration."""
    import torch

    found: dict[str, torch.Tensor] = other.state_dict()
    for name, tensor in model.state_dict().items():
        # transformers keeps some weights of some models in FP32 whatever their files hold.
        if name not in found or not torch.equal(tensor, found[name].to(tensor.dtype)):
            return f"{name} has other values"
    return None


def _cast(model: PreTrainedModel, dtype: str) -> None:
    """Turn all floating-point weights into `dtype`; none may become infinite by that."""
    import torch

    kind = getattr(torch, dtype)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and bool((tensor.to(kind).isinf() & tensor.isfinite()).any()):
            raise UserError(f"--dtype {dtype}: {name} holds larger numbers; take bfloat16")
    model.to(kind)


def _write(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Save weights and configuration as transformers does; a tokenizer's files are copied as they are."""
    # transformers looks for DeepSpeed as it saves, and that logs its start on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        model.save_pretrained(folder, max_shard_size=FILE_SIZE)
    files.open_to_readers(folder)
    files.seal_weights(folder)
    for path in sorted(source.iterdir()):
        beside = path.suffix in TEXT and path.name not in (MANIFEST, STATE) and not path.name.endswith(".index.json")
        if beside and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
