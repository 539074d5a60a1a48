"""Training scripts as processes of this machine, children and forks: their results, failures, ends and records."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.full.conftest import ROOT, TINY
from tests.full.launches import RANK, until
from tests.full.launches import train as train_ranks
from tests.made import a_config, a_rank
from zeropods.cli import main
from zeropods.data.prepare import Preparation, prepare
from zeropods.data.tokenizers import GPT_TINY
from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.launch.local import run_here, run_planned
from zeropods.launch.notebook import train
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.script_call import ScriptCall
from zeropods.measure.record import read_record
from zeropods.pods.hostfile import Host

WAIT_SECONDS, LIMIT_SECONDS = 600.0, 8.0
OPENING = f"""
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--outputdir") + 1])
folder.mkdir(parents=True, exist_ok=True)
def config():
    (folder / "config.json").write_text(json.dumps({a_config()!r}))
def rank(status, reason):
    config()
    (folder / "ranks").mkdir(exist_ok=True)
    (folder / "ranks" / "0.json").write_text(json.dumps({a_rank()!r} | {{"status": status, "reason": reason}}))
def until_told(status, reason):
    config()
    signal.signal(signal.SIGTERM, lambda *_: (rank(status, reason), os._exit(1)))
    print("waits", flush=True)
    time.sleep(60)
