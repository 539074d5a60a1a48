"""A run's weights as a model folder that anyone can load, put together from what its ranks have saved."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods import files
from zeropods import files as atomic
from zeropods.errors import UserError
from zeropods.files import SUFFIX, first_line, foreign_object, has_weights, plain_values_only, refuse_other_weights
from zeropods.measure.record import read_json
from zeropods.measure.run_folder import CONFIG, RECORD
from zeropods.train.checkpoint_files import (
    MANIFEST,
    Manifest,
    UnsoundError,
    name_of,
    names_of,
    newest_first,
    step_of,
    verified,
    zero_folders,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


DTYPES = ("float32", "bfloat16", "float16")
"""What exported numbers may be; those of a checkpoint are FP32."""


# Which checkpoint of a run its weights are taken from, verified before anything of it is opened.

STATE = "trainer_state.json"


@dataclass(frozen=True)
class Source:
    """Weights of a run, at one step."""

    folder: Path
    """With configuration and tokenizer, and safetensors or ZeRO's shards."""
    step: int
    shards: str | None = None
    """The folder in it that holds ZeRO's shards; None where there are none."""
    final: Path | None = None
    """The finished run's `model/`, where it is of the same step, and not the source itself."""
    asked: bool = False
    """Whether the step was asked for."""


def find_source(run: Path, asked: int | None = None) -> Source:
    """The weights of a run: of the step asked for, else those it ended with, else of the newest checkpoint that counts.

    Args:
        run: a run folder.
        asked: the step of a checkpoint.

    Raises:
        UserError: no run folder, nothing to export, or the checkpoint asked for does not verify.
    """
    config = read_json(run / CONFIG) if (run / CONFIG).is_file() else {}
    if "run_id" not in config:
        raise UserError(f"{run}: no {CONFIG} of a run; expected the run folder of a training script (--outputdir)")
    run_id = str(config["run_id"])
    ended = _ended_at(run)
    final = run / "model" if ended is not None else None
    if asked is not None:
        return _asked_for(run, run_id, asked, final if asked == ended else None)
    if ended is None:
        return _newest(run, run_id)
    checkpoint = run / "checkpoints" / name_of(ended)
    if checkpoint.is_dir():
        try:
            return _of_checkpoint(checkpoint, run_id, final)
        except UnsoundError as unsound:
            _passed_over(checkpoint, unsound)
    refuse_other_weights(run / "model")
    return Source(run / "model", ended)


def _asked_for(run: Path, run_id: str, asked: int, final: Path | None) -> Source:
    checkpoint = run / "checkpoints" / name_of(asked)
    try:
        return _of_checkpoint(checkpoint, run_id, final, asked=True)
    except UnsoundError as unsound:
        there = ", ".join(str(step_of(name)) for name in newest_first(names_of(run / "checkpoints"))) or "none"
        why = unsound if checkpoint.is_dir() else "no such checkpoint"
        raise UserError(f"--checkpoint {asked}: {checkpoint}: {why}; there are: {there}") from None


def _newest(run: Path, run_id: str) -> Source:
    for name in newest_first(names_of(run / "checkpoints")):
        try:
            return _of_checkpoint(run / "checkpoints" / name, run_id, None)
        except UnsoundError as unsound:
            _passed_over(run / "checkpoints" / name, unsound)
    raise UserError(f"{run}: not finished, and has no checkpoint that counts; train on, with --save_steps above 0")


def _of_checkpoint(checkpoint: Path, run_id: str, final: Path | None, *, asked: bool = False) -> Source:
    manifest = verified(checkpoint, lambda found: None if found.run_id == run_id else f"of run {found.run_id}")
    if manifest.step != step_of(checkpoint.name):
        raise UnsoundError(f"is of step {manifest.step}, under another name")
    refuse_other_weights(checkpoint)
    return Source(checkpoint, manifest.step, _shards(checkpoint, manifest), final, asked)


def _shards(checkpoint: Path, manifest: Manifest) -> str | None:
    folders = zero_folders(manifest.files)
    if len(folders) > 1:
        raise UnsoundError(f"holds the shards of several steps ({', '.join(sorted(folders))})")
    return folders.pop() if folders else None


