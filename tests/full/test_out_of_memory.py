"""A rank on a real pod that the kernel ends for want of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.full.launches import ended, left, record, started
from tests.small_memory import small_memory, within
from zeropods import pods


def test_a_rank_that_the_kernel_ended_is_named_with_its_pod_and_phase(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with small_memory(700) as group:
        up = [sys.executable, "-m", "zeropods", "pods", "up", "--count", 2, "--name", "small"]
        subprocess.run(within(group, up), capture_output=True, timeout=60, check=True)
        cluster = pods.find("small")
        try:
            said = ended(started(cluster, folder, "--seconds", 60, "--hog_mib", 8))
        finally:
            cluster.down()
    found = record(folder)
    assert found["status"] == "oom" and found["pod"] in ("pod1", "pod2"), said
    assert f"rank {found['pod'] == 'pod2':d}: killed by the kernel, out of memory: phase steady, " in found["reason"]
    assert not left(folder)
