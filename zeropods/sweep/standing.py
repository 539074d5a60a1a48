"""What earlier calls of a sweep have left, and what of it stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from zeropods.errors import UserError
from zeropods.folder_lock import folder_locked
from zeropods.launch import finished
from zeropods.launch.flags import flag_values
from zeropods.measure.records import read_record
from zeropods.measure.run_folder import CONFIG, RECORD
from zeropods.sweep.results import FILE, Row
from zeropods.sweep.trial import Trial

LOCK = "sweep.lock"


def held(out: Path) -> AbstractContextManager[None]:
    """Hold a sweep's folder; a second sweep in it is refused, and so is a folder of something else."""
    return folder_locked(out, LOCK, signs=(FILE, LOCK), kind="sweep", flag="--out")


def refuse_other_runs(trials: Sequence[Trial]) -> None:
    """Refuse where a run folder holds a run with other settings than the matrix gives it now."""
    for trial in trials:
        before = finished.remembered(trial.folder)
        if before is None:
            continue
        now = finished.identity(trial.launch)
        changed = [key for key in now if now[key] != before.get(key)]
        if changed:
            was, what = _difference(before, now, changed[0])
            raise UserError(f"{trial.folder}: was run with other settings ({what}: {was}); choose another --out")


def standing_row(trial: Trial, earlier: Mapping[tuple[str, int], Row], *, again: bool) -> Row:
    """The row of a run as it stands: measured if nothing is left to do for it.

    A run that is finished stays finished. Out of memory, too slow, failed and lost are results too; `again` asks for
    another try of those. What was killed or interrupted has no result yet.

    Args:
        earlier: rows of an earlier call: a run that was refused before it began has left nothing else.
    """
    waiting = Row.of(trial)
    before = earlier.get((waiting.cell, waiting.repeat))
    seconds = None if before is None else before.seconds
    if (trial.folder / RECORD).is_file():
        row = waiting.ended(read_record(trial.folder), seconds)
        return row if row.status == "ok" or (row.is_measured and not again) else waiting
    was_refused = before is not None and before.is_measured and not (trial.folder / CONFIG).is_file()
    return before if before is not None and was_refused and not again else waiting


def _difference(before: Mapping[str, object], now: Mapping[str, object], key: str) -> tuple[str, str]:
    """What is different, as it was and by its name."""
    old, new = before.get(key), now[key]
    if key != "arguments" or not isinstance(old, list) or not isinstance(new, list):
        return f"{old!r:.60}, now {new!r:.60}", key
    was, will = flag_values(old), flag_values(new)
    name = next((name for name in {**will, **was} if was.get(name) != will.get(name)), "order of flags")
    return f"{was.get(name)}, now {will.get(name)}", f"--{name}"
