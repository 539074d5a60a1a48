"""A training script as a real child process of this one: its result, its failure, its end, and who records it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.full.conftest import TINY
from tests.full.launches import until
from tests.made import a_config, a_rank
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.launch.local import run_here, run_one
from zeropods.launch.notebook import train
from zeropods.launch.outcome import UnopenedError
from zeropods.measure.record import Record, read_record
from zeropods.pods.hostfile import Host

WAIT_SECONDS, LIMIT_SECONDS = 20.0, 1.5
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


def one(script: Path, folder: Path, timeout_seconds: float | None = None) -> Record:
    """What a sweep makes of a run in one process."""
    launch = Launch(
        script=script, arguments=("--outputdir", str(folder)), folder=folder, hosts=(Host("here", 1),), master_port=0,
        launcher="none",
    )  # fmt: skip
    return run_one(launch, timeout_seconds)


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


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_refused_run_had_opened_goes_and_the_output_of_another_script_stays(
    script: Callable[[str], Path], tmp_path: Path, is_there: bool
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    if is_there:
        folder.mkdir()
    with pytest.raises(UserError, match=r"^no such data$"):
        run(script("sys.exit('zeropods: no such data')"), folder)
    assert list(folder.iterdir()) == [] if is_there else not folder.exists()
    with pytest.raises(KeyboardInterrupt):
        run(script("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"), folder)
    assert list(folder.iterdir()) == [] if is_there else not folder.exists()
    with pytest.raises(UserError, match="its last message: why"):
        run(script("sys.exit('why')"), other)
    assert (other / "launch.log").read_text() == "why\n"


def test_a_launch_in_which_no_rank_began_leaves_no_folder(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(prepared, tmp_path / "broken"))
    os.truncate(next((broken / "train").glob("*.arrow")), 100)
    words = [*TINY, "--dataset_path", broken, "--outputdir", tmp_path / "run", "--max_steps", 1]
    assert main(["launch", "--launcher", "none", "--slots", "2", "--", "textsql_train.py", *map(str, words)]) == 1
    assert "interrupted" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_failure_is_not_explained_by_an_older_record(script: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="failed: long ago"):
        run(script("rank('failed', 'long ago'); sys.exit(1)"), tmp_path / "run")
    with pytest.raises(UserError, match="failed: ended with status 1; its last message: in use"):
        run(script("print('in use'); sys.exit(1)"), tmp_path / "run")


def test_an_interrupted_run_has_time_to_say_so_and_nothing_is_left(
    script: Callable[[str], Path], tmp_path: Path
) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: (rank('interrupted', 'SIGTERM'), sys.exit(1)))\nlast()"
    assert not ended(TRAIN, script(handler), tmp_path / "run")
    assert '"interrupted"' in (tmp_path / "run" / "ranks" / "0.json").read_text()


def test_a_script_that_ignores_the_request_to_end_is_killed(script: Callable[[str], Path], tmp_path: Path) -> None:
    path = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nlast()")
    assert not ended(f"local.GRACE_SECONDS = 0.5; {TRAIN}", path, tmp_path / "run")


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


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (("interrupted", "SIGTERM"), ("timeout", "took longer than 1.5 s")),
        (("oom", "no memory left"), ("oom", "no memory left")),
    ],
)
def test_a_run_that_takes_too_long_is_recorded_with_what_it_measured(
    script: Callable[[str], Path], tmp_path: Path, told: tuple[str, str], found: tuple[str, str]
) -> None:
    record = one(script(f"until_told{told}"), tmp_path / "run", LIMIT_SECONDS)
    assert (record.status, record.reason) == found
    assert record.samples_per_second == pytest.approx(32 / 0.8)
    assert record.last_lines == ["waits"] and read_record(tmp_path / "run") == record


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("print('bad flag'); sys.exit(3)", "failed", "ended with status 3; its last message: bad flag"),
        ("time.sleep(60)", "timeout", "took longer than 1.5 s"),
    ],
)
def test_a_run_that_never_began_has_no_record(
    script: Callable[[str], Path], tmp_path: Path, body: str, status: str, reason: str
) -> None:
    with pytest.raises(UnopenedError) as caught:
        one(script(body), tmp_path / "run", LIMIT_SECONDS)
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert not (tmp_path / "run" / "record.json").exists()


def test_a_notebook_s_run_is_ended_too_and_not_by_a_time_that_ends_nothing(
    script: Callable[[str], Path], tmp_path: Path
) -> None:
    told = script("until_told('interrupted', 'SIGTERM')")
    with pytest.raises(UserError, match=r"timeout: took longer than 1.5 s; last lines of launch.log:\nwaits"):
        train(told, outputdir=tmp_path / "run", timeout_seconds=LIMIT_SECONDS)
    for seconds in (0.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"--timeout .*; expected more than 0 seconds"):
            train(told, outputdir=tmp_path / "other", timeout_seconds=seconds)
