"""Rows of a summary: what repeats become, what is compared with what, and what differs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.report.groups import letters, unequal
from zeropods.report.summary import Summary, read_runs


def a_run(folder: Path, seconds: float = 0.8, pods: int = 1, **values: Any) -> Path:
    """A run of 48 samples per step, of that many seconds each; its id is its folder's name."""
    ranks = [a_rank(i, step_seconds=[seconds] * 20, **values.pop("rank", {})) for i in range(pods)]
    scores = {"score_test": values.pop("score")} if "score" in values else {}
    record = a_record(**{"ranks": ranks, "pods": pods, "run_id": str(folder), "effective_batch_size": 48, **values})
    return write_run(folder, record, **scores)


def two(folder: Path, one: dict[str, Any], other: dict[str, Any], **options: Any) -> Summary:
    """The summary of two runs, `a` and `b`."""
    a_run(folder / "a", **one)
    a_run(folder / "b", **other)
    return read_runs([folder], **options)


def rows(folder: Path, **options: Any) -> list[dict[str, Any]]:
    return read_runs([folder], **options).to_json()["groups"]


def identity(seed: int = 42, **flags: Any) -> dict[str, Any]:
    return {"identity": {"seed": seed, **flags}}


PROFILED = {"technique": "zero1", "deepspeed": {"flops_profiler": {"enabled": True}}}
STAGE_1 = identity(deepspeed={"zero_optimization": {"stage": 1}})
BF16_ON_TWO = {"seconds": 0.4, "pods": 2, "precision": "bf16"}


def test_runs_equal_but_for_their_seed_are_repeats(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        a_run(tmp_path / "cell" / str(seed), **identity(seed))
    (row,) = rows(tmp_path)
    assert (row["name"], row["repeats"], row["runs"]) == ("cell", 3, ["cell/1", "cell/2", "cell/3"])


def test_a_technique_of_ones_own_is_shown_with_the_keys_that_make_it_so(tmp_path: Path) -> None:
    nvme = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "zero_quantized_weights": True}}
    a_run(tmp_path / "run", technique="custom", deepspeed=nvme)
    (row,) = rows(tmp_path)
    assert (row["technique"], row["planned_bytes"]) == ("custom", None)
    shown = read_runs([tmp_path]).to_markdown()
    assert "custom (zero_quantized_weights true, offload_param.device nvme)" in shown


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"technique": "zero1"}, []),
        ({"pods": 3, "technique": "zero1"}, []),
        (STAGE_1, []),
        ({"rank": {"machine": None}}, []),
        ({"precision": "bf16"}, ["precision: fp32 (A); bf16 (B)"]),
        (
            {"hardware": {"cpu": "another"}},
            ["hardware cpu: a CPU (A); another (B)"],
        ),
        ({"versions": {"python": "9"}}, ["versions python: 3.11.4 (A); 9 (B)"]),
        (identity(learning_rate=0.1), ["learning_rate: not recorded (A); 0.1 (B)"]),
        (identity(max_train_seconds=0.0), ["max_train_seconds: not recorded (A); no limit (B)"]),
        (identity(max_steps=-1), ["max_steps: not recorded (A); no limit (B)"]),
        (PROFILED, ["profiler: false (A); true (B)"]),
    ],
)
def test_runs_that_are_no_repeats_are_rows_and_what_else_differs_is_spelled_out(
    tmp_path: Path, other: dict[str, Any], said: list[str]
) -> None:
    hardware = {"hardware": {"cpu": "a CPU"}}
    found = two(tmp_path, hardware, {**hardware, **other})
    assert (len(found.groups), found.differences()) == (2, said)


def test_throughput_of_repeats_is_their_mean_with_its_interval(tmp_path: Path) -> None:
    # 48 samples in 4, 2 and 1.5 s: 12, 24 and 32 samples/s. Mean 22.667, standard deviation 10.066;
    # 4.303 x 10.066 / sqrt(3) = 25.007, and a rate is never below 0.
    for seconds in (4.0, 2.0, 1.5):
        a_run(tmp_path / str(seconds), seconds)
    (row,) = rows(tmp_path)
    assert row["samples_per_second"] == pytest.approx(22.667, abs=1e-3)
    assert row["samples_per_second_interval"] == pytest.approx([0.0, 47.674], abs=5e-3)


def test_memory_of_repeats_is_the_most_that_each_pod_needed(tmp_path: Path) -> None:
    for name, sizes in (("a", (1, 4)), ("b", (3, 2))):
        ranks = [a_rank(i, peak_resident_bytes=size) for i, size in enumerate(sizes)]
        a_run(tmp_path / name, ranks=ranks, pods=2)
    (row,) = rows(tmp_path)
    assert (row["pod_memory_bytes"], row["peak_memory_bytes"]) == ([3, 4], 4)


def test_repeats_of_two_kinds_of_memory_have_none(tmp_path: Path) -> None:
    (group,) = two(tmp_path, {"rank": {"peak_allocated_bytes": 5}}, {}).groups
    assert (group.values["memory_kind"], group.values["peak_memory_bytes"]) == (None, None)


