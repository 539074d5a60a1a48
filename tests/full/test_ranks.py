"""Ranks of one run on several pods: what each leaves, and who speaks, with and without a supervisor."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full.conftest import TINY
from tests.full.forks import Forked, fork_server
from tests.full.launches import until
from zeropods.programs import child_environment, free_port

PODS = ("10.0.0.1", "10.0.0.2")
SECONDS = 120.0
TwoRanks = Callable[..., AbstractContextManager[list[Forked]]]


@pytest.fixture
def two_ranks(tmp_path: Path) -> TwoRanks:
    """Starts two ranks, each on a pod of its own, as DeepSpeed's launcher starts them there."""

    @contextmanager
    def start(arguments: list[object], **environment: str) -> Iterator[list[Forked]]:
        port = free_port()
        ranks = []
        try:
            for rank, pod in enumerate(PODS):
                given = {
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "ZEROPODS_POD": pod,
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment,
                }  # fmt: skip
                argv = [*TINY, *map(str, arguments)]
                ranks.append(fork_server().start(argv, child_environment() | given, tmp_path / f"said.{port}.{rank}"))
            yield ranks
        finally:
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
                rank.communicate(SECONDS)

    return start


def said(ranks: list[Forked]) -> list[list[str]]:
    """The lines for people of each rank, after its end."""
    texts = [rank.communicate(SECONDS) for rank in ranks]
    return [[line for line in text.splitlines() if line.startswith("zeropods: ")] for text in texts]


def measurement(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / "ranks" / f"{rank}.json").read_text())


@pytest.fixture
def flags(prepared: Path, tmp_path: Path) -> list[object]:
    return ["--dataset_path", prepared, "--outputdir", tmp_path / "run", "--eval_steps", "0", "--precision", "fp32"]


def test_a_rank_that_waits_for_a_lost_one_still_leaves_what_it_measured(
    two_ranks: TwoRanks, flags: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with two_ranks([*flags, "--max_steps", "100000", "--per_device_train_batch_size", "1"], ZEROPODS_RUN="r1") as ranks:
        log = run / "train.log"
        until(lambda: log.is_file() and "step 5 " in log.read_text(), SECONDS)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(1)
        ranks[0].send_signal(signal.SIGTERM)
        until((run / "ranks" / "0.json").is_file, SECONDS)
        left = measurement(run, 0)
    assert (left["status"], left["reason"]) == ("interrupted", "SIGTERM while waiting for other ranks")
    assert len(left["losses"]) >= 5
    assert left["step"] == len(np.load(run / "steps" / "0.npy")) >= left["losses"][-1]["step"]
    assert left["peak_resident_bytes"] >= left["phases"]["steady"]["peak_resident_bytes"] > 0
    assert left["sampled"]["resident_bytes"]["samples"] > 0


def test_an_error_that_all_ranks_share_is_said_once_and_one_before_they_meet_by_each(
    two_ranks: TwoRanks, flags: list[object], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "of_somebody_else").touch()
    for added, line, count in (([], "holds something that is no run", 1), (["/nowhere"], "no prepared data set", 2)):
        with two_ranks([*flags, "--max_steps", "1", *(["--dataset_path", *added] if added else [])]) as ranks:
            lines = [each for own in said(ranks) for each in own]
            assert [rank.returncode for rank in ranks] == [1, 1]
        assert len(lines) == count and all(line in each for each in lines)
