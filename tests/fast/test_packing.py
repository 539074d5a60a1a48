"""Packing loses no token but the leftover, and repeats none but what evaluation needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeropods.data.text import join, overlap, pack

tokens = st.lists(st.integers(0, 50_000), max_size=80).map(lambda ids: np.array(ids, np.int32))
END = 99_999


@given(tokens, st.integers(2, 20))
def test_unpacking_gives_the_tokens_back_but_for_the_leftover(ids: np.ndarray, length: int) -> None:
    blocks, leftover = pack(ids, length)
    assert leftover < length
    assert blocks.shape[1:] == (length,)
    assert blocks.reshape(-1).tolist() == ids[: len(ids) - leftover].tolist()


@given(st.lists(tokens, max_size=8))
def test_documents_are_joined_by_the_end_token(documents: list[np.ndarray]) -> None:
    joined = join(documents, END).tolist()
    parts: list[list[int]] = [[]]
    for token in joined:
        if token == END:
            parts.append([])
        else:
            parts[-1].append(token)
    assert parts == [document.tolist() for document in documents] or (not documents and not joined)


@given(tokens, st.integers(2, 20))
def test_every_token_but_the_first_is_predicted_once(ids: np.ndarray, length: int) -> None:
    lengths, blocks = overlap(ids, length)
    predicted = [token for block in np.split(blocks, np.cumsum(lengths)[:-1]) for token in block[1:].tolist()]
    assert predicted == ids[1:].tolist()


@given(tokens, st.integers(2, 20))
def test_only_the_last_block_of_an_evaluation_is_short(ids: np.ndarray, length: int) -> None:
    lengths, _ = overlap(ids, length)
    assert set(lengths[:-1].tolist()) <= {length}
    assert all(2 <= count <= length for count in lengths)