def last():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "pids").write_text(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(600)
"""
CALLER = """
import sys
from pathlib import Path
from zeropods.launch import local
argv = [sys.executable, sys.argv[1], "--outputdir", sys.argv[2]]
"""
TRAIN = "local.run_here(argv, Path(sys.argv[2]))"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a training script that ends as its body says."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(OPENING + body)
        return path

    return write


def run(script: Path, folder: Path) -> None:
    run_here([sys.executable, str(script), "--outputdir", str(folder)], folder)


def ended(code: str, script: Path, folder: Path, signum: signal.Signals = signal.SIGINT) -> list[int]:
    """Processes that are left of a run whose caller got a signal once the run lasted."""
    command = [sys.executable, "-c", CALLER + code, str(script), str(folder)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    until(lambda: (folder / "pids").is_file() and " " in (folder / "pids").read_text(), WAIT_SECONDS)
    pids = (folder / "pids").read_text().split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    parent.send_signal(signum)
    parent.communicate(timeout=WAIT_SECONDS)
    _, alive = psutil.wait_procs(processes, timeout=0 if signum == signal.SIGINT else 2)
    left = [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    return [int(pid) for pid in pids if int(pid) in left]


def test_why_a_run_was_refused_is_said_in_the_words_of_its_script_and_no_folder_is_left(
    script: Callable[[str], Path], prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"^no such data$"):
        run(script("sys.exit('zeropods: no such data')"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="its last message: why"):
        run(script("sys.exit('why')"), tmp_path / "run")
    assert (tmp_path / "run" / "launch.log").read_text() == "why\n"
    broken = Path(shutil.copytree(prepared, tmp_path / "broken"))
    os.truncate(next((broken / "train").glob("*.arrow")), 100)
    words = [*TINY, "--dataset_path", broken, "--outputdir", tmp_path / "both", "--max_steps", 1]
    assert main(["launch", "--launcher", "none", "--slots", "2", "--", "textsql_train.py", *map(str, words)]) == 1
    assert "interrupted" not in capsys.readouterr().err and not (tmp_path / "both").exists()


def test_a_failure_is_not_explained_by_an_older_record(script: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="failed: long ago"):
        run(script("rank('failed', 'long ago'); sys.exit(1)"), tmp_path / "run")
    with pytest.raises(UserError, match="failed: ended with status 1; its last message: in use"):
        run(script("print('in use'); sys.exit(1)"), tmp_path / "run")


@pytest.mark.parametrize("handler", ["lambda *_: (rank('interrupted', 'SIGTERM'), sys.exit(1))", "signal.SIG_IGN"])
def test_an_interrupted_run_has_time_to_say_so_and_is_killed_if_it_does_not_end(
    script: Callable[[str], Path], tmp_path: Path, handler: str
) -> None:
    path = script(f"signal.signal(signal.SIGTERM, {handler})\nlast()")
    assert not ended(f"local.END_GRACE_SECONDS = 0.5; {TRAIN}", path, tmp_path / "run")
    said = tmp_path / "run" / "ranks" / "0.json"
    assert '"interrupted"' in said.read_text() if "rank" in handler else not said.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a child to its parent")
def test_a_script_ends_with_a_caller_that_was_killed(script: Callable[[str], Path], tmp_path: Path) -> None:
    left = ended(TRAIN, script("last()"), tmp_path / "run", signal.SIGKILL)
    leader = int((tmp_path / "run" / "pids").read_text().split()[0])
    assert leader not in left


KILLED = """
marks = folder / "marks"
marks.write_text(marks.read_text() + "x" if marks.exists() else "x")
if len(marks.read_text()) < {good}:
    config()
    os.kill(os.getpid(), signal.SIGKILL)
rank("ok", None)
"""


@pytest.mark.parametrize(("good", "restarts", "attempts"), [(2, 3, 2), (9, 2, 3), (9, 0, 1)])
def test_a_run_of_this_machine_is_started_again_after_sigkill(
    script: Callable[[str], Path], tmp_path: Path, good: int, restarts: int, attempts: int
) -> None:
    folder = tmp_path / "run"
    argv = [sys.executable, str(script(KILLED.format(good=good))), "--outputdir", str(folder)]
    if good > attempts:
        with pytest.raises(UserError, match="failed: rank 0 left no measurement: killed by SIGKILL"):
            run_here(argv, folder, restarts=restarts)
    else:
        run_here(argv, folder, restarts=restarts)
    assert len((folder / "marks").read_text()) == attempts


LEAVES = "print('goodbye', flush=True); os._exit(0)"


def test_a_run_whose_process_ends_with_status_0_and_is_not_finished_has_failed(
    script: Callable[[str], Path], tmp_path: Path
) -> None:
    ended_early = "failed: rank 0 left no measurement: ended with status 0 before the run was finished"
    with pytest.raises(UserError, match=f"{ended_early}; its last words: goodbye"):
        train(script(f"config(); {LEAVES}"), outputdir=tmp_path / "run")
    with pytest.raises(UserError, match="failed: ended with status 0 before it had opened the run"):
        train(script(LEAVES), outputdir=tmp_path / "run")
    launch = Launch(
        call=ScriptCall(script(f"config(); {LEAVES}"), ("--outputdir", str(tmp_path / "of-a-sweep"))),
        folder=tmp_path / "of-a-sweep", hosts=(Host("here", 1),), master_port=0, launcher="none",
    )  # fmt: skip
    record = run_planned(launch)
    assert (record.status, record.rank, [seen.status for seen in record.exits]) == ("failed", 0, [0])
    assert read_record(tmp_path / "of-a-sweep") == record


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("print('bad flag'); sys.exit(3)", "failed", "ended with status 3; its last message: bad flag"),
        ("time.sleep(60)", "timeout", "took longer than 8 s"),
    ],
)
def test_a_run_that_never_began_has_no_record(
    script: Callable[[str], Path], tmp_path: Path, body: str, status: str, reason: str
) -> None:
    folder = tmp_path / "run"
    launch = Launch(
        call=ScriptCall(script(body), ("--outputdir", str(folder))), folder=folder, hosts=(Host("here", 1),),
        master_port=0, launcher="none",
    )  # fmt: skip
    with pytest.raises(UnopenedError) as caught:
        run_planned(launch, LIMIT_SECONDS)
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert not (folder / "record.json").exists()


def test_a_notebook_s_run_is_ended_too_and_not_by_a_time_that_ends_nothing(
    script: Callable[[str], Path], tmp_path: Path
) -> None:
    told = script("until_told('interrupted', 'SIGTERM')")
    with pytest.raises(UserError, match=r"timeout: took longer than 8 s; last lines of launch.log:\nwaits"):
        train(told, outputdir=tmp_path / "run", timeout_seconds=LIMIT_SECONDS)
    for seconds in (0.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"--timeout .*; expected more than 0 seconds"):
            train(told, outputdir=tmp_path / "other", timeout_seconds=seconds)


def test_the_rank_that_was_killed_of_several_on_this_machine_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["launch", "--launcher", "none", "--slots", 2, "--", RANK, "--outputdir", folder, "--seconds", 600]
    command = [sys.executable, "-m", "zeropods", *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as launch:
        until((folder / "ranks" / "1.beat").is_file)
        until(lambda: "rank 1 trains" in (folder / "launch.log").read_text())
        os.kill(train_ranks(folder, 2)[1], signal.SIGKILL)
        said = launch.communicate(timeout=WAIT_SECONDS)[1]
    record = read_record(folder)
    assert (launch.returncode, record.status, record.rank) == (1, "failed", 1), said
    reason = "rank 1 left no measurement: killed by SIGKILL, phase steady, "
    assert (record.reason or "").startswith(reason) and f"failed: {record.reason}; last lines" in said
    assert record.last_lines == ["rank 1 trains"]
    assert (record.exits[0].rank, record.exits[0].status) == (1, -signal.SIGKILL)


# A series, by forks of one process.


DEADLINE_SECONDS = 600
SERIES = """
import json, sys
from zeropods.launch.notebook import train_series

if __name__ == "__main__":
    train_series("causal_train.py", json.loads(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def series(text_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A series whose runs fail and are interrupted; its folder and exit status."""
    folder = tmp_path_factory.mktemp("series")
    for length in (64, 2048):
        wanted = Preparation(task="lm", data=text_sample, tokenizer=GPT_TINY, max_seq_length=length, limit=20)
        prepare(wanted, folder / str(length))
    with begun(folder, flags(folder, "too-long", 2048), flags(folder, "interrupted", 64, slots=2)) as runner:
        log = folder / "interrupted" / "train.log"
        until(lambda: log.is_file() and " loss " in log.read_text(), DEADLINE_SECONDS)
        runner.send_signal(signal.SIGTERM)
        return folder, runner.wait(timeout=DEADLINE_SECONDS)


@contextmanager
def begun(folder: Path, *runs: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains these runs one after the other; it is not left."""
    (folder / "series.py").write_text(SERIES)
    command = [sys.executable, folder / "series.py", json.dumps(runs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as runner:
        try:
            yield runner
        finally:
            runner.kill()


def flags(folder: Path, name: str, length: int, **more: int) -> dict[str, Any]:
    return {
        **{"data": str(folder / str(length)), "model_name_or_path": GPT_TINY, "init": "random", "threads": 1},
        **{"max_train_steps": 100_000, "logging_steps": 1, "save_steps": 0, "eval_steps": 0, "precision": "fp32"},
        **{"outputdir": str(folder / name), **more},
    }


def test_a_run_that_fails_leaves_its_record_and_its_words(series: tuple[Path, int]) -> None:
    record = read_record(series[0] / "too-long")
    assert record.status == "failed" and "has 1024 positions" in (record.reason or "")
    assert "has 1024 positions" in (series[0] / "too-long" / "launch.log").read_text()


def test_an_interrupted_series_ends_its_run_in_order_and_says_so_by_its_status(series: tuple[Path, int]) -> None:
    record = read_record(series[0] / "interrupted")
    assert (record.status, record.world_size) == ("interrupted", 2)
    assert series[1] == 128 + signal.SIGTERM


def test_an_interrupt_while_the_fork_server_imports_ends_a_series_at_once(
    series: tuple[Path, int],
) -> None:
    with begun(series[0], flags(series[0], "early", 64)) as runner:
        begins = psutil.Process(runner.pid)
        until(lambda: "zeropods.launch.forks" in [word for child in begins.children() for word in child.cmdline()])
        (server,) = begins.children()
        runner.send_signal(signal.SIGINT)
        assert runner.wait(timeout=600) != 0
        until(lambda: not server.is_running())
    assert not (series[0] / "early" / "config.json").exists()
