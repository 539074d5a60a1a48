"""The four answers of a summary, and what makes its figures comparable, whole and honest."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, a_run, a_score, statistics, write_run
from zeropods.cli import main
from zeropods.measure.intervals import ratio_interval
from zeropods.plan.known_models import known_config
from zeropods.report.summary import Summary, read_runs
from zeropods.techniques import DSCONFIG

SHAPE = known_config("t5-tiny")
REASON = "tried to allocate 2 GiB"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Three repeats of one pod, of DDP, of ZeRO-1 that is as fast, and of ZeRO-3 that is slow and small; one failed."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [("none", 1, 0.8, 8), ("ddp", 3, 0.4, 8), ("zero1", 3, 0.4, 5), ("zero3_offload", 3, 1.0, 2)]
    for technique, pods, seconds, size in rows:
        for seed, factor in enumerate((0.98, 1.0, 1.02)):
            score = a_score(intervals={"execution_accuracy": [0.7, 0.8]})
            run = folder / technique / str(seed)
            a_run(run, technique, pods, seconds * factor, mebibytes=size, score_test=score)
    oom = a_failed_record("oom", REASON, effective_batch_size=48, run_id="oom", identity={"x": 1})
    write_run(folder / "oom", oom)
    return read_runs([folder])


def test_the_four_questions_are_answered_by_the_figures(compared: Summary) -> None:
    fits, techniques, time, accuracy = compared.answers().by_question.values()
    assert fits.startswith("t5-tiny trained in 4 ways on 2 cores of a CPU. The fullest pod took 1.000 GiB resident. ")
    assert "2.000 MiB (D zero3_offload x3) to 8.000 MiB (A none x1 and B ddp x3) per process." in fits
    assert fits.endswith("per process. E none x1 oom ran out of memory.")
    assert techniques.startswith("Fastest is B ddp x3, with 2.00 [1.")
    assert "times the samples/s of A none x1. It cannot be told apart from C zero1 x3. " in techniques
    smallest = "Smallest is D zero3_offload x3: 25% of the parameters, gradients and optimizer states of A none x1"
    assert smallest in techniques
    assert "B ddp x3 trained 20 steps in 8.0 s, 30 s from start to end" in time and "adds the cost" in time
    names = "A none x1, B ddp x3, C zero1 x3 and D zero3_offload x3"
    assert accuracy == f"{names} reach execution 0.750 [0.700, 0.800] (test)."


def test_the_first_tables_have_rows_that_are_compared_then_those_that_failed(compared: Summary) -> None:
    first, failed, *_ = compared.tables
    base, ddp, *more = (dict(zip(first.header, row, strict=True)) for row in first.rows)
    assert [row["row"] for row in (base, ddp, *more)] == ["A none x1", "B ddp x3", "C zero1 x3", "D zero3_offload x3"]
    assert (failed.title, failed.rows[0][:3]) == ("Failed or unfinished runs", ("E none x1 oom", "oom", REASON))
    assert (base["speed-up"], ddp["inference result"]) == ("1.00, baseline", "execution 0.750 [0.700, 0.800] (test)")
    assert ddp["speed-up"].startswith("2.00 [1.") and ddp["speed-up"].endswith("] over A none x1")
    assert ddp["throughput (samples/s)"].startswith("120.0 [") and ddp["duration (s)"] == "30.0"
    assert (ddp["states of each pod (MiB)"], ddp["memory of each pod (GiB)"]) == ("8.0", "1.00")


def test_the_first_picture_has_a_point_and_a_legend_for_each_row_that_is_compared(compared: Summary) -> None:
    picture = compared.plots["speed_memory"].svg
    assert picture.startswith("<svg ") and "<title>D zero3_offload x3: 48.01 samples/s, 2.000 MiB</title>" in picture
    assert picture.count("zero3_offload x3") >= 2 and "E none x1" not in picture


def test_a_run_out_of_memory_belongs_to_the_rows_of_its_settings(tmp_path: Path) -> None:
    for name, pods in (("a", 2), ("b", 3)):
        a_run(tmp_path / name, "zero1", pods)
    write_run(tmp_path / "c", a_failed_record("oom", "tried to allocate 2 GiB", effective_batch_size=48, run_id="c"))
    found = read_runs([tmp_path])
    assert [(table.title, len(table.rows)) for table in found.tables[:2]] == [
        ("Results", 2),
        ("Failed or unfinished runs", 1),
    ]
    fits = found.answers().by_question["Does it fit?"]
    assert "in 2 of 3 ways" in fits and "A none x1 ran out of memory." in fits


def test_rows_of_other_settings_and_runs_without_a_result_are_named_apart(tmp_path: Path) -> None:
    for name, values in (("a", {}), ("b", {"pods": 2}), ("c", {"precision": "bf16"}), ("d", {"pods": 3})):
        a_run(tmp_path / name, **values, status="timeout" if name == "d" else "ok")
    fits = read_runs([tmp_path]).answers().by_question["Does it fit?"]
    assert "in 2 of 3 ways" in fits
    assert fits.endswith(" Without a result: C ddp x3. Other settings, so not compared with these: D none x1 bf16.")


def test_the_rows_with_the_most_runs_come_first_and_no_profiled_one_before_another(tmp_path: Path) -> None:
    profiler = {"flops_profiler": {"enabled": True}}
    for name, first, other, count, values in (
        ("a", "zero1", "zero2", 3, {"deepspeed": profiler}),
        ("b", "none", "zero1", 1, {"precision": "bf16"}),
        ("c", "zero1", "zero2", 2, {}),
    ):
        for technique in (first, other):
            for seed in range(count):
                a_run(tmp_path / name / technique / str(seed), technique, **values)
    found = read_runs([tmp_path])
    assert [group.row.name.split("/")[0] for group in found.groups] == ["c", "c", "b", "b", "a", "a"]
    assert [row[0] for row in found.tables[0].rows] == ["A zero1 x1", "B zero2 x1"]


def test_rows_as_small_as_one_another_are_all_named_and_share_their_letters_in_the_picture(tmp_path: Path) -> None:
    for technique, seconds, size in (("none", 0.8, 16), ("zero1", 0.5, 10), ("zero2", 0.5, 10), ("zero3", 0.9, 11)):
        a_run(tmp_path / technique, technique, 1, seconds, mebibytes=size)
    found = read_runs([tmp_path])
    assert "Smallest are B zero1 x1 and C zero2 x1 alike: 62% of" in found.answers().by_question["Which technique?"]
    texts = re.findall(r"<text[^>]*>([A-D](?:, [A-D])*)</text>", found.plots["speed_memory"].svg)
    assert texts == ["A", "B, C", "D"]


def test_a_price_and_an_accuracy_that_fell_are_told_and_a_terminal_ends_with_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, pods, share in (("a", 1, 0.75), ("b", 2, 0.25)):
        score = a_score(execution_accuracy=share, intervals={"execution_accuracy": [share - 0.05, share + 0.05]})
        a_run(tmp_path / "runs" / name, pods=pods, score_test=score)
    words = ["summary", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--price-per-hour", "120"]
    assert main(words) == 0
    fits, techniques, time, accuracy = capsys.readouterr().out.splitlines()[-4:]
    assert fits.startswith("Does it fit? ") and techniques.startswith("Which technique? ")
    assert time.startswith("How long, and at what cost? ") and "which costs 1" in time
    assert accuracy.startswith("Is the model still good? ")
    assert accuracy.endswith("B ddp x2 0.250 differs from it by more than chance.")


def test_linked_answers_are_named_so_and_not_compared_with_others(tmp_path: Path) -> None:
    by_names = a_score(execution_accuracy=0.5, intervals={"execution_accuracy": [0.45, 0.55]})
    linked = a_score(execution_accuracy=0.9, intervals={"execution_accuracy": [0.85, 0.95]}, linked=True)
    a_run(tmp_path / "a", "none", score_test=by_names)
    a_run(tmp_path / "b", "zero1", 2, score_test=linked)
    found = read_runs([tmp_path])
    accuracy = found.answers().by_question["Is the model still good?"]
    assert accuracy == "A none x1 reaches execution 0.500 [0.450, 0.550] (test)."
    table = found.table("Accuracy")
    assert [line[table.header.index("split")] for line in table.rows] == ["test", "test, linked"]
    assert "execution 0.900 [0.850, 0.950] (test, linked)" in found.to_markdown()


def test_nothing_is_claimed_where_nothing_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, "{")
    words = ["summary", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    said, error = capsys.readouterr()
    assert re.fullmatch(r"zeropods: a: .*broken JSON.*; no run could be read\n", error)
    for text in (said, *((tmp_path / "out" / name).read_text() for name in ("summary.md", "index.html"))):
        assert text.count("No run left a record, so nothing is known yet.") == 1
    assert len(read_runs([tmp_path / "runs"]).to_json()["answers"]) == 4
    write_run(tmp_path / "runs" / "c", a_record())
    assert main(words) == 0 and capsys.readouterr().err == ""
    fits, techniques, _, accuracy = read_runs([tmp_path / "runs"]).answers().by_question.values()
    assert "1 way" in fits and "their speeds are not compared" in techniques and "No score can be shown" in accuracy


def near_zero(execution: float, ends: tuple[float, float]) -> dict[str, Any]:
    return a_score(
        execution_accuracy=execution, logical_form_accuracy=execution, intervals={"execution_accuracy": ends}
    )


NOT_TRAINED = "Not trained enough: fewer than 1 answer in 20 is right, so nothing can be concluded about the technique"


def test_scores_near_zero_are_not_said_to_be_alike(tmp_path: Path) -> None:
    a_run(tmp_path / "a", "none", score_test=near_zero(0.0, (0.0, 0.01)))
    a_run(tmp_path / "b", "zero1", 2, score_test=near_zero(0.002, (0.0, 0.01)))
    accuracy = read_runs([tmp_path]).answers().by_question["Is the model still good?"]
    said = "A none x1 answers nothing right: execution 0.000 [0.000, 0.010] (test)."
    assert accuracy.startswith(f"{said} {NOT_TRAINED}; train")
    assert "by no more than chance" not in accuracy


def test_a_score_near_zero_is_not_said_to_be_nothing(tmp_path: Path) -> None:
    for name, technique in (("a", "none"), ("b", "zero1")):
        a_run(tmp_path / name, technique, score_test=near_zero(0.002, (0.0, 0.01)))
    accuracy = read_runs([tmp_path]).answers().by_question["Is the model still good?"]
    assert accuracy.startswith("A none x1 and B zero1 x1 reach execution 0.002 [0.000, 0.010] (test). Not trained")


@pytest.mark.parametrize(("pods", "said"), [(5, "and E zero1 x5 reach"), (6, "D zero1 x4 and 2 more reach")])
def test_the_last_of_many_rows_is_named_and_several_are_counted(tmp_path: Path, pods: int, said: str) -> None:
    for number in range(1, pods + 1):
        a_run(tmp_path / str(number), "zero1", number, score_test=near_zero(0.8, (0.7, 0.9)))
    assert said in read_runs([tmp_path]).answers().by_question["Is the model still good?"]


def test_a_score_far_from_one_near_zero_is_told_beside_the_word_about_it(tmp_path: Path) -> None:
    a_run(tmp_path / "a", "none", score_test=near_zero(0.0, (0.0, 0.01)))
    a_run(tmp_path / "b", "zero1", 2, score_test=near_zero(0.8, (0.7, 0.9)))
    accuracy = read_runs([tmp_path]).answers().by_question["Is the model still good?"]
    assert NOT_TRAINED in accuracy
    assert accuracy.endswith("B zero1 x2 0.800 differs from it by more than chance.")


def test_a_perplexity_is_no_share_of_right_answers(tmp_path: Path) -> None:
    score = {"task": "lm", "tokens": 100, "loss": 0.01, "perplexity": 1.01, "intervals": {}}
    a_run(tmp_path / "a", "none", task="lm", score_test=score)
    accuracy = read_runs([tmp_path]).answers().by_question["Is the model still good?"]
    assert "perplexity 1.01" in accuracy and "trained enough" not in accuracy


def test_each_model_has_an_answer_of_its_own(tmp_path: Path) -> None:
    for name in ("t5-small", "t5-large"):
        a_run(tmp_path / name, model_id=f"google-t5/{name}", score_test=a_score())
    fits, _, _, accuracy = read_runs([tmp_path]).answers().by_question.values()
    assert [line.split(":")[0] for line in fits.splitlines()] == ["t5-large", "t5-small"]
    assert [line.split(" reaches")[0] for line in accuracy.splitlines()] == [
        "t5-large: A none x1",
        "t5-small: B none x1",
    ]


def test_the_interval_of_a_ratio_is_that_of_the_delta_method() -> None:
    # Means 20 and 10, standard deviations 2 and 1: relative variances 2 x 0.01 / 3 = 1/150; by Welch 4 degrees of
    # freedom, t(0.975, 4) = 2.776; 2 x 2.776 x sqrt(1/150) = 0.4534.
    assert ratio_interval([18.0, 20.0, 22.0], [9.0, 10.0, 11.0]) == pytest.approx([1.5466, 2.4534], abs=1e-3)
    assert ratio_interval([18.0, 20.0], [9.0, 10.0, 11.0]) is None


# The whole DeepSpeed configuration is compared.


def config(name: str, zero: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DSCONFIG / f"{name}.json").read_text())
    found["zero_optimization"].update(zero or {})
    return {**found, **changes}


ADAMW = {
    "optimizer.type": ("from the flags", "AdamW"),
    "scheduler.type": ("from the flags", "WarmupDecayLR"),
    "scheduler.params.warmup_type": ("by default", "linear"),
}
ONE_PASS = "use_multi_rank_bucket_allreduce"
QUANTIZED, LIVE, ELSEWHERE = "zero_quantized_weights", "stage3_max_live_parameters", {"output_path": "/elsewhere"}


@pytest.mark.parametrize(
    ("one", "other", "unequal"),
    [
        ("zero3_offload", config("causal_zero3_offload"), ADAMW),
        ("zero3", config("zero3", {LIVE: 5}), {f"zero_optimization.{LIVE}": ("100000000", "5")}),
        ("zero3", config("zero3", wall_clock_breakdown=True), {"wall_clock_breakdown": ("by default", "true")}),
        ("zero2", config("zero2", {"overlap_comm": False}), {"zero_optimization.overlap_comm": ("true", "false")}),
        ("zero2", config("zero2", {ONE_PASS: False}), {f"zero_optimization.{ONE_PASS}": ("by default", "false")}),
        # What technique, pods and folder change is no difference, nor what is said to be off.
        ("zero2", config("zero2", {QUANTIZED: False}), {}),
        ("zero3", config("zero3++", {"zero_hpz_partition_size": 2}), {}),
        ("zero3", config("zero3", {QUANTIZED: True}), {}),
        (None, config("zero3_offload"), {}),
        ("zero1", config("zero3_offload"), {}),
        ("zero2", config("zero2", tensorboard={"enabled": True, "job_name": "x", **ELSEWHERE}), {}),
        ("zero2", config("zero2", train_micro_batch_size_per_gpu=8, gradient_clipping=0.0), {}),
    ],
)
def test_keys_of_deepspeed_that_differ_are_named_and_no_ratio_is_drawn(
    tmp_path: Path, one: str | None, other: dict[str, Any], unequal: dict[str, tuple[str, str]]
) -> None:
    a_run(tmp_path / "a", "zero3_offload" if one else "none", deepspeed=config(one) if one else None)
    a_run(tmp_path / "b", "zero3_offload", 2, deepspeed=other)
    found = read_runs([tmp_path])
    first, second = "A zero3_offload x1", "B zero3_offload x2"
    if len(unequal) > 1:
        pairs = [f"deepspeed {key}: {before} / {after}" for key, (before, after) in unequal.items()]
        lines = [f"{first} / {second}: {'; '.join(pairs)}"]
    else:
        lines = [f"deepspeed {key}: {before} ({first}); {after} ({second})" for key, (before, after) in unequal.items()]
    assert found.differences() == lines
    assert {row["base"] for row in found.to_json()["groups"]} == ({None} if unequal else {"A"})


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
    assert remark.startswith("a: its own matmul peak is 50% of the 200.0 GFLOP/s of b, on which its MFU is based: ")


def test_many_disturbed_peaks_are_one_remark(tmp_path: Path) -> None:
    for number in range(6):
        a_run(tmp_path / f"run{number}", rank={"matmul_flops_per_second": (100.0 if number else 400.0) * 1e9})
    (remark,) = (line for line in read_runs([tmp_path]).remarks() if "peak" in line)
    assert remark.startswith(
        "run1, run2, run3 and 2 more: their own matmul peaks are 25% to 25% of the 400.0 GFLOP/s of"
    )


def test_use_and_power_are_means_over_ranks_with_their_95th_percentile(tmp_path: Path) -> None:
    def sampled(mean: float, p95: float) -> dict[str, Any]:
        one = statistics(100.0, mean, 0.0, p95=p95)
        return {"utilization_percent": one, "power_watts": one}

    ranks = [a_rank(i, sampled=sampled(40.0 + 20 * i, 90.0 + i)) for i in range(2)]
    a_run(tmp_path / "a", pods=2, ranks=ranks)
    # One rank without samples is enough, and so are all.
    a_run(tmp_path / "b", "zero1", 2, ranks=[a_rank(0, sampled=sampled(10.0, 20.0)), a_rank(1)])
    a_run(tmp_path / "c", "zero2", 2)
    found = read_runs([tmp_path])
    keys = ("utilization_percent_mean", "utilization_percent_p95", "power_watts_mean")
    assert [[row[key] for key in keys] for row in found.to_json()["groups"]] == [
        [50.0, 90.5, 50.0],
        [None, None, None],
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
    # The steps of both attempts, those done again once; what the whole run cost nobody has measured.
    assert (row["steps"], row["train_seconds"]) == (20, pytest.approx(20.0))
    told = read_runs([tmp_path], price_per_hour=4.0).answers().by_question["How long, and at what cost?"]
    assert "trained 20 steps in 20.0 s." in told and "The cost is unknown: " in told
    assert "goodput (%)" in found.to_markdown()
    (run / "attempts" / "0.json").unlink()
    (row,) = read_runs([tmp_path]).to_json()["groups"]
    assert (row["goodput"], row["train_seconds"]) == (None, None)
