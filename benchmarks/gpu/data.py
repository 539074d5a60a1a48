"""The data that cells run on: prepared sets and raw questions, found in a folder or made from
it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.cells import PROMPTS, Cell
from benchmarks.gpu.jobs import call
from zeropods.data.manifest import FILE
from zeropods.errors import UserError

TOKENIZERS = ("t5/spiece.model", "spiece.model", "tokenizer.json")
OTHER_SETS = ("squad",)
"""Sets that are used where they are there."""
PREPARE_SECONDS = 1_800.0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Folders of data, all of which exist, and the lengths of their rows."""

    sets: dict[str, Path]
    """Prepared sets by prompt; `squad` is that of the workshop's job, where there is one."""
    raw: Path | None
    """Folder of WikiSQL's dev split as it is published; None: there are no questions to predict
    answers for."""
    lengths: dict[str, np.ndarray]
    """(rows, 2) source and target tokens of the train split, by prompt."""

    def shapes(self, prompt: str, batch: int, multiple: int, passes: int = 1) -> np.ndarray:
        """(batches, 2) padded source and target tokens of the batches of an epoch, in the order of
        training; an optimizer step has `passes` of them."""
        from zeropods.train.sampler import LengthGroupedSampler

        lengths = self.lengths[prompt]
        order = LengthGroupedSampler(lengths, batch * passes, seed=42).order()
        batches = lengths[order.reshape(-1, batch)]
        longest = batches.max(axis=1)
        # Rounded up.
        return -(-longest // multiple) * multiple

    def padded(self, cell: Cell, batch: int) -> np.ndarray:
        """`shapes` of the batches that a cell trains on; the control pads every row to one
        length."""
        if cell.kind == "control":
            return np.full_like(self.shapes(cell.prompt, batch, 1), cell.padded_to)
        shapes = self.shapes(cell.prompt, batch, cell.padded_to, cell.passes)
        if cell.steps is None:
            return shapes
        return shapes[: cell.steps * cell.passes]

    def mean_tokens(self, prompt: str) -> list[float]:
        """Mean source and target tokens of a row, without padding."""
        means = self.lengths[prompt].mean(axis=0)
        return [float(mean) for mean in means]


def find_data(place: Path, out: Path, tokenizer: str | None) -> Data:
    """Find the sets in `place`, or prepare sets in `out` from the raw data there.

    Raises:
        UserError: neither is there, there is no tokenizer to prepare with, or preparing failed.
    """
    from zeropods.train.sampler import Prepared

    raw = _raw_data(place)
    sets = {}
    for name in (*PROMPTS, *OTHER_SETS):
        if (place / name / FILE).is_file():
            sets[name] = place / name
    for prompt in PROMPTS:
        if prompt not in sets:
            sets[prompt] = _prepared(place, raw, out / "data" / prompt, prompt, tokenizer)
    lengths = {}
    for prompt, folder in sets.items():
        lengths[prompt] = Prepared.read(folder).train.lengths()
    return Data(sets=sets, raw=raw, lengths=lengths)


def _raw_data(place: Path) -> Path | None:
    """The folder with the dev split of WikiSQL as it is published, among those where it may be."""
    for folder in (place / "wikisql", place / "raw", place):
        if (folder / "dev.jsonl").is_file():
            return folder
    return None


def _prepared(place: Path, raw: Path | None, out: Path, prompt: str, tokenizer: str | None) -> Path:
    """Prepare the set of a prompt, unless an earlier call has; returns its folder."""
    if raw is None or not (raw / "train.jsonl").is_file():
        raise UserError(
            f"--data {place}: neither {prompt}/manifest.json nor train.jsonl of WikiSQL is there; "
            "put the raw files there, or make it: "
            f"zeropods prepare --prompt {prompt} --out {place / prompt}"
        )
    if (out / FILE).is_file():
        return out
    tokenizer = tokenizer or _tokenizer(place)
    if tokenizer is None:
        raise UserError(f"--data {place}: no {', '.join(TOKENIZERS)} in it; give --tokenizer FILE")
    words = ["prepare", "--data", str(raw), "--tokenizer", tokenizer]
    words += ["--prompt", prompt, "--out", str(out)]
    status, output = call("zeropods", words, PREPARE_SECONDS)
    if status != 0:
        reason = "it said nothing"
        lines = output.strip().splitlines()
        if lines:
            reason = lines[-1].removeprefix("zeropods: ")
        raise UserError(f"zeropods {' '.join(words)}: status {status}: {reason}")
    return out


def _tokenizer(place: Path) -> str | None:
    for name in TOKENIZERS:
        if (place / name).is_file():
            return str(place / name)
    return None
