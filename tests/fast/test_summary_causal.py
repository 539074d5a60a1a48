"""Causal runs in the summary: beside those of text-to-SQL, and never compared with them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.plan.shapes import causal_shape
from zeropods.report.gate import compare, read_rows
from zeropods.report.run import Run
from zeropods.report.run_tables import memory_table, scaling_table, training_table
from zeropods.report.summary import Summary, read_runs

MIB = 2**20
SQUAD_SCORE = {
    "task": "squad", "examples": 200, "exact_match": 0.25, "f1": 0.5,
    "intervals": {"exact_match": [0.2, 0.3], "f1": [0.4, 0.6]}, "own_metrics": {"short": 0.75},
}  # fmt: skip
LM_SCORE = {"task": "lm", "tokens": 1_000, "loss": 2.0, "perplexity": math.exp(2.0)}


def causal(
    folder: Path, task: str = "squad", *, seconds: float = 0.8, pods: int = 1, length: int = 512, **values: Any
) -> Path:
    """A run of gpt-tiny, with its score if one is given."""
    scores = {"score_dev": values.pop("score")} if "score" in values else {}
    shape = asdict(causal_shape("gpt-tiny"))
    rank = {"shape": shape, "step_seconds": [seconds] * 20, **values.pop("rank", {})}
    record = {
        "task": task,
        "model_id": "gpt-tiny",
        "prompt": "squad" if task == "squad" else None,
        "identity": {"max_seq_length": length, "loss_on": "answer" if task == "squad" else "all"},
        "run_id": str(folder),
        "effective_batch_size": 48,
        "pods": pods,
        "ranks": [a_rank(number, **rank) for number in range(pods)],
        **values,
    }
    return write_run(folder, a_record(**record), **scores)


def text2sql(folder: Path, **values: Any) -> Path:
    return write_run(folder, a_record(run_id=str(folder), **values), score_test=a_score())


def rows(summary: Summary) -> list[dict[str, Any]]:
    return summary.to_json()["groups"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A run of each task, all scored."""
    folder = tmp_path_factory.mktemp("three")
    text2sql(folder / "a")
    causal(folder / "b", score=SQUAD_SCORE)
    causal(folder / "c", "lm", score=LM_SCORE)
    return read_runs([folder])


def section(summary: Summary, title: str) -> str:
    return summary.to_markdown().split(f"## {title}")[1].split("##")[0]


def test_a_causal_run_is_a_row_with_its_task(three: Summary) -> None:
    assert [(row["task"], row["model_id"]) for row in rows(three)] == [
        ("text2sql", "t5-tiny"),
        ("squad", "gpt-tiny"),
        ("lm", "gpt-tiny"),
    ]


def test_scores_of_all_tasks_are_values_of_their_rows(three: Summary) -> None:
    keys = ("exact_match", "f1", "perplexity", "text_tokens", "execution_accuracy")
    assert [[row[key] for key in keys] for row in rows(three)] == [
        [0.5, None, None, None, 0.75],
        [0.25, 0.5, None, None, None],
        [None, None, pytest.approx(math.exp(2)), 1_000, None],
    ]


def test_f1_and_perplexity_are_shown(three: Summary) -> None:
    accuracy = section(three, "Accuracy")
    assert "| 0.500 [0.400, 0.600] |" in accuracy
    assert "| 7.39 " in accuracy and "| short " in accuracy and "| 0.750 " in accuracy


def test_the_inference_result_is_that_of_the_task(three: Summary) -> None:
    results = section(three, "Results")
    assert "| execution 0.750 [0.500, 1.000] (test) |" in results
    assert "| F1 0.500 [0.400, 0.600] (dev) " in results
    assert "| perplexity 7.39 (dev) " in results


def test_rows_of_several_tasks_say_so_and_not_what_else_differs(three: Summary) -> None:
    assert three.differences() == ["task: text2sql (A); squad (B); lm (C): different kinds of samples, never compared"]


