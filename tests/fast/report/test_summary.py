"""The summary of runs whose records are written by hand: rows, reasons, differences, ratios, files."""

import csv
import fcntl
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.made import GIB, a_config, a_failed_record, a_rank, a_record, a_run, a_score, write_run
from zeropods.errors import UserError
from zeropods.report.entry import Timeline
from zeropods.report.groups import letters, unequal
from zeropods.report.plots import over_time
from zeropods.report.run import Run
from zeropods.report.summary import Summary, read_runs


def rows(folder: Path, **options: Any) -> list[dict[str, Any]]:
    return read_runs([folder], **options).to_json()["groups"]


def two(folder: Path, one: dict[str, Any], other: dict[str, Any], **options: Any) -> Summary:
    """The summary of two runs, `a` and `b`."""
    a_run(folder / "a", **one)
    a_run(folder / "b", **other)
    return read_runs([folder], **options)


def identity(seed: int = 42, **flags: Any) -> dict[str, Any]:
    return {"identity": {"seed": seed, **flags}}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that a process is writing."""
    folder = tmp_path / "held"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(a_config()))
    with open(folder / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


# Runs: which there are, and what of them cannot be read.


def test_what_of_a_run_cannot_be_read_is_its_status_and_reason_and_breaks_no_other(tmp_path: Path, held: Path) -> None:
    write_run(tmp_path / "a", a_record(steps="20"))
    a_run(tmp_path / "b", hardware={"gpus": None}, score_test=a_score(groups=5))
    # A reason is one line, and cannot steer a terminal.
    write_run(tmp_path / "c", a_failed_record("oom", "tried \x1b[31m\u202e to allocate\n2 GiB", run_id="c"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "run.lock").touch()
    found = read_runs([tmp_path])
    runs = {run["run"]: (run["status"], run["model_id"], run["reason"]) for run in found.to_json()["runs"]}
    assert [runs[name][:2] for name in ("a", "b", "d", held.name)] == [
        ("broken", None), ("ok", "t5-tiny"), ("killed", None), ("running", "t5-tiny"),
    ]  # fmt: skip
    said = "score.test.json: groups is 5: Input should be an object; measure again"
    assert "steps is '20'" in runs["a"][2] and runs["b"][2].startswith(said)
    failed = {run: reason for _, _, reason, run, *_ in found.table("Failed or unfinished runs").rows}
    assert failed.keys() == {"a", "c", "d", held.name} and failed["c"] == "tried \ufffd[31m\ufffd to allocate 2 GiB"
    # Why a row failed stands in its line; of a run with a result, a remark says what could not be read.
    assert [remark.split(":")[:2] for remark in found.remarks()] == [["b", " ok"]]


def test_folders_are_runs_or_hold_some(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / parent / "a") for parent in "xy"]

    def names(*folders: Path) -> list[str]:
        return [run["run"] for run in read_runs(folders).to_json()["runs"]]

    assert names(runs[0]) == ["a"] and names(tmp_path) == ["x/a", "y/a"]
    assert names(tmp_path / "x", runs[0]) == ["a"] and names(*runs) == [str(run) for run in runs]
    (tmp_path / "empty").mkdir()
    for folder, said in (("none", "no such folder"), ("empty", "no runs found")):
        with pytest.raises(UserError, match=said):
            read_runs([tmp_path / folder])


HEADER = (
    "unix_seconds,phase,allocated_bytes,reserved_bytes,device_used_bytes,resident_bytes,"
    "utilization_percent,power_watts,memory_utilization_percent,cpu_percent,io_wait_percent\n"
)


def a_sample(seconds: float, resident: int | str = 5, phase: str = "steady") -> str:
    return f"{seconds},{phase},,,,{resident},,,,50.5,\n"


def timeline(folder: Path, samples: str) -> Timeline:
    """The samples of a run of one rank, whose attempt took 30 s and ended at 1,030."""
    a_run(folder, rank={"ended_unix_seconds": 1_030.0})
    (folder / "memory").mkdir()
    (folder / "memory" / "0.csv").write_bytes(samples.encode("utf-8", "surrogateescape"))
    (found,) = read_runs([folder]).timelines
    return found


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (a_sample(1_001, 7, "save"), [(1_000, "load", 5), (1_001, "save", 7)]),
        # A later attempt, of a later version, has more columns.
        ("1001,save,,,,7,,,,50.5,,9,9\n", [(1_000, "load", 5), (1_001, "save", 7)]),
        # A last line that was cut short, and samples of an earlier attempt, are left out.
        ("1001,ste", [(1_000, "load", 5)]),
        (a_sample(500), [(1_000, "load", 5)]),
    ],
)
def test_samples_of_the_last_attempt_are_read_in_their_order(
    tmp_path: Path, rest: str, expected: list[tuple[float, str, float]]
) -> None:
    found = timeline(tmp_path / "a", HEADER + a_sample(1_000, phase="load") + rest)
    samples = found.ranks[0][["unix_seconds", "phase", "resident_bytes"]]
    assert (list(samples.itertuples(index=False, name=None)), found.faults) == (expected, ())


def test_of_a_long_file_peaks_and_means_are_kept(tmp_path: Path) -> None:
    samples = [a_sample(1_000 + number / 1_000, 90 if number == 7_001 else 5) for number in range(10_000)]
    found = timeline(tmp_path / "a", HEADER + "".join(samples))
    kept = found.ranks[0]
    assert len(kept) <= 2_000 and found.faults == ()
    assert (kept["resident_bytes"].max(), kept["resident_bytes"].min(), set(kept["cpu_percent"])) == (90, 5, {50.5})
    assert kept["unix_seconds"].is_monotonic_increasing and kept["unix_seconds"].iloc[0] == 1_000
    memory, use = (over_time([found], 1, what) for what in ("memory", "use"))
    assert (memory.text, use.text) == ("memory over time of A none x1", "use over time of A none x1")
    assert "GiB resident" in memory.svg and "CPU (% of cores)" in use.svg


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "damaged: No columns"),
        ("unix_seconds,bytes\n1,2\n", "no column allocated_bytes"),
        (HEADER + "???\n", "left out 1 line without a valid sample"),
        ("\udcff\udcfe", "damaged"),
    ],
)
def test_samples_that_cannot_be_read_are_named(tmp_path: Path, text: str, said: str) -> None:
    assert timeline(tmp_path / "a", text).ranks == {}
    (remark,) = read_runs([tmp_path]).remarks()
    assert remark.startswith("A none x1: memory/0.csv: ") and said in remark


# Rows: repeats together.


def test_runs_equal_but_for_their_seed_are_repeats(tmp_path: Path) -> None:
    # 48 samples in 4, 2 and 1.5 s: 12, 24 and 32 samples/s. Mean 22.667, standard deviation 10.066;
    # 4.303 x 10.066 / sqrt(3) = 25.007, and a rate is never below 0.
    for seed, seconds in enumerate((4.0, 2.0, 1.5)):
        a_run(tmp_path / "cell" / str(seed), seconds=seconds, **identity(seed))
        (row,) = rows(tmp_path)
        if seed == 1:
            assert row["samples_per_second_interval"] is None
            assert "| 12.0, 24.0 " in read_runs([tmp_path]).to_markdown()
    assert (row["name"], row["repeats"], row["runs"]) == ("cell", 3, ["cell/0", "cell/1", "cell/2"])
    assert row["samples_per_second"] == pytest.approx(22.667, abs=1e-3)
    assert row["samples_per_second_interval"] == pytest.approx([0.0, 47.674], abs=5e-3)


def test_memory_of_repeats_is_the_most_that_each_pod_needed_of_one_kind(tmp_path: Path) -> None:
    for name, sizes in (("a", (1, 4)), ("b", (3, 2))):
        ranks = [a_rank(i, peak_resident_bytes=size) for i, size in enumerate(sizes)]
        a_run(tmp_path / name, ranks=ranks, pods=2)
    (row,) = rows(tmp_path)
    assert (row["pod_memory_bytes"], row["peak_memory_bytes"]) == ([3, 4], 4)
    (row,) = two(tmp_path / "kinds", {"rank": {"peak_allocated_bytes": 5}}, {}).to_json()["groups"]
    assert (row["memory_kind"], row["peak_memory_bytes"]) == (None, None)


def test_a_failed_repeat_is_counted_and_not_averaged(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    write_run(tmp_path / "b", a_failed_record("oom", effective_batch_size=48, run_id="b"))
    (row,) = rows(tmp_path)
    assert (row["status"], row["repeats"], row["duration_seconds"]) == ("1 ok, 1 oom", 1, 30.0)


def test_accuracy_of_repeats_is_the_mean_of_shares_and_of_the_ends_of_intervals(tmp_path: Path) -> None:
    scores = [
        {"score_test": a_score(execution_accuracy=share, intervals={"execution_accuracy": [low, 0.8]})}
        for share, low in ((0.5, 0.4), (0.7, 0.5))
    ]
    (row,) = two(tmp_path, *scores).to_json()["groups"]
    assert row["execution_accuracy"] == pytest.approx(0.6)
    assert row["execution_accuracy_interval"] == pytest.approx([0.45, 0.8])


def test_why_repeats_of_a_row_with_a_result_failed_is_said_once_for_all_of_one_reason(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    for name, reason in (("b", "no memory"), ("c", "no memory"), ("d", "no time")):
        write_run(tmp_path / name, a_failed_record("failed", reason, effective_batch_size=48, run_id=name))
    found = read_runs([tmp_path])
    assert found.remarks() == ["each of b, c: failed: no memory", "d: failed: no time"]
    assert found.table("Failed or unfinished runs").rows == ()


def test_copied_and_resumed_runs_are_remarked(tmp_path: Path) -> None:
    resumed = {"rank": {"first_step": 5, "losses": [], "eval_losses": []}, "run_id": "0123"}
    found = two(tmp_path, {"run_id": "0123"}, resumed)
    assert [row["repeats"] for row in found.to_json()["groups"]] == [1, 1]
    assert found.remarks() == [
        "b: has the id 0123 of a: a copied run, not counted as a repeat",
        "b: was resumed: its times are those of its last attempt",
    ]


def test_notes_of_one_kind_are_one(tmp_path: Path) -> None:
    resumed = {"first_step": 5, "losses": [], "eval_losses": []}
    for name in "abcdef":
        a_run(tmp_path / name, rank=resumed, run_id="0123" if name in "abc" else name)
    assert read_runs([tmp_path]).remarks() == [
        "b of a, c of a: copied runs, which have the ids of the others; not counted as repeats",
        "each of a, d, e and 3 more: was resumed: its times are those of its last attempt",
    ]


# What rows differ in, and ratios between those that may be compared.

PROFILED = {"technique": "zero1", "deepspeed": {"flops_profiler": {"enabled": True}}}
BF16_ON_TWO = {"seconds": 0.4, "pods": 2, "precision": "bf16"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"technique": "zero1"}, []),
        ({"pods": 3, "technique": "zero1"}, []),
        (identity(deepspeed={"zero_optimization": {"stage": 1}}), []),
        ({"rank": {"machine": None}}, []),
        ({"precision": "bf16"}, ["precision: fp32 (A none x1); bf16 (B none x1)"]),
        ({"hardware": {"cpu": "another"}}, ["hardware cpu: a CPU (A none x1); another (B none x1)"]),
        ({"versions": {"python": "9"}}, ["versions python: 3.11.4 (A none x1); 9 (B none x1)"]),
        (identity(learning_rate=0.1), ["learning_rate: not recorded (A none x1); 0.1 (B none x1)"]),
        (PROFILED, ["profiler: false (A none x1); true (B zero1 x1)"]),
        (
            {"precision": "bf16", "init": "pretrained"},
            ["A none x1 / B none x1: init: random / pretrained; precision: fp32 / bf16"],
        ),
    ],
)
def test_runs_that_are_no_repeats_are_rows_and_what_else_differs_is_spelled_out(
    tmp_path: Path, other: dict[str, Any], said: list[str]
) -> None:
    hardware = {"hardware": {"cpu": "a CPU"}}
    found = two(tmp_path, hardware, {**hardware, **other})
    assert (len(found.groups), found.differences()) == (2, said)


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
    assert "* B ddp x2 is compared with A none x1, but they differ in precision" in found.remarks()
    lines = [dict(zip(found.tables[0].header, row, strict=True)) for row in found.tables[0].rows]
    assert [line["speed-up"] for line in lines] == ["1.00, baseline", "2.00 over A none x1*"]
    assert "No ratio is computed between such rows" not in found.to_markdown()
    assert "No ratio is computed between such rows" in read_runs([tmp_path]).to_markdown()


def test_of_gpus_the_names_are_compared_and_not_their_number_and_buckets_where_both_have_them(tmp_path: Path) -> None:
    values = [{"pods": count, "hardware": {"gpus": ["GPU X"] * count}} for count in (1, 2)]
    assert two(tmp_path, *values).differences() == []
    small, large = {"reduce_bucket_size": 1}, {"reduce_bucket_size": 2}
    assert (unequal(small, large), unequal(small, {})) == (["reduce_bucket_size"], [])


def test_rows_of_the_same_technique_and_pods_are_told_apart_by_what_they_are(tmp_path: Path) -> None:
    more = {
        "a": {},
        "b": {"pods": 2},
        "c": {"precision": "bf16"},
        "d": {"effective_batch_size": 16},
        "e": {"deepspeed": {"flops_profiler": {"enabled": True}}},
        "f": identity(learning_rate=0.1),
    }
    for name, values in more.items():
        a_run(tmp_path / name, **values)
    assert {row.name: row.label for row in read_runs([tmp_path]).rows} == {
        "a": "A none x1",
        "b": "B ddp x2",
        "c": "C none x1 bf16",
        "d": "D none x1 batch 16",
        "e": "F none x1 profiled",
        # No word of a label says that another rate was learned with.
        "f": "E none x1 f",
    }


def test_rows_of_one_value_are_named_as_a_span(tmp_path: Path) -> None:
    for name, pods, precision in (("a", 1, "bf16"), ("b", 1, "fp32"), ("c", 2, "fp32"), ("d", 3, "fp32")):
        a_run(tmp_path / name, pods=pods, precision=precision)
    assert read_runs([tmp_path]).differences() == ["precision: fp32 (A none x1 to C ddp x3); bf16 (D none x1)"]
    assert list(islice(letters(), 28))[-3:] == ["Z", "AA", "AB"]


# Tables, and the files of a report.


def test_failed_and_unlike_runs_have_tables_of_their_own(tmp_path: Path, held: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", pods=2)
    a_run(tmp_path / "c", precision="bf16")
    oom = a_failed_record("oom", "no memory", technique="zero3", effective_batch_size=48, run_id="d")
    write_run(tmp_path / "d", oom)
    first, others, failed, settings, *_ = read_runs([tmp_path]).tables
    titles = ("Results", "Runs with other settings", "Failed or unfinished runs", "Settings")
    assert (first.title, others.title, failed.title, settings.title) == titles
    assert [row[0] for row in (*first.rows, *others.rows)] == ["A none x1", "C ddp x2", "D none x1 bf16"]
    lines = [dict(zip(failed.header, row, strict=True)) for row in failed.rows]
    assert [(line["run"], line["status"], line["reason"]) for line in lines] == [
        ("d", "oom", "no memory"),
        (held.name, "running", "no record yet"),
    ]


def test_where_nothing_ended_well_there_is_no_table_of_results(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_failed_record())
    assert [table.title for table in read_runs([tmp_path]).tables][:2] == ["Failed or unfinished runs", "Settings"]


def test_tables_of_people(tmp_path: Path) -> None:
    small = {"model_id": "google-t5/t5-small"}
    a_run(tmp_path / "a", rank={"wall_seconds": 1_800.0}, score_test=a_score(execution_accuracy=None), **small)
    a_run(tmp_path / "b", pods=3, **small)
    a_run(tmp_path / "c", ranks=[a_rank(0), a_rank(1)], pods=1, slots=2, **small)
    found = read_runs([tmp_path], price_per_hour=3.0)
    text, document = found.to_markdown(), found.to_json()
    names = [name.strip() for name in text.split("## Results")[1].splitlines()[2].strip("| ").split("|")]
    assert names[:3] == ["row", "throughput (samples/s)", "speed-up"] and names[-3:] == ["model", "technique", "pods"]
    assert {"duration (s)", "inference result"} <= set(names)
    assert "| logical form 0.600 (test) " in text and "| B ddp x1x2 " in text and "| A none x1   | 3 on 1 " in text
    scaling = found.table("Scaling and arithmetic")
    assert scaling.header[:4] == ("row", "processes", "speed-up", "scaling efficiency")
    assert "MFU" not in text and document["groups"][0]["cost"] == 1.5
    assert {row["model"] for row in document["reference"]} == {"t5-small"} and len(document["groups"]) == 3
    facts = Run(tmp_path / "a").summary().rows
    assert ("throughput (samples/s)", "60.0") in facts and len(facts) <= 12
    assert len(Run(tmp_path / "a").summary(whole=True).rows) > 20


def test_accuracy_is_of_test_before_dev_with_a_line_for_unseen_tables_and_columns_of_rouge(tmp_path: Path) -> None:
    rouge = {"rouge1": 0.875, "rouge2": 0.625, "rougeL": 0.75, "rougeLsum": 0.75}
    groups = {"known_tables": a_score(), "unseen_tables": a_score(examples=4, execution_accuracy=0.125)}
    scored = a_score(exact_match=0.25, rouge=rouge, groups=groups)
    a_run(tmp_path / "a", score_dev=a_score(), score_test=scored)
    a_run(tmp_path / "b", "zero1", score_test=a_score())
    a_run(tmp_path / "c", "zero2")
    found = read_runs([tmp_path])
    table = found.table("Accuracy")
    lines = [dict(zip(table.header, line, strict=True)) for line in table.rows]
    keys = ("row", "split", "tables", "exact match", "execution", "rouge1", "rougeL")
    assert [tuple(line[key].split(" [")[0] for key in keys) for line in lines] == [
        ("A none x1", "test", "all", "0.250", "0.750", "0.875", "0.750"),
        ("A none x1", "test", "known", "0.500", "0.750", "n/a", "n/a"),
        ("A none x1", "test", "unseen", "0.500", "0.125", "n/a", "n/a"),
        ("B zero1 x1", "test", "all", "0.500", "0.750", "n/a", "n/a"),
        ("C zero2 x1", *["n/a"] * 6),
    ]
    assert "rouge2" in found.to_csv().splitlines()[0] and "rouge" not in read_runs([tmp_path / "b"]).to_markdown()


def test_accuracy_of_rows_that_read_alike_is_printed_once(tmp_path: Path) -> None:
    groups = {"known_tables": a_score(), "unseen_tables": a_score(execution_accuracy=0.125)}
    for name, technique, score in (
        ("a", "none", a_score(groups=groups)),
        ("b", "zero1", a_score(groups=groups)),
        ("c", "zero2", a_score(groups=groups)),
        ("d", "zero3", a_score(groups=None)),
        ("e", "zero3_offload", a_score(groups=groups)),
    ):
        a_run(tmp_path / name, technique, score_test=score)
    a_run(tmp_path / "f", "ddp", 2)
    lines = read_runs([tmp_path]).table("Accuracy").rows
    alike = "A none x1 to C zero2 x1, E zero3_offload x1"
    assert [line[:3] for line in lines] == [
        (alike, "test", "all"),
        (alike, "test", "known"),
        (alike, "test", "unseen"),
        ("D zero3 x1", "test", "all"),
        ("F ddp x2", "n/a", "n/a"),
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run whose texts are markup, and of one that was scored."""
    folder = tmp_path_factory.mktemp("report")
    evil = "<script>alert('x')</script>"
    write_run(folder / "a", a_failed_record("failed", f"'>{evil}", model_id=f"{evil}|\n", run_id="a"))
    where = {"hardware": {"cpu": "a CPU", "cores": 2}, "versions": {"torch": "2.9", "deepspeed": None}}
    write_run(folder / "b", a_record(**where), score_test=a_score())
    read_runs([folder]).write(folder / "summary")
    return folder / "summary"


