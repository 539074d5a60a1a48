"""Batched generation with a causal model: answers to SQuAD's questions, and a sample of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from zeropods.data.prompts import answer_in
from zeropods.data.squad import SquadEncoder, SquadExample
from zeropods.data.tokenizers import first_tokens
from zeropods.errors import UserError
from zeropods.evaluate.generate import Generation
from zeropods.evaluate.predictions import SquadAnswer
from zeropods.evaluate.saved import SavedCausal, load_causal_answerer

# Batched generation with a causal model: answers to SQuAD's questions.


@dataclass(frozen=True)
class QuestionAnswerer:
    """A trained model with what it needs to answer questions about a text."""

    saved: SavedCausal
    max_seq_length: int
    """The most tokens of prompt and answer together: no more than the model was trained on."""

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end an answer: the end token, and every one with a line break in it."""
        tokenizer = self.saved.tokenizer
        return sorted({tokenizer.eos_token_id, *_with_line_break(tokenizer)})

    def answer(
        self,
        examples: Sequence[SquadExample],
        how: Generation,
        progress: Callable[[int], object] = lambda rows: None,
    ) -> list[SquadAnswer]:
        """An answer to each question, in their order. Batches are of like length."""
        ids = self._prompts(examples, how.max_new_tokens)
        order = sorted(range(len(examples)), key=lambda i: len(ids[i]))
        texts: dict[int, str] = {}
        for start in range(0, len(order), how.batch_size):
            rows = order[start : start + how.batch_size]
            texts.update(zip(rows, self._texts([ids[i] for i in rows], how), strict=True))
            progress(len(rows))
        return [
            SquadAnswer(index=example.index, id=example.id, question=example.question, text=texts[i])
            for i, example in enumerate(examples)
        ]

    def _prompts(self, examples: Sequence[SquadExample], max_new_tokens: int) -> list[np.ndarray]:
        """As in training: a context that is too long is cut, question and room for the answer stay."""
        room = self.max_seq_length - max_new_tokens
        if room < 1:
            raise UserError(
                f"--max-new-tokens {max_new_tokens}: no room for a prompt in the {self.max_seq_length} tokens that "
                "the model was trained on; lower it"
            )
        return SquadEncoder(self.saved.tokenizer, room).prompts(examples)

    def _texts(self, ids: list[np.ndarray], how: Generation) -> Iterator[str]:
        for row in self._generate(ids, how):
            yield answer_in(self.saved.tokenizer.decode(row, skip_special_tokens=True))

    @torch.inference_mode()
    def _generate(self, ids: list[np.ndarray], how: Generation) -> list[list[int]]:
        """New token ids of each row; the end token and pads may follow.

        Padding is on the left: the first new token stands right behind the prompt in every row.
        """
        longest = max(map(len, ids))
        padded = torch.full((len(ids), longest), self.saved.pad)
        mask = torch.zeros_like(padded)
        for row, of_row in enumerate(ids):
            padded[row, longest - len(of_row) :] = torch.from_numpy(of_row)
            mask[row, longest - len(of_row) :] = 1
        device = self.saved.model.device
        options: dict[str, Any] = {"min_new_tokens": how.max_new_tokens} if how.fixed_length else {}
        generated = self.saved.model.generate(
            input_ids=padded.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=how.max_new_tokens,
            num_beams=how.num_beams,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.saved.pad,
            **options,
        )
        return generated[:, longest:].tolist()


def _with_line_break(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    pieces = tokenizer.backend_tokenizer.decode_batch([[i] for i in range(len(tokenizer))])
    return (i for i, piece in enumerate(pieces) if "\n" in piece)


# What a causal model writes after a few words: a sample for people to read.


@dataclass(frozen=True, kw_only=True)
class SampledText:
    """A prompt and what a model wrote after it."""

    prompt: str
    text: str
    """What followed the prompt, without it; the end token is not shown."""
    new_tokens: int
    seconds: float
    """Of generation; loading left out."""

    def to_json(self) -> dict[str, Any]:
        """What `generated.json` of a run holds."""
        return asdict(self)


def sample_text(
    source: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 60,
    seed: int = 42,
    temperature: float = 0.0,
    precision: str = "fp32",
) -> SampledText:
    """Let a saved causal model go on from a prompt.

    Args:
        source: run folder, model folder or hub id.
        max_new_tokens: at most; fewer where the model ends, or where its positions do.
        seed: of what is drawn; other parts of the program draw as if nothing had happened.
        temperature: 0 takes the likeliest token each time; above, one is drawn from softmax(logits / temperature).

    Raises:
        UserError: a prompt of no tokens or of more than the model has positions, or a model that cannot be loaded.
    """
    if max_new_tokens < 1:
        raise UserError(f"{max_new_tokens} new tokens; expected at least 1")
    saved = load_causal_answerer(source, precision)
    words = saved.tokenizer(prompt, add_special_tokens=False).input_ids
    ids = [*first_tokens(saved.tokenizer), *words]
    if not words:
        raise UserError(f"prompt {prompt!r}: no tokens; give some words to go on from")
    if saved.positions is not None and len(ids) >= saved.positions:
        raise UserError(f"prompt of {len(ids)} tokens, the model has {saved.positions} positions; give a shorter one")
    began = time.perf_counter()
    new = _continued(saved, ids, max_new_tokens, seed, temperature)
    seconds = time.perf_counter() - began
    text = saved.tokenizer.decode(new, skip_special_tokens=True)
    return SampledText(prompt=prompt, text=text, new_tokens=len(new), seconds=seconds)


def _continued(saved: SavedCausal, ids: list[int], most: int, seed: int, temperature: float) -> list[int]:
    import torch

    left = most if saved.positions is None else min(most, saved.positions - len(ids))
    drawn: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    start = torch.tensor([ids], device=saved.model.device)
    devices = [saved.model.device] if saved.model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.manual_seed(seed)
        generated = saved.model.generate(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=left,
            eos_token_id=saved.tokenizer.eos_token_id,
            pad_token_id=saved.pad,
            **drawn,
        )
    return generated[0, len(ids) :].tolist()
