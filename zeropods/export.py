"""A run's weights as a model folder that anyone can load.

Each checkpoint holds the weights whole and in FP32, also where ZeRO divides them: the ranks put them together as they
save (`train.trainer.whole_weights`).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import SUFFIX, has_weights, refuse_other_weights
from zeropods.measure.record import read_config, read_json, read_record
from zeropods.measure.run_folder import CONFIG, RECORD
from zeropods.tables import GIB
from zeropods.train.checkpoints import (
    MANIFEST,
    STATE,
    CheckpointManifest,
    Origin,
    UnsoundError,
    name_of,
    newest_first,
    newest_good,
    step_of,
    verified_step,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
"""What exported numbers may be; those of a checkpoint are FP32."""
MODEL_CONFIG = "config.json"
FILE_BYTES = 4 * GIB
TEXT = (".json", ".jinja", ".model", ".txt")
"""Endings of what a tokenizer and a configuration are made of."""
OTHERS = (MODEL_CONFIG, MANIFEST, STATE)
REMEDY = "free or repair the disk, then export again"

Weights = dict[str, Callable[[], "torch.Tensor"]]
"""Tensors by name that are read, contiguous and on the CPU, when they are called."""


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
    progress: Callable[[int], object] = lambda count: None,
) -> Exported:
    """Make a model folder of a run's weights: safetensors, configuration, tokenizer, generation settings.

    It appears whole, after it was read back and loaded.

    Args:
        run: a run folder.
        out: the folder to make; it may exist if it is empty.
        checkpoint: the step to take; the finished run's own, or the newest one, if not given.
        dtype: the type of the exported floating-point numbers.
        progress: is told of each tensor written.

    Raises:
        UserError: nothing to export, `out` holds something, or the weights are not what they should be.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r}; expected {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists; choose a new folder, or an empty one")
    import torch

    source, kind = find_source(run, checkpoint), getattr(torch, dtype)
    weights = stored(source.folder)
    equals = _compared(source, weights)
    with files.new_folder(out) as built:
        with files.said_in_one_line(built.parent, str(out), REMEDY):
            write_weights(weights, built, kind, progress)
            write_companions(source.folder, built, dtype)
        parameters = check_export(weights, built, kind)
        size = sum(path.stat().st_size for path in built.glob(f"*{SUFFIX}"))
    return Exported(
        out=str(out),
        source=str(source.folder),
        checkpoint=source.step,
        consolidated=source.divided,
        parameters=parameters,
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
    """The finished run's `model/`, where it is of the same step, and not the source itself."""
    asked: bool = False
    """Whether the step was asked for."""


def find_source(run: Path, asked: int | None) -> ExportSource:
    """The weights of a run: of the step asked for, else those it ended with, else of the newest checkpoint that counts.

    Raises:
        UserError: no run folder, nothing to export, or the checkpoint asked for does not verify.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run}: no {CONFIG} of a run; expected the run folder of a training script (--outputdir)")
    run_id, ended = read_config(run).run_id, _ended_at(run)
    saved, model = run / "checkpoints", run / "model"

    def refused(origin: Origin) -> str | None:
        return None if origin.run_id == run_id else f"of run {origin.run_id}"

    if asked is not None:
        place = saved / name_of(asked)
        try:
            manifest = verified_step(place, refused)
        except UnsoundError as unsound:
            there = ", ".join(str(step_of(name)) for name in newest_first(saved)) or "none"
            raise UserError(f"--checkpoint {asked}: {place}: {unsound}; there are: {there}") from None
        return _of_checkpoint(place, manifest, model if asked == ended else None, asked=True)
    if ended is None:
        newest = newest_good(saved, refused, _passed_over)
        if newest is None:
            remedy = "train on, with --save_steps above 0"
            raise UserError(f"{run}: not finished, and has no checkpoint that counts; {remedy}")
        return _of_checkpoint(*newest)
    place = saved / name_of(ended)
    if place.is_dir():
        try:
            return _of_checkpoint(place, verified_step(place, refused), model)
        except UnsoundError as unsound:
            _passed_over(place, str(unsound))
    refuse_other_weights(model)
    return ExportSource(model, ended)


def _of_checkpoint(
    checkpoint: Path, manifest: CheckpointManifest, final: Path | None = None, *, asked: bool = False
) -> ExportSource:
    refuse_other_weights(checkpoint)
    return ExportSource(checkpoint, manifest.step, manifest.shards() is not None, final, asked)


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


# Weights by name, read one at a time.


def stored(folder: Path) -> Weights:
    """The tensors of a folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    found: Weights = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path}: damaged ({error}); move it away") from None
        names = file.keys()
        found |= {name: partial(file.get_tensor, name) for name in names}
    if not found:
        raise UserError(f"{folder}: no weights (*{SUFFIX}) in this folder")
    return found


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight as `dtype`, if it holds floating-point numbers; none may become infinite by that."""
    import torch

    if not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()) and bool(torch.isfinite(tensor).all()):
        raise UserError(f"--dtype {str(dtype).removeprefix('torch.')}: {name} holds larger numbers; take bfloat16")
    # A view of a large vector would take all of it along.
    return converted.clone() if converted.untyped_storage().nbytes() > converted.nbytes else converted


def write_weights(
    weights: Weights, folder: Path, dtype: torch.dtype, done: Callable[[int], object], file_bytes: int = FILE_BYTES
) -> None:
    """Write all weights, floating-point ones as `dtype`, and an index where there is more than one file.

    Args:
        folder: where to write them.
        done: is told of each tensor.
        file_bytes: most bytes of a file, as far as single tensors allow.
    """
    from huggingface_hub import save_torch_state_dict

    tensors = {}
    for name, read in weights.items():
        tensors[name] = cast(name, read(), dtype)
        done(1)
    save_torch_state_dict(tensors, folder, max_shard_size=file_bytes)


def write_companions(source: Path, folder: Path, dtype: str) -> None:
    """Copy configuration and tokenizer; the configuration says the type that the weights have now."""
    if not (source / MODEL_CONFIG).is_file():
        raise UserError(f"{source}: no {MODEL_CONFIG} beside the weights; export another checkpoint")
    config = {**read_json(source / MODEL_CONFIG), "dtype": dtype}
    config.pop("torch_dtype", None)
    (folder / MODEL_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in sorted(source.iterdir()):
        if path.suffix in TEXT and path.name not in OTHERS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


# Whether weights are those they should be.


def _compared(source: ExportSource, weights: Weights) -> bool | None:
    """Whether the weights of a checkpoint are those of the finished model; None where there is none of that step."""
    if source.final is None:
        return True if source.folder.name == "model" else None
    different = difference(weights, stored(source.final))
    if different is not None and not source.asked:
        raise UserError(
            f"{source.final}: differs from {source.folder.name}: {different}; "
            f"one of them was changed: --checkpoint {source.step} exports the checkpoint"
        )
    return different is None


def difference(weights: Weights, others: Weights) -> str | None:
    """The first tensor that is not the same, and how; None where all are."""
    import torch

    for name in sorted(weights.keys() ^ others.keys()):
        return f"{name} is in one of them only"
    for name, read in weights.items():
        expected, found = read(), others[name]()
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            return f"{name} is {found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        if not torch.equal(expected, found):
            return f"{name} has other values"
    return None


def check_export(weights: Weights, folder: Path, dtype: torch.dtype) -> int:
    """Load an exported folder as a model; returns the model's parameters, tied ones once.

    Raises:
        UserError: something is missing, or is not what was exported.
    """
    import torch

    model = _loaded(folder)
    state = model.state_dict(keep_vars=True)
    for name, read in weights.items():
        expected = cast(name, read(), dtype)
        # transformers keeps some weights of some models in FP32 whatever their files hold.
        if name not in state or not torch.equal(state[name].detach().to(expected.dtype), expected):
            raise UserError(f"{folder}: {name} is another once the model is loaded; {REMEDY}")
    own = {state[name].data_ptr() for name in weights}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if state[name].data_ptr() not in own:
            raise UserError(f"{folder}: {name} is in no file, and tied to nothing that is")
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