def test_the_files_of_a_report_are_those_of_its_runs_byte_for_byte(report: Path) -> None:
    again = read_runs([report.parent / "a", report.parent / "b"])
    assert json.loads((report / "summary.json").read_text()) == json.loads(json.dumps(again.to_json()))
    assert (again.plots["throughput"].svg, again.to_csv(), again.to_markdown()) == tuple(
        (report / name).read_text() for name in ("throughput.svg", "summary.csv", "summary.md")
    )
    _, failed = csv.DictReader((report / "summary.csv").open())
    assert (failed["run"], failed["train_seconds"], failed["peak_memory_bytes"]) == ("a", "", str(GIB))
    plots = {"memory_over_time", "use_over_time", "losses", "throughput", "memory", "scaling", "speed_memory"}
    written = {path.name for path in report.iterdir()}
    assert written == {"summary.md", "summary.json", "summary.csv", "index.html", *(f"{name}.svg" for name in plots)}


def test_no_text_of_a_run_is_markup(report: Path) -> None:
    page = (report / "index.html").read_text()
    tags = [tag.lower() for tag in re.findall(r"<([A-Za-z]+)", page)]
    assert "script" not in tags and "table" in tags and tags.count("svg") == 7
    # Addresses within the page are those of its own plots' marks.
    addresses = re.findall(r"""(?:src|href)\s*=\s*["']?([^\s"'>]*)""", page, re.IGNORECASE)
    assert addresses and not [each for each in addresses if not each.startswith("#")]
    text = (report / "summary.md").read_text()
    assert "| '&gt;&lt;script&gt;alert('x')&lt;/script&gt; |" in text and r"| B script&gt;\| none x1 |" in text


def test_the_answers_come_first_then_where_they_are_from_and_the_picture_before_the_tables(report: Path) -> None:
    page, text = (report / "index.html").read_text(), (report / "summary.md").read_text()
    said = "Measured: 2026-01-02; 2 cores of a CPU; torch 2.9. Each figure is defined in docs/figures.md of zeropods."
    places = [page.index(part) for part in ("Does it fit?", "Is the model still good?", said, "<svg", "<table")]
    assert places == sorted(places)
    questions = [each["question"] for each in json.loads((report / "summary.json").read_text())["answers"]]
    places = [text.index(part) for part in (*questions, said, "## Results", "## Settings", "## Accuracy")]
    assert places == sorted(places) and text.startswith("- **Does it fit?** ") and len(questions) == 4
    folded = re.findall(r"<details><summary>(.*?)</summary><div class='table'", page)
    assert folded[:2] == ["Settings", "Accuracy"]
    cell = read_runs([report.parent / "a", report.parent / "b"])._repr_html_()
    assert re.findall(r"<details><summary>(.*?)</summary>", cell) == folded
    places = [cell.index(part) for part in (*questions, "<h2>Results</h2>", "<h2>Failed or unf", "<details>")]
    assert places == sorted(places)
