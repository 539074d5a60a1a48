"""Records: composed from what ranks left, read back strictly, their figures checked against one another."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_config, a_failed_record, a_rank, a_record, as_record, write_run
from zeropods.errors import UserError
from zeropods.measure.record import (
    Loss,
    RankMeasurement,
    Statistics,
    closing_line,
    compose_record,
    read_record,
    samples_per_second,
    train_seconds,
    write_record,
)
from zeropods.report.summary import read_runs

GONE = object()
TWO = [a_rank(0), a_rank(1)]


def changed(record: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy with the value at `key.0.key` replaced, or taken away."""
    record = deepcopy(record)
    *path, last = (int(part) if part.isdigit() else part for part in dotted.split("."))
    place: Any = record
    for part in path:
        place = place[part]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return record


def refused(folder: Path, record: dict[str, Any]) -> str:
    """What reading the record says, without the place of the file."""
    write_run(folder / "run", record)
    with pytest.raises(UserError) as error:
        read_record(folder / "run")
    line = str(error.value)
    assert line.startswith(f"{folder}/run/record.json: ") and "\n" not in line
    return line.removeprefix(f"{folder}/run/record.json: ")


@pytest.mark.parametrize(
    "record",
    [a_record(), a_record(ranks=TWO), a_failed_record(), a_record(ranks=[], status="failed", reason="nobody came")],
    ids=["one rank", "two ranks", "failed", "no rank"],
)
def test_what_is_written_is_read(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "run").mkdir()
    write_record(tmp_path / "run", as_record(record))
    assert read_record(tmp_path / "run") == as_record(record)
    assert json.loads((tmp_path / "run" / "record.json").read_text()) == record


def test_losses_which_all_ranks_have_stand_once_in_a_record(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(a_config(pods=2)))
    curve = [Loss(step=1, loss=8.0)]
    for rank in range(2):
        RankMeasurement(rank=rank, host="pod", status="ok", losses=curve, eval_losses=curve).write(tmp_path)
    record = compose_record(tmp_path)
    assert (record.losses, record.eval_losses) == (curve, curve)
    assert not any(rank.losses or rank.eval_losses for rank in record.ranks)


def test_a_measurement_of_another_form_is_refused_where_a_record_is_composed_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(a_config()))
    (tmp_path / "ranks").mkdir()
    path = tmp_path / "ranks" / "0.json"
    for key, value in (("step_seconds", [0.8] * 20), ("python_seconds", 1e-6)):
        path.write_text(json.dumps(a_rank() | {key: value}))
        with pytest.raises(UserError, match=rf"^{path}: {key} is .*; run it again$"):
            compose_record(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *(("schema_version", version, f"schema_version {version}; this version reads 3: run it again")
          for version in (2, 4, None)),
        ("schema_version", GONE, "schema_version None; this version reads 3: run it again"),
        *((key, 1, f"{key} is 1: ") for key in ("speed", "ranks.0.speed", "losses.0.speed")),
        *((key, GONE, f"{key}: ")
          for key in ("run_id", "status", "losses.0.loss", "reason", "device", "ranks.0.step_seconds.median")),
        ("effective_batch_size", "32", "effective_batch_size is '32': "),
        ("gradient_checkpointing", 1, "gradient_checkpointing is 1: "),
        ("status", "fine", "status is 'fine': "),
        ("hosts", "pod1", "hosts is 'pod1': "),
        ("slots", 0, "slots is 0: "),
        ("ranks.0.step_seconds", [0.8], "ranks.0.step_seconds"),
        ("ranks.0.largest_batch", {"rows": 1}, "ranks.0.largest_batch"),
        ("losses.0.step", True, "losses.0.step is True: "),
        *((key, value, f"{key} is {value}: Input should be a finite number")
          for key in ("train_seconds", "losses.0.loss", "ranks.0.wall_seconds") for value in (math.nan, -math.inf)),
    ],
)  # fmt: skip
def test_what_is_no_record_of_this_version_is_refused_with_its_place(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    assert refused(tmp_path, changed(a_record(), key, value)).startswith(said)


def timed(*seconds: float) -> RankMeasurement:
    later = Statistics.of(seconds[1:])
    return RankMeasurement(rank=0, host="pod1", warmup_seconds=sum(seconds[:1]), step_seconds=later, step=len(seconds))


def test_training_time_and_rate_are_those_of_the_slowest_rank_the_rate_without_warm_up() -> None:
    assert train_seconds([timed(1.0, 2.0), timed(2.0, 2.5)]) == 4.5
    assert train_seconds([timed()]) is None
    # 2 steps of 12 samples in 4 s.
    assert samples_per_second([timed(9.0, 1.0, 1.0), timed(9.0, 2.0, 2.0)], 12) == 6.0
    assert samples_per_second([timed(9.0)], 12) is samples_per_second([], 12) is None


@pytest.mark.parametrize(
    ("steps", "warmup", "said"),
    [
        (1, 1, "only 1 step, all warm-up: 2 or more give samples/s"),
        (2, 2, "only 2 steps, all warm-up up to the profiled one: 3 or more give samples/s"),
    ],
)
def test_a_run_without_a_step_after_warm_up_says_why_it_has_no_rate(
    tmp_path: Path, steps: int, warmup: int, said: str
) -> None:
    run = write_run(tmp_path / "a", a_record(ranks=[a_rank(step_seconds=[0.8] * steps, warmup_steps=warmup)]))
    assert f", {said}; " in closing_line(run, read_record(run))
    assert f"a: {said}" in read_runs([tmp_path]).remarks()


# The status and reason of a record, composed from what the ranks left.


def left(folder: Path, statuses: tuple[str, ...], ended: tuple[float, ...]) -> None:
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
        # One process needs no name.
        (("failed",), ("failed", "failed 0")),
    ],
)
def test_the_reason_is_that_of_the_rank_that_began_the_end(
    tmp_path: Path, statuses: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    left(tmp_path, statuses, ended=(5.0, 9.0, 4.0)[: len(statuses)])
    record = compose_record(tmp_path)
    assert (record.status, record.reason) == expected


def test_a_supervisor_overrules_the_ranks_and_a_rank_without_a_measurement_is_counted(tmp_path: Path) -> None:
    left(tmp_path, ("interrupted", "ok"), ended=(1.0, 1.0))
    record = compose_record(tmp_path, status="pod_lost", reason="pod2 (127.0.1.2): no heartbeat for 10 s")
    assert (record.status, record.reason) == ("pod_lost", "pod2 (127.0.1.2): no heartbeat for 10 s")
    (tmp_path / "ranks" / "0.json").unlink()
    assert compose_record(tmp_path).reason == "1 of 2 ranks left no measurement"
