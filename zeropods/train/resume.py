"""Checkpoints of several ranks: saved together, verified by rank 0, and gone on from, also by other ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, set_seed

from zeropods.errors import UserError
from zeropods.files import said_in_one_line
from zeropods.measure.run_folder import Opening
from zeropods.programs import bound_argv
from zeropods.train import processes
from zeropods.train.checkpoints import (
    MANIFEST,
    UNIVERSAL,
    CheckpointManifest,
    Origin,
    SavedFile,
    UnsoundError,
    check_universal,
    complete,
    discard,
    hashed,
    make_room,
    make_universal,
    name_of,
    names_in,
    newest_good,
    prune,
    share,
    verified,
)

REMEDY = "free or repair the disk, then run again: it resumes from the checkpoint before"
CONVERT_SECONDS = 1_500.0
"""The other ranks wait 1,800 s for rank 0 before they give up."""
PROGRESS_SECONDS = 5.0
PACKAGES = Path(__file__).resolve().parents[2]
"""Where this package is: a process finds it wherever it starts."""

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run. Every rank has one, and calls the same methods at the same time."""

    def __init__(self, folder: Path, origin: Origin, *, keep: int | None = None) -> None:
        """`Checkpoints` of a folder that all ranks share.

        Args:
            folder: `checkpoints/` of the run folder.
            origin: this run's.
            keep: how many may stay when a newer one is whole; None: all.
        """
        self.folder = folder
        self.origin = origin
        self.keep = keep

    def save(self, step: int, write: Callable[[], None], best: Callable[[], str | None] = lambda: None) -> None:
        """Save an optimizer step, then prune older ones.

        Args:
            write: writes this rank's files into the step's folder.
            best: gives the folder of the best model's checkpoint, asked after writing; it is never deleted.

        Raises:
            UserError: the disk is full, or may not be written; earlier checkpoints stay as they are.
        """
        place = self.folder / name_of(step)

        def guarded(act: Callable[[], object]) -> Callable[[], None]:
            def acted() -> None:
                with said_in_one_line(self.folder, place.name, REMEDY):
                    act()

            return acted

        try:
            processes.on_rank_zero(guarded(lambda: make_room(self.folder, step)))
            guarded(write)()
            processes.gathered(None)
            files = _hashed_by_all(place)
            processes.on_rank_zero(guarded(lambda: complete(self.folder, step, self.origin, files)))
        except UserError:
            # The run's record still has to be written: give back the room that an unfinished checkpoint takes.
            if not (place / MANIFEST).exists():
                with contextlib.suppress(OSError):
                    discard(place)
            raise
        if self.keep is not None and processes.rank() == 0:
            self._prune(step, self.keep, best())

    def newest(self) -> tuple[Path, CheckpointManifest] | None:
        """The newest checkpoint that counts; those that are passed over are named, with the reason."""
        return processes.on_rank_zero(
            lambda: newest_good(
                self.folder,
                lambda found: found.other_run(self.origin),
                lambda place, why: _say(f"{place}: passed over: {why}", logging.WARNING),
            )
        )

    def check(self, checkpoint: Path, place: str, remedy: str) -> CheckpointManifest:
        """The manifest of a checkpoint, which may be another run's.

        Args:
            place: what the message begins with.

        Raises:
            UserError: it is not whole, or not of this model.
        """

        def checked() -> CheckpointManifest:
            try:
                return verified(checkpoint, lambda found: found.other_model(self.origin))
            except UnsoundError as unsound:
                raise UserError(f"{place}: {unsound}; {remedy}") from None

        return processes.on_rank_zero(checked)

    def fitted(self, checkpoint: Path, manifest: CheckpointManifest) -> Path:
        """What this number of ranks can load of a checkpoint that verifies: itself, or its universal form.

        That is made where there is none yet.

        Args:
            manifest: the checkpoint's own.

        Raises:
            UserError: it cannot be made.
        """
        technique, saved_by = self.origin.model.get("deepspeed"), manifest.origin.world_size
        if technique is None or saved_by == self.origin.world_size:
            return checkpoint
        if technique == "custom":
            raise processes.SharedError(
                f"{checkpoint}: saved by {saved_by} ranks; with a DeepSpeed configuration that is none of dsconfig/ "
                f"it resumes on {saved_by} ranks only"
            )
        return processes.on_rank_zero(lambda: self._universal(checkpoint, manifest))

    def _universal(self, checkpoint: Path, manifest: CheckpointManifest) -> Path:
        """On rank 0, which has the run's lock."""
        place = self.folder / UNIVERSAL / str(manifest.step)
        try:
            if place.exists():
                check_universal(place, checkpoint)
                return place
        except UnsoundError as unsound:
            _say(f"{place}: made again: {unsound}")
        _say(f"{place}: made of {checkpoint.name} ({manifest.origin.world_size} ranks -> {self.origin.world_size})")
        try:
            with said_in_one_line(place.parent, place.name, REMEDY):
                make_universal(place, checkpoint, manifest, convert)
        except UnsoundError as unsound:
            raise UserError(f"{checkpoint}: {unsound}; resume on as many ranks") from None
        return place

    def _prune(self, step: int, keep: int, best: str | None) -> None:
        """On rank 0; what cannot be deleted takes room, and is no reason to end a run."""
        try:
            for name in prune(self.folder, step, self.origin, keep, Path(best).name if best else None):
                log.info("%s deleted: --save_total_limit %d", self.folder / name, keep)
        except OSError as error:
            log.warning("%s: older checkpoints cannot be deleted (%s)", self.folder, error.strerror)
        except UnsoundError as unsound:
            _say(f"{self.folder / name_of(step)}: {unsound}; older checkpoints stay", logging.WARNING)


