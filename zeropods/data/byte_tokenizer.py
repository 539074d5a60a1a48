"""A byte-level BPE tokenizer of GPT-2's kind, trained on the spot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GPT_TINY = "gpt-tiny"
VOCABULARY = 1_024
"""With the 256 bytes and the two special tokens."""
END, PAD = "<|endoftext|>", "<|pad|>"
MOST_CHARACTERS = 10_000_000
"""What is read to learn the merges: more text changes little in so small a vocabulary."""


def train_byte_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerBase:
    """Train on the first ten million characters; the same texts give the same tokenizer.

    It has no unknown token, since every byte is a token, and decoding gives the text back exactly.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first(texts, MOST_CHARACTERS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
