"""The order of the tests where several processes share them, and which of them one process keeps together."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

DEAREST = (
    "test_notebooks", "test_same_numbers", "test_fault_notebook", "test_supervise", "test_train", "test_agent",
    "test_sweep", "test_causal_notebooks", "test_hangs", "test_restarts", "test_other_ranks",
    "test_demo_page", "test_deepspeed_launcher", "test_checkpoint_training", "test_cluster",
    "test_own_hosts", "test_cut_network", "test_sbatch_files", "test_slurm",
)  # fmt: skip
"""Files of the full lane that take longest: whoever got one of them last would be waited for."""

INTERFACES = (
    "test_notebooks", "test_demo_page", "test_lab", "test_curves", "test_gallery", "test_cut_network",
    "test_own_hosts",
)  # fmt: skip
"""Files that drive chromium, and those that make network interfaces: whenever one comes or goes, it drops requests."""


class FilesTogether(LoadFileScheduling):
    """Gives a process all tests of a file, or of all files that mind interfaces. xdist's own groups, which are markers,
    are lost with pytest 9 (pytest-xdist 3.8, remote.py: it sets an attribute that pytest does not read any more)."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        return "interfaces" if file.stem in INTERFACES and file.parent.name != "fast" else str(file)


def dearest_first(item: pytest.Item) -> tuple[bool, int]:
    """The fast lane, which must not find torch loaded; then the dearest files; then the others."""
    name = item.path.stem
    return item.path.parent.name != "fast", DEAREST.index(name) if name in DEAREST else len(DEAREST)
