"""The order of the tests where several processes share them, and which files stay together in one process."""

from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

DEAREST = (
    "fast/test_terminal", "fast/test_make", "fast/test_plan_verb", "fast/test_wrong_turns",
    "browser/test_notebooks", "full/test_notebooks", "full/test_typed", "full/test_supervise", "full/test_train",
    "full/test_same_numbers", "full/test_agent", "full/test_sweep", "full/test_hangs",
    "full/test_checkpoint_training", "full/test_deepspeed", "full/test_local_runs", "full/test_cluster",
    "full/test_sbatch_files", "full/test_slurm", "full/test_bench_gpu", "full/test_forks",
)  # fmt: skip
"""Files that take longest: were one of them begun last, everything else would wait for it."""

INTERFACES = (
    "browser/test_notebooks", "full/test_demo_page", "full/test_gallery", "full/test_own_hosts",
)  # fmt: skip
"""Files that drive Chromium, or make network interfaces: it drops requests whenever an interface comes or goes."""


class FilesTogether(LoadFileScheduling):
    """Gives a process all tests of a file, or of all files in `INTERFACES`. xdist's own groups, which are markers, are
    lost with pytest 9 (pytest-xdist 3.8, remote.py: it sets an attribute that pytest does not read any more)."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "interfaces" if name_of(Path(file)) in INTERFACES else file


def name_of(file: Path) -> str:
    """Name of a file of tests: its lane and its own name."""
    return f"{file.parent.name}/{file.stem}"


def dearest_first(item: pytest.Item) -> tuple[bool, int]:
    """Sort key: the fast lane first, which must not find torch loaded; then the longest files; then the others."""
    name = name_of(item.path)
    return item.path.parent.name != "fast", DEAREST.index(name) if name in DEAREST else len(DEAREST)
