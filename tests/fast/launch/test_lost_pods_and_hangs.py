"""What a supervisor makes of what it sees and reads: lost pods, hangs by heartbeats made here, killed processes."""

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.full.launches import RANK, left, until
from tests.made import a_pod, a_rank
from tests.small_memory import small_memory, within
from zeropods.launch.logs import RunLog, ranks_doing
from zeropods.launch.lost_pods_and_hangs import (
    DEFAULT_SECONDS,
    FIRST_RANK_SECONDS,
    GONE_SECONDS,
    LOST_SECONDS,
    MEASURED_SECONDS,
    PATIENT_SECONDS,
    REPORT_SECONDS,
    Ending,
    HangDetector,
    PodState,
    culprit,
    judge,
)
from zeropods.launch.outcome import Ranks, UnopenedError, verdict_of_ranks
from zeropods.measure.heartbeat import Beat, HeartbeatWriter, beat_file, read_beats, write_beat
from zeropods.measure.sampling import HEADER
from zeropods.pods.processes import oom_kills

Seen = Callable[[], PodState]


def pod(number: int, most: int = 2, silent: float = 1.0, error: str | None = None, absent: float | None = None) -> Seen:
    """A pod that has been silent for so long when it is looked at, and without a process of the run for `absent`."""

    def seen() -> PodState:
        answered = time.monotonic() - silent
        return PodState(a_pod(number), answered, most, None if absent is None else answered - absent, error=error)

    return seen


SILENT = LOST_SECONDS + 1
NEVER = pod(2, most=0)


@pytest.mark.parametrize(
    ("seen", "others"),
    [
        ([pod(1), pod(2)], {"since_start": 1000.0}),
        ([pod(1)], {"since_measured": 1.0}),
        ([pod(1), pod(2)], {"failed_sessions": {"pod2": 0.5}}),
        ([pod(1), NEVER], {"since_start": 5.0}),
        ([pod(1)], {"since_start": 60.0, "timeout_seconds": 60.0}),
        ([pod(1), pod(2, absent=MEASURED_SECONDS + 1)], {}),
        ([pod(1, absent=1.0), pod(2, absent=1.0)], {}),
    ],
    ids=["answering", "ended well", "session just failed", "late", "in time", "one absent", "absent a moment"],
)
def test_a_run_goes_on(seen: list[Seen], others: dict[str, Any]) -> None:
    assert judge(pods=[each() for each in seen], **others) is None


@pytest.mark.parametrize(
    ("seen", "others", "status", "blamed", "said"),
    [
        ([pod(1), pod(2, silent=SILENT)], {}, "pod_lost", "pod2", "127.0.1.2"),
        ([pod(1), pod(2, silent=GONE_SECONDS + 1)], {"failed_sessions": {"pod2": 1.0}}, "pod_lost", "pod2", ""),
        ([pod(1, silent=99.0)], {"launcher_status": 1, "signal_name": "SIGTERM"}, "interrupted", None, "SIGTERM"),
        ([pod(1)], {"launcher_status": -9}, None, None, "SIGKILL"),
        (
            [pod(1), pod(2, silent=99.0, error="run r has ended")],
            {},
            "failed",
            "pod2",
            "longer than its lease",
        ),
        ([pod(1), pod(2)], {"failed_sessions": {"pod2": REPORT_SECONDS + 1}}, None, "pod2", ""),
        ([pod(1)], {"since_measured": MEASURED_SECONDS + 1}, None, None, "keeps the launcher waiting"),
        ([pod(number, absent=MEASURED_SECONDS + 1) for number in (1, 2)], {}, None, None, "keeps their output open"),
        (
            [pod(1), NEVER],
            {"since_start": FIRST_RANK_SECONDS + 1},
            "failed",
            "pod2",
            "no process of the run started within",
        ),
        ([pod(1)], {"since_start": 61.0, "timeout_seconds": 60.0}, "timeout", None, "took longer than 60 s"),
        ([pod(1, silent=SILENT)], {"since_start": 61.0, "timeout_seconds": 60.0}, "pod_lost", "pod1", ""),
    ],
)
def test_a_run_is_ended(
    seen: list[Seen], others: dict[str, Any], status: str | None, blamed: str | None, said: str
) -> None:
    verdict = judge(pods=[each() for each in seen], **others)
    assert verdict is not None and (verdict.status, verdict.pod) == (status, blamed)
    assert said in (verdict.reason or "")


def test_a_launcher_that_ended_in_its_last_moment_leaves_the_word_to_the_ranks() -> None:
    assert judge(pods=[pod(1)()], launcher_status=0, since_start=61.0, timeout_seconds=60.0) == Ending()


