"""A run in one process that takes too long, or is killed: a record says so, whoever writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made import a_config, a_rank, a_record
from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.launch.local import run_one
from zeropods.launch.notebook import train
from zeropods.launch.outcome import UnopenedError
from zeropods.measure.record import Record, read_record
from zeropods.measure.run_folder import open_run
from zeropods.pods.hostfile import Host

CONFIG = a_config()
RANK = a_rank(status="interrupted", reason="SIGTERM")
OPENING = f"""
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--outputdir") + 1])
folder.mkdir(parents=True, exist_ok=True)
def write(name, document):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document))
def config():
    write("config.json", {CONFIG!r})
def record(status, reason, rank={RANK!r}):
    rank = rank | {{"status": status, "reason": reason}}
    write("ranks/0.json", rank)
    write("record.json", {a_record(ranks=[RANK])!r} | {{"ranks": [rank], "status": status, "reason": reason}})
def until_told(status, reason):
    signal.signal(signal.SIGTERM, lambda *_: (record(status, reason), os._exit(1)))
    print("waits", flush=True)
    time.sleep(60)
"""
SECONDS = 1.5

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Makes a training script that ends as its body says."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(OPENING + body)
        return path

    return write


def ended(script: Path, folder: Path, timeout_seconds: float | None = None) -> Record:
    launch = Launch(
        script=script,
        arguments=("--outputdir", str(folder)),
        folder=folder,
        hosts=(Host("here", 1),),
        master_port=0,
        launcher="none",
    )
    return run_one(launch, timeout_seconds)


def test_a_run_that_takes_too_long_is_recorded_with_what_it_measured(script: Script, tmp_path: Path) -> None:
    record = ended(script("config(); until_told('interrupted', 'SIGTERM')"), tmp_path / "run", SECONDS)
    assert (record.status, record.reason) == ("timeout", "took longer than 1.5 s")
    assert record.samples_per_second == pytest.approx(32 / 0.8)
    assert record.last_lines == ["waits"] and read_record(tmp_path / "run") == record
    record = ended(script("config(); until_told('oom', 'no memory left')"), tmp_path / "full", SECONDS)
    assert (record.status, record.reason) == ("oom", "no memory left")


def test_a_run_that_was_killed_gets_its_record_from_outside_and_can_be_resumed(script: Script, tmp_path: Path) -> None:
    record = ended(script("config(); os.kill(os.getpid(), signal.SIGKILL)"), tmp_path / "run")
    assert (record.status, record.reason) == ("failed", "rank 0 left no measurement: killed by SIGKILL")
    assert read_record(tmp_path / "run") == record
    opening = open_run(tmp_path / "run", CONFIG["identity"], again=False)
    assert (opening.attempt, opening.resume, opening.finished) == (1, True, False)
    assert "SIGKILL" in json.loads((tmp_path / "run" / "attempts" / "0.json").read_text())["reason"]


def test_a_run_that_never_began_has_no_record(script: Script, tmp_path: Path) -> None:
    with pytest.raises(UnopenedError, match="bad flag") as caught:
        ended(script("print('bad flag'); sys.exit(3)"), tmp_path / "run")
    assert (caught.value.status, "status 3" in caught.value.reason) == ("failed", True)
    assert not (tmp_path / "run" / "record.json").exists()


def test_a_run_that_took_too_long_to_begin_has_timed_out(script: Script, tmp_path: Path) -> None:
    with pytest.raises(UnopenedError) as caught:
        ended(script("time.sleep(60)"), tmp_path / "run", SECONDS)
    assert (caught.value.status, caught.value.reason) == ("timeout", "took longer than 1.5 s")


def test_an_older_record_is_none_of_this_attempt(script: Script, tmp_path: Path) -> None:
    ended(script("config(); record('failed', 'long ago')"), tmp_path / "run")
    with pytest.raises(UnopenedError):
        ended(script("sys.exit(1)"), tmp_path / "run")


def test_a_notebook_s_run_is_ended_too(script: Script, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"timeout: took longer than 1.5 s; last lines of launch.log:\nwaits"):
        train(
            script("config(); until_told('interrupted', 'SIGTERM')"),
            outputdir=tmp_path / "run",
            timeout_seconds=SECONDS,
        )


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_a_time_that_ends_nothing_is_refused(seconds: float, script: Script, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"timeout of .* seconds; expected more than 0"):
        train(script(""), outputdir=tmp_path / "run", timeout_seconds=seconds)
