"""Rows of a summary: what repeats become, what is compared with what, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.made import GIB, a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.report.groups import letters, unequal
from zeropods.report.summary import Summary, read_runs


def a_run(folder: Path, seconds: float = 0.8, pods: int = 1, **values: Any) -> Path:
    """A run of 48 samples a step, of that many seconds each; its id is its folder's name."""
    ranks = [a_rank(i, step_seconds=[seconds] * 20, **values.pop("rank", {})) for i in range(pods)]
    scores = {"score_test": values.pop("score")} if "score" in values else {}
    record = a_record(**{"ranks": ranks, "pods": pods, "run_id": str(folder), "effective_batch_size": 48, **values})
    return write_run(folder, record, **scores)


def rows(folder: Path, **options: Any) -> list[dict[str, Any]]:
    return summary(folder, **options).to_json()["groups"]


def summary(folder: Path, **options: Any) -> Summary:
    return read_runs([folder], **options)


def identity(seed: int = 42, **flags: Any) -> dict[str, Any]:
    return {"identity": {"seed": seed, **flags}}


def test_runs_equal_but_for_their_seed_are_repeats(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        a_run(tmp_path / "cell" / str(seed), **identity(seed))
    (row,) = rows(tmp_path)
    assert (row["name"], row["repeats"], row["runs"]) == ("cell", 3, ["cell/1", "cell/2", "cell/3"])


@pytest.mark.parametrize(
    "other",
    [
        {"technique": "zero1"},
        {"precision": "bf16"},
        identity(learning_rate=0.1),
        identity(deepspeed={"zero_optimization": {"stage": 1}}),
        {"hardware": {"cpu": "another"}},
        {"versions": {"torch": "9"}},
        {"rank": {"machine": None}},
    ],
)
def test_runs_that_differ_in_what_is_compared_are_rows_of_their_own(tmp_path: Path, other: dict[str, Any]) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", **other)
    assert len(rows(tmp_path)) == 2


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
    a_run(tmp_path / "a", rank={"peak_allocated_bytes": 5})
    a_run(tmp_path / "b")
    (row,) = rows(tmp_path)
    assert (row["memory_kind"], row["peak_memory_bytes"]) == (None, None)


def test_a_failed_repeat_is_counted_and_not_averaged(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    write_run(tmp_path / "b", a_failed_record("oom", effective_batch_size=48, run_id="b"))
    (row,) = rows(tmp_path)
    assert (row["status"], row["repeats"], row["duration_seconds"]) == ("1 ok, 1 oom", 1, 30.0)


def test_accuracy_of_repeats_is_the_mean_of_shares_and_of_the_ends_of_intervals(tmp_path: Path) -> None:
    for name, share, low in (("a", 0.5, 0.4), ("b", 0.7, 0.5)):
        a_run(tmp_path / name, score=a_score(execution_accuracy=share, intervals={"execution_accuracy": [low, 0.8]}))
    (row,) = rows(tmp_path)
    assert row["execution_accuracy"] == pytest.approx(0.6)
    assert row["execution_accuracy_interval"] == pytest.approx([0.45, 0.8])


def test_where_no_query_could_be_run_the_result_is_logical_form(tmp_path: Path) -> None:
    a_run(tmp_path / "a", score=a_score(execution_accuracy=None))
    assert "| logical form 0.600 (test) " in summary(tmp_path).to_markdown()


def test_a_copied_run_is_shown_and_no_repeat(tmp_path: Path) -> None:
    for name in "ab":
        a_run(tmp_path / name, run_id="0123")
    found = summary(tmp_path)
    assert [group.values["repeats"] for group in found.groups] == [1, 1]
    assert found.remarks() == ["b: has the id 0123 of a: a copied run, not counted as a repeat"]


def test_a_resumed_run_says_that_its_times_are_of_its_last_attempt(tmp_path: Path) -> None:
    a_run(tmp_path / "a", rank={"first_step": 5, "losses": [], "eval_losses": []})
    assert summary(tmp_path).remarks() == ["a: was resumed: its times are those of its last attempt"]


def test_efficiency_is_speed_up_by_growth_in_processes(tmp_path: Path) -> None:
    # 48 samples in 0.8 s, and on three processes in 0.4 s: twice as fast, by 3.
    a_run(tmp_path / "a", 0.8)
    a_run(tmp_path / "b", 0.4, pods=3, technique="zero1")
    base, row = rows(tmp_path)
    assert (base["base"], base["scaling_efficiency"]) == ("A", 1.0)
    assert (row["base"], row["speed_up"]) == ("A", pytest.approx(2))
    assert row["scaling_efficiency"] == pytest.approx(2 / 3)


def test_the_base_is_none_before_other_techniques_of_as_few_processes(tmp_path: Path) -> None:
    a_run(tmp_path / "a", technique="zero1")
    a_run(tmp_path / "b")
    assert [row["base"] for row in rows(tmp_path)] == ["B", "B"]


def test_the_base_is_the_row_with_the_fewest_processes(tmp_path: Path) -> None:
    a_run(tmp_path / "a", pods=3)
    a_run(tmp_path / "b", pods=2)
    assert [row["base"] for row in rows(tmp_path)] == ["B", "B"]


@pytest.mark.parametrize(
    "other", [{"precision": "bf16"}, {"hardware": {"cpu": "another"}}, identity(dropout=0.5), {"model_id": "t5-small"}]
)
def test_no_ratio_is_drawn_between_rows_that_differ_in_more(tmp_path: Path, other: dict[str, Any]) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", technique="zero1", **other)
    assert [row["scaling_efficiency"] for row in rows(tmp_path)] == [None, None]


def test_where_it_is_asked_for_a_ratio_is_drawn_and_marked(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", 0.4, pods=2, precision="bf16")
    found = summary(tmp_path, allow_differences=True)
    assert found.to_json()["groups"][1]["speed_up"] == pytest.approx(2)
    assert "* B is set against A although they differ in precision" in found.remarks()


def test_a_row_that_is_a_base_for_others_has_itself_as_base(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", 0.4, pods=2, precision="bf16")
    groups = summary(tmp_path, allow_differences=True).to_json()["groups"]
    assert [(row["base"], row["differs_in"]) for row in groups] == [("A", []), ("A", ["precision"])]


def test_where_ratios_were_asked_for_it_is_not_said_that_there_are_none(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", 0.4, pods=2, precision="bf16")
    texts = [summary(tmp_path, allow_differences=allowed).to_markdown() for allowed in (False, True)]
    assert ["No ratio is drawn between rows that do" in text for text in texts] == [True, False]


def test_a_profiled_run_is_not_compared_with_one_that_was_not(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", technique="zero1", deepspeed={"flops_profiler": {"enabled": True}})
    assert summary(tmp_path).differences() == ["profiler: false (A); true (B)"]


def test_a_failed_run_is_no_base(tmp_path: Path) -> None:
    a_run(tmp_path / "a", status="timeout")
    a_run(tmp_path / "b", pods=2)
    assert [row["base"] for row in rows(tmp_path)] == [None, None]


def test_pods_that_share_a_machine_are_said_so_beside_efficiency(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", pods=3)
    assert "| A           | 3 on 1 " in summary(tmp_path).to_markdown()


def test_of_gpus_the_names_are_compared_and_not_their_number(tmp_path: Path) -> None:
    for name, count in (("a", 1), ("b", 2)):
        a_run(tmp_path / name, pods=count, hardware={"gpus": ["GPU X"] * count})
    assert summary(tmp_path).differences() == []


def test_a_row_of_several_slots_says_so(tmp_path: Path) -> None:
    a_run(tmp_path / "a", ranks=[a_rank(0), a_rank(1)], pods=1, slots=2)
    assert "| A ddp x1x2 " in summary(tmp_path).to_markdown()


def test_buckets_are_compared_where_both_have_them() -> None:
    small, large = {"reduce_bucket_size": 1}, {"reduce_bucket_size": 2}
    assert (unequal(small, large), unequal(small, {})) == (["reduce_bucket_size"], [])


def test_rows_that_differ_in_technique_and_pods_alone_differ_in_nothing_else(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", pods=3, technique="zero1")
    assert summary(tmp_path).differences() == []


def test_what_else_rows_differ_in_is_spelled_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_record())
    a_run(tmp_path / "b")
    assert summary(tmp_path).differences() == ["effective_batch_size: 32 (A); 48 (B)"]


def test_another_learning_rate_is_a_difference(tmp_path: Path) -> None:
    for name, rate in (("a", 0.001), ("b", 0.002)):
        a_run(tmp_path / name, **identity(learning_rate=rate))
    assert summary(tmp_path).differences() == ["learning_rate: 0.001 (A); 0.002 (B)"]


def test_another_deepspeed_configuration_is_the_technique(tmp_path: Path) -> None:
    for name, config in (("a", None), ("b", {"zero_optimization": {"stage": 1}})):
        a_run(tmp_path / name, **identity(deepspeed=config))
    assert summary(tmp_path).differences() == []


def test_rows_of_one_value_are_named_as_a_span(tmp_path: Path) -> None:
    for name, pods, precision in (("a", 1, "bf16"), ("b", 1, "fp32"), ("c", 2, "fp32"), ("d", 3, "fp32")):
        a_run(tmp_path / name, pods=pods, precision=precision)
    assert summary(tmp_path).differences() == ["precision: bf16 (A); fp32 (B-D)"]


def test_after_z_come_two_letters() -> None:
    named = letters()
    assert [next(named) for _ in range(28)][-3:] == ["Z", "AA", "AB"]


def test_a_column_that_no_row_has_is_left_out(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    assert "MFU" not in summary(tmp_path).to_markdown()


def test_the_originals_columns_come_first(tmp_path: Path) -> None:
    a_run(tmp_path / "a", rank={"peak_resident_bytes": GIB * 3 // 2})
    header = summary(tmp_path).to_markdown().splitlines()[2]
    names = [name.strip() for name in header.strip("| ").split("|")]
    assert names[:7] == [
        "row", "model", "technique", "pods", "duration (s)", "inference result", "memory of each pod (GiB)",
    ]  # fmt: skip


def test_a_price_gives_a_cost(tmp_path: Path) -> None:
    a_run(tmp_path / "a", rank={"wall_seconds": 1_800.0})
    assert rows(tmp_path, price_per_hour=3.0)[0]["cost"] == 1.5


def test_published_rows_are_shown_and_never_compared(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    document = summary(tmp_path).to_json()
    assert {row["model"] for row in document["reference"]} == {"t5-small", "t5-large"}
    assert [row["name"] for row in document["groups"]] == ["a"]