@pytest.mark.parametrize(
    ("ranks", "status"),
    [(("interrupted", "failed"), "timeout"), (("interrupted",), "timeout"), (("oom", "interrupted"), "oom")],
)
def test_what_ranks_say_because_of_a_time_out_is_not_its_cause(tmp_path: Path, ranks: Any, status: str) -> None:
    launched = Ranks(tmp_path, ["pod1", "pod2"])
    (tmp_path / "ranks").mkdir()
    (tmp_path / "config.json").touch()
    for number, ended in enumerate(ranks):
        (tmp_path / "ranks" / f"{number}.json").write_text(json.dumps(a_rank(number, status=ended, reason=ended)))
    assert verdict_of_ranks(launched, Ending("timeout", "took longer than 60 s")).status == status


def test_lines_carry_the_pods_names_and_failed_sessions_are_known(tmp_path: Path) -> None:
    shown: list[str] = []
    (tmp_path / "launch.log").write_text("127.0.1.2: of an earlier attempt\n")
    log = RunLog(tmp_path, shown.append, {f"127.0.1.{n}": f"pod{n}" for n in (2, 3)})
    failed = "pdsh@here: 127.0.1.2: ssh exited with exit code 255\npdsh@here: 127.0.1.3: ssh killed by signal 9\n"
    with open(tmp_path / "launch.log", "a") as file:
        file.write(f"127.0.1.2: hello\n{failed}last without end")
    log.read()
    assert log.tail("pod9") == ["pod2: hello", *failed.splitlines()]
    log.read(ended=True)
    assert shown == ["pod2: hello", *failed.splitlines(), "last without end"]
    assert log.tail("pod2") == ["pod2: hello"] and log.tail("pod9") == shown
    assert list(log.failed_at) == ["pod2", "pod3"]


def test_a_reader_that_takes_nothing_keeps_no_supervisor_waiting(tmp_path: Path) -> None:
    taken = threading.Event()
    log = RunLog(tmp_path, lambda line: taken.wait())
    log.path.write_text("pod1: a line\n" * 1_000)
    reader = threading.Thread(target=log.read, daemon=True)
    reader.start()
    reader.join(30)
    assert not reader.is_alive() and len(log.tail()) == 8
    taken.set()


def test_why_a_run_never_began_is_said_in_one_line_whatever_pdsh_says_after_it() -> None:
    folder, refused = Path("runs/a"), "runs/a: in use by process 7 on vm; wait for it"
    lines = [f"pod1: zeropods: {refused}", "pod2: zeropods: interrupted"]
    lines.append("pdsh@vm: 127.0.1.1: ssh exited with exit code 1")
    assert str(UnopenedError(folder, Ending(None, "the launcher ended with status 1"), lines)) == refused
    interrupted = UnopenedError(folder, Ending("interrupted", "SIGINT"), lines)
    assert (str(interrupted), interrupted.exit_status) == ("runs/a: interrupted: SIGINT", 130)


# Hangs.

BARRIER = ("torch/distributed/distributed_c10d.py:4811 barrier", "train.py:9 step")


def beat(rank: int = 0, alive: int = 1, marks: int = 1, **other: Any) -> Beat:
    known = {"step": 1, "phase": "steady", "patient": False, "stack": ("train.py:7 step",), "called_from": None}
    began = {"pid": 1000 + rank, "began_unix_seconds": 0.0}
    return Beat(rank=rank, alive=alive, marks=marks, **{**known, **began, **other})


def saving(rank: int, *stack: str) -> Beat:
    return beat(rank, phase="save", patient=True, stack=stack or BARRIER)


class Watched:
    """A run of which the test says what its ranks do."""

    def __init__(self, folder: Path, step_timeout: float | None = 10.0) -> None:
        (folder / "ranks").mkdir()
        self.folder = folder
        self.now = 100.0
        self.beats = 0
        self.hangs = HangDetector(folder, step_timeout, lambda: True, ("pod1", "pod2"))

    def alive(self, seconds: int, *beats: Beat) -> str | None:
        """What is said when these ranks give signs of life for so long, and do nothing."""
        for _ in range(seconds):
            self.beats += 1
            for each in beats:
                write_beat(self.folder, replace(each, alive=self.beats))
            self.now += 1.0
            found = self.hangs.check(self.now)
        return None if found is None else f"{found.pod}: {found.reason}"


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_run_of_which_one_rank_does_something_goes_on(watched: Watched) -> None:
    for marks in range(12):
        assert watched.alive(3, beat(0), beat(1, marks=marks)) is None


def test_ranks_that_load_or_save_have_more_time(watched: Watched) -> None:
    loading = [beat(rank, phase="load", patient=True) for rank in (0, 1)]
    assert watched.alive(int(PATIENT_SECONDS), *loading) is None
    assert watched.alive(3, *loading) is not None


@pytest.mark.parametrize("kind", [beat, saving])
def test_a_run_whose_ranks_do_nothing_hangs_also_where_all_wait_in_a_save(
    watched: Watched, kind: Callable[[int], Beat]
) -> None:
    ranks = [kind(0), kind(1)]
    assert watched.alive(11, *ranks) is None
    assert "no progress for 11 s (step timeout 10 s)" in (watched.alive(1, *ranks) or "")


