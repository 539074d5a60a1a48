"""Whether a run hangs, by heartbeats that are made here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeropods.launch.lost_pods_and_hangs import DEFAULT_SECONDS, PATIENT_SECONDS, HangDetector, culprit
from zeropods.measure.heartbeat import Beat, beat_file, write_beat

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
            found = self.hangs.look(self.now)
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
    assert "nothing done for 11 s (step time-out 10 s)" in (watched.alive(1, *ranks) or "")


def test_a_save_in_which_ranks_work_or_move_has_more_time(watched: Watched) -> None:
    working = saving(0, "zeropods/checkpoints/shards.py:9 sha256", *BARRIER)
    assert watched.alive(50, working, saving(1)) is None
    for second in range(30):
        place = "torch/distributed/x.py:1 broadcast" if second % 2 else BARRIER[0]
        assert watched.alive(1, saving(0, place, "save.py:1 save"), saving(1)) is None


def test_time_in_which_nobody_looked_does_not_count(watched: Watched) -> None:
    watched.alive(3, beat(0), beat(1))
    watched.now += 1000
    assert watched.alive(8, beat(0), beat(1)) is None


def test_ranks_that_have_ended_are_watched_no_more(watched: Watched) -> None:
    watched.alive(3, beat(0), beat(1))
    for rank in (0, 1):
        beat_file(watched.folder, rank).unlink()
    assert watched.alive(60) is None


def test_heartbeats_of_an_earlier_attempt_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    write_beat(tmp_path, beat())
    earlier = HangDetector(tmp_path, 10.0, lambda: False)
    assert earlier.look(0.0) is None and earlier.look(99.0) is None and not earlier.beats()


def test_without_a_time_out_given_it_follows_the_longest_pause(tmp_path: Path) -> None:
    watched = Watched(tmp_path, None)
    assert watched.hangs.limit() == DEFAULT_SECONDS
    watched.alive(90, beat(0))
    watched.alive(1, beat(0, marks=2))
    assert 20 * 88 < watched.hangs.limit() < 20 * 92


def test_a_time_out_of_zero_ends_nothing(tmp_path: Path) -> None:
    assert Watched(tmp_path, 0).alive(2000, beat(0)) is None


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
