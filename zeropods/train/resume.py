"""Checkpoints of several ranks: saved together, verified by rank 0, and resumed, also on another number of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerState

from zeropods.errors import UserError
from zeropods.files import first_line, foreign_object, plain_values_only, said_in_one_line
from zeropods.measure.run_folder import Opening
from zeropods.train import checkpoints, processes
from zeropods.train.arguments import NOT_NAMED, RESUME_REMEDY
from zeropods.train.checkpoints import CheckpointManifest, Origin, SavedFile, UnsoundError

REMEDY = "free or repair the disk, then run again: it resumes from the previous checkpoint"
UNDIVIDED = (checkpoints.STATE, "scheduler.pt")
"""Files that each checkpoint holds undivided, and that resuming reads."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run. Every rank has one, and calls the same methods at the same time."""

    folder: Path
    """`checkpoints/` of the run folder, which all ranks share."""
    origin: Origin
    """Origin of this run's checkpoints."""
    keep: int | None = None
    """Number of checkpoints that may stay once a newer one is whole; None: all."""

    def save(self, step: int, write: Callable[[], None], best: Callable[[], str | None] = lambda: None) -> None:
        """Save a checkpoint of an optimizer step, then prune older checkpoints.

        Args:
            write: writes this rank's files into the step's folder.
            best: returns the folder of the best model's checkpoint, which is never deleted; it is called after writing.

        Raises:
            UserError: the disk is full, or may not be written; earlier checkpoints stay as they are.
        """
        place = self.folder / checkpoints.name_of(step)
        in_one_line = said_in_one_line(self.folder, place.name, REMEDY)
        own = (processes.rank(), processes.world_size())
        try:
            processes.on_rank_zero(in_one_line(lambda: checkpoints.make_room(self.folder, step)))
            in_one_line(write)()
            processes.gathered(None)
            files: dict[str, SavedFile] = {}
            for theirs in processes.on_every_rank(in_one_line(lambda: checkpoints.hashed(place, *own))):
                files |= theirs
            processes.on_rank_zero(in_one_line(lambda: checkpoints.complete(self.folder, step, self.origin, files)))
        except UserError:
            # The run's record still has to be written: free the space that an unfinished checkpoint takes.
            if not (place / checkpoints.MANIFEST).exists():
                with contextlib.suppress(OSError):
                    checkpoints.discard(place)
            raise
        if self.keep is None or processes.rank() != 0:
            return
        # Checkpoints that cannot be deleted take space, but are no reason to end a run.
        try:
            kept = best()
            for name in checkpoints.prune(self.folder, step, self.origin, self.keep, Path(kept).name if kept else None):
                log.info("%s deleted: --save_total_limit %d", self.folder / name, self.keep)
        except OSError as error:
            log.warning("%s: older checkpoints cannot be deleted (%s)", self.folder, error.strerror)
        except UnsoundError as unsound:
            _say(f"{place}: {unsound}; older checkpoints stay", logging.WARNING)

    def check(self, checkpoint: Path, place: str, remedy: str) -> CheckpointManifest:
        """Verify a checkpoint, which may be another run's, and return its manifest.

        Args:
            place: the beginning of the message.

        Raises:
            UserError: it is not whole, or not of this model.
        """

        def checked() -> CheckpointManifest:
            try:
                return checkpoints.verified(checkpoint, lambda found: found.other_model(self.origin))
            except UnsoundError as unsound:
                raise UserError(f"{place}: {unsound}; {remedy}") from None

        return processes.on_rank_zero(checked)

    def fitted(self, checkpoint: Path, manifest: CheckpointManifest) -> Path:
        """What this number of ranks can load of a verified checkpoint: itself, or the universal form made from it.

        Args:
            manifest: the checkpoint's manifest.

        Raises:
            UserError: the universal form cannot be made.
        """
        technique = self.origin.model.get("deepspeed")
        saved_by = manifest.origin.world_size
        if technique is None or saved_by == self.origin.world_size:
            return checkpoint
        if technique == "custom":
            raise processes.SharedError(
                f"{checkpoint}: saved by {saved_by} ranks; with a DeepSpeed configuration that is not in dsconfig/, "
                f"it can be resumed only on {saved_by} ranks"
            )
        place = self.folder / checkpoints.UNIVERSAL / str(manifest.step)

        def made() -> Path:
            with said_in_one_line(place.parent, place.name, REMEDY):
                make_universal(place, checkpoint, manifest)
            _say(f"{place}: made of {checkpoint.name} ({saved_by} ranks -> {self.origin.world_size})")
            return place

        return processes.on_rank_zero(made)


