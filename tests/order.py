"""The order of the tests where several processes share them."""

from __future__ import annotations

import pytest

DEAREST = (
    "test_notebooks", "test_same_numbers", "test_supervise", "test_train", "test_agent", "test_sweep",
    "test_deepspeed_launcher", "test_checkpoint_training", "test_other_ranks", "test_cluster", "test_own_hosts",
    "test_cut_network", "test_sbatch_files", "test_slurm", "test_fault_notebook", "test_restarts", "test_killed_kernel",
)  # fmt: skip
"""Files of the full lane that take longest: whoever got one of them last would be waited for."""


def dearest_first(item: pytest.Item) -> tuple[bool, int]:
    """The fast lane, which must not find torch loaded; then the dearest files; then the others."""
    name = item.path.stem
    return item.path.parent.name != "fast", DEAREST.index(name) if name in DEAREST else len(DEAREST)
