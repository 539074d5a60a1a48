"""Wrong turns of somebody's first hour, on the command line: one clear line, before any work, and nothing left."""

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.made import a_rank, a_record, write_run
from zeropods.cli import main

ROOT = Path(__file__).resolve().parents[3]
VERBS = {
    "sample": ["data", "sample"],
    "from-csv": ["data", "from-csv", "--tables", "nowhere", "--questions", "nowhere"],
    "prepare": ["prepare", "--data", "nowhere", "--tokenizer", "t5-tiny"],
    "predict": ["predict", "--model", "nowhere", "--data", "nowhere", "--split", "test"],
    "perplexity": ["perplexity", "nowhere", "--data", "nowhere", "--split", "test"],
    "export": ["export", "nowhere"],
    "sweep": ["sweep", "nowhere.yaml"],
    "summary": ["summary", "nowhere"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a command is refused with."""
    assert main([str(word) for word in words]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    return error


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("out", ["", "file/below", "/proc/new", os.fsdecode(b"\xff")])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    verb: str, out: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()
    assert "zeropods: --out" in refused(capsys, *VERBS[verb], "--out", out)
    assert os.listdir(here) == ["file"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*VERBS["predict"], "--out", "run"], "--out 'run': is a folder; give the name of a file"),
        (["score", "nosuch", "--data", "nowhere", "--split", "dev"], "nosuch: no such file; give one that"),
        (["score", "/proc/p.jsonl", "--data", "nowhere", "--split", "dev"], "choose another place"),
        (["summary", "run", "--out", "run"], "--out run: is a run folder; choose another"),
    ],
)
def test_what_is_there_is_not_written_into(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(here / "run", a_record())
    before = sorted(os.listdir(here / "run"))
    assert said in refused(capsys, *words)
    assert sorted(os.listdir(here / "run")) == before


@pytest.mark.parametrize(
    ("runs", "report"),
    [
        (["all"], "all/summary"),
        (["all/a"], "all/summary"),
        (["all/a", "all/more/b"], "all/summary"),
        (["all/more", "others/c"], "summary"),
    ],
)
def test_a_summary_is_written_beside_its_runs_where_no_place_is_named(
    runs: list[str], report: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("all/a", "all/more/b", "others/c"):
        write_run(here / run, a_record())
    assert main(["summary", *runs, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (here / document["out"]).resolve() == here / report
    assert (here / report / "index.html").is_file()
    # A second call does not take the report for a run.
    assert main(["summary", *runs, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == len(document["runs"])


NO_TORCH = """
import sys
from zeropods.cli import main
status = main(sys.argv[1:])
sys.exit("torch was imported" if "torch" in sys.modules else status)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict --model nowhere", "nowhere: no such folder; expected a run or model folder"),
        (
            "predict --model nowhere --data there --split test",
            "nowhere: no such folder; expected a run or model folder",
        ),
        ("predict --model there", "there: no record.json"),
        ("predict --model there --data there --split test", "there: no trained model (*.safetensors) there"),
        ("predict --model t5 --data nowhere --split test", "nowhere: no such folder; give the raw data, or fetch some"),
        ("predict --model t5 --data there --split test", "there/test.jsonl: no such file; give a folder that has it"),
        ("predict --model ../nowhere --task squad --data there", "nowhere: no such folder; expected a run or model"),
        (
            "perplexity ./nowhere --data there --split dev",
            "./nowhere: no such folder; expected a run or model fold",
        ),
        ("perplexity there --data there --split dev", "there: no trained model (*.safetensors) there"),
        (
            "perplexity gpt2 --data ./nowhere --split dev",
            "--data ./nowhere: no such folder; give a prepared",
        ),
        ("export nowhere --out new", "nowhere: no such folder; expected the run folder of a training script"),
        ("export there --out new", "there: no config.json of a run"),
        ("demo nowhere", "nowhere: no such folder; name run folders"),
        (
            "prepare --data nowhere --tokenizer t5-tiny --out new",
            "nowhere: no such folder; give the raw data, or fetch",
        ),
        ("prepare --task squad --data nowhere --tokenizer x --out new", "zeropods data get squad --out squad"),
        ("score p.jsonl --data nowhere --split dev", "nowhere: no such folder; give the raw data, or fetch some"),
        ("summary --against nowhere", "nowhere"),
    ],
)
def test_a_path_that_is_not_there_is_named_before_torch_is_imported(words: str, said: str, here: Path) -> None:
    (here / "there").mkdir()
    (here / "t5").mkdir()
    (here / "t5" / "model.safetensors").touch()
    (here / "t5" / "config.json").write_text(json.dumps({"is_encoder_decoder": True, "prompt": "schema"}))
    (here / "p.jsonl").write_text(json.dumps({"index": 0, "question": "?", "prediction": "", "query": None}))
    before = sorted(here.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *words.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert said in line and done.returncode == 1
    assert sorted(here.rglob("*")) == before


def test_a_summary_of_no_runs_makes_no_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere: no such folder" in refused(capsys, "summary", "nowhere")
    assert "runs: no such folder" in refused(capsys, "summary")
    assert os.listdir(here) == []


REPORT = Path(__file__).parents[1] / "data" / "profile-zero1.txt"
PLAN = "plan --model t5-small --pods 3 --gpu T4"


@pytest.mark.parametrize(
    ("words", "closed", "status"),
    [
        (PLAN, ">&-", 0),
        (PLAN, "<&- >&- 2>&-", 0),
        ("--version", ">&-", 0),
        ("plan --help", ">&-", 0),
        (f"profile {REPORT}", ">&-", 0),
        ("data sample --task lm --out sample", ">&- 2>&-", 0),
        ("pods list", ">&-", 0),
        ("summary nowhere", ">&-", 1),
        ("sumary", "2>&-", 2),
    ],
)
def test_a_command_ends_well_where_a_standard_stream_is_closed(
    words: str, status: int, closed: str, here: Path
) -> None:
    command = f"{sys.executable} -m zeropods {words} {closed}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ZEROPODS_HOME": str(here / "home")}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def test_a_terminal_that_cannot_show_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert main(["data", "sample", "--task", "lm", "--out", "thé"]) == 0
    assert b"th\\xe9" in shown.getvalue()


