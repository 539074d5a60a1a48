"""The summary of runs whose records are written by hand: numbers, reasons, differences, files."""

from __future__ import annotations

import csv
import fcntl
import html.parser
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.made import GIB, a_config, a_failed_record, a_rank, a_record, a_score, write_run
from zeropods.errors import UserError
from zeropods.report.run import Run
from zeropods.report.summary import read_runs, summarize


def row(folder: Path) -> dict[str, Any]:
    """The only run of a folder, by column."""
    (run,) = read_runs([folder]).to_json()["runs"]
    return run


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that a process is writing."""
    folder = tmp_path / "held"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(a_config()))
    with open(folder / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.mark.parametrize(
    ("key", "value"),
    [("train_seconds", 16.0), ("samples_per_second", 40.0), ("eval_loss", 2.25), ("status", "ok")],
)
def test_a_finished_run_is_a_row_of_its_record(tmp_path: Path, key: str, value: object) -> None:
    write_run(tmp_path / "a", a_record())
    assert row(tmp_path)[key] == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"deepspeed": {"zero_optimization": "x"}}, "deepspeed.zero_optimization is 'x'; expected dict"),
        ({"deepspeed": {"flops_profiler": 5}}, "deepspeed.flops_profiler is 5; expected dict"),
        ({"hardware": {"gpus": "one"}}, "hardware.gpus is 'one'; expected list"),
    ],
)
def test_a_part_of_another_kind_breaks_its_run_and_no_other(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    write_run(tmp_path / "a", a_record(**values))
    write_run(tmp_path / "b", a_record(run_id="b" * 12, hardware={"gpus": None}))
    well, broken = read_runs([tmp_path]).to_json()["runs"]
    assert (broken["status"], well["status"]) == ("broken", "ok")
    assert broken["reason"] == f"record.json: {said}: run it again"


@pytest.mark.parametrize("text", ['{"identity": 5}', '{"hardware": []}', "[" * 100_000])
def test_a_configuration_of_another_kind_breaks_its_run(tmp_path: Path, held: Path, text: str) -> None:
    (held / "config.json").write_text(text)
    assert row(tmp_path)["status"] == "broken"


def test_a_reason_cannot_steer_a_terminal(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_failed_record(reason="bad \x1b[31m\u202e end"))
    assert row(tmp_path)["reason"] == "bad \ufffd[31m\ufffd end"


def test_a_run_without_a_score_has_no_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_record())
    accuracy = read_runs([tmp_path]).to_markdown().split("## Accuracy")[1]
    assert re.search(r"\| A none x1 +(\| n/a +){7}\|\n", accuracy)


def test_the_score_of_test_is_preferred_to_that_of_dev(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_record(), score_dev=a_score(), score_test=a_score(exact_match=0.25))
    assert (row(tmp_path)["split"], row(tmp_path)["exact_match"]) == ("test", 0.25)


def test_unseen_tables_have_a_line_of_their_own(tmp_path: Path) -> None:
    groups = {"known_tables": a_score(), "unseen_tables": a_score(examples=4, execution_accuracy=0.125)}
    write_run(tmp_path / "a", a_record(), score_test=a_score(groups=groups))
    assert re.search(r"\| test +\| unseen +\| 4 .*\| 0\.125 ", read_runs([tmp_path]).to_markdown())


def test_rouge_has_its_columns_where_a_score_has_it(tmp_path: Path) -> None:
    rouge = {"rouge1": 0.875, "rouge2": 0.625, "rougeL": 0.75, "rougeLsum": 0.75}
    write_run(tmp_path / "a", a_record(), score_test=a_score(rouge=rouge))
    write_run(tmp_path / "b", a_record(technique="zero1"), score_test=a_score())
    (table,) = (table for table in read_runs([tmp_path]).tables if table.title == "Accuracy")
    assert [line[-3:] for line in (table.header, *table.rows)] == [
        ("rouge1", "rouge2", "rougeL"),
        ("0.875", "0.625", "0.750"),
        ("n/a", "n/a", "n/a"),
    ]
    without = read_runs([tmp_path / "b"])
    assert "rouge" not in without.to_markdown() and "rouge2" in read_runs([tmp_path]).to_csv().splitlines()[0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{", "broken JSON"),
        (json.dumps({"schema_version": 1}), "schema_version 1; this version reads 2"),
        (json.dumps(a_record() | {"schema_version": 9}), "schema_version 9"),
        (json.dumps(a_record(steps="20")), "steps is '20'"),
        (json.dumps(a_record(samples_per_second=float("nan"))), "samples_per_second"),
        (json.dumps(a_record(ranks=[a_rank(shape={"d_model": 0})])), "ranks.0.shape: "),
    ],
)
def test_a_broken_record_is_listed_with_its_reason(tmp_path: Path, record: str, reason: str) -> None:
    write_run(tmp_path / "a", record)
    assert row(tmp_path)["status"] == "broken" and reason in row(tmp_path)["reason"]


def test_a_run_out_of_memory_is_listed_with_its_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_failed_record("oom", "tried to allocate\n2 GiB"))
    assert "- a: oom: tried to allocate 2 GiB\n" in read_runs([tmp_path]).to_markdown()


def test_a_name_in_markdown_stays_in_its_cell(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_record(model_id="a|b\n<b>"))
    assert r"| a\|b &lt;b&gt; |" in read_runs([tmp_path]).to_markdown()


class Reader(html.parser.HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run whose texts are markup, and of one that was scored."""
    folder = tmp_path_factory.mktemp("report")
    evil = "<script>alert('x')</script>"
    write_run(folder / "a", a_failed_record("failed", f"'>{evil}", model_id=evil, run_id="a"))
    where = {"hardware": {"cpu": "a CPU", "cores": 2}, "versions": {"torch": "2.9", "deepspeed": None}}
    write_run(folder / "b", a_record(**where), score_test=a_score())
    summarize([folder], folder / "summary")
    return folder / "summary"


