"""Perplexity of a text: of a saved model, in one process, the same before and after training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.tokenizers import fingerprint
from zeropods.errors import UserError
from zeropods.evaluate.saved import SavedCausal, load_causal_answerer, trained_length
from zeropods.files import write_json

# Perplexity of a text: what a causal language model's score is.


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """How well a text is predicted, token by token."""

    task: str = field(default="lm", init=False)
    tokens: int
    """Tokens that were predicted: all of a dev or test split but the first."""
    loss: float
    """Mean, nats a token."""
    perplexity: float
    """exp(loss): as unsure as a choice among so many equally likely tokens. It is of a tokenizer's tokens: models with
    different tokenizers cannot be compared by it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def text_score(loss_sum: float, tokens: int) -> TextScore:
    """The score of a text.

    Args:
        loss_sum: nats of all predicted tokens together.

    Raises:
        UserError: no tokens, or a loss that is not finite or beyond what a number can hold as perplexity.
    """
    if tokens < 1:
        raise UserError(f"perplexity of {tokens} tokens; expected a text of at least two tokens")
    loss = loss_sum / tokens
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    if not math.isfinite(perplexity):
        raise UserError(f"perplexity: a loss of {loss:.4g} nats a token over {tokens} tokens; the model is broken")
    return TextScore(tokens=tokens, loss=loss, perplexity=perplexity)


def write_perplexity(folder: Path, split: str, *, loss_sum: float, tokens: int) -> TextScore:
    """Write `score.SPLIT.json` of a run folder; it appears whole.

    Args:
        loss_sum: nats of all predicted tokens of the split together, over all ranks.
        tokens: how many they are.

    Raises:
        UserError: as `text_score`.
    """
    score = text_score(loss_sum, tokens)
    write_json(Path(folder) / f"score.{split}.json", score.to_json())
    return score


# Perplexity of a saved model on a text, in one process: the same before and after training.

DEFAULT_LENGTH = 512
Tick = Callable[[int], object]
Row = tuple[np.ndarray, np.ndarray]
"""Token ids of a block, and labels: -100 where nothing is predicted."""


@dataclass(frozen=True, kw_only=True)
class TextToScore:
    """A split of a text."""

    data: str
    """A set that was prepared with the model's tokenizer, or raw text, which is cut into blocks as for training."""
    split: str
    max_seq_length: int | None = None
    """Tokens of a block of raw text; if not given, what the run was trained on, else 512 or as many as the model has
    positions for."""
    limit: int | None = None
    """Only the first so many blocks of a prepared set, or documents of raw text."""
    dataset_config: str | None = None
    """Of raw text at the hub, as `zeropods prepare` has it; the next too."""
    text_field: str = "text"

    @property
    def is_prepared(self) -> bool:
        """Whether it is cut into blocks already."""
        return (Path(self.data) / FILE).is_file()


def text_perplexity(
    source: str | Path,
    text: TextToScore,
    *,
    batch_size: int = 4,
    precision: str = "fp32",
    progress: Tick = lambda blocks: None,
) -> TextScore:
    """Loss and perplexity of a model over the blocks of a split.

    Args:
        source: run folder, model folder or hub id.
        batch_size: blocks at once.
        progress: called with how many blocks were done since the last call.

    Raises:
        UserError: a split that is not there, another tokenizer, blocks longer than the model's positions.
    """
    if batch_size < 1 or (text.limit is not None and text.limit < 1):
        raise UserError(f"--batch-size {batch_size}, --limit {text.limit}; expected at least 1")
    saved = load_causal_answerer(source, precision)
    rows = _prepared_rows(saved, text) if text.is_prepared else _raw_rows(saved, source, text)
    loss_sum, tokens = _summed(saved, rows, batch_size, progress)
    return text_score(loss_sum, tokens)


def _prepared_rows(saved: SavedCausal, text: TextToScore) -> list[Row]:
    from zeropods.train.sampler import load_split

    manifest, data = read_manifest(Path(text.data)), text.data
    if text.max_seq_length is not None:
        raise UserError(f"--max-seq-length {text.max_seq_length}: {data} is in blocks already; leave it out")
    if manifest.task != "lm":
        raise UserError(f"{data}: prepared for {manifest.task}; perplexity is of text: prepare it with --task lm")
    if manifest.tokenizer_fingerprint != fingerprint(saved.tokenizer):
        raise UserError(f"{data}: prepared with another tokenizer than the model's; give the raw text")
    _check_length(saved, data, manifest.max_seq_length)
    rows = load_split(Path(data), text.split)
    if rows is None:
        raise UserError(_no_such_split(text, list(manifest.splits)))
    return [rows[i] for i in range(len(rows))][: text.limit]


def _raw_rows(saved: SavedCausal, source: str | Path, text: TextToScore) -> list[Row]:
    from zeropods.data.prepare_causal import CausalPreparation, TextData
    from zeropods.data.tokenizers import with_ends

    length = text.max_seq_length or trained_length(Path(source))
    length = length or min(DEFAULT_LENGTH, saved.positions or DEFAULT_LENGTH)
    _check_length(saved, text.data, length)
    wanted = CausalPreparation(
        task="lm", data=text.data, tokenizer=str(source), max_seq_length=length, limit=text.limit,
        dataset_config=text.dataset_config, text_field=text.text_field,
    )  # fmt: skip
    corpus = TextData(wanted)
    if text.split not in corpus.splits:
        raise UserError(_no_such_split(text, corpus.splits))
    blocks, _ = corpus.build(text.split, with_ends(str(source), saved.tokenizer), lambda documents: None)
    return [(block["input_ids"], block["labels"]) for block in blocks.with_format("numpy")]


def _no_such_split(text: TextToScore, there: list[str]) -> str:
    return f"{text.data}: no split {text.split!r} in it; expected {' or '.join(there)}"


def _check_length(saved: SavedCausal, data: str, length: int | None) -> None:
    if saved.positions is not None and length is not None and length > saved.positions:
        raise UserError(f"{data}: blocks of {length} tokens, the model has {saved.positions} positions; cut shorter")


def _summed(saved: SavedCausal, rows: list[Row], batch_size: int, progress: Tick) -> tuple[float, int]:
    """Nats of all predicted tokens together, and how many they are."""
    loss_sum, tokens = 0.0, 0
    # Blocks are of one length but for the last of a split, so that a batch needs no padding.
    for length in sorted({len(ids) for ids, _ in rows}):
        alike = [row for row in rows if len(row[0]) == length]
        for start in range(0, len(alike), batch_size):
            batch = alike[start : start + batch_size]
            nats, count = _batch(saved, np.stack([ids for ids, _ in batch]), np.stack([labels for _, labels in batch]))
            loss_sum, tokens = loss_sum + nats, tokens + count
            progress(len(batch))
    return loss_sum, tokens


def _batch(saved: SavedCausal, ids: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Args: ids, labels: (rows, tokens) int32; labels are -100 where nothing is predicted."""
    import torch
    from torch.nn.functional import cross_entropy

    device = saved.model.device
    with torch.inference_mode():
        logits = saved.model(input_ids=torch.from_numpy(ids).long().to(device), use_cache=False).logits
        nats = 0.0
        wanted = torch.from_numpy(labels).long().to(device)[:, 1:]
        # Row by row: in FP32 the logits of a batch would be there a second time.
        for of_row, labels_of_row in zip(logits[:, :-1], wanted, strict=True):
            nats += float(cross_entropy(of_row.float(), labels_of_row, ignore_index=-100, reduction="sum"))
    return nats, int((wanted != -100).sum())
