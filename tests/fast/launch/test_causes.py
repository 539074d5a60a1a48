"""Which rank is named where a run ended badly, by what the ranks left and what their parents noted of them."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.made import a_config, a_rank
from zeropods.launch.lost_pods_and_hangs import Ending
from zeropods.launch.outcome import Ranks, verdict_of_ranks
from zeropods.measure.exits import EXIT_BYTES, exit_file, exits_noted, read_exits, write_exit
from zeropods.measure.heartbeat import Beat, write_beat
from zeropods.measure.record import RankExit, compose_record, lost_connection

GLOO = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:5801: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the "
    "application. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)
LAUNCHER = Ending(None, "DeepSpeed's launcher ended with status 1")
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a rank has left behind, and what its parent has noted."""

    measured: str | None = None
    """Status that it measured; None where it left nothing."""
    reason: str | None = None
    status: int | None = None
    """Exit status of its process."""
    at: float = 0.0
    """When its process ended, and its measurement before that, in seconds of its pod's clock."""
    words: tuple[str, ...] = ()


def lost(at: float) -> Left:
    """A rank that noticed that another one was gone."""
    return Left(measured="failed", reason=GLOO, status=1, at=at)


class Broken:
    """The folder of a run that has ended, with a rank on each of its pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def verdict(
        self,
        *ends: Left,
        verdict: Ending = LAUNCHER,
        watched: bool = True,
        sessions: tuple[str, ...] = (),
        **more: object,
    ) -> Ending:
        """What is said of such an end."""
        (self.folder / "ranks").mkdir(exist_ok=True)
        ranks = Ranks(self.folder, [f"pod{number + 1}" for number in range(len(ends))])
        (self.folder / "config.json").write_text("{}")
        for number, end in enumerate(ends):
            if watched:
                seen = RankExit(
                    rank=number, host=f"127.0.1.{number + 1}", pid=1000 + number, status=end.status,
                    ended_unix_seconds=None if end.status is None else end.at,
                )  # fmt: skip
                write_exit(self.folder, seen, end.words)
            if end.measured is not None:
                rank = a_rank(number, status=end.measured, reason=end.reason, ended_unix_seconds=end.at)
                (self.folder / "ranks" / f"{number}.json").write_text(json.dumps(rank))
        ranks.note_exits()
        ranks.session_statuses = dict.fromkeys(sessions, 137)
        return verdict_of_ranks(ranks, verdict, **more)  # type: ignore[arg-type]


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    return Broken(tmp_path)


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    [
        (Left(status=-signal.SIGKILL, at=5.0), "failed", "rank 1 left no measurement: killed by SIGKILL"),
        (Left(status=-signal.SIGSEGV, at=5.0), "failed", "rank 1 left no measurement: killed by SIGSEGV"),
        (Left(status=-64, at=5.0), "failed", "rank 1 left no measurement: killed by SIGRTMAX"),
        (
            Left(status=3, at=5.0, words=("[2026-11-27 01:27:16,798] [INFO] [x.py:1:f] ready", "no licence")),
            "failed",
            "rank 1 left no measurement: ended with status 3; its last words: no licence",
        ),
        (
            Left(status=0, at=5.0),
            "failed",
            "rank 1 left no measurement: ended with status 0 before the run was finished",
        ),
        (Left(measured="oom", reason="no memory left", status=1, at=5.0), "oom", "rank 1: no memory left"),
        (Left(measured="failed", reason="ValueError: row 7", status=1, at=5.0), "failed", "rank 1: ValueError: row 7"),
        (
            Left(measured="failed", reason="ConnectionResetError: [Errno 104] of a hub", status=1, at=5.0),
            "failed",
            "rank 1: ConnectionResetError: [Errno 104] of a hub",
        ),
    ],
    ids=["SIGKILL", "SIGSEGV", "another signal", "a status", "status 0", "oom", "an exception", "a lost hub"],
)
def test_the_rank_with_a_reason_of_its_own_is_named_whatever_the_clocks_of_the_pods_say(
    broken: Broken, cause: Left, status: str, reason: str
) -> None:
    named = broken.verdict(lost(at=5.0 - HOUR), cause, lost(at=5.0 + HOUR))
    assert (named.status, named.pod, named.rank, named.reason) == (status, "pod2", 1, reason)


def test_of_two_ranks_with_reasons_of_their_own_the_first_one_is_named(broken: Broken) -> None:
    late = Left(status=-signal.SIGABRT, at=7.0)
    assert broken.verdict(late, Left(status=3, at=6.0), lost(5.0)).rank == 1


def test_a_rank_that_the_supervisor_had_to_end_is_not_named_for_that(broken: Broken) -> None:
    ran_on = Left()
    named = broken.verdict(ran_on, Left(measured="failed", reason="ValueError: x", status=1, at=9.0))
    assert (named.rank, named.pod) == (1, "pod2")


@pytest.mark.parametrize(
    ("raised", "uncounted", "status", "said"),
    [
        (
            ("pod1", "pod2", "pod3"),
            (),
            "oom",
            "rank 1: killed by the kernel, out of memory: phase steady, 12 steps done",
        ),
        ((), (), "failed", "killed by SIGKILL, phase steady, 20 steps done"),
        (
            (),
            ("pod2",),
            "failed",
            "killed by SIGKILL, perhaps by the kernel for lack of memory, phase steady, 20 steps",
        ),
    ],
    ids=["counted, in a group that the pods share", "not counted", "no count"],
)
def test_whether_the_kernel_killed_a_rank_for_its_memory_is_told_by_its_count(
    broken: Broken, raised: tuple[str, ...], uncounted: tuple[str, ...], status: str, said: str
) -> None:
    (broken.folder / "ranks").mkdir()
    beat = Beat(
        rank=1, pid=1001, began_unix_seconds=0.0, alive=1, marks=1, step=12, phase="steady", patient=False, stack=(),
        called_from=None,
    )  # fmt: skip
    write_beat(broken.folder, beat)
    killed = Left(status=-signal.SIGKILL, at=5.0)
    named = broken.verdict(lost(4.0), killed, lost(6.0), out_of_memory=raised, uncounted=uncounted)
    assert (named.status, named.rank) == (status, 1) and said in (named.reason or "")


def test_ranks_that_only_lost_one_another_are_not_blamed_and_torchs_words_are_not_the_reason(broken: Broken) -> None:
    named = broken.verdict(lost(4.0), lost(5.0))
    assert (named.status, named.pod, named.rank) == ("failed", None, None)
    assert "lost their connections to one another" in (named.reason or "") and "GLHF" not in (named.reason or "")


def test_a_rank_that_somebody_else_asked_to_end_is_named(broken: Broken) -> None:
    asked = Left(measured="interrupted", reason="SIGTERM", status=130, at=5.0)
    named = broken.verdict(lost(4.0), asked)
    assert (named.status, named.rank) == ("failed", 1)
    assert named.reason == "rank 1 was asked to end, and not by this launch: SIGTERM"


def test_where_nobody_watched_the_ranks_the_one_that_left_nothing_is_named_by_its_pods_session(broken: Broken) -> None:
    named = broken.verdict(lost(4.0), Left(), Left(), watched=False, sessions=("pod3", "pod2", "pod1"))
    assert (named.status, named.pod, named.rank) == ("failed", "pod3", 2)
    assert named.reason == "rank 2 left no measurement: its launcher's session ended with status 137, as after SIGKILL"


def test_a_lost_pod_is_named_with_its_only_rank(broken: Broken) -> None:
    gone = Ending("pod_lost", "pod2 (127.0.1.2) has not answered for 7 s", "pod2")
    named = broken.verdict(lost(4.0), Left(), verdict=gone)
    assert (named.status, named.pod, named.rank) == ("pod_lost", "pod2", 1)


def test_of_ranks_that_refuse_to_begin_the_one_that_says_why_is_named(broken: Broken) -> None:
    silent = Left(status=1, at=4.0, words=("[2026-11-27 01:27:16,798] [INFO] [x.py:1:f] ready",))
    speaking = Left(status=1, at=5.0, words=("zeropods: data/sample: no prepared data set",))
    named = broken.verdict(silent, speaking)
    assert named.rank == 1 and "no prepared data set" in (named.reason or "")


@pytest.mark.parametrize(
    ("reason", "is_lost"),
    [
        (GLOO, True),
        ("RuntimeError: [pair.cc:534] Connection closed by peer [127.0.1.2]:1", True),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 1800000ms while trying", True),
        ("DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("[rank1]: RuntimeError: [pair.cc:537] Read error: Connection reset by peer", True),
        (
            "  what():  [Rank 1] Process group watchdog thread terminated: remote process exited or a network error",
            True,
        ),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
        ("BrokenPipeError: [Errno 32] Broken pipe", False),
        ("OSError: [Errno 28] No space left on device", False),
        (None, False),
    ],
)
def test_what_torch_says_of_a_lost_connection_is_told_from_errors_of_a_ranks_own(
    reason: str | None, is_lost: bool
) -> None:
    assert lost_connection(reason) is is_lost


def test_a_record_without_a_supervisor_names_the_rank_that_the_others_lost(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(a_config(pods=3)))
    for number in (0, 2):
        rank = a_rank(number, status="failed", reason=GLOO)
        (tmp_path / "ranks" / f"{number}.json").write_text(json.dumps(rank))
    record = compose_record(tmp_path)
    assert (record.status, record.rank) == ("failed", 1)
    assert record.reason == "rank 1 left no measurement: it was killed, or ended without saying why"


def test_a_note_takes_the_room_of_the_one_before_it_and_none_is_left_after_an_attempt(tmp_path: Path) -> None:
    seen = RankExit(rank=3, host="pod", pid=7)
    with exits_noted(tmp_path):
        write_exit(tmp_path, seen)
        before = exit_file(tmp_path, 3).stat()
        seen.status = -9
        long = [f"line {number} {'x' * 500}" for number in range(40)]
        write_exit(tmp_path, seen, long)
        after = exit_file(tmp_path, 3).stat()
        assert (before.st_ino, before.st_blocks, before.st_size) == (after.st_ino, after.st_blocks, EXIT_BYTES)
        note = read_exits(tmp_path)[3]
        assert note.exit == seen and note.last_lines[-1].startswith("line 39 xxx")
        exit_file(tmp_path, 3).write_text("{")
        assert read_exits(tmp_path) == {}
    assert not (tmp_path / "ranks").exists()