def test_a_failed_repeat_is_counted_and_not_averaged(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    write_run(tmp_path / "b", a_failed_record("oom", effective_batch_size=48, run_id="b"))
    (row,) = rows(tmp_path)
    assert (row["status"], row["repeats"], row["duration_seconds"]) == ("1 ok, 1 oom", 1, 30.0)


def test_accuracy_of_repeats_is_the_mean_of_shares_and_of_the_ends_of_intervals(tmp_path: Path) -> None:
    scores = [
        {"score": a_score(execution_accuracy=share, intervals={"execution_accuracy": [low, 0.8]})}
        for share, low in ((0.5, 0.4), (0.7, 0.5))
    ]
    (group,) = two(tmp_path, *scores).groups
    assert group.values["execution_accuracy"] == pytest.approx(0.6)
    assert group.values["execution_accuracy_interval"] == pytest.approx([0.45, 0.8])


def test_copied_and_resumed_runs_are_remarked(tmp_path: Path) -> None:
    resumed = {"rank": {"first_step": 5, "losses": [], "eval_losses": []}, "run_id": "0123"}
    found = two(tmp_path, {"run_id": "0123"}, resumed)
    assert [group.values["repeats"] for group in found.groups] == [1, 1]
    assert found.remarks() == [
        "b: has the id 0123 of a: a copied run, not counted as a repeat",
        "b: was resumed: its times are those of its last attempt",
    ]


@pytest.mark.parametrize(
    ("one", "other", "options", "expected"),
    [
        # 48 samples in 0.8 s, and on three processes in 0.4 s: twice as fast, by 3.
        ({}, {"seconds": 0.4, "pods": 3, "technique": "zero1"}, {}, [("A", 1, 1), ("A", 2, 2 / 3)]),
        ({"technique": "zero1"}, {}, {}, [("A", 1, 1), ("A", 1, 1)]),
        ({"pods": 3}, {"pods": 2}, {}, [("A", 1, 1), ("A", 1, 2 / 3)]),
        *(({}, {"technique": "zero1", **more}, {}, [(None, None, None)] * 2) for more in (
            {"precision": "bf16"}, {"hardware": {"cpu": "another"}}, identity(dropout=0.5), {"model_id": "t5-small"},
        )),
        ({"status": "timeout"}, {"pods": 2}, {}, [(None, None, None)] * 2),
        ({}, BF16_ON_TWO, {"allow_differences": True}, [("A", 1, 1), ("A", 2, 1)]),
    ],
)  # fmt: skip
def test_rows_scale_against_the_one_with_the_fewest_processes(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], options: dict[str, Any], expected: list[Any]
) -> None:
    found = two(tmp_path, one, other, **options).to_json()["groups"]
    scaled = [(row["base"], row["speed_up"], row["scaling_efficiency"]) for row in found]
    assert scaled == [(base, *(value and pytest.approx(value) for value in values)) for base, *values in expected]


def test_a_ratio_that_was_asked_for_is_marked(tmp_path: Path) -> None:
    found = two(tmp_path, {}, BF16_ON_TWO, allow_differences=True)
    assert "* B is set against A although they differ in precision" in found.remarks()
    assert "No ratio is drawn between rows that do" not in found.to_markdown()
    assert "No ratio is drawn between rows that do" in read_runs([tmp_path]).to_markdown()


def test_of_gpus_the_names_are_compared_and_not_their_number(tmp_path: Path) -> None:
    values = [{"pods": count, "hardware": {"gpus": ["GPU X"] * count}} for count in (1, 2)]
    assert two(tmp_path, *values).differences() == []


def test_rows_of_one_value_are_named_as_a_span(tmp_path: Path) -> None:
    for name, pods, precision in (("a", 1, "bf16"), ("b", 1, "fp32"), ("c", 2, "fp32"), ("d", 3, "fp32")):
        a_run(tmp_path / name, pods=pods, precision=precision)
    assert read_runs([tmp_path]).differences() == ["precision: fp32 (A-C); bf16 (D)"]
    assert list(islice(letters(), 28))[-3:] == ["Z", "AA", "AB"]


def test_buckets_are_compared_where_both_have_them() -> None:
    small, large = {"reduce_bucket_size": 1}, {"reduce_bucket_size": 2}
    assert (unequal(small, large), unequal(small, {})) == (["reduce_bucket_size"], [])


def test_tables_of_people(tmp_path: Path) -> None:
    a_run(tmp_path / "a", rank={"wall_seconds": 1_800.0}, score=a_score(execution_accuracy=None))
    a_run(tmp_path / "b", pods=3)
    a_run(tmp_path / "c", ranks=[a_rank(0), a_rank(1)], pods=1, slots=2)
    found = read_runs([tmp_path], price_per_hour=3.0)
    text, document = found.to_markdown(), found.to_json()
    names = [name.strip() for name in text.split("## Results")[1].splitlines()[2].strip("| ").split("|")]
    assert names[:5] == ["row", "model", "technique", "pods", "throughput (samples/s)"]
    assert {"duration (s)", "inference result"} <= set(names)
    assert "| logical form 0.600 (test) " in text and "| B ddp x1x2 " in text and "| A           | 3 on 1 " in text
    assert "MFU" not in text and document["groups"][0]["cost"] == 1.5
    assert {row["model"] for row in document["reference"]} == {"t5-small", "t5-large"} and len(document["groups"]) == 3
