"""Perplexity of a text: the score of a causal model, in one process, the same before and after training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeropods.data.manifest import FILE, read_manifest
from zeropods.data.tokenizers import fingerprint
from zeropods.errors import UserError
from zeropods.evaluate.models import SavedModel, load_causal_lm, trained_length
from zeropods.evaluate.score_file import TextScore

DEFAULT_LENGTH = 512
Row = tuple[np.ndarray, np.ndarray]
"""Token ids of a block, and labels: -100 where nothing is predicted."""


@dataclass(frozen=True, kw_only=True)
class TextToScore:
    """A split of a text."""

    data: str
    """A set that was prepared with the model's tokenizer, or raw text, which is cut into blocks as for training."""
    split: str
    max_seq_length: int | None = None
    """Tokens per block of raw text; if not given, what the run was trained on, else 512 or as many as the model has
    positions for."""
    limit: int | None = None
    """Only the first so many blocks of a prepared set, or documents of raw text."""
    dataset_config: str | None = None
    """Configuration of raw text at the hub, as `zeropods prepare` has it; `text_field` too."""
    text_field: str = "text"

    def no_split(self, there: list[str]) -> UserError:
        """What is wrong where the split is not among those that are there."""
        return UserError(f"{self.data}: no split {self.split!r} in it; expected {' or '.join(there)}")


def text_perplexity(
    source: str | Path,
    text: TextToScore,
    *,
    batch_size: int = 4,
    precision: str = "fp32",
    progress: Callable[[int], object] = lambda blocks: None,
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
    saved = load_causal_lm(source, precision)
    is_prepared = (Path(text.data) / FILE).is_file()
    rows = _prepared_rows(saved, text) if is_prepared else _raw_rows(saved, source, text)
    loss_sum, tokens = 0.0, 0
    # Blocks are of one length but for the last of a split, so that a batch needs no padding.
    for length in sorted({len(ids) for ids, _ in rows}):
        alike = [row for row in rows if len(row[0]) == length]
        for start in range(0, len(alike), batch_size):
            batch = alike[start : start + batch_size]
            nats, count = _summed_loss(saved, batch)
            loss_sum, tokens = loss_sum + nats, tokens + count
            progress(len(batch))
    return text_score(loss_sum, tokens)


def text_score(loss_sum: float, tokens: int) -> TextScore:
    """The score of a text.

    Args:
        loss_sum: nats of all predicted tokens together, over all ranks.
        tokens: how many they are.

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


def _prepared_rows(saved: SavedModel, text: TextToScore) -> list[Row]:
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
        raise text.no_split(list(manifest.splits))
    return [rows[i] for i in range(len(rows))][: text.limit]


def _raw_rows(saved: SavedModel, source: str | Path, text: TextToScore) -> list[Row]:
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
        raise text.no_split(corpus.splits)
    blocks, _ = corpus.build(text.split, with_ends(str(source), saved.tokenizer), lambda documents: None)
    return [(block["input_ids"], block["labels"]) for block in blocks.with_format("numpy")]


def _check_length(saved: SavedModel, data: str, length: int | None) -> None:
    if saved.positions is not None and length is not None and length > saved.positions:
        raise UserError(f"{data}: blocks of {length} tokens, the model has {saved.positions} positions; cut shorter")


def _summed_loss(saved: SavedModel, rows: list[Row]) -> tuple[float, int]:
    """Nats of all predicted tokens of some rows of one length, and how many they are."""
    import torch
    from torch.nn.functional import cross_entropy

    ids, labels = (
        torch.from_numpy(np.stack(column)).long().to(saved.model.device) for column in zip(*rows, strict=True)
    )
    with torch.inference_mode():
        logits = saved.model(input_ids=ids, use_cache=False).logits
        # Row by row: in FP32 the logits of a batch would be there a second time.
        nats = [
            float(cross_entropy(of_row.float(), wanted, ignore_index=-100, reduction="sum"))
            for of_row, wanted in zip(logits[:, :-1], labels[:, 1:], strict=True)
        ]
    return sum(nats), int((labels[:, 1:] != -100).sum())
