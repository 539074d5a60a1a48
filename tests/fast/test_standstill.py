"""Whether a run stands still, by beats that are made here."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeropods.errors import UserError
from zeropods.launch.hangs import DEFAULT_SECONDS, PATIENT_SECONDS, Standstill, check_step_timeout, culprit, save_stacks
from zeropods.measure.heartbeat import BYTES, STACKS, Beat, beat_file, read_beats, write_beat
from zeropods.pods.processes import catches, find_process

BARRIER = ("torch/distributed/distributed_c10d.py:4811 barrier", "train.py:9 step")


def beat(rank: int = 0, alive: int = 1, marks: int = 1, **other: Any) -> Beat:
    known = {"step": 1, "phase": "steady", "patient": False, "stack": ("train.py:7 step",), "called_from": None}
    began = {"pid": 1000 + rank, "began_unix_seconds": 0.0}
    return Beat(rank=rank, alive=alive, marks=marks, **{**known, **began, **other})


class Watched:
    """A run of which the test says what its ranks do."""

    def __init__(self, folder: Path, step_timeout: float | None = 10.0) -> None:
        (folder / "ranks").mkdir()
        self.folder = folder
        self.now = 100.0
        self.standstill = Standstill(folder, ("pod1", "pod2"), step_timeout, lambda: True)

    def after(self, seconds: float, *beats: Beat) -> tuple[str | None, str] | None:
        """Pod and reason of the verdict, when these beats are all that has changed since."""
        for each in beats:
            write_beat(self.folder, each)
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            found = self.standstill.look(self.now)
        return None if found is None else (found.pod, found.reason or "")


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def alive(watched: Watched, seconds: int, *beats: Beat) -> tuple[str | None, str] | None:
    """These ranks do nothing for so long, and give signs of life."""
    for second in range(seconds):
        found = watched.after(1, *(replace(each, alive=each.alive + second + 1) for each in beats))
    return found


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    write_beat(tmp_path, beat(3))
    assert read_beats(tmp_path) == {3: beat(3)}


def test_a_beat_with_a_deep_stack_fits_by_leaving_out_the_outermost(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    write_beat(tmp_path, beat(stack=tuple(f"{'x' * 500}:{number} f" for number in range(24))))
    (found,) = read_beats(tmp_path).values()
    assert beat_file(tmp_path, 0).stat().st_size == BYTES
    assert 4 < len(found.stack) < 10 and found.stack[0].endswith(":0 f")


def test_a_beat_that_is_half_written_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    beat_file(tmp_path, 0).write_text('{"rank": 0, "pid"')
    assert read_beats(tmp_path) == {}


def test_a_run_whose_ranks_do_nothing_stands_still(watched: Watched) -> None:
    assert alive(watched, 10, beat(0), beat(1)) is None
    found = alive(watched, 2, beat(0, alive=50), beat(1, alive=50))
    assert found is not None and "nothing done for 11 s" in found[1]


def test_a_run_whose_ranks_do_something_goes_on(watched: Watched) -> None:
    for marks in range(30):
        assert alive(watched, 3, beat(0, alive=9 * marks, marks=marks), beat(1, alive=9 * marks, marks=marks)) is None


def test_ranks_that_load_or_save_have_more_time(watched: Watched) -> None:
    loading = [beat(rank, phase="load", patient=True) for rank in (0, 1)]
    assert alive(watched, int(PATIENT_SECONDS), *loading) is None
    assert alive(watched, 2, *(replace(each, alive=9000) for each in loading)) is not None


def saving(rank: int, *stack: str) -> Beat:
    return beat(rank, phase="save", patient=True, stack=stack or BARRIER)


def test_ranks_that_all_wait_for_one_another_in_a_save_have_no_more_time(watched: Watched) -> None:
    assert alive(watched, 10, saving(0), saving(1)) is None
    found = alive(watched, 2, *(replace(saving(rank), alive=50) for rank in (0, 1)))
    assert found is not None and "nothing done for 11 s (step time-out 10 s)" in found[1]


def test_a_save_in_which_one_rank_works_has_more_time(watched: Watched) -> None:
    assert alive(watched, 100, saving(0, "zeropods/checkpoints/shards.py:9 sha256", *BARRIER), saving(1)) is None


def test_ranks_that_come_to_other_places_in_a_save_have_more_time(watched: Watched) -> None:
    for second in range(30):
        there = saving(0, "torch/distributed/x.py:1 broadcast" if second % 2 else BARRIER[0], "save.py:1 save")
        assert watched.after(1, replace(there, alive=second + 1), replace(saving(1), alive=second + 1)) is None


def test_a_rank_that_does_something_holds_for_all(watched: Watched) -> None:
    for second in range(30):
        assert watched.after(1, beat(0, alive=second), beat(1, alive=second, marks=second)) is None


def test_a_rank_without_signs_of_life_is_stopped_whatever_it_was_doing(watched: Watched) -> None:
    watched.after(1, beat(1, phase="save", patient=True))
    found = alive(watched, 11, beat(0, phase="save", patient=True))
    assert found is not None and found[0] == "pod2"
    assert "rank 1 on pod2 is stopped at train.py:7 step (phase save, 1 steps done)" in found[1]
    assert "rank 0 on pod1 is at" in found[1]


def test_time_in_which_nobody_looked_does_not_count(watched: Watched) -> None:
    alive(watched, 3, beat(0), beat(1))
    watched.now += 1000
    assert alive(watched, 8, beat(0, alive=50), beat(1, alive=50)) is None


def test_ranks_that_have_ended_are_watched_no_more(watched: Watched) -> None:
    alive(watched, 3, beat(0), beat(1))
    for rank in (0, 1):
        beat_file(watched.folder, rank).unlink()
    assert watched.after(60) is None


def test_beats_of_an_earlier_attempt_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    write_beat(tmp_path, beat())
    earlier = Standstill(tmp_path, ("pod1",), 10.0, lambda: False)
    assert earlier.look(0.0) is None and earlier.look(1.0) is None and not earlier.seen


def test_without_a_time_out_given_it_follows_the_longest_pause(tmp_path: Path) -> None:
    watched = Watched(tmp_path, None)
    assert watched.standstill.limit() == DEFAULT_SECONDS
    alive(watched, 90, beat(0))
    watched.after(1, beat(0, alive=500, marks=2))
    assert 20 * 88 < watched.standstill.limit() < 20 * 92


def test_a_time_out_of_zero_ends_nothing(tmp_path: Path) -> None:
    assert alive(Watched(tmp_path, 0), 2000, beat(0), beat(1)) is None


@pytest.mark.parametrize("seconds", [-1.0, 0.5, float("inf"), float("nan")])
def test_a_time_out_in_which_no_rank_could_speak_is_refused(seconds: float) -> None:
    with pytest.raises(UserError, match="expected more than 4, or 0 for none"):
        check_step_timeout(seconds)


def test_who_waits_for_nobody_holds_up_those_that_wait() -> None:
    assert culprit({0: beat(0, stack=BARRIER), 1: beat(1, step=5), 2: beat(2, stack=BARRIER)}) == 1


def test_who_is_behind_holds_up_the_others() -> None:
    assert culprit({0: beat(0, step=5), 1: beat(1, step=4), 2: beat(2, step=5)}) == 1


def test_who_is_elsewhere_holds_up_the_others() -> None:
    assert culprit({0: beat(0), 1: beat(1), 2: beat(2, stack=("train.py:99 other",))}) == 2


def test_the_stack_of_a_rank_that_does_not_answer_is_that_of_its_last_beat(tmp_path: Path) -> None:
    save_stacks(tmp_path, {1: beat(1, stack=BARRIER)}, lambda: None, lambda process: False)
    text = (tmp_path / "stacks" / "1.txt").read_text()
    assert "rank 1, process 1001: does not answer" in text and "  train.py:9 step" in text


def test_a_process_that_does_not_catch_the_signal_is_not_asked() -> None:
    this = find_process(os.getpid())
    assert this is not None and not catches(this, STACKS) and catches(this, signal.SIGINT)
