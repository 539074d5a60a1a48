"""The four answers of a summary, and what makes its figures comparable, whole and honest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.cli import main
from zeropods.report.groups import ratio_interval
from zeropods.report.summary import Summary, read_runs, summarize
from zeropods.techniques import DSCONFIG

MIB = 2**20
SHAPE = {"d_model": 2, "d_kv": 1, "d_ff": 4, "layers": 1, "heads": 2, "vocabulary": 10}


def a_run(
    folder: Path,
    technique: str = "none",
    pods: int = 1,
    seconds: float = 0.8,
    mebibytes: int = 8,
    deepspeed: dict[str, Any] | None = None,
    **values: Any,
) -> Path:
    """A run of 48 samples per step, of that many seconds each, whose states take so many MiB of each process."""
    live = {"parameters": mebibytes * MIB, "gradients": 0, "optimizer": 0}
    score = {"score_test": values.pop("score")} if "score" in values else {}
    given = values.pop("rank", {})
    ranks = [a_rank(i, **{"step_seconds": [seconds] * 20, "live_bytes": live, **given}) for i in range(pods)]
    record = {"ranks": ranks, "pods": pods, "run_id": str(folder), "effective_batch_size": 48, "deepspeed": deepspeed}
    return write_run(folder, a_record(**{**record, "technique": technique, **values}), **score)


@pytest.fixture
def compared(tmp_path: Path) -> Summary:
    """Three repeats of one pod, of DDP, of ZeRO-1 that is as fast, and of ZeRO-3 that is slow and small; one failed."""
    rows = [("none", 1, 0.8, 8), ("ddp", 3, 0.4, 8), ("zero1", 3, 0.4, 5), ("zero3_offload", 3, 1.0, 2)]
    for technique, pods, seconds, size in rows:
        for seed, factor in enumerate((0.98, 1.0, 1.02)):
            score = a_score(intervals={"execution_accuracy": [0.7, 0.8]})
            a_run(tmp_path / technique / str(seed), technique, pods, seconds * factor, size, score=score)
    oom = a_failed_record("oom", "tried to allocate 2 GiB", effective_batch_size=48, run_id="oom", identity={"x": 1})
    write_run(tmp_path / "oom", oom)
    return read_runs([tmp_path])


def test_the_four_questions_are_answered_by_the_figures(compared: Summary) -> None:
    fits, techniques, time, accuracy = compared.answers().texts
    assert fits.startswith("t5-tiny trained in 4 ways on 2 cores of a CPU. The fullest pod took 1 GiB resident. ")
    assert "2 MiB (D zero3_offload x3) to 8 MiB (A none x1 and B ddp x3) of each process." in fits
    assert techniques.startswith("Fastest is B ddp x3, with 2.00 [1.")
    assert "times the samples/s of A none x1. It cannot be told apart from C zero1 x3. " in techniques
    smallest = "Smallest is D zero3_offload x3: 25% of the parameters, gradients and optimizer states of A none x1"
    assert smallest in techniques
    assert "B ddp x3 trained 20 steps in 8.0 s, 30 s from start to end" in time and "adds the cost" in time
    assert accuracy.startswith("A none x1 reaches execution 0.750 [0.700, 0.800] (test). ")
    assert "D zero3_offload x3 differ from it by no more than chance." in accuracy


def test_rows_that_stand_alone_have_a_table_of_their_own_and_a_short_mention(compared: Summary) -> None:
    first, other, *_ = compared.tables
    assert [row[0] for row in first.rows] == ["A none x1", "B ddp x3", "C zero1 x3", "D zero3_offload x3"]
    assert (other.title, [row[0] for row in other.rows]) == ("Other runs", ["E none x1"])
    assert other.header == first.header and compared.answers().texts[0].endswith("Not set against these: E none x1.")
    assert "E none x1" not in compared.speed_memory.svg


def test_a_run_out_of_memory_belongs_to_the_rows_of_its_settings(tmp_path: Path) -> None:
    for name, pods in (("a", 2), ("b", 3)):
        a_run(tmp_path / name, "zero1", pods)
    write_run(tmp_path / "c", a_failed_record("oom", "tried to allocate 2 GiB", effective_batch_size=48, run_id="c"))
    found = read_runs([tmp_path])
    assert [len(table.rows) for table in found.tables if table.title in ("Results", "Other runs")] == [3]
    assert "in 2 of 3 ways" in found.answers().texts[0] and "A none x1 ran out of memory." in found.answers().texts[0]


def test_the_rows_with_the_most_runs_come_first_and_no_profiled_one_before_another(tmp_path: Path) -> None:
    profiler = {"flops_profiler": {"enabled": True}}
    for name, technique, count, values in (
        ("a", "zero1", 3, {"deepspeed": profiler}),
        ("a", "zero2", 3, {"deepspeed": profiler}),
        ("b", "none", 1, {"precision": "bf16"}),
        ("b", "zero1", 1, {"precision": "bf16"}),
        ("c", "zero1", 2, {}),
        ("c", "zero2", 2, {}),
    ):
        for seed in range(count):
            a_run(tmp_path / name / technique / str(seed), technique, 1, **values)
    found = read_runs([tmp_path])
    assert [group.name.split("/")[0] for group in found.groups] == ["c", "c", "b", "b", "a", "a"]
    assert [row[0] for row in found.tables[0].rows] == ["A zero1 x1", "B zero2 x1"]


def test_rows_as_small_as_one_another_are_all_named(tmp_path: Path) -> None:
    for technique, size in (("none", 16), ("zero1", 10), ("zero2", 10), ("zero3", 11)):
        a_run(tmp_path / technique, technique, 1, mebibytes=size)
    assert "Smallest are B zero1 x1 and C zero2 x1 alike: 62% of" in read_runs([tmp_path]).answers().texts[1]


def test_points_at_one_place_share_their_letters(tmp_path: Path) -> None:
    for technique, seconds, size in (("none", 0.8, 16), ("zero1", 0.5, 10), ("zero2", 0.5, 10), ("zero3", 0.9, 10)):
        a_run(tmp_path / technique, technique, 1, seconds, size)
    texts = re.findall(r"<text[^>]*>([A-D](?:, [A-D])*)</text>", read_runs([tmp_path]).speed_memory.svg)
    assert texts == ["A", "B, C", "D"]


def test_a_price_and_an_accuracy_that_fell_are_told(tmp_path: Path) -> None:
    for name, pods, share in (("a", 1, 0.75), ("b", 2, 0.25)):
        score = a_score(execution_accuracy=share, intervals={"execution_accuracy": [share - 0.05, share + 0.05]})
        a_run(tmp_path / name, "ddp" if pods > 1 else "none", pods, score=score)
    _, _, time, accuracy = read_runs([tmp_path], price_per_hour=120.0).answers().texts
    assert "which costs 1" in time and "adds the cost" not in time
    assert "B ddp x2 0.250 differs from it by more than chance." in accuracy


def test_nothing_is_claimed_where_nothing_is_known(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "{")
    assert set(read_runs([tmp_path]).answers().texts) == {"No run left a record, so nothing is known yet."}
    write_run(tmp_path / "b", a_record())
    fits, techniques, _, accuracy = read_runs([tmp_path]).answers().texts
    assert "1 way" in fits and "none is called faster" in techniques and "No run was scored" in accuracy


def test_each_model_has_an_answer_of_its_own(tmp_path: Path) -> None:
    for name in ("t5-small", "t5-large"):
        a_run(tmp_path / name, model_id=f"google-t5/{name}", score=a_score())
    answers = read_runs([tmp_path]).answers()
    assert [line.split(":")[0] for line in answers.texts[0].splitlines()] == ["t5-large", "t5-small"]
    assert [line.split(" reaches")[0] for line in answers.texts[3].splitlines()] == [
        "t5-large: A none x1",
        "t5-small: B none x1",
    ]


def test_a_terminal_ends_with_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "runs" / "a")
    assert main(["summary", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("?")[0] for line in said if "?" in line] == [
        "Does it fit",
        "Which technique",
        "How long, and at what cost",
        "Is the model still good",
    ]
    assert said[-1].startswith("Is the model still good?")


# What the first table shows of each row.


def test_the_first_table_has_accuracy_ratio_and_memory_of_states(compared: Summary) -> None:
    table = compared.tables[0]
    line = dict(zip(table.header, table.rows[1], strict=True))
    assert line["inference result"] == "execution 0.750 [0.700, 0.800] (test)"
    assert line["speed-up"].startswith("2.00 [1.") and line["speed-up"].endswith("] over A")
    assert line["throughput (samples/s)"].startswith("120.0 [") and line["duration (s)"] == "30.0"
    assert (line["states of each pod (MiB)"], line["memory of each pod (GiB)"]) == ("8.0", "1.00")
    assert dict(zip(table.header, table.rows[0], strict=True))["speed-up"] == "1.00, baseline"


def test_activations_are_those_of_the_plan(tmp_path: Path) -> None:
    batch = {"rows": 16, "source_tokens": 64, "target_tokens": 64}
    a_run(tmp_path / "a", rank={"shape": SHAPE, "largest_batch": batch})
    (row,) = read_runs([tmp_path]).to_json()["groups"]
    assert row["pod_activation_bytes"] > 0 and row["pod_state_bytes"] == [8 * MIB]


# Repeats.


def test_two_repeats_are_their_values_and_three_have_an_interval(tmp_path: Path) -> None:
    for number, seconds in enumerate((0.8, 0.4, 0.6)):
        a_run(tmp_path / str(number), seconds=seconds)
        (row,) = read_runs([tmp_path]).to_json()["groups"]
        if number == 1:
            assert (
                row["samples_per_second_interval"] is None and "| 60.0, 120.0 " in read_runs([tmp_path]).to_markdown()
            )
    assert len(row["samples_per_second_interval"]) == 2


def test_the_interval_of_a_ratio_is_that_of_the_delta_method() -> None:
    # Means 20 and 10, standard deviations 2 and 1: relative variances 2 x 0.01 / 3 = 1/150; by Welch 4 degrees of
    # freedom, t(0.975, 4) = 2.776; 2 x 2.776 x sqrt(1/150) = 0.4534.
    assert ratio_interval([18.0, 20.0, 22.0], [9.0, 10.0, 11.0]) == pytest.approx([1.5466, 2.4534], abs=1e-3)
    assert ratio_interval([18.0, 20.0], [9.0, 10.0, 11.0]) is None


# The whole DeepSpeed configuration is compared.


def config(name: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DSCONFIG / f"{name}.json").read_text())
    found["zero_optimization"].update(changes.pop("zero", {}))
    return {**found, **changes}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            config("zero3_offload"),
            config("causal_zero3_offload"),
            ["optimizer.type: from the flags (A); AdamW (B)", "scheduler.type: from the flags (A); WarmupDecayLR (B)"],
        ),
        (
            config("zero3_offload"),
            config("zero3_offload", zero={"zero_quantized_weights": True}),
            ["zero_optimization.zero_quantized_weights: by default (A); true (B)"],
        ),
        (
            config("zero3"),
            config("zero3", zero={"stage3_max_live_parameters": 5}),
            ["zero_optimization.stage3_max_live_parameters: 100000000 (A); 5 (B)"],
        ),
        (
            config("zero3"),
            config("zero3", wall_clock_breakdown=True),
            ["wall_clock_breakdown: by default (A); true (B)"],
        ),
    ],
)
def test_keys_of_deepspeed_that_differ_are_named_and_no_ratio_is_drawn(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], said: list[str]
) -> None:
    for name, pods, deepspeed in (("a", 1, one), ("b", 2, other)):
        a_run(tmp_path / name, "zero3_offload", pods, deepspeed=deepspeed)
    found = read_runs([tmp_path])
    assert [line for line in found.differences() if not line.endswith("warmup_type: by default (A); linear (B)")] == [
        f"deepspeed {line}" for line in said
    ]
    assert [row["base"] for row in found.to_json()["groups"]] == [None, None]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, config("zero3_offload")),
        (config("zero1"), config("zero3_offload")),
        (config("zero2"), config("zero2", zero={"zero_quantized_weights": False, "reduce_scatter": True})),
        (config("zero2"), config("zero2", tensorboard={"enabled": True, "output_path": "/elsewhere", "job_name": "x"})),
        (config("zero2"), config("zero2", train_micro_batch_size_per_gpu=8, gradient_clipping=0.0)),
    ],
)
def test_what_technique_pods_folder_and_defaults_change_is_no_difference(
    tmp_path: Path, one: dict[str, Any] | None, other: dict[str, Any]
) -> None:
    for name, pods, deepspeed in (("a", 1, one), ("b", 2, other)):
        a_run(tmp_path / name, "none" if deepspeed is None else "zero2", pods, deepspeed=deepspeed)
    found = read_runs([tmp_path])
    assert (found.differences(), [row["base"] for row in found.to_json()["groups"]]) == ([], ["A", "A"])


# A peak that was disturbed, use of the hardware, and a run that was restarted.


def test_mfu_is_of_the_best_peak_of_such_hardware_and_a_disturbed_one_is_told(tmp_path: Path) -> None:
    tokens = {"source_tokens": 6_400, "target_tokens": 3_200, "padded_tokens": 12_800, "shape": SHAPE}
    for name, technique, peak in (("a", "none", 100e9), ("b", "zero1", 200e9)):
        a_run(tmp_path / name, technique, rank={**tokens, "matmul_flops_per_second": peak})
    a_run(tmp_path / "c", precision="bf16", rank={**tokens, "matmul_flops_per_second": 50e9})
    found = read_runs([tmp_path])
    rows = found.to_json()["groups"]
    assert [(row["peak_flops_per_second"], row["peak_flops_run"]) for row in rows] == [
        (200e9, "b"),
        (200e9, "b"),
        (50e9, "c"),
    ]
    assert rows[0]["model_flops_utilization"] == pytest.approx(rows[1]["model_flops_utilization"])
    (remark,) = (line for line in found.remarks() if "peak" in line)
    assert remark.startswith("a: its own matmul peak, 100.0 GFLOP/s, is 50% of the 200.0 of b")


def test_use_and_power_are_means_over_ranks_with_their_95th_percentile(tmp_path: Path) -> None:
    def sampled(mean: float, p95: float | None) -> dict[str, Any]:
        one = {"samples": 9, "peak": 100.0, "mean": mean, "minimum": 0.0, "p95": p95}
        return {"utilization_percent": one, "power_watts": one}

    ranks = [a_rank(i, sampled=sampled(40.0 + 20 * i, 90.0 + i)) for i in range(2)]
    a_run(tmp_path / "a", pods=2, ranks=ranks)
    # A record from before there was a percentile, and one without samples.
    a_run(tmp_path / "b", "zero1", 2, rank={"sampled": sampled(10.0, None)})
    a_run(tmp_path / "c", "zero2", 2)
    found = read_runs([tmp_path])
    keys = ("utilization_percent_mean", "utilization_percent_p95", "power_watts_mean")
    assert [[row[key] for key in keys] for row in found.to_json()["groups"]] == [
        [50.0, 90.5, 50.0],
        [10.0, None, 10.0],
        [None, None, None],
    ]
    table = found.to_markdown().split("## Use and power\n")[1].split("##")[0]
    assert "GPU, mean (%)" in table and "power, 95th percentile (W)" in table and "zero2" not in table


def test_goodput_is_the_share_of_the_wall_time_in_steps_that_count(tmp_path: Path) -> None:
    # 12 steps of 1 s, the last two of them lost; then 10 more. The end comes 40 s after the start.
    began = 1_700_000_000.0
    first = a_rank(step_seconds=[1.0] * 12, status="failed", reason="killed")
    last = a_rank(step_seconds=[1.0] * 10, first_step=10, losses=[], eval_losses=[], ended_unix_seconds=began + 40)
    started = {"started_at": "2023-11-14T22:13:20+00:00", "effective_batch_size": 48}
    run = write_run(tmp_path / "a", a_record(ranks=[last], attempt=1, **started))
    (run / "attempts").mkdir()
    (run / "attempts" / "0.json").write_text(json.dumps(a_record(ranks=[first], status="failed", **started)))
    found = read_runs([tmp_path])
    (row,) = found.to_json()["groups"]
    assert (row["goodput"], row["lost_steps"]) == (pytest.approx(0.5), 2)
    assert "goodput (%)" in found.to_markdown()
    (run / "attempts" / "0.json").unlink()
    assert read_runs([tmp_path]).to_json()["groups"][0]["goodput"] is None


def test_a_page_has_whole_words_and_a_legend_for_its_rows(compared: Summary, tmp_path: Path) -> None:
    summarize([compared.entries[0].folder.parents[1]], tmp_path / "out")
    picture = (tmp_path / "out" / "speed_memory.svg").read_text()
    assert picture.startswith("<svg ") and "<title>D zero3_offload x3: 48.01 samples/s, 2 MiB</title>" in picture
    assert picture.count("zero3_offload x3") >= 2
    assert "anywhere" not in (tmp_path / "out" / "index.html").read_text()