def _hashed_by_all(place: Path) -> dict[str, SavedFile]:
    """The files of all ranks, each of which hashes its own."""
    mine: dict[str, SavedFile] = {}
    failure = None
    try:
        with said_in_one_line(place.parent, place.name, REMEDY):
            mine = hashed(place, share(names_in(place), processes.rank(), processes.world_size()))
    except UserError as error:
        # Every rank is told, or the others would wait for ever.
        failure = str(error)
    files: dict[str, SavedFile] = {}
    for theirs, failed in processes.gathered((mine, failure)):
        if failed is not None:
            raise processes.SharedError(failed)
        files |= theirs
    return files


def _say(line: str, level: int = logging.INFO) -> None:
    log.log(level, "%s", line)
    print(line, file=sys.stderr, flush=True)


def convert(shards: Path, out: Path, *, limit: float = CONVERT_SECONDS) -> None:
    """Make the universal form of a folder of ZeRO's shards, in a process of its own (`train.convert`).

    Args:
        shards: a checkpoint's folder of what ZeRO has divided; it has been verified.
        out: the folder to make; its own folder gets `latest_universal`, which names it.
        limit: seconds after which it is given up.

    Raises:
        UserError: it took too long, ran out of room, or the shards hold what is no plain value.
    """
    command = bound_argv([sys.executable, "-m", "zeropods.train.convert", str(shards), str(out)])
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    # It needs no GPU, and would take room on one.
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    began, said = time.monotonic(), None
    try:
        while said is None:
            try:
                said = process.communicate(timeout=min(PROGRESS_SECONDS, limit))[1]
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - began
                if elapsed >= limit:
                    raise UserError(
                        f"{shards}: not converted within {limit:.0f} s; resume on as many ranks as saved it"
                    ) from None
                _say(f"{out.parent}: converting for {elapsed:.0f} s")
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        for line in reversed(lines):
            if line.startswith("zeropods: "):
                raise UserError(line.removeprefix("zeropods: "))
        last = f": {lines[-1][:200]}" if lines else ""
        status = process.returncode
        raise UserError(f"{shards}: the conversion ended with status {status}{last}; resume on as many ranks")


