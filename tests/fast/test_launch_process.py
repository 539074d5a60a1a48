"""A training script as a command, and as a real child process: its result, its failure, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made import a_config, a_record
from zeropods.errors import UserError
from zeropods.launch.child import child_environment
from zeropods.launch.local import SCRIPT, Tail, planned_steps, train, train_argv
from zeropods.measure.record import RunConfig

WAIT_SECONDS = 20.0
OPENING = f"""
import json, os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--outputdir") + 1])
folder.mkdir(parents=True, exist_ok=True)
def record(status, reason):
    document = {a_record()!r} | {{"status": status, "reason": reason}}
    (folder / "config.json").write_text("{{}}")
    (folder / "record.json").write_text(json.dumps(document))
"""
LASTING = """
import signal
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "pids").write_text(f"{os.getpid()} {child.pid}")
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a training script that ends as its body says."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(OPENING + body)
        return path

    return write


def caller(code: str, *arguments: Path) -> subprocess.Popen[str]:
    """Another Python that runs `code`; its arguments are in `sys.argv`."""
    command = [sys.executable, "-c", f"import sys\n{code}", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def pids(folder: Path) -> list[int]:
    """The script's process and the one that it started, once both are there."""
    until(lambda: (folder / "pids").is_file() and len((folder / "pids").read_text().split()) == 2)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


TRAIN = "from zeropods.launch.local import train; train(sys.argv[1], outputdir=sys.argv[2])"


def test_a_command_has_its_flags_as_the_script_reads_them() -> None:
    argv = train_argv("a.py", outputdir=Path("/runs/a"), gradient_checkpointing=False, learning_rate=2e-3)
    flags = ["--outputdir", "/runs/a", "--gradient_checkpointing", "False", "--learning_rate", "0.002"]
    assert argv == [sys.executable, "a.py", *flags]


def test_a_flag_without_a_value_is_left_out() -> None:
    assert train_argv("a.py", deepspeed=None, resume="never")[2:] == ["--resume", "never"]


def test_the_default_script_is_that_of_the_checkout() -> None:
    assert SCRIPT.is_file()


def test_a_child_finds_the_programs_of_its_python_first() -> None:
    assert child_environment()["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_a_run_that_ends_well_is_returned_with_its_record(script: Callable[[str], Path], tmp_path: Path) -> None:
    run = train(script("record('ok', None)"), outputdir=tmp_path / "run")
    assert run.record.status == "ok"


def test_what_a_script_says_stays_in_its_run_folder(script: Callable[[str], Path], tmp_path: Path) -> None:
    train(script("record('ok', None); print('a word')"), outputdir=tmp_path / "run")
    assert (tmp_path / "run" / "launch.log").read_text() == "a word\n"


def test_a_run_that_was_finished_before_is_returned_and_says_so(
    script: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(script("record('ok', None)"), outputdir=tmp_path / "run")
    train(script("print('nothing to do')"), outputdir=tmp_path / "run")
    assert capsys.readouterr().err == "nothing to do\n"


def test_a_failure_names_the_reason_in_the_record(script: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="oom: no memory left"):
        train(script("record('oom', 'no memory left'); sys.exit(1)"), outputdir=tmp_path / "run")


def test_a_failure_without_a_record_shows_the_last_lines(script: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"status 3 .*\nbad flag"):
        train(script("print('bad flag'); sys.exit(3)"), outputdir=tmp_path / "run")


def test_a_failure_is_not_explained_by_an_older_record(script: Callable[[str], Path], tmp_path: Path) -> None:
    train(script("record('failed', 'long ago')"), outputdir=tmp_path / "run")
    with pytest.raises(UserError, match="without a record"):
        train(script("print('in use'); sys.exit(1)"), outputdir=tmp_path / "run")


def test_an_interrupted_caller_lets_the_script_write_its_record(script: Callable[[str], Path], tmp_path: Path) -> None:
    handler = "def end(*_): record('interrupted', 'SIGTERM'); sys.exit(1)\nsignal.signal(signal.SIGTERM, end)"
    path = script("import signal\n" + handler + LASTING + "time.sleep(600)")
    parent = caller(TRAIN, path, tmp_path / "run")
    pids(tmp_path / "run")
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=WAIT_SECONDS)
    assert '"interrupted"' in (tmp_path / "run" / "record.json").read_text()


def test_nothing_is_left_of_an_interrupted_run(script: Callable[[str], Path], tmp_path: Path) -> None:
    parent = caller(TRAIN, script(LASTING + "time.sleep(600)"), tmp_path / "run")
    started = pids(tmp_path / "run")
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=WAIT_SECONDS)
    assert all(map(is_gone, started))


def test_a_script_that_ignores_the_request_to_end_is_killed(script: Callable[[str], Path], tmp_path: Path) -> None:
    path = script("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + LASTING + "time.sleep(600)")
    code = (
        "from zeropods.launch.child import run_child\n"
        "argv = [sys.executable, sys.argv[1], '--outputdir', sys.argv[2]]\n"
        "run_child(argv, open('/dev/null', 'wb'), grace_seconds=0.5)"
    )
    parent = caller(code, path, tmp_path / "run")
    started = pids(tmp_path / "run")
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=WAIT_SECONDS)
    assert all(map(is_gone, started))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a child to its parent")
def test_a_script_ends_with_a_caller_that_was_killed(script: Callable[[str], Path], tmp_path: Path) -> None:
    parent = caller(TRAIN, script(LASTING + "child.wait()"), tmp_path / "run")
    leader, child = pids(tmp_path / "run")
    parent.kill()
    parent.communicate(timeout=WAIT_SECONDS)
    try:
        until(lambda: is_gone(leader))
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("batch", "steps"), [(32, 5_286), (64, 2_643), (96, 1_764)])
def test_steps_of_three_epochs_over_wikisql(batch: int, steps: int) -> None:
    identity = {"max_train_seconds": 0.0, "max_steps": -1, "epochs": 3.0}
    config = a_config(identity=identity, train_rows=56_355, effective_batch_size=batch)
    assert planned_steps(RunConfig(**config)) == steps


def test_steps_are_unknown_where_the_clock_ends_training() -> None:
    assert planned_steps(RunConfig(**a_config(identity={"max_train_seconds": 150.0}))) is None


def test_progress_is_read_from_new_and_complete_lines_only(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("INFO step 1 loss 9\n")
    tail = Tail(log)
    with open(log, "a") as file:
        file.write("INFO step 10 loss 2.5\nINFO something else\nINFO step 20 lo")
    assert tail.entries() == [(10, "loss", 2.5)]


def test_a_line_that_was_cut_is_read_when_it_is_complete(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    tail = Tail(log)
    log.write_text("INFO step 20 lo")
    assert tail.entries() == []
    with open(log, "a") as file:
        file.write("ss 2\n")
    assert tail.entries() == [(20, "loss", 2.0)]