def test_a_save_in_which_ranks_work_or_move_has_more_time(watched: Watched) -> None:
    working = saving(0, "zeropods/checkpoints/shards.py:9 sha256", *BARRIER)
    assert watched.alive(50, working, saving(1)) is None
    for second in range(30):
        place = "torch/distributed/x.py:1 broadcast" if second % 2 else BARRIER[0]
        assert watched.alive(1, saving(0, place, "save.py:1 save"), saving(1)) is None


def test_time_in_which_nobody_looked_does_not_count_nor_do_ranks_that_have_ended(watched: Watched) -> None:
    watched.alive(3, beat(0), beat(1))
    watched.now += 1000
    assert watched.alive(8, beat(0), beat(1)) is None
    for rank in (0, 1):
        beat_file(watched.folder, rank).unlink()
    assert watched.alive(60) is None


def test_heartbeats_of_an_earlier_attempt_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    write_beat(tmp_path, beat())
    earlier = HangDetector(tmp_path, 10.0, lambda: False)
    assert earlier.check(0.0) is None and earlier.check(99.0) is None and not earlier.ranks


def test_a_heartbeat_keeps_nothing_alive_of_what_a_rank_works_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next heartbeat would free what this one kept.
    monkeypatch.setattr("zeropods.measure.heartbeat.BEAT_PAUSE_SECONDS", 60.0)

    class Gradients:
        pass

    def step(writer: HeartbeatWriter) -> "weakref.ref[Gradients]":
        gradients = Gradients()
        writer.__enter__()
        until(lambda: any(" step" in place for beat in read_beats(tmp_path).values() for place in beat.stack))
        return weakref.ref(gradients)

    writer = HeartbeatWriter(tmp_path, 0, lambda: "steady")
    kept = step(writer)
    until(lambda: kept() is None, seconds=20)
    writer.__exit__(None, None, None)


def test_without_a_time_out_given_it_follows_the_longest_pause_and_one_of_zero_ends_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, None)
    assert watched.hangs.limit() == DEFAULT_SECONDS
    watched.alive(90, beat(0))
    watched.alive(1, beat(0, marks=2))
    assert 20 * 88 < watched.hangs.limit() < 20 * 92
    (tmp_path / "never").mkdir()
    assert Watched(tmp_path / "never", 0).alive(2000, beat(0)) is None


@pytest.mark.parametrize(
    ("beats", "rank"),
    [
        ([beat(0, stack=BARRIER), beat(1, step=5), beat(2, stack=BARRIER)], 1),
        ([beat(0, step=5), beat(1, step=4), beat(2, step=5)], 1),
        ([beat(0), beat(1), beat(2, stack=("train.py:99 other",))], 2),
    ],
    ids=["waits for nobody", "is behind", "is elsewhere"],
)
def test_who_holds_up_the_others(beats: list[Beat], rank: int) -> None:
    assert culprit({each.rank: each for each in beats}) == rank


# The kernel's count of processes that it ended for want of memory, and what a record makes of it.

V1, V2 = "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n", "0::/user.slice/job\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        (V2, {"cgroups/user.slice/job/memory.events": EVENTS}, 3),
        (V1, {"cgroups/memory/job/7/memory.oom_control": CONTROL}, 2),
        (V1, {"cgroups/memory/memory.oom_control": CONTROL}, 2),
        (V1, {"cgroups/memory/job/7/memory.oom_control": "under_oom 0\n", "proc/vmstat": "oom_kill 5\n"}, 5),
        (V2, {"proc/vmstat": "nr_free_pages 7\noom_kill 5\n"}, 5),
        (V2, {}, None),
    ],
    ids=["v2", "v1", "v1 in a container", "v1 before Linux 4.13", "no group", "nothing"],
)
def test_the_count_is_read_where_it_stands(
    cgroup: str, files: dict[str, str], count: int | None, tmp_path: Path
) -> None:
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
    (tmp_path / "memory" / "1.csv").write_text("\n".join([",".join(HEADER), *rows]))
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
            env={**os.environ, **RANK_ENVIRONMENT}, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert done.stdout.startswith("oom "), done.stdout + done.stderr
    reason = json.loads((folder / "record.json").read_text())["reason"]
    assert reason.startswith("rank 0: killed by the kernel, out of memory: phase steady, ")
    assert not left(folder)


def test_what_the_ranks_do_while_no_steps_come_is_said(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    assert ranks_doing(tmp_path) == {"ranks": "starting"}
    write_beat(tmp_path, beat(0, alive=1, marks=0, phase="first_step"))
    write_beat(tmp_path, beat(1, alive=1, marks=0, phase="load"))
    assert ranks_doing(tmp_path) == {"ranks": "in first step and load"}
    for rank in (0, 1):
        write_beat(tmp_path, beat(rank, alive=9, marks=5, phase="steady"))
    assert ranks_doing(tmp_path) == {}