def test_runs_of_one_task_have_no_columns_of_another(tmp_path: Path) -> None:
    causal(tmp_path / "a", score=SQUAD_SCORE)
    header = section(read_runs([tmp_path]), "Accuracy").strip().splitlines()[0]
    assert [name.strip() for name in header.strip("| ").split("|")] == [
        "row", "split", "examples", "exact match", "F1", "short",
    ]  # fmt: skip


@pytest.mark.parametrize("other", [{"task": "lm"}, {"length": 128}])
def test_another_task_or_length_is_not_compared_even_where_differences_are_allowed(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    causal(tmp_path / "a")
    causal(tmp_path / "b", pods=2, **other)
    assert [row["base"] for row in rows(read_runs([tmp_path], allow_differences=True))] == [None, None]


def test_perplexity_of_repeats_is_that_of_their_mean_loss(tmp_path: Path) -> None:
    for name, loss in (("a", 1.0), ("b", 3.0)):
        causal(tmp_path / name, "lm", score=LM_SCORE | {"loss": loss, "perplexity": math.exp(loss)})
    (row,) = rows(read_runs([tmp_path]))
    assert (row["repeats"], row["perplexity"]) == (2, pytest.approx(math.exp(2)))


@pytest.mark.parametrize(
    ("task", "score", "worse"),
    [
        ("squad", SQUAD_SCORE | {"f1": 0.41}, []),
        ("squad", SQUAD_SCORE | {"f1": 0.39}, ["f1"]),
        ("lm", LM_SCORE | {"perplexity": math.exp(2.0), "loss": 2.0}, []),
        # 1 % of 2 nats: up to exp(2.02).
        ("lm", LM_SCORE | {"perplexity": math.exp(2.019), "loss": 2.019}, []),
        ("lm", LM_SCORE | {"perplexity": math.exp(2.03), "loss": 2.03}, ["perplexity"]),
    ],
)
def test_the_gate_judges_f1_and_perplexity(tmp_path: Path, task: str, score: dict[str, Any], worse: list[str]) -> None:
    old = {"squad": SQUAD_SCORE, "lm": LM_SCORE}[task]
    for name, of_run in (("old", old), ("new", score)):
        causal(tmp_path / name / "a", task, score=of_run)
        (tmp_path / name / "summary.json").write_text(json.dumps(read_runs([tmp_path / name]).to_json()))
    before, now = (read_rows(tmp_path / name / "summary.json") for name in ("old", "new"))
    assert [one.figure for one in compare(before, now).worse] == worse


def test_a_summary_from_before_there_were_causal_runs_is_still_judged() -> None:
    old = read_rows(Path(__file__).parent / "data" / "summary-before-causal.json")
    verdict = compare(old, old)
    assert (verdict.worse, verdict.not_comparable, verdict.judged) == ((), (), len(old)) and old[0].f1 is None


def test_a_run_in_a_notebook_lists_its_f1(tmp_path: Path) -> None:
    run = Run(causal(tmp_path / "a", score=SQUAD_SCORE))
    assert ("F1", "0.500 [0.400, 0.600]") in run.summary().rows


def epochs(folder: Path, **values: Any) -> Run:
    """300 rows by 48: seven steps an epoch, 20 steps, evaluated before the first and twice in the second epoch."""
    losses = [(0, 6.0), (7, 3.0), (10, 2.75), (14, 2.5), (20, 2.25)]
    rank = {"eval_losses": [{"step": step, "loss": loss} for step, loss in losses], **values.pop("rank", {})}
    return Run(causal(folder, train_rows=300, rank=rank, **values))


def one_line(table: Any) -> dict[str, str]:
    (row,) = table.rows
    return dict(zip(table.header, row, strict=True))


def test_the_training_table_has_the_last_evaluation_of_each_epoch(tmp_path: Path) -> None:
    assert one_line(training_table([epochs(tmp_path / "a")])) == {
        "run": "a",
        "technique": "none",
        "final train loss": "2.0000",
        "eval loss, before": "6.0000",
        "eval loss, epoch 1": "3.0000",
        "eval loss, epoch 2": "2.5000",
        "eval loss, epoch 3": "2.2500",
        # 48 samples in 0.8 s; 100 dev rows in 0.5 s.
        "training (samples/s)": "60.00",
        "evaluation (samples/s)": "200.00",
        "steps per epoch": "7",
        "status": "ok",
    }


def test_an_epoch_without_an_evaluation_is_not_measured(tmp_path: Path) -> None:
    table = training_table([epochs(tmp_path / "a"), Run(causal(tmp_path / "b", train_rows=960))])
    last = dict(zip(table.header, table.rows[1], strict=True))
    assert (last["eval loss, epoch 1"], last["eval loss, epoch 2"]) == ("2.2500", "n/a")


def test_a_run_out_of_memory_has_a_line_of_its_own(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "a", a_failed_record("oom", task="squad")))
    line = one_line(training_table([run]))
    assert (line["status"], line["final train loss"], line["training (samples/s)"]) == ("oom", "n/a", "n/a")


