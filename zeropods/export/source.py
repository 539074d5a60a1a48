"""Which checkpoint of a run its weights are taken from, verified before anything of it is opened."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods.checkpoints.manifest import Manifest, UnsoundError
from zeropods.checkpoints.names import name_of, names_of, newest_first, step_of
from zeropods.checkpoints.shards import zero_folders
from zeropods.checkpoints.verify import verified
from zeropods.errors import UserError
from zeropods.measure.records import read_json
from zeropods.measure.run_folder import CONFIG, RECORD
from zeropods.safe_weights import has_weights, refuse_other_weights

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
    if not (run / CONFIG).is_file():
        raise UserError(f"{run}: no {CONFIG}; expected the run folder that a training script wrote (--outputdir)")
    run_id = str(read_json(run / CONFIG)["run_id"])
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
