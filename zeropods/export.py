"""Export a run's weights as a model folder that anyone can load.

Each checkpoint holds the weights whole and in FP32, even where ZeRO divides them: the ranks gather
them when they save (`train.engines.deepspeed.whole_weights`).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods import files, outputs
from zeropods.errors import UserError
from zeropods.files import SUFFIX, has_weights, no_folder
from zeropods.measure.record import CONFIG, RECORD, Record, read_config, read_json, read_record
from zeropods.train import checkpoints
from zeropods.train.checkpoints import Origin, Refuse, UnsoundError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
"""Types that exported numbers may have; those of a checkpoint are FP32."""
FILE_SIZE = "4GB"
"""Largest size of a weight file, unless a single tensor is larger."""
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of a tokenizer's files."""
NOT_OF_TOKENIZER = (checkpoints.MANIFEST, checkpoints.STATE, f"model{SUFFIX}.index.json")
"""Files with such a suffix that do not belong to a tokenizer."""
EXPORT_REMEDY = "free or repair the disk, then export again"
PARTS = 4
"""Number of times that `export` reports progress."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Facts about what was exported."""

    out: str
    source: str
    """The folder that the weights were taken from."""
    checkpoint: int
    """Step of the weights."""
    consolidated: bool
    """Whether the source also holds ZeRO's shards, from which the ranks gathered the weights when
    they saved."""
    parameters: int
    """Number of parameters, tied ones once."""
    bytes: int
    """Size of the weight files in bytes."""
    dtype: str
    equals_model: bool | None
    """True for weights of the finished run's `model/`, whose digests were checked; None for those
    of a checkpoint."""


def export(
    run: Path,
    out: Path,
    *,
    checkpoint: int | None = None,
    dtype: str = "float32",
    progress: Callable[[int], object] = lambda parts: None,
) -> Exported:
    """Make a model folder of a run's weights.

    It has safetensors, configuration, tokenizer and generation settings, and appears whole, after
    it has been read back and loaded.

    Args:
        run: a run folder.
        out: the folder to make; it may exist if it is empty.
        checkpoint: step of the checkpoint to take; if not given, the finished run's model, or the
            newest checkpoint.
        dtype: the type of the exported floating-point numbers.
        progress: called with 1 after each part: reading, converting, writing, reading back.

    Raises:
        UserError: there is nothing to export, `out` holds something, or the weights are not what
            they should be.
    """
    _check_out(out)
    source, step, is_divided = find_source(run, checkpoint)
    model = _read(source, "float32")
    progress(1)
    _convert(model, dtype)
    progress(1)
    with outputs.new_folder(out) as built:
        with files.said_in_one_line(out.parent, out.name, EXPORT_REMEDY):
            _write(model, source, built)
        progress(1)
        _check_read_back(model, built, dtype, out)
        progress(1)
        size = sum(path.stat().st_size for path in built.glob(f"*{SUFFIX}"))
    is_from_model = source == run / "model"
    return Exported(
        out=str(out),
        source=str(source),
        checkpoint=step,
        consolidated=is_divided,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=size,
        dtype=dtype,
        equals_model=True if is_from_model else None,
    )


def _check_out(out: Path) -> None:
    """Refuse a folder that holds something, or a path that is no folder."""
    if not out.exists():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise UserError(f"--out {out}: exists; choose a new folder, or an empty one")


def _read(folder: Path, dtype: str) -> PreTrainedModel:
    """The model in a folder, with every weight from the folder's safetensors files."""
    # Only now, since they take seconds.
    from zeropods.train.pretrained import source_options
    from zeropods.train.saved_models import is_t5, read_model

    is_causal = not is_t5(folder)
    return read_model(str(folder), dtype, causal=is_causal, **source_options(str(folder)))


def _convert(model: PreTrainedModel, dtype: str) -> None:
    """Convert the weights to a type, in place; `UserError` if it cannot hold one of them."""
    import torch

    kind = getattr(torch, dtype)
    _check_range(model, kind, dtype)
    model.to(kind)


def _check_range(model: PreTrainedModel, kind: torch.dtype, name: str) -> None:
    """Refuse a type that cannot hold a weight.

    This is a separate function: otherwise the last tensor, often the largest, would be kept in FP32
    to the end.
    """
    for weight, tensor in model.state_dict().items():
        if tensor.is_floating_point() and _overflows(tensor, kind):
            fault = f"{weight} holds numbers too large for it"
            raise UserError(f"--dtype {name}: {fault}; use bfloat16")


