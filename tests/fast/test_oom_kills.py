"""The kernel's count of processes that it ended for want of memory, and what a record makes of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.full.launches import RANK, left
from tests.made import a_rank
from tests.small_memory import small_memory, within
from zeropods.launch.lost_pods_and_hangs import Ending
from zeropods.launch.outcome import Ranks, verdict_of_ranks
from zeropods.measure.heartbeat import Beat, write_beat
from zeropods.measure.memory import HEADER
from zeropods.pods.processes import oom_kills

V1, V2 = "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n", "0::/user.slice/job\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        (V2, {"cgroups/user.slice/job/memory.events": EVENTS}, 3),
        (V2, {"cgroups/memory.events": EVENTS}, 3),
        (V1, {"cgroups/memory/job/7/memory.oom_control": CONTROL}, 2),
        (V1, {"cgroups/memory/memory.oom_control": CONTROL}, 2),
        (V1, {"cgroups/memory/job/7/memory.oom_control": "under_oom 0\n", "proc/vmstat": "oom_kill 5\n"}, 5),
        (V2, {"proc/vmstat": "nr_free_pages 7\noom_kill 5\n"}, 5),
        (V2, {}, 0),
    ],
    ids=["v2", "v2 in a container", "v1", "v1 in a container", "v1 before Linux 4.13", "no group", "nothing"],
)
def test_the_count_is_read_where_it_stands(cgroup: str, files: dict[str, str], count: int, tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path / "proc", tmp_path / "cgroups") == count


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run of two ranks, of which the second was killed in its steps."""
    for name in ("ranks", "memory"):
        (tmp_path / name).mkdir()
    before = Ranks(tmp_path, ["pod1", "pod2"])
    assert not before.have_opened_the_run()
    (tmp_path / "ranks" / "0.json").write_text(json.dumps(a_rank(0, status="failed", reason="connection closed")))
    gib = 2**30
    rows = [f"50.0,steady,,,,{9 * gib},,", f"101.0,load,,,,{gib},,", f"102.0,steady,,,,{3 * gib},,", "10"]
    (tmp_path / "memory" / "1.csv").write_text("\n".join([HEADER, *rows]))
    beat: dict[str, Any] = {"pid": 1, "alive": 9, "marks": 9, "patient": False, "stack": (), "called_from": None}
    write_beat(tmp_path, Beat(rank=1, began_unix_seconds=100.0, step=12, phase="steady", **beat))
    return tmp_path


@pytest.mark.parametrize(
    ("verdict", "raised", "status", "reason"),
    [
        (
            Ending(None, "its ranks ended", "pod2"),
            ("pod2",),
            "oom",
            "rank 1: killed by the kernel, out of memory: phase steady, 12 steps done, peak resident 3.00 GiB",
        ),
        (Ending(None, "DeepSpeed's launcher ended with status 1"), ("pod2",), "oom", "rank 1: killed by the kernel"),
        (Ending(None, "its ranks ended", "pod2"), (), "failed", "rank 1 left no measurement"),
        (Ending("interrupted", "SIGINT"), ("pod2",), "failed", ""),
    ],
    ids=["the count was raised", "others say otherwise", "the count was not raised", "interrupted"],
)
def test_a_killed_rank_is_out_of_memory_where_the_count_of_its_pod_was_raised(
    killed: Path, verdict: Ending, raised: tuple[str, ...], status: str, reason: str
) -> None:
    ranks = Ranks(killed, ["pod1", "pod2"])
    (killed / "config.json").write_text("{}")
    found = verdict_of_ranks(ranks, verdict, frozenset(raised))
    assert found.status == status and reason in (found.reason or "")
    assert status != "oom" or found.pod == "pod2"


ALONE = (
    "import sys; from pathlib import Path; from zeropods.launch.local import start_child, to_end; "
    "ended = to_end(lambda log: [start_child(sys.argv[2:], log)], Path(sys.argv[1])); print(ended.status, ended.reason)"
)
RANK_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(RANK.parents[2])}


def test_a_process_that_the_kernel_ended_is_out_of_memory_with_its_phase(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", ALONE, folder, sys.executable, RANK, "--outputdir", folder, "--seconds", 30]
    with small_memory(128) as group:
        done = subprocess.run(
            within(group, [*command, "--hog_mib", 16]),
            env={**os.environ, **RANK_ENVIRONMENT}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.stdout.startswith("oom "), done.stdout + done.stderr
    reason = json.loads((folder / "record.json").read_text())["reason"]
    assert reason.startswith("rank 0: killed by the kernel, out of memory: phase steady, ")
    assert not left(folder)