def test_a_prepared_set_is_not_replaced_by_another(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", "--task", "lm", "--data", "text", "--tokenizer", "gpt-tiny", "--out", "set"]
    assert main(["data", "sample", "--task", "lm", "--out", "text"]) == 0
    assert main([*words, "--max-seq-length", "16", "--limit", "50"]) == 0
    assert main([*words, "--max-seq-length", "16", "--limit", "50"]) == 0
    capsys.readouterr()
    other = "set: holds a set with other data, settings or versions"
    assert f"{other} (max_seq_length 16 -> 512)" in refused(capsys, *words, "--limit", "50")
    assert f"{other} (limit 50 -> none)" in refused(capsys, *words, "--max-seq-length", "16")
    more = ["--max-seq-length", "16", "--limit", "50", "--text-field", "body"]
    assert f"{other} (versions, --plain-vocabulary or --text-field)" in refused(capsys, *words, *more)


def test_a_writer_that_is_ended_leaves_nothing_and_one_that_was_killed_is_cleared_up(here: Path) -> None:
    assert main(["data", "sample", "--task", "lm", "--out", "data"]) == 0
    words = ["prepare", "--task", "lm", "--data", "data", "--tokenizer", "gpt-tiny", "--out", "set"]
    for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        process = subprocess.Popen([sys.executable, "-m", "zeropods", *words], stderr=subprocess.PIPE, text=True)
        while not list(here.glob(".set.*/new")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=240)
        # A busy machine gets as far as lines about progress.
        last_words = [line for line in said.splitlines() if not line.startswith("prepare: ")]
        if number == signal.SIGTERM:
            assert (process.returncode, last_words) == (128 + number, ["zeropods: ended by SIGTERM"])
        else:
            assert (process.returncode, last_words) == (-number, [])
        assert len(list(here.glob(".set.*"))) == left
    (here / ".set.other" / "new").mkdir(parents=True)
    held = os.open(here / ".set.other" / "held", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert main([*words, "--limit", "20"]) == 0
    os.close(held)
    assert sorted(os.listdir(here)) == [".set.other", "data", "set"]


def test_a_million_processes_are_planned_at_once_and_nothing_may_cost_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "t5-small", "--pods", "1e12", "--price-per-hour", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["techniques"][0]["samples_per_second"] > 0
    write_run(here / "run", a_record())
    assert main(["summary", "run", "--out", "report", "--price-per-hour", "0"]) == 0


def test_a_run_behind_a_link_is_found_once_and_a_link_that_leads_elsewhere_is_not_followed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(here / "kept" / "a", a_record())
    write_run(here / "kept" / "b", a_record(run_id="fedcba987654"))
    (here / "runs").mkdir()
    (here / "runs" / "linked").symlink_to("../kept/a")
    (here / "runs" / "again").symlink_to("../kept/a")
    (here / "runs" / "round").symlink_to("..")
    assert main(["summary", "runs", "--out", "report", "--json"]) == 0
    assert [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["again"]


def test_whiskers_end_where_the_table_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, seconds in enumerate((0.02, 0.2, 0.25)):
        rank = a_rank(step_seconds=[seconds] * 20)
        write_run(here / "runs" / str(number), a_record(run_id=f"{number:012x}", ranks=[rank]))
    assert main(["summary", "runs", "--out", "report", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["groups"]
    low, high = row["samples_per_second_interval"]
    svg = (here / "report" / "throughput.svg").read_text()
    begin, end = (float(x) for x in re.findall(r'id="patch_3">\s*<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) ', svg)[0])
    ends = re.findall(r'id="LineCollection_1">\s*<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) ', svg)[0]
    assert low == 0.0
    scale = (end - begin) / row["samples_per_second"]
    assert [float(x) for x in ends] == pytest.approx([begin, begin + scale * high])


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_home_that_is_a_file_is_named(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZEROPODS_HOME", f"{tmp_path}/file{below}")
    message = refused(capsys, "pods", "list")
    assert message == f"zeropods: ZEROPODS_HOME {tmp_path}/file{below}: {tmp_path}/file is a file; name a folder\n"