def _overflows(tensor: torch.Tensor, kind: torch.dtype) -> bool:
    """Whether a finite number would become infinite."""
    is_lost = tensor.to(kind).isinf() & tensor.isfinite()
    return bool(is_lost.any())


def _write(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Write a model folder, with the tokenizer of the folder that the weights were taken from."""
    # transformers looks for DeepSpeed when it saves, and DeepSpeed logs its start on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        model.save_pretrained(folder, max_shard_size=FILE_SIZE)
    files.open_to_readers(folder)
    # A tokenizer's files are copied as they are.
    for path in sorted(source.iterdir()):
        is_of_tokenizer = path.suffix in TOKENIZER_SUFFIXES and path.name not in NOT_OF_TOKENIZER
        copy = folder / path.name
        if is_of_tokenizer and not copy.exists():
            shutil.copyfile(path, copy)
    files.seal_model(folder)


def _check_read_back(model: PreTrainedModel, folder: Path, dtype: str, out: Path) -> None:
    """Refuse a folder whose weights, when they are loaded, are not those of the model."""
    import torch

    read_back: dict[str, torch.Tensor] = _read(folder, dtype).state_dict()
    for name, tensor in model.state_dict().items():
        # transformers keeps some weights of some models in FP32 whatever their files hold.
        if name not in read_back or not torch.equal(tensor, read_back[name].to(tensor.dtype)):
            fault = f"{name} was read back with different values"
            raise UserError(f"{out}: {fault}; {EXPORT_REMEDY}")


def find_source(run: Path, asked: int | None) -> tuple[Path, int, bool]:
    """Where a run's weights lie: those of its finished model, else those of its newest checkpoint
    that is sound and of this run.

    Args:
        asked: the step of the checkpoint to take instead; None for the choice above.

    Returns:
        The folder, the step of the weights, and whether the folder also holds ZeRO's shards. Those
        files are pickles, and are never opened.

    Raises:
        UserError: there is no run folder or nothing to export, or the checkpoint asked for does not
            verify.
    """
    expected = "expected the run folder of a training script (--outputdir)"
    if not run.is_dir():
        raise UserError(f"{run}: {no_folder(run)}; {expected}")
    # A model's own configuration file has the same name.
    if not (run / CONFIG).is_file() or "run_id" not in read_json(run / CONFIG):
        raise UserError(f"{run}: no {CONFIG} of a run; {expected}")
    run_id = read_config(run).run_id
    saved = run / "checkpoints"

    def refused(origin: Origin) -> str | None:
        """Why a checkpoint is not this run's; None if it is."""
        return None if origin.run_id == run_id else f"belongs to run {origin.run_id}"

    if asked is not None:
        return _checkpoint_of_step(saved, asked, refused)
    if (run / RECORD).is_file() and has_weights(run / "model"):
        record = read_record(run)
        if record.status == "ok":
            return run / "model", _step_of_model(record, saved), False
    newest = checkpoints.newest_good(saved, refused, _say_passed_over)
    if newest is None:
        fault = "unfinished, and has no usable checkpoint"
        raise UserError(f"{run}: {fault}; continue training with --save_steps above 0")
    folder, manifest = newest
    return folder, manifest.step, manifest.shards() is not None


def _checkpoint_of_step(saved: Path, step: int, refused: Refuse) -> tuple[Path, int, bool]:
    """The checkpoint of a step, as `find_source` returns it."""
    folder = saved / checkpoints.name_of(step)
    try:
        manifest = checkpoints.verified(folder, refused)
    except UnsoundError as unsound:
        available = ", ".join(map(str, checkpoints.saved_steps(saved))) or "none"
        fault = f"{folder}: {unsound}"
        raise UserError(f"--checkpoint {step}: {fault}; available: {available}") from None
    return folder, manifest.step, manifest.shards() is not None


def _step_of_model(record: Record, saved: Path) -> int:
    """The step of a finished run's model: the last one, or the best where the run ended with it."""
    identity = record.identity
    ends_with_best = identity.get("load_best_model") or identity.get("early_stopping_patience")
    state = saved / checkpoints.name_of(record.steps) / checkpoints.STATE
    if ends_with_best and state.is_file():
        return int(read_json(state).get("best_global_step") or record.steps)
    return int(record.steps)


def _say_passed_over(place: Path, why: str) -> None:
    print(f"{place}: passed over: {why}", file=sys.stderr)
