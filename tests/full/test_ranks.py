"""Ranks of one run on several pods: what each leaves, and who speaks, with and without a supervisor."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.full.conftest import TINY
from tests.full.forks import Forked, begin_ranks
from tests.full.launches import until

SECONDS = 120.0


@contextmanager
def two_ranks(said: Path, arguments: list[object], **variables: str) -> Iterator[list[Forked]]:
    """Two ranks that train, each the only one of its pod; neither is left."""
    ranks = begin_ranks([*TINY, *arguments], 2, said, LOCAL_RANK="0", LOCAL_SIZE="1", **variables)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate(SECONDS)


def said(ranks: list[Forked]) -> list[list[str]]:
    """The lines for people of each rank, after its end."""
    texts = [rank.communicate(SECONDS) for rank in ranks]
    return [[line for line in text.splitlines() if line.startswith("zeropods: ")] for text in texts]


@pytest.fixture
def flags(prepared: Path, tmp_path: Path) -> list[object]:
    return ["--dataset_path", prepared, "--outputdir", tmp_path / "run", "--eval_steps", "0", "--precision", "fp32"]


def test_a_rank_that_waits_for_a_lost_one_still_leaves_what_it_measured(flags: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = [*flags, "--max_steps", "100000", "--per_device_train_batch_size", "1"]
    with two_ranks(tmp_path / "said", endless, ZEROPODS_RUN="r1") as ranks:
        log = run / "train.log"
        until(lambda: log.is_file() and "step 5 " in log.read_text(), SECONDS)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(1)
        ranks[0].send_signal(signal.SIGTERM)
        until((run / "ranks" / "0.json").is_file, SECONDS)
        left = json.loads((run / "ranks" / "0.json").read_text())
    assert (left["status"], left["reason"]) == ("interrupted", "SIGTERM while waiting for other ranks")
    assert len(left["losses"]) >= 5
    assert left["step"] == len(np.load(run / "steps" / "0.npy")) >= left["losses"][-1]["step"]
    assert left["peak_resident_bytes"] >= left["phases"]["steady"]["peak_resident_bytes"] > 0
    assert left["sampled"]["resident_bytes"]["samples"] > 0


def test_an_error_that_all_ranks_share_is_said_once_and_one_before_they_meet_by_each(
    flags: list[object], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "of_somebody_else").touch()
    for added, line, count in (
        ([], "holds something that is no run", 1),
        (["--dataset_path", "/nowhere"], "no prepared data set", 2),
    ):
        with two_ranks(tmp_path / f"said-{count}", [*flags, "--max_steps", "1", *added]) as ranks:
            lines = [each for own in said(ranks) for each in own]
            assert [rank.returncode for rank in ranks] == [1, 1]
        assert len(lines) == count and all(line in each for each in lines)
