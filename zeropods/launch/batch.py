"""One effective batch on any number of ranks: which flags keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROWS, PASSES = "per_device_train_batch_size", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """What a rank contributes to an optimizer step."""

    rows: int
    """Of a forward pass: `--per_device_train_batch_size`."""
    passes: int
    """`--gradient_accumulation_steps`."""

    def on(self, ranks: int, fewer: int) -> Batch | None:
        """The same effective batch on fewer ranks than there were; None where it does not divide.

        More passes, of as many rows as before. Where that does not divide, of the most rows that do: never of more
        than before, since they may not fit into memory.
        """
        each, rest = divmod(self.rows * self.passes * ranks, fewer)
        if rest:
            return None
        rows = next(rows for rows in range(min(self.rows, each), 0, -1) if each % rows == 0)
        return Batch(rows, each // rows)

    def flags(self, before: Batch) -> dict[str, str]:
        """What has to be said to a script that was told `before`."""
        now, then = {ROWS: self.rows, PASSES: self.passes}, {ROWS: before.rows, PASSES: before.passes}
        return {name: str(value) for name, value in now.items() if value != then[name]}


def batch_of(script: Path, arguments: Sequence[str]) -> Batch | None:
    """The batch of a call; None for another's script that is not told it by both flags."""
    from zeropods.launch.flags import flag_values, typed
    from zeropods.train.flags import read_flags
    from zeropods.train.scripts import arguments_of

    kind = arguments_of(script)
    words = [_plain(word) for word in arguments]
    said: Mapping[str, Any] = typed(flag_values(words)) if kind is None else read_flags(kind, words)
    rows, passes = said.get(ROWS), said.get(PASSES)
    known = isinstance(rows, int) and isinstance(passes, int) and min(rows, passes) > 0
    return Batch(rows, passes) if known else None  # type: ignore[arg-type]


def with_flags(arguments: Sequence[str], flags: Mapping[str, str]) -> tuple[str, ...]:
    """The arguments with these flags, in the place of those of the same names."""
    kept: list[str] = []
    for before, word in pairwise(("", *arguments)):
        is_value = _name(before) in flags and "=" not in before and not word.startswith("--")
        if _name(word) not in flags and not is_value:
            kept.append(word)
    return (*kept, *(part for name, value in flags.items() for part in (f"--{name}", value)))


def _name(word: str) -> str | None:
    """Of a flag, as a script's dataclass has it; None of another word."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else None


def _plain(word: str) -> str:
    """A flag under the name that its dataclass has."""
    name = _name(word)
    return word if name is None else f"--{name}{word[len(name) + 2 :]}"
