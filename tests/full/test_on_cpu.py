"""What a run takes on a CPU: the precision of `auto`."""

from __future__ import annotations

import pytest

from zeropods.train import device


@pytest.mark.parametrize(
    ("model", "hardware", "taken"), [("t5-small", True, "bf16"), ("t5-tiny", True, "fp32"), ("t5-small", False, "fp32")]
)
def test_auto_takes_bf16_where_a_model_gains_by_it(
    model: str, hardware: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "multiplies_bf16", lambda: hardware)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    assert device.resolve_precision("auto", model) == taken
