"""Checkpoints of several ranks: saved together, verified by rank 0 before anything of them is loaded."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from zeropods.checkpoints.disk import discard
from zeropods.checkpoints.manifest import Manifest, UnsoundError
from zeropods.checkpoints.names import name_of
from zeropods.checkpoints.newest import newest_good
from zeropods.checkpoints.origin import Origin
from zeropods.checkpoints.retire import retire
from zeropods.checkpoints.save import complete, make_room
from zeropods.checkpoints.shards import MANIFEST, Shard, measured, names_in, share
from zeropods.checkpoints.universal import check_universal, make_universal, universal_of
from zeropods.checkpoints.verify import verified
from zeropods.errors import UserError
from zeropods.train import processes
from zeropods.train.conversion import convert
from zeropods.train.disk_errors import said_in_one_line

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
