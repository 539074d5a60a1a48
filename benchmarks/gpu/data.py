"""The data that cells run on: prepared sets and raw questions, found in a folder or made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.gpu.cells import PROMPTS, Cell
from zeropods.errors import UserError

if TYPE_CHECKING:
    from benchmarks.gpu.jobs import Jobs

TOKENIZERS = ("t5/spiece.model", "spiece.model", "tokenizer.json")
PREPARE_SECONDS = 1_800.0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Folders, all of them there."""

    sets: dict[str, Path]
    """Prepared sets by prompt."""
    raw: Path | None
    """WikiSQL as it is published; None: nothing to predict from."""
    lengths: dict[str, Path]
    """(rows, 2) source and target tokens of the train split, by prompt: a NumPy file each."""

    def shapes(self, prompt: str, batch: int, multiple: int, seed: int = 42) -> np.ndarray:
        """(steps, 2) padded source and target tokens of the batches of an epoch, in the order of training."""
        from zeropods.train.sampler import LengthGroupedSampler

        lengths = np.load(self.lengths[prompt])
        order = LengthGroupedSampler(lengths, batch, seed).order()
        longest = lengths[order].max(axis=1)
        return -(-longest // multiple) * multiple

    def padded(self, cell: Cell, batch: int) -> np.ndarray:
        """`shapes` of a cell's batches; the control pads every row to one length."""
        if cell.kind == "control":
            return np.full_like(self.shapes(cell.prompt, batch, 1), cell.multiple)
        return self.shapes(cell.prompt, batch, cell.multiple)

    def mean_tokens(self, prompt: str) -> list[float]:
        """Source and target tokens of a mean row, without padding."""
        return [float(mean) for mean in np.load(self.lengths[prompt]).mean(axis=0)]


def find_data(place: Path, out: Path, tokenizer: str | None, jobs: Jobs) -> Data:
    """The sets in `place`, or sets prepared of the raw data there, in `out`.

    Raises:
        UserError: neither is there, or there is no tokenizer to prepare with.
    """
    if not place.is_dir():
        raise UserError(f"--data {place}: no such folder; name one with question/ and schema/, or raw WikiSQL")
    raw = next((folder for folder in (place / "wikisql", place / "raw", place) if _is_raw(folder)), None)
    sets = {prompt: place / prompt for prompt in PROMPTS if (place / prompt / "manifest.json").is_file()}
    for prompt in PROMPTS:
        if prompt not in sets:
            sets[prompt] = _prepared(place, raw, out / "data" / prompt, prompt, tokenizer, jobs)
    lengths = {prompt: _lengths(folder, out / "data" / f"{prompt}.npy", jobs) for prompt, folder in sets.items()}
    return Data(sets=sets, raw=raw, lengths=lengths)


def _is_raw(folder: Path) -> bool:
    return (folder / "train.jsonl").is_file()


def _prepared(place: Path, raw: Path | None, out: Path, prompt: str, tokenizer: str | None, jobs: Jobs) -> Path:
    if raw is None:
        raise UserError(
            f"--data {place}: neither {prompt}/manifest.json nor train.jsonl of WikiSQL is there; "
            f"put the raw files there, or make it: zeropods prepare --prompt {prompt} --out {place / prompt}"
        )
    if (out / "manifest.json").is_file():
        return out
    found = tokenizer or next((str(place / name) for name in TOKENIZERS if (place / name).is_file()), None)
    if found is None:
        raise UserError(f"--data {place}: no {', '.join(TOKENIZERS)} in it; give --tokenizer FILE")
    words = ["prepare", "--data", str(raw), "--tokenizer", found, "--prompt", prompt, "--out", str(out)]
    _done(jobs, "zeropods", words)
    return out


def _lengths(prepared: Path, out: Path, jobs: Jobs) -> Path:
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        _done(jobs, "benchmarks.gpu.lengths", [str(prepared), str(out)])
    return out


def _done(jobs: Jobs, module: str, words: list[str]) -> None:
    status, said = jobs.call(module, words, PREPARE_SECONDS)
    if status != 0:
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"{module} {' '.join(words)}: status {status}: {last[0].removeprefix('zeropods: ')}")
