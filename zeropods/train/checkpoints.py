"""Checkpoints of several ranks: saved together, verified by rank 0, and what an attempt goes on from."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from zeropods.errors import UserError
from zeropods.files import said_in_one_line
from zeropods.launch.bound import bound_argv
from zeropods.measure.run_folder import Opening
from zeropods.train import processes
from zeropods.train.checkpoint_files import (
    MANIFEST,
    Manifest,
    Origin,
    Shard,
    UnsoundError,
    check_universal,
    complete,
    discard,
    make_room,
    make_universal,
    measured,
    name_of,
    names_in,
    newest_good,
    retire,
    share,
    universal_of,
    verified,
)

# ZeRO's shards made universal by a process of its own: with a line of progress, and an end.

LIMIT_SECONDS = 1_500.0
"""The other ranks wait 1,800 s for rank 0 before they give up."""
PROGRESS_SECONDS = 5.0
PACKAGES = Path(__file__).resolve().parents[2]
"""Where this package is: the process finds it wherever it starts."""


def convert(shards: Path, out: Path, *, limit: float = LIMIT_SECONDS) -> None:
    """Make the universal form of a folder of shards.

    Args:
        shards: a checkpoint's folder of what ZeRO has divided; it has been verified.
        out: the folder to make; its own folder gets `latest_universal`, which names it.
        limit: seconds after which it is given up.

    Raises:
        UserError: it took too long, ran out of room, or the shards hold what is no plain value.
    """
    command = bound_argv([sys.executable, "-m", "zeropods.train.convert", str(shards), str(out)])
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            _await(process, shards, out, limit)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            said.seek(0)
            raise UserError(_why(said.read().decode(errors="replace"), shards, process.returncode))


def _environment() -> dict[str, str]:
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(PACKAGES), *([found] if found else [])])
    # It needs no GPU, and would take room on one.
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def _await(process: subprocess.Popen[bytes], shards: Path, out: Path, limit: float) -> None:
    began = time.monotonic()
    while True:
        try:
            process.wait(min(PROGRESS_SECONDS, limit))
            return
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - began
        if elapsed >= limit:
            raise UserError(f"{shards}: not converted within {limit:.0f} s; resume on as many ranks as saved it")
        line = f"{out.parent}: {_bytes_in(out) / 1e9:.1f} GB converted in {elapsed:.0f} s"
        print(line, file=sys.stderr, flush=True)
        log.info(line)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _why(said: str, shards: Path, status: int) -> str:
    """The process's line for people, without the name that begins it; else the last one."""
    lines = [line for line in said.splitlines() if line.strip()]
    ours = [line.removeprefix("zeropods: ") for line in lines if line.startswith("zeropods: ")]
    if ours:
        return ours[-1]
    last = f": {lines[-1][:200]}" if lines else ""
    return f"{shards}: the process that converts it ended with status {status}{last}; resume on as many ranks"


# Checkpoints of several ranks: saved together, verified by rank 0 before anything of them is loaded.

log = logging.getLogger(__name__)
REMEDY = "see to the disk, then call again: the run goes on from the checkpoint before"