def _say(line: str, level: int = logging.INFO) -> None:
    log.log(level, "%s", line)
    print(line, file=sys.stderr, flush=True)


def make_universal(place: Path, checkpoint: Path, manifest: CheckpointManifest) -> None:
    """Make the form of a checkpoint that any number of ranks can load, with DeepSpeed's own converter.

    It is made for the attempt that is about to load it, and deleted at the next checkpoint, so it has no manifest.

    Args:
        place: the folder to make; what is there is replaced.
        checkpoint: a verified checkpoint. The converter makes only tensors and plain values from what it reads.
        manifest: the checkpoint's manifest.

    Raises:
        UserError: there are no ZeRO shards, or they hold something other than plain values, or cannot be converted.
    """
    from deepspeed.checkpoint import ds_to_universal

    shards = manifest.shards()
    if shards is None:
        raise UserError(f"{checkpoint}: contains no ZeRO shards; resume on the same number of ranks")
    checkpoints.discard(place)
    place.mkdir(parents=True)
    for name in manifest.files.keys() & set(UNDIVIDED):
        shutil.copyfile(checkpoint / name, place / name)
    wanted = Namespace(
        input_folder=str(checkpoint / shards),
        output_folder=str(place / f"{shards}_{checkpoints.UNIVERSAL}"),
        # Worker processes would each hold a rank's states.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), plain_values_only():
            ds_to_universal.main(wanted)
    except (pickle.UnpicklingError, ValueError, KeyError, RuntimeError, NotImplementedError, AssertionError) as error:
        fault = f"cannot be converted ({first_line(error)}); resume on the same number of ranks"
        if isinstance(error, pickle.UnpicklingError):
            fault = f"contains {foreign_object(error)}, which is not a plain value; the file will not be opened"
        raise UserError(f"{checkpoint / shards}: {fault}") from None


# What an attempt goes on from, and whether any training is left to do


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that an attempt goes on from."""

    checkpoint: Path
    """The folder that is loaded: the checkpoint itself, or its universal form."""
    saved: CheckpointManifest
    wanted: Origin
    """The origin of the checkpoints that this attempt saves."""
    kept: dict[str, Any]
    """State that each of the trainer's callbacks had saved in it, by the callback's name."""

    @property
    def universal(self) -> bool:
        """Whether another number of ranks saved it with ZeRO, so that its universal form is loaded."""
        return self.checkpoint.parent.name == checkpoints.UNIVERSAL

    def has_ended(self, state: TrainerState) -> bool:
        """Whether the run had ended when the checkpoint was saved: by steps, by the clock, or by early stopping.

        A run may be killed after its last checkpoint and before its record. transformers checks for the end only
        after a step, and would train one step too many.

        Args:
            state: the state of a trainer that has loaded the checkpoint.
        """
        same_run = self.saved.origin.settings == self.wanted.settings
        stopping = self.kept.get("TrainerControl", {}).get("args", {}).get("should_training_stop")
        return state.global_step >= state.max_steps or (same_run and bool(stopping))


def resumption(asked: str, opening: Opening, ours: Checkpoints) -> Resumption | None:
    """Find what `--resume` asks for: the newest checkpoint that counts, nothing, or a named one, which is verified."""

    def newest() -> tuple[Path, CheckpointManifest] | None:
        """Find the newest checkpoint that counts; report each one that is passed over, with the reason."""
        return checkpoints.newest_good(
            ours.folder,
            lambda found: found.other_run(ours.origin),
            lambda place, why: _say(f"{place}: passed over: {why}", logging.WARNING),
        )

    found = None
    if asked not in NOT_NAMED:
        found = Path(asked), ours.check(Path(asked), f"--resume {asked}", RESUME_REMEDY)
    elif opening.resume:
        found = processes.on_rank_zero(newest)
    if found is None:
        return None
    fitted = ours.fitted(*found)
    log.info("resuming from %s", fitted)
    kept: Any = TrainerState.load_from_json(str(fitted / checkpoints.STATE)).stateful_callbacks
    return Resumption(fitted, found[1], ours.origin, kept)