# What an attempt goes on from, and whether any training is left to do.


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to go on from."""

    checkpoint: str | None = None
    """None: from the beginning."""
    same_run: bool = False
    """Whether it was saved under the settings of this run, so that what ended that run ended this one."""
    step: int = 0
    universal: bool = False
    """Whether it is the universal form of what another number of ranks had saved with ZeRO."""
    other_ranks: bool = False
    """Whether another number of ranks had saved it."""

    def has_ended(self, state: TrainerState) -> bool:
        """Whether training had ended when the checkpoint was saved: by steps, the clock, or want of progress.

        A run may be killed after its last checkpoint and before its record. transformers looks for the end only
        after a step, and would train one too many.

        Args:
            state: the state of a trainer that has loaded the checkpoint.
        """
        if state.global_step >= state.max_steps:
            return True
        stopping = _saved_by(state, "TrainerControl").get("args", {}).get("should_training_stop")
        return self.checkpoint is not None and self.same_run and bool(stopping)


def resumption(asked: str, opening: Opening, checkpoints: Checkpoints) -> Resumption:
    """What `--resume` asks for: the newest checkpoint that counts, nothing, or one that is named and verified."""
    found = None
    if asked not in ("auto", "never"):
        remedy = "give auto, never or the folder of a whole checkpoint"
        found = Path(asked), checkpoints.check(Path(asked), f"--resume {asked}", remedy)
    elif opening.resume:
        found = checkpoints.newest()
    if found is None:
        return Resumption()
    place, manifest = found
    fitted, wanted = checkpoints.fitted(place, manifest), checkpoints.origin
    log.info("resuming from %s", fitted)
    return Resumption(
        str(fitted),
        same_run=manifest.origin.settings == wanted.settings,
        step=manifest.step,
        universal=fitted != place,
        other_ranks=manifest.origin.world_size != wanted.world_size,
    )


class ResumedPatience(TrainerCallback):
    """Lets early stopping count on from the checkpoint: otherwise a resumed run would be more patient."""

    def __init__(self, stopping: EarlyStoppingCallback) -> None:
        self.stopping = stopping

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        saved = _saved_by(state, EarlyStoppingCallback.__name__).get("attributes", {})
        self.stopping.early_stopping_patience_counter = saved.get("early_stopping_patience_counter", 0)


def has_waited(callbacks: Iterable[TrainerCallback]) -> bool:
    """Whether early stopping, where it is among the callbacks, has waited as long as it may."""
    stopping = [callback for callback in callbacks if isinstance(callback, EarlyStoppingCallback)]
    return any(one.early_stopping_patience_counter >= one.early_stopping_patience for one in stopping)


def _saved_by(state: TrainerState, callback: str) -> dict[str, Any]:
    """What a callback had put into the state; the last one of a kind."""
    found = (state.stateful_callbacks or {}).get(callback, {})
    return found[-1] if isinstance(found, list) and found else found or {}


# transformers' trainer, resuming also where training had ended or other ranks have saved the checkpoint.


class ResumingTrainer(Trainer):
    """`Trainer` that does as its `resumption` says, which is set before training begins."""

    control: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.resumption = Resumption()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train for an epoch, unless the checkpoint that was loaded is of the end."""
        if self.resumption.has_ended(self.state):
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare, and load what is resumed: an engine is told by its configuration that it is a universal one."""
        if self.resumption.universal:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        return super()._prepare_for_training(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what DeepSpeed has not loaded just before."""
        if self.resumption.universal:
            _universal_loaded(self.model_wrapped)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with this rank's random numbers; on another number of ranks, with new ones by seed, step and place.

        The order of rows does not depend on them; dropout masks do.
        """
        args = self.args
        if self.resumption.other_ranks:
            place = (args.seed, self.resumption.step, args.world_size, args.process_index)
            set_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        else:
            super()._load_rng_state(checkpoint)


@contextlib.contextmanager
def loading_universal(engine: Any) -> Iterator[None]:
    """What DeepSpeed's engine loads in this block is a universal checkpoint."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        _universal_loaded(engine)


def _universal_loaded(engine: Any) -> None:
    """Correct what was loaded, and let what the engine loads after that be checkpoints of its own.

    ZeRO-3 gives all its sub-groups one tensor that counts their steps: each sub-group would count for all, and Adam's
    correction of its averages would be that of a later step.
    """
    engine._config.load_universal_checkpoint = False
    # DeepSpeed's optimizer has torch's within; without ZeRO it is that itself.
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