class Checkpoints:
    """The checkpoints of a run. Every rank has one, and calls the same methods at the same time."""

    def __init__(self, folder: Path, origin: Origin, *, keep: int | None = None) -> None:
        """`Checkpoints` of a folder that all ranks share.

        Args:
            folder: `checkpoints/` of the run folder.
            origin: of this run.
            keep: how many may stay when a newer one is whole; None: all.
        """
        self.folder = folder
        self.origin = origin
        self.keep = keep

    def save(self, step: int, write: Callable[[], None], best: Callable[[], str | None] = lambda: None) -> None:
        """Save a step, then delete older ones that are too many.

        Args:
            step: of the optimizer.
            write: writes this rank's files into the step's folder.
            best: the folder of the best model's checkpoint, asked after writing; it is never deleted.

        Raises:
            UserError: the disk is full, or may not be written; earlier checkpoints stay as they are.
        """
        try:
            processes.on_rank_zero(self._in_one_line(step, lambda: make_room(self.folder, step)))
            self._in_one_line(step, write)()
            processes.gathered(None)
            files = self._files(step)
            processes.on_rank_zero(self._in_one_line(step, lambda: complete(self.folder, step, self.origin, files)))
        except UserError:
            self._free(step)
            raise
        if self.keep is not None and processes.rank() == 0:
            self._retire(step, self.keep, best())

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that counts; what is passed over is said, with the reason."""
        return processes.on_rank_zero(self._newest)

    def fitted(self, checkpoint: Path, manifest: Manifest) -> Path:
        """What this number of ranks can load of a checkpoint that verifies: itself, or its universal form.

        That is made where there is none yet.

        Args:
            manifest: the checkpoint's own.

        Raises:
            UserError: it cannot be made.
        """
        kind, saved_by = self.origin.model.get("deepspeed"), manifest.origin.world_size
        if kind is None or saved_by == self.origin.world_size:
            return checkpoint
        if kind == "custom":
            raise processes.SharedError(
                f"{checkpoint}: saved by {saved_by} ranks; with a DeepSpeed configuration that is none of "
                f"dsconfig/ it goes on on {saved_by} ranks only"
            )
        return processes.on_rank_zero(lambda: self._universal(checkpoint, manifest))

    def check(self, checkpoint: Path, place: str, remedy: str) -> Manifest:
        """Refuse a checkpoint that is not whole, or not of this model; it may be another run's. Returns its manifest.

        Args:
            place: what the message begins with.
        """

        def check() -> Manifest:
            try:
                return verified(checkpoint, lambda found: found.other_model(self.origin))
            except UnsoundError as unsound:
                raise UserError(f"{place}: {unsound}; {remedy}") from None

        return processes.on_rank_zero(check)

    def _newest(self) -> tuple[Path, Manifest] | None:
        found = newest_good(self.folder, self.origin)
        for name, why in found.skipped:
            log.warning("%s passed over: %s", self.folder / name, why)
            print(f"{self.folder / name}: passed over: {why}", file=sys.stderr)
        if found.path is not None:
            log.info("going on from %s", found.path)
        elif found.skipped:
            log.warning("no checkpoint counts: beginning at step 0")
        return None if found.path is None or found.manifest is None else (found.path, found.manifest)

    def _universal(self, checkpoint: Path, manifest: Manifest) -> Path:
        """On rank 0, which has the run's lock."""
        place = universal_of(self.folder, manifest.step)
        try:
            if place.exists():
                check_universal(place, checkpoint)
                log.info("going on from %s, made before", place)
                return place
        except UnsoundError as unsound:
            self._say(place, f"made again: {unsound}")
        ranks = f"{manifest.origin.world_size} ranks -> {self.origin.world_size}"
        self._say(place, f"made of {checkpoint.name} ({ranks})")
        try:
            with said_in_one_line(place.parent, place.name, REMEDY):
                make_universal(place, checkpoint, manifest, convert)
        except UnsoundError as unsound:
            raise UserError(f"{checkpoint}: {unsound}; resume on as many ranks") from None
        return place

    def _say(self, place: Path, what: str) -> None:
        log.info("%s: %s", place, what)
        print(f"{place}: {what}", file=sys.stderr, flush=True)

    def _retire(self, step: int, keep: int, best: str | None) -> None:
        """On rank 0; what cannot be deleted takes room, and is no reason to end a run."""
        try:
            retired = retire(self.folder, step, self.origin, keep, Path(best).name if best else None)
        except OSError as error:
            log.warning("%s: older checkpoints cannot be deleted (%s)", self.folder, error.strerror)
            return
        if retired.fault is not None:
            place = self.folder / name_of(step)
            log.warning("%s: %s; older checkpoints stay", place, retired.fault)
            print(f"{place}: {retired.fault}; older checkpoints stay", file=sys.stderr)
        for name in retired.gone:
            log.info("%s deleted: --save_total_limit %d", self.folder / name, keep)

    def _files(self, step: int) -> dict[str, Shard]:
        """What all ranks answer for. A rank that cannot must tell the others, or they would wait for ever."""
        told = processes.gathered(self._share(step))
        for _, failure in told:
            if failure is not None:
                raise processes.SharedError(failure)
        return {name: shard for share_, _ in told for name, shard in share_.items()}

    def _share(self, step: int) -> tuple[dict[str, Shard], str | None]:
        """What this rank answers for, or why it cannot."""
        place = self.folder / name_of(step)
        try:
            with said_in_one_line(self.folder, name_of(step), REMEDY):
                return measured(place, share(names_in(place), processes.rank(), processes.world_size())), None
        except UserError as error:
            return {}, str(error)

    def _in_one_line(self, step: int, act: Callable[[], object]) -> Callable[[], None]:
        def said() -> None:
            with said_in_one_line(self.folder, name_of(step), REMEDY):
                act()

        return said

    def _free(self, step: int) -> None:
        """Give back the room that an unfinished checkpoint takes: the run's record still has to be written."""
        place = self.folder / name_of(step)
        if not (place / MANIFEST).exists():
            with contextlib.suppress(OSError):
                discard(place)


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
        """Whether training had ended when the checkpoint was saved.

        A run may be killed after its last checkpoint and before its record. transformers looks for the end only
        after a step, and would train one too many.

        Args:
            state: of a trainer that has loaded the checkpoint.
        """
        if state.global_step >= state.max_steps:
            return True
        return self.checkpoint is not None and self.same_run and _was_stopping(state)


