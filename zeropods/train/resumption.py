"""What an attempt goes on from, and whether any training is left to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from zeropods.checkpoints.manifest import Manifest
from zeropods.measure.run_folder import Opening
from zeropods.train.checkpoints import Checkpoints


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