def sampled(**columns: tuple[float, float, float]) -> dict[str, Any]:
    """Statistics by column: peak, mean and minimum, in MiB."""
    return {
        name: {"samples": 5, "peak": peak * MIB, "mean": mean * MIB, "minimum": minimum * MIB}
        for name, (peak, mean, minimum) in columns.items()
    }


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({"resident_bytes": (900.0, 800.0, 512.5)}, ("resident", "900.0", "800.0", "512.5")),
        (
            {"resident_bytes": (900.0, 800.0, 512.5), "device_used_bytes": (4_096.0, 3_000.0, 500.0)},
            ("device-used", "4,096.0", "3,000.0", "500.0"),
        ),
        ({}, ("n/a",) * 4),
    ],
)
def test_the_memory_table_is_of_the_gpu_where_there_is_one(
    tmp_path: Path, columns: dict[str, tuple[float, float, float]], shown: tuple[str, ...]
) -> None:
    run = Run(causal(tmp_path / "a", rank={"sampled": sampled(**columns)}))
    assert memory_table([run]).rows == (("a", "none", *shown),)


def test_the_memory_table_is_over_all_ranks(tmp_path: Path) -> None:
    shape = asdict(causal_shape("gpt-tiny"))
    found = [sampled(resident_bytes=(900.0, 800.0, 500.0)), sampled(resident_bytes=(1_000.0, 700.0, 600.0))]
    ranks = [a_rank(number, shape=shape, sampled=one) for number, one in enumerate(found)]
    run = Run(causal(tmp_path / "a", ranks=ranks, pods=2))
    assert memory_table([run]).rows[0][-3:] == ("1,000.0", "750.0", "500.0")


def test_the_scaling_table_goes_over_slots_and_pods(tmp_path: Path) -> None:
    shape = asdict(causal_shape("gpt-tiny"))
    two = [a_rank(number, shape=shape, step_seconds=[0.5] * 20) for number in range(2)]
    runs = [
        Run(causal(tmp_path / "alone")),
        Run(causal(tmp_path / "slots", ranks=two, slots=2, world_size=2)),
        Run(causal(tmp_path / "pods", seconds=0.4, pods=2)),
    ]
    table = scaling_table(runs)
    columns = [table.header.index(name) for name in ("pods", "slots of a pod", "speed-up", "scaling efficiency")]
    assert [[row[column] for column in columns] for row in table.rows] == [
        ["1", "1", "1.00", "1.00"],
        ["1", "2", "1.60", "0.80"],
        ["2", "1", "2.00", "1.00"],
    ]


def test_csv_and_json_hold_causal_rows(three: Summary) -> None:
    assert json.loads(json.dumps(three.to_json()))["runs"][1]["f1"] == 0.5
    assert "own_metrics.short" in three.to_csv().splitlines()[0]