@pytest.fixture(scope="module")
def page(report: Path) -> Reader:
    reader = Reader()
    reader.feed((report / "index.html").read_text())
    return reader


def test_csv_has_a_line_of_raw_values_for_each_run(report: Path) -> None:
    _, failed = csv.DictReader((report / "summary.csv").open())
    assert (failed["run"], failed["train_seconds"], failed["peak_memory_bytes"]) == ("a", "", str(GIB))


def test_json_on_disk_is_what_the_summary_says(report: Path) -> None:
    said = read_runs([report.parent / "a", report.parent / "b"]).to_json()
    assert json.loads((report / "summary.json").read_text()) == json.loads(json.dumps(said))


def test_the_same_runs_give_the_same_bytes(report: Path) -> None:
    again = read_runs([report.parent / "a", report.parent / "b"])
    assert (again.throughput.svg, again.to_csv()) == (
        (report / "throughput.svg").read_text(),
        (report / "summary.csv").read_text(),
    )


def test_a_run_in_a_notebook_lists_what_was_measured(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "a", a_record()))
    assert ("throughput (samples/s)", "40.0") in run.summary().rows


def test_a_run_without_a_record_is_running_or_was_killed(tmp_path: Path, held: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.lock").touch()
    runs = read_runs([tmp_path / "a", held]).to_json()["runs"]
    assert [(run["status"], run["model_id"]) for run in runs] == [("killed", None), ("running", "t5-tiny")]


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (a_score(groups=5), "groups is 5: Input should be an object; measure again"),
        ({"examples": "ten"}, "examples is 'ten'"),
    ],
)
def test_a_damaged_score_is_named_and_leaves_the_run(tmp_path: Path, score: dict[str, Any], said: str) -> None:
    write_run(tmp_path / "a", a_record(), score_test=score)
    assert row(tmp_path)["status"] == "ok" and row(tmp_path)["reason"].startswith(f"score.test.json: {said}")


def test_folders_are_runs_or_hold_some(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "a", a_record()) for parent in "xy"]

    def names(*folders: Path) -> list[str]:
        return [run["run"] for run in read_runs(folders).to_json()["runs"]]

    assert names(runs[0]) == ["a"] and names(tmp_path) == ["x/a", "y/a"]
    assert names(tmp_path / "x", runs[0]) == ["a"] and names(*runs) == [str(run) for run in runs]


@pytest.mark.parametrize(("folder", "said"), [("none", "no such folder"), ("", "no run there")])
def test_a_folder_without_runs_is_refused(tmp_path: Path, folder: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_runs([tmp_path / folder])


def test_the_page_holds_its_plots_and_no_markup_of_runs(report: Path, page: Reader) -> None:
    assert "script" not in page.tags and "table" in page.tags
    # Addresses within the page are those of its own plots' marks.
    assert page.tags.count("svg") == 7 and not [each for each in page.addresses if not each.startswith("#")]
    plots = {"memory_over_time", "use_over_time", "losses", "throughput", "memory", "scaling", "speed_memory"}
    written = {path.name for path in report.iterdir()}
    assert written == {"summary.md", "summary.json", "summary.csv", "index.html", *(f"{name}.svg" for name in plots)}


def test_the_answers_come_first_and_the_picture_before_the_tables(report: Path) -> None:
    page, text = (report / "index.html").read_text(), (report / "summary.md").read_text()
    places = [page.index(part) for part in ("Does it fit?", "Is the model still good?", "<svg", "<table")]
    assert places == sorted(places)
    answers = json.loads((report / "summary.json").read_text())["answers"]
    assert [text.index(each["question"]) for each in answers] == sorted(
        text.index(each["question"]) for each in answers
    )
    assert text.startswith("- **Does it fit?** ") and len(answers) == 4


def test_the_page_says_when_and_on_what_was_measured_and_where_figures_are_defined(report: Path) -> None:
    said = "Measured: 2026-01-02; 2 cores of a CPU; torch 2.9. Each figure is defined in docs/figures.md of zeropods."
    assert [name for name in ("index.html", "summary.md") if said not in (report / name).read_text()] == []
