"""Random numbers of a rank that goes on from what another number of ranks has saved."""

from __future__ import annotations

import numpy as np
from transformers import set_seed


def draw_anew(seed: int, step: int, ranks: int, rank: int) -> None:
    """Seed this rank's generators by where it is: the same in each call, another for each rank.

    The order of rows does not depend on them; dropout masks do.
    """
    set_seed(int(np.random.SeedSequence((seed, step, ranks, rank)).generate_state(1)[0]))
