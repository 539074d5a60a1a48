"""Our flags in the words of the transformers that is installed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zeropods.train import device, run


@dataclass
class OlderArguments:
    """As of 5.17."""

    gradient_checkpointing: bool = False


def test_checkpointing_goes_by_the_name_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"use_reentrant": False}
    assert run.checkpointing(True) == {"activation_checkpointing": True, "activation_checkpointing_kwargs": how}
    monkeypatch.setattr(run, "TrainingArguments", OlderArguments)
    assert run.checkpointing(True) == {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how}


@pytest.mark.parametrize(
    ("model", "hardware", "taken"), [("t5-small", True, "bf16"), ("t5-tiny", True, "fp32"), ("t5-small", False, "fp32")]
)
def test_auto_takes_bf16_where_a_model_gains_by_it(
    model: str, hardware: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "multiplies_bf16", lambda: hardware)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    assert device.resolve_precision("auto", None, model) == taken


def test_what_is_asked_for_is_taken_for_a_tiny_model_too() -> None:
    assert device.resolve_precision("bf16", None, "t5-tiny") == "bf16"
