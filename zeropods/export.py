"""Export a run's weights as a model folder that anyone can load.

Each checkpoint holds the weights whole and in FP32, even where ZeRO divides them: the ranks gather them when they
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

from zeropods import files, outputs
from zeropods.errors import UserError
from zeropods.files import SUFFIX, has_weights, no_folder
from zeropods.measure.record import CONFIG, RECORD, read_config, read_json, read_record
from zeropods.train import checkpoints
from zeropods.train.checkpoints import Origin, UnsoundError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
"""Types that exported numbers may have; those of a checkpoint are FP32."""
FILE_SIZE = "4GB"
"""Largest size of a weight file, unless a single tensor is larger."""
TEXT = (".json", ".jinja", ".model", ".txt")
"""Suffixes of a tokenizer's files."""
NO_TEXT = (checkpoints.MANIFEST, checkpoints.STATE, f"model{SUFFIX}.index.json")
"""Files with such a suffix that do not belong to a tokenizer."""
REMEDY = "free or repair the disk, then export again"
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
    """Whether the source also holds ZeRO's shards, from which the ranks gathered the weights when they saved."""
    parameters: int
    """Number of parameters, tied ones once."""
    bytes: int
    """Size of the weight files in bytes."""
    dtype: str
    equals_model: bool | None
    """True for weights of the finished run's `model/`, whose digests were checked; None for those of a checkpoint."""


def export(
    run: Path,
    out: Path,
    *,
    checkpoint: int | None = None,
    dtype: str = "float32",
    progress: Callable[[int], object] = lambda parts: None,
) -> Exported:
    """Make a model folder of a run's weights: safetensors, configuration, tokenizer, generation settings.

    The folder appears whole, after it has been read back and loaded.

    Args:
        run: a run folder.
        out: the folder to make; it may exist if it is empty.
        checkpoint: step of the checkpoint to take; if not given, the finished run's model, or the newest checkpoint.
        dtype: the type of the exported floating-point numbers.
        progress: called with 1 after each part: reading, converting, writing, reading back.

    Raises:
        UserError: there is nothing to export, `out` holds something, or the weights are not what they should be.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists; choose a new folder, or an empty one")
    source, step, is_divided = find_source(run, checkpoint)

    # Only now, since they take seconds.
    import torch

    from zeropods.evaluate.models import is_t5, read_model
    from zeropods.train.pretrained import source_options

    def read(folder: Path, kind: str) -> PreTrainedModel:
        """The model in a folder, with every weight from the folder's safetensors files."""
        return read_model(str(folder), kind, causal=not is_t5(folder), **source_options(str(folder)))

    model, kind = read(source, "float32"), getattr(torch, dtype)
    progress(1)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and bool((tensor.to(kind).isinf() & tensor.isfinite()).any()):
            raise UserError(f"--dtype {dtype}: {name} holds numbers too large for it; use bfloat16")
    # Otherwise the last tensor, often the largest, would be kept in FP32 to the end.
    del name, tensor
    model.to(kind)
    progress(1)
    with outputs.new_folder(out) as built:
        with files.said_in_one_line(out.parent, out.name, REMEDY):
            # transformers looks for DeepSpeed when it saves, and DeepSpeed logs its start on stdout.
            with contextlib.redirect_stdout(sys.stderr):
                model.save_pretrained(built, max_shard_size=FILE_SIZE)
            files.open_to_readers(built)
            # A tokenizer's files are copied as they are.
            for path in sorted(source.iterdir()):
                if path.suffix in TEXT and path.name not in NO_TEXT and not (built / path.name).exists():
                    shutil.copyfile(path, built / path.name)
            files.seal_model(built)
        progress(1)
        found: dict[str, torch.Tensor] = read(built, dtype).state_dict()
        for name, tensor in model.state_dict().items():
            # transformers keeps some weights of some models in FP32 whatever their files hold.
            if name not in found or not torch.equal(tensor, found[name].to(tensor.dtype)):
                raise UserError(f"{out}: {name} was read back with different values; {REMEDY}")
        progress(1)
        size = sum(path.stat().st_size for path in built.glob(f"*{SUFFIX}"))
    return Exported(
        out=str(out),
        source=str(source),
        checkpoint=step,
        consolidated=is_divided,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=size,
        dtype=dtype,
        equals_model=source == run / "model" or None,
    )


def find_source(run: Path, asked: int | None) -> tuple[Path, int, bool]:
    """Folder and step of a run's weights: those that it ended with, else the newest checkpoint that counts.

    The third value is whether that folder also holds ZeRO's shards; those files are pickles, and are never opened.

    Args:
        asked: the step of the checkpoint to take instead.

    Raises:
        UserError: there is no run folder or nothing to export, or the checkpoint asked for does not verify.
    """
    if not run.is_dir():
        raise UserError(f"{run}: {no_folder(run)}; expected the run folder of a training script (--outputdir)")
    # A model's own configuration file has the same name.
    if not (run / CONFIG).is_file() or "run_id" not in read_json(run / CONFIG):
        raise UserError(f"{run}: no {CONFIG} of a run; expected the run folder of a training script (--outputdir)")
    run_id, saved = read_config(run).run_id, run / "checkpoints"

    def refused(origin: Origin) -> str | None:
        return None if origin.run_id == run_id else f"belongs to run {origin.run_id}"

    if asked is not None:
        place = saved / checkpoints.name_of(asked)
        try:
            manifest = checkpoints.verified(place, refused)
        except UnsoundError as unsound:
            there = ", ".join(map(str, checkpoints.saved_steps(saved))) or "none"
            raise UserError(f"--checkpoint {asked}: {place}: {unsound}; available: {there}") from None
        return place, manifest.step, manifest.shards() is not None
    record = read_record(run) if (run / RECORD).is_file() and has_weights(run / "model") else None
    if record is not None and record.status == "ok":
        state = saved / checkpoints.name_of(record.steps) / checkpoints.STATE
        best = record.identity.get("load_best_model") or record.identity.get("early_stopping_patience")
        ended = (best and state.is_file() and read_json(state).get("best_global_step")) or record.steps
        return run / "model", int(ended), False
    newest = checkpoints.newest_good(
        saved, refused, lambda place, why: print(f"{place}: passed over: {why}", file=sys.stderr)
    )
    if newest is None:
        raise UserError(f"{run}: unfinished, and has no usable checkpoint; continue training with --save_steps above 0")
    place, manifest = newest
    return place, manifest.step, manifest.shards() is not None
