"""Learning rates by kind of weight, for a T5 that starts from random weights.

AdamW moves every weight by about the learning rate, whatever its size. T5 was made with Adafactor, which
steps in proportion to a weight's size (Shazeer & Stern 2018, arXiv:1804.04235), and it is drawn for that:
the embedding with deviation 1, norms at 1, others with about d_model ** -0.5. Above all the relative
position bias must grow from 0.1 to several units before a head can look at the neighbouring token: at a
common rate of 0.001 that alone takes thousands of steps. In trials of t5-tiny, after
1,000 steps of 16 rows, a target cost 8.8 nats with only the embedding raised, 4.3 with the position bias
at 30 as well, 3.2 with all three: one run each, and the first had a longer schedule and another
initialisation, so the size of the gain is rough. The factors were not searched further.
"""

from __future__ import annotations

from typing import Any

from torch import nn

RATES = {"shared": 30.0, "relative_attention_bias": 100.0, "layer_norm": 10.0}
"""Rate over the common one, for weights whose name contains the key."""


def rate_groups(model: nn.Module, rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one for each factor of `RATES`, the common rate first."""
    by_factor: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, parameter in model.named_parameters():
        factor = next((factor for key, factor in RATES.items() if key in name), 1.0)
        by_factor.setdefault(factor, []).append(parameter)
    return [
        {"params": parameters, "lr": rate * factor, "weight_decay": weight_decay}
        for factor, parameters in by_factor.items()
    ]
