"""Batched generation with a causal model: answers to SQuAD's questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from zeropods.data.squad import SquadExample
from zeropods.data.squad_prompt import answer_in
from zeropods.data.squad_tokens import SquadEncoder
from zeropods.errors import UserError
from zeropods.evaluate.generate import Generation
from zeropods.evaluate.saved_causal import SavedCausal
from zeropods.evaluate.squad_answers import SquadAnswer


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