def resumption(asked: str, opening: Opening, checkpoints: Checkpoints) -> Resumption:
    """What `--resume` asks for: the newest checkpoint that counts, nothing, or one that is named and verified.

    Of what another number of ranks has saved with ZeRO, its universal form.
    """
    if asked not in ("auto", "never"):
        place = Path(asked)
        manifest = checkpoints.check(place, f"--resume {asked}", "give auto, never or the folder of a whole checkpoint")
        return _going_on(place, manifest, checkpoints)
    found = checkpoints.newest() if opening.resume else None
    return _going_on(*found, checkpoints) if found else Resumption()


def _going_on(place: Path, manifest: Manifest, checkpoints: Checkpoints) -> Resumption:
    fitted, wanted = checkpoints.fitted(place, manifest), checkpoints.origin
    return Resumption(
        str(fitted),
        same_run=manifest.origin.settings == wanted.settings,
        step=manifest.step,
        universal=fitted != place,
        other_ranks=manifest.origin.world_size != wanted.world_size,
    )


class SamePatience(TrainerCallback):
    """Lets early stopping count on from the checkpoint: otherwise a resumed run would be more patient."""

    def __init__(self, stopping: EarlyStoppingCallback) -> None:
        self.stopping = stopping

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        saved = _saved(state, EarlyStoppingCallback.__name__).get("attributes", {})
        self.stopping.early_stopping_patience_counter = saved.get("early_stopping_patience_counter", 0)


def has_waited(callbacks: Iterable[TrainerCallback]) -> bool:
    """Whether early stopping, where it is among the callbacks, has waited as long as it may."""
    stopping = [callback for callback in callbacks if isinstance(callback, EarlyStoppingCallback)]
    return any(one.early_stopping_patience_counter >= one.early_stopping_patience for one in stopping)


def _was_stopping(state: TrainerState) -> bool:
    """Whether the last step before the save had set the end: by its number, the clock, or want of progress."""
    return bool(_saved(state, "TrainerControl").get("args", {}).get("should_training_stop"))


def _saved(state: TrainerState, callback: str) -> dict[str, Any]:
    """What a callback had put into the state; the last one of a kind."""
    found = (state.stateful_callbacks or {}).get(callback, {})
    return found[-1] if isinstance(found, list) and found else found or {}
