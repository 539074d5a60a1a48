"""The record's status and reason, composed from what the ranks left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.made import a_config
from zeropods.measure.record import RankMeasurement, compose_record, real_tokens


def write_run(folder: Path, statuses: tuple[str, ...], ended: tuple[float, ...]) -> None:
    (folder / "config.json").write_text(json.dumps(a_config(pods=len(statuses))))
    for rank, (status, when) in enumerate(zip(statuses, ended, strict=True)):
        reason = None if status == "ok" else f"{status} {rank}"
        measured = RankMeasurement(rank=rank, host=f"pod{rank}", status=status, reason=reason, ended_unix_seconds=when)
        measured.write(folder)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("interrupted", "failed", "failed"), ("failed", "rank 2 on pod2: failed 2")),
        (("failed", "oom", "interrupted"), ("oom", "rank 1 on pod1: oom 1")),
        (("ok", "interrupted", "interrupted"), ("interrupted", "rank 2 on pod2: interrupted 2")),
        (("ok", "ok", "ok"), ("ok", None)),
    ],
)
def test_the_reason_is_that_of_the_rank_that_began_the_end(
    tmp_path: Path, statuses: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    write_run(tmp_path, statuses, ended=(5.0, 9.0, 4.0))
    record = compose_record(tmp_path)
    assert (record.status, record.reason) == expected


def test_one_process_needs_no_name(tmp_path: Path) -> None:
    write_run(tmp_path, ("failed",), ended=(1.0,))
    assert compose_record(tmp_path).reason == "failed 0"


def test_a_supervisor_overrules_the_ranks(tmp_path: Path) -> None:
    write_run(tmp_path, ("interrupted", "interrupted"), ended=(1.0, 1.0))
    record = compose_record(tmp_path, status="pod_lost", reason="pod2 (127.0.1.2): no heartbeat for 10 s")
    assert (record.status, record.reason) == ("pod_lost", "pod2 (127.0.1.2): no heartbeat for 10 s")


def test_a_rank_without_a_measurement_is_counted(tmp_path: Path) -> None:
    write_run(tmp_path, ("ok", "ok"), ended=(1.0, 1.0))
    (tmp_path / "ranks" / "1.json").unlink()
    assert compose_record(tmp_path).reason == "1 of 2 ranks left no measurement"


def test_tokens_with_a_loss_are_among_those_of_a_text() -> None:
    rank = RankMeasurement(rank=0, host="pod1", source_tokens=100, target_tokens=30)
    assert [real_tokens(rank, task) for task in ("text2sql", "squad", "lm")] == [130, 100, 100]