def _ended_at(run: Path) -> int | None:
    """The step of which a finished run's `model/` is; None where the run is not finished."""
    if not (run / RECORD).is_file() or not has_weights(run / "model"):
        return None
    record = read_json(run / RECORD)
    if record["status"] != "ok":
        return None
    identity: dict[str, Any] = record.get("identity") or {}
    if not (identity.get("load_best_model") or identity.get("early_stopping_patience")):
        return int(record["steps"])
    state = run / "checkpoints" / name_of(record["steps"]) / STATE
    best = read_json(state).get("best_global_step") if state.is_file() else None
    return int(best or record["steps"])


def _passed_over(checkpoint: Path, why: UnsoundError) -> None:
    print(f"{checkpoint}: passed over: {why}", file=sys.stderr)


# Export: source -> weights -> folder -> read back -> in place.


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported."""

    out: str
    source: str
    """The folder that the weights were taken from."""
    checkpoint: int
    """Its step."""
    consolidated: bool
    """Whether they were put together from ZeRO's shards."""
    parameters: int
    """Tied ones once."""
    bytes: int
    """Of the weight files."""
    dtype: str
    equals_model: bool | None
    """Whether they are those of the finished run's `model/`; None where that is not of the same step."""

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


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
        dtype: of the exported floating-point numbers.
        progress: is told of each tensor written.

    Raises:
        UserError: nothing to export, `out` holds something, or the weights are not what they should be.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r}; expected {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists; choose a new folder, or an empty one")
    source = find_source(run, checkpoint)
    return _exported(source, out, dtype, progress)


def _exported(source: Source, out: Path, dtype: str, progress: Callable[[int], object]) -> Exported:
    import torch

    from zeropods.files import said_in_one_line

    weights, kind = weights_of(source), getattr(torch, dtype)
    equals = _compared(source, weights)
    with files.new_folder(out) as built:
        with said_in_one_line(built.parent, str(out), "see to the disk, then export again"):
            write_weights(weights, built, kind, progress)
            write_companions(source.folder, built, dtype)
        parameters = check_export(weights, built, kind)
        size = sum(path.stat().st_size for path in built.glob(f"*{SUFFIX}"))
    return Exported(
        out=str(out),
        source=str(source.folder),
        checkpoint=source.step,
        consolidated=source.shards is not None,
        parameters=parameters,
        bytes=size,
        dtype=dtype,
        equals_model=equals,
    )


def _compared(source: Source, weights: Any) -> bool | None:
    """Compare with what training itself put together: the checkpoint's whole weights, the finished model."""

    if source.shards is not None and has_weights(source.folder):
        different = difference(weights, stored(source.folder))
        if different is not None:
            raise UserError(f"{source.folder}: its shards and its *{SUFFIX} differ: {different}; take another one")
    if source.final is None:
        return True if source.folder.name == "model" else None
    different = difference(weights, stored(source.final))
    if different is not None and not source.asked:
        raise UserError(
            f"{source.final}: differs from {source.folder.name}: {different}; "
            f"one of them was changed: --checkpoint {source.step} exports the checkpoint"
        )
    return different is None


# Weights by name that are read one at a time: from safetensors, or from the shards that ZeRO's ranks have saved.


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


# Weights into safetensors files, a file's worth in memory at a time, and what belongs beside them.

MODEL_CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 4 * 2**30
"""Most bytes of a weight file, as far as single tensors allow."""
TEXT = (".json", ".jinja", ".model", ".txt")
"""Endings of what a tokenizer and a configuration are made of."""
OTHERS = (MODEL_CONFIG, MANIFEST, STATE)


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
    if not (source / MODEL_CONFIG).is_file():
        raise UserError(f"{source}: no {MODEL_CONFIG} beside the weights; export another checkpoint")
    config = {**read_json(source / MODEL_CONFIG), "dtype": dtype}
    config.pop("torch_dtype", None)
    (folder / MODEL_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
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


# Whether weights are those they should be: bit by bit on the disk, and as a model that was loaded from there.


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
