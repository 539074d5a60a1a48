"""T5 in operations that suit a CPU, against transformers' own and against FP64; which precision `auto` takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from zeropods.plan.shapes import T5Shape
from zeropods.train import device
from zeropods.train.cpu import suit_cpu
from zeropods.train.text2sql import T5ForTextToSQL, random_t5

SMALL = T5Shape(d_model=64, d_kv=16, d_ff=128, layers=2, heads=4, vocabulary=256)


def a_batch() -> dict[str, Tensor]:
    """Rows of several lengths on both sides."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 256, (6, 20), generator=generator)
    labels = torch.randint(2, 256, (6, 12), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate((20, 3, 11, 20, 1, 7)):
        ids[row, length:] = mask[row, length:] = 0
        labels[row, max(1, length // 2) :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def both(kind: torch.dtype = torch.float32, dropout: float = 0.0) -> tuple[T5ForTextToSQL, T5ForTextToSQL]:
    theirs = random_t5(SMALL, seed=0, dropout=dropout).to(kind).train()
    return theirs, suit_cpu(copy.deepcopy(theirs)).train()


def gradients(model: T5ForTextToSQL) -> Tensor:
    model.zero_grad()
    model(**a_batch()).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def test_loss_and_gradients_are_those_of_transformers() -> None:
    theirs, ours = both(torch.float64)
    torch.testing.assert_close(ours(**a_batch()).loss, theirs(**a_batch()).loss, rtol=1e-6, atol=0)
    want = gradients(theirs)
    assert (gradients(ours) - want).norm() < 1e-5 * want.norm()


def test_bf16_is_as_near_to_fp64_as_transformers_is() -> None:
    theirs, ours = both(torch.bfloat16)
    exact = gradients(copy.deepcopy(theirs).double())
    far, near = ((gradients(model) - exact).norm() / exact.norm() for model in (theirs, ours))
    # Two ways of rounding, of one small model: neither is always the nearer one.
    assert near < 1.25 * far < 0.25


def test_answers_with_a_cache_are_those_of_transformers() -> None:
    # In FP64 no two tokens are as near to each other as the two ways of rounding are apart.
    theirs, ours = both(torch.float64)
    asked = {name: a_batch()[name] for name in ("input_ids", "attention_mask")}
    found = [model.eval().generate(**asked, max_new_tokens=6, min_new_tokens=6) for model in (theirs, ours)]
    assert torch.equal(*found)


def test_checkpointing_computes_the_same() -> None:
    _, ours = both()
    want = gradients(ours)
    ours.activation_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(ours), want)


@pytest.mark.parametrize(
    ("model", "hardware", "taken"), [("t5-small", True, "bf16"), ("t5-tiny", True, "fp32"), ("t5-small", False, "fp32")]
)
def test_auto_takes_bf16_where_a_model_gains_by_it(
    model: str, hardware: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "multiplies_bf16", lambda: hardware)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    assert device.resolve_precision("auto", model) == taken
