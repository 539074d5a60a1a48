"""Our flags in the words of the transformers that is installed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zeropods.train import settings


@dataclass
class OlderArguments:
    """As of 5.17."""

    gradient_checkpointing: bool = False


def test_checkpointing_goes_by_the_name_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"use_reentrant": False}
    assert settings.checkpointing(True) == {"activation_checkpointing": True, "activation_checkpointing_kwargs": how}
    monkeypatch.setattr(settings, "TrainingArguments", OlderArguments)
    assert settings.checkpointing(True) == {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how}
