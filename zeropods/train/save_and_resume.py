"""Checkpoints of several ranks.

They are saved together, verified by rank 0, and resumed, also on another number of ranks.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerState

from zeropods.errors import UserError
from zeropods.files import said_in_one_line
from zeropods.measure.run_folder import Opening
from zeropods.train import checkpoints, processes
from zeropods.train.checkpoints import CheckpointManifest, Origin, SavedFile, UnsoundError
from zeropods.train.engines.base import Engine
from zeropods.train.flags import NOT_NAMED, RESUME_REMEDY

REMEDY = "free or repair the disk, then run again: it resumes from the previous checkpoint"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run. Every rank has one, and calls the same methods at the same time."""

    folder: Path
    """`checkpoints/` of the run folder, which all ranks share."""
    origin: Origin
    """Origin of this run's checkpoints."""
    engine: Engine
    keep: int | None = None
    """Number of checkpoints that may stay, the newest included; None: all."""

    def save(
        self,
        step: int,
        write: Callable[[], None],
        best: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Save a checkpoint of an optimizer step, then prune older checkpoints.

        Args:
            write: writes this rank's files into the step's folder.
            best: returns the folder of the best model's checkpoint, which is never deleted; it is
                called after writing.

        Raises:
            UserError: the disk is full, or may not be written; earlier checkpoints stay as they
                are.
        """
        place = self.folder / checkpoints.name_of(step)
        try:
            self._write(step, place, write)
        except UserError:
            # The run's record still has to be written: free the space that an unfinished checkpoint
            # takes.
            if not (place / checkpoints.MANIFEST).exists():
                # A folder that stays does not count, and the error at hand is the one to report.
                with contextlib.suppress(OSError):
                    checkpoints.discard(place)
            raise
        if self.keep is not None and processes.rank() == 0:
            self._prune(step, self.keep, best)

    def _write(self, step: int, place: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint into the folder `place` with all ranks, and mark it as complete."""
        in_one_line = said_in_one_line(self.folder, place.name, REMEDY)
        files: dict[str, SavedFile] = {}

        @in_one_line
        def make_room() -> None:
            checkpoints.make_room(self.folder, step)

        @in_one_line
        def hash_share() -> dict[str, SavedFile]:
            return checkpoints.hashed(place, processes.rank(), processes.world_size())

        @in_one_line
        def mark_complete() -> None:
            checkpoints.mark_complete(self.folder, step, self.origin, files)

        processes.on_rank_zero(make_room)
        in_one_line(write)()
        # No rank lists the files before all have written theirs.
        processes.gathered(None)
        for share in processes.on_every_rank(hash_share):
            files.update(share)
        processes.on_rank_zero(mark_complete)

    def _prune(self, step: int, keep: int, best: Callable[[], str | None]) -> None:
        """Delete older checkpoints, and log which; a failure is logged and does not end the run.

        Args:
            step: the step that has just been saved.
            keep: number of checkpoints that may stay.
            best: as for `save`.
        """
        try:
            best_checkpoint = best()
            best_name = Path(best_checkpoint).name if best_checkpoint else None
            for name in checkpoints.prune(self.folder, step, self.origin, keep, best_name):
                log.info("%s deleted: --save_total_limit %d", self.folder / name, keep)
        except OSError as error:
            log.warning("%s: older checkpoints cannot be deleted (%s)", self.folder, error.strerror)
        except UnsoundError as unsound:
            place = self.folder / checkpoints.name_of(step)
            _say(f"{place}: {unsound}; older checkpoints stay", logging.WARNING)

    def check(self, checkpoint: Path, subject: str, remedy: str) -> CheckpointManifest:
        """Verify a checkpoint, which may be another run's, and return its manifest.

        Rank 0 verifies it; the result, or the error, is the same on every rank.

        Args:
            subject: the beginning of an error's message, such as `--resume DIR`.
            remedy: the end of that message.

        Raises:
            UserError: it is not whole, or not of this model.
        """

        def verify() -> CheckpointManifest:
            try:
                return checkpoints.verified(
                    checkpoint, lambda origin: origin.other_model(self.origin)
                )
            except UnsoundError as unsound:
                raise UserError(f"{subject}: {unsound}; {remedy}") from None

        return processes.on_rank_zero(verify)

    def fitted(self, checkpoint: Path, manifest: CheckpointManifest) -> Path:
        """The folder that this number of ranks can load in place of a verified checkpoint.

        Args:
            manifest: the checkpoint's manifest.

        Returns:
            The checkpoint itself, or its universal form, which is made from it.

        Raises:
            UserError: the universal form cannot be made.
        """
        saved_by = manifest.origin.world_size
        if saved_by == self.origin.world_size or not self.engine.is_divided_on_disk:
            return checkpoint
        place = self.folder / checkpoints.UNIVERSAL / str(manifest.step)

        def make() -> Path:
            with said_in_one_line(place.parent, place.name, REMEDY):
                self.engine.make_universal(place, checkpoint, manifest)
            ranks = f"{saved_by} ranks -> {self.origin.world_size}"
            _say(f"{place}: made of {checkpoint.name} ({ranks})")
            return place

        return processes.on_rank_zero(make)


def _say(line: str, level: int = logging.INFO) -> None:
    """Write a line to the log and to stderr."""
    log.log(level, "%s", line)
    print(line, file=sys.stderr, flush=True)


# What an attempt goes on from, and whether any training is left to do


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that an attempt goes on from."""

    checkpoint: Path
    """The folder that is loaded: the checkpoint itself, or its universal form."""
    saved: CheckpointManifest
    origin: Origin
    """The origin of the checkpoints that this attempt saves."""
    kept: dict[str, Any]
    """State that each of the trainer's callbacks had saved in it, by the callback's name."""

    @property
    def universal(self) -> bool:
        """Whether the checkpoint's universal form is loaded, since ZeRO saved the checkpoint on
        another number of ranks."""
        return self.checkpoint.parent.name == checkpoints.UNIVERSAL

    def has_ended(self, state: TrainerState) -> bool:
        """Whether the run had ended when the checkpoint was saved.

        A run ends by steps, by the clock, or by early stopping. It may be killed after its last
        checkpoint and before its record. transformers checks for the end only after a step, and
        would train one step too many.

        Args:
            state: the state of a trainer that has loaded the checkpoint.
        """
        if state.global_step >= state.max_steps:
            return True
        # A run with other settings, such as more epochs, goes on where this one stopped.
        is_same_run = self.saved.origin.settings == self.origin.settings
        control = self.kept.get("TrainerControl", {}).get("args", {})
        return is_same_run and bool(control.get("should_training_stop"))


def resumption(resume: str, opening: Opening, ours: Checkpoints) -> Resumption | None:
    """The checkpoint that an attempt goes on from, made loadable here; None where it begins anew.

    Every rank calls this, and gets the same.

    Args:
        resume: the value of `--resume`. A checkpoint that it names is verified and taken.
        opening: how the run folder was opened. Where `resume` names no checkpoint, it decides
            whether the newest checkpoint of this run that counts is taken.
        ours: the checkpoints of this run.

    Raises:
        UserError: the named checkpoint does not count, or this number of ranks cannot load it.
    """

    def find_newest() -> tuple[Path, CheckpointManifest] | None:
        """Find the newest checkpoint that counts, and say why newer ones are passed over."""
        return checkpoints.newest_good(
            ours.folder,
            lambda origin: origin.other_run(ours.origin),
            lambda place, why: _say(f"{place}: passed over: {why}", logging.WARNING),
        )

    if resume not in NOT_NAMED:
        checkpoint = Path(resume)
        manifest = ours.check(checkpoint, f"--resume {resume}", RESUME_REMEDY)
    elif opening.resume:
        newest = processes.on_rank_zero(find_newest)
        if newest is None:
            return None
        checkpoint, manifest = newest
    else:
        return None
    loadable = ours.fitted(checkpoint, manifest)
    log.info("resuming from %s", loadable)
    state = TrainerState.load_from_json(str(loadable / checkpoints.STATE))
    kept: Any = state.stateful_callbacks
    return Resumption(loadable, manifest, ours.origin, kept)
