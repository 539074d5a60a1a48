"""A language model before and after training: what 14 shows."""

from __future__ import annotations

from pathlib import Path

from zeropods.data.manifest import read_manifest
from zeropods.evaluate.sample_text import sample_text
from zeropods.evaluate.score_file import read_score
from zeropods.evaluate.text_perplexity import TextToScore, text_perplexity
from zeropods.report.progress import progress
from zeropods.report.run import Run
from zeropods.report.table import Table

UNSEEN = ("dev", "test")
"""Splits that training does not see, as far as a set has them."""


def perplexity_table(before: str | Path, run: Run, prepared: Path) -> Table:
    """Tokens, loss and perplexity of each unseen split: of a model before its run, and as the run has written it."""
    splits = [split for split in UNSEEN if split in read_manifest(prepared).splits]
    return Table.of(_scored(before, run, prepared, split) for split in splits)


def continued_table(before: str | Path, run: Run, prompt: str) -> Table:
    """What a model writes after a prompt, before its run and after."""
    models = {"before": before, "after": run.folder}
    return Table.of(
        {"": when, "prompt": prompt, "goes on": sample_text(model, prompt).text} for when, model in models.items()
    )


def _scored(before: str | Path, run: Run, prepared: Path, split: str) -> dict[str, str]:
    with progress("perplexity", "blocks") as bar:
        first = text_perplexity(before, TextToScore(data=str(prepared), split=split), progress=bar.update)
    last = read_score(run.folder / f"score.{split}.json")
    return {
        "split": split,
        "tokens": f"{first.tokens:,}",
        "loss before (nats a token)": f"{first.loss:.4f}",
        "loss after": f"{last['loss']:.4f}",
        "perplexity before": f"{first.perplexity:,.1f}",
        "perplexity after": f"{last['perplexity']:,.1f}",
    }
