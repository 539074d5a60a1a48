"""Causal runs in the summary: beside those of text-to-SQL, and never compared with them."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.made import MIB, a_failed_record, a_rank, a_run, a_score, statistics, write_run
from zeropods.plan.known_models import known_config
from zeropods.report.run import Run, memory_table, training_table
from zeropods.report.summary import Summary, read_runs

SHAPE = known_config("gpt-tiny")
SQUAD_SCORE = {
    "task": "squad", "examples": 200, "exact_match": 0.25, "f1": 0.5,
    "intervals": {"exact_match": [0.2, 0.3], "f1": [0.4, 0.6]}, "own_metrics": {"short": 0.75},
}  # fmt: skip
LM_SCORE = {"task": "lm", "tokens": 1_000, "loss": 2.0, "perplexity": math.exp(2.0)}


def causal(
    folder: Path, task: str = "squad", *, seconds: float = 0.8, pods: int = 1, length: int = 512, **values: Any
) -> Path:
    """A run of gpt-tiny, with its score if one is given."""
    record = {
        "task": task,
        "model_id": "gpt-tiny",
        "prompt": "squad" if task == "squad" else None,
        "identity": {"max_seq_length": length, "loss_on": "answer" if task == "squad" else "all"},
        "rank": {"shape": SHAPE, **values.pop("rank", {})},
        **{"score_dev" if key == "score" else key: value for key, value in values.items()},
    }
    return a_run(folder, None, pods, seconds, **record)


def rows(summary: Summary) -> list[dict[str, Any]]:
    return summary.to_json()["groups"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A run of each task, all scored."""
    folder = tmp_path_factory.mktemp("three")
    a_run(folder / "a", model_id="t5-small", score_test=a_score())
    causal(folder / "b", score=SQUAD_SCORE)
    causal(folder / "c", "lm", score=LM_SCORE)
    return read_runs([folder])


def section(summary: Summary, title: str) -> str:
    return summary.to_markdown().split(f"## {title}")[1].split("##")[0]


def test_published_runs_stand_beside_runs_of_their_task_and_model_alone(three: Summary, tmp_path: Path) -> None:
    causal(tmp_path / "task" / "c", "lm", score=LM_SCORE)
    a_run(tmp_path / "model" / "a", model_id="t5-tiny")
    others = [read_runs([tmp_path / name]) for name in ("task", "model")]
    for summary, is_shown in ((three, True), *((other, False) for other in others)):
        texts = (summary.to_text(), summary.to_markdown(), summary.to_page())
        assert {"Published elsewhere" in text for text in texts} == {is_shown} == {bool(summary.to_json()["reference"])}


def test_runs_of_each_task_are_rows_with_their_scores(three: Summary) -> None:
    keys = ("task", "model_id", "exact_match", "f1", "perplexity", "text_tokens", "execution_accuracy")
    assert [[row[key] for key in keys] for row in rows(three)] == [
        ["text2sql", "t5-small", 0.5, None, None, None, 0.75],
        ["squad", "gpt-tiny", 0.25, 0.5, None, None, None],
        ["lm", "gpt-tiny", None, None, pytest.approx(math.exp(2)), 1_000, None],
    ]
    assert "own_metrics.short" in three.to_csv().splitlines()[0]


def test_people_read_f1_perplexity_and_the_result_of_each_task(three: Summary) -> None:
    accuracy, results = section(three, "Accuracy"), section(three, "Results")
    assert "| 0.500 [0.400, 0.600] |" in accuracy
    assert "| 7.39 " in accuracy and "| short " in accuracy and "| 0.750 " in accuracy
    for shown in (
        "execution 0.750 [0.500, 1.000] (test) |",
        "F1 0.500 [0.400, 0.600] (dev) ",
        "perplexity 7.39 (dev) ",
    ):
        assert f"| {shown}" in results
    assert three.differences() == [
        "task: text2sql (A none x1); squad (B none x1); lm (C none x1): different kinds of samples, never compared"
    ]


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


def epochs(folder: Path, **values: Any) -> Run:
    """300 rows by 48: seven steps an epoch, 20 steps, evaluated before the first and twice in the second epoch."""
    losses = [(0, 6.0), (7, 3.0), (10, 2.75), (14, 2.5), (20, 2.25)]
    rank = {"eval_losses": [{"step": step, "loss": loss} for step, loss in losses], **values.pop("rank", {})}
    return Run(causal(folder, train_rows=300, rank=rank, **values))


def test_the_training_table_has_the_last_evaluation_of_each_epoch(tmp_path: Path) -> None:
    table = training_table([epochs(tmp_path / "a")])
    (row,) = table.rows
    assert dict(zip(table.header, row, strict=True)) == {
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


def test_what_a_run_has_not_measured_is_said_in_its_line(tmp_path: Path) -> None:
    oom = Run(write_run(tmp_path / "oom", a_failed_record("oom", task="squad")))
    table = training_table([epochs(tmp_path / "a"), Run(causal(tmp_path / "b", train_rows=960)), oom])
    _, short, failed = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert (short["eval loss, epoch 1"], short["eval loss, epoch 2"]) == ("2.2500", "n/a")
    assert (failed["status"], failed["final train loss"], failed["training (samples/s)"]) == ("oom", "n/a", "n/a")


def sampled(**columns: tuple[float, float, float]) -> dict[str, Any]:
    """Statistics by column: peak, mean and minimum, in MiB."""
    return {name: statistics(*(size * MIB for size in sizes)) for name, sizes in columns.items()}


SAMPLES = sampled(resident_bytes=(900.0, 800.0, 512.5))


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ([SAMPLES], ("resident", "1,024.0", "800.0", "512.5")),
        ([SAMPLES | sampled(device_used_bytes=(4e3, 3e3, 500.0))], ("device-used", "4,000.0", "3,000.0", "500.0")),
        ([SAMPLES, sampled(resident_bytes=(1e3, 700.0, 600.0))], ("resident", "1,024.0", "750.0", "512.5")),
        ([{}], ("resident", "1,024.0", "n/a", "n/a")),
    ],
)
def test_the_memory_table_is_of_the_gpu_where_there_is_one_and_over_all_ranks(
    tmp_path: Path, ranks: list[dict[str, Any]], shown: tuple[str, ...]
) -> None:
    measured = [a_rank(number, shape=SHAPE, sampled=one) for number, one in enumerate(ranks)]
    (row,) = memory_table([Run(causal(tmp_path / "a", ranks=measured, pods=len(ranks)))]).rows
    assert row == ("a", "none" if len(ranks) == 1 else "ddp", *shown)
