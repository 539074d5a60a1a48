"""Processes of a fork server: what a new process would be, on this machine and as the ranks of a pod."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.full.clusters import command, zeropods
from tests.full.conftest import TINY
from tests.full.forks import train_ranks
from tests.full.launches import ROOT, until
from zeropods.launch.forks import Forked, fork, own_server
from zeropods.measure.heartbeat import read_beats
from zeropods.measure.record import read_record
from zeropods.programs import child_environment, extension_cache

SCRIPT = """
import json, os, sys, time
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("COLOUR"), "torch" in sys.modules, __name__]), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server whose libraries are loaded."""
    train_ranks(["--help"], 1, tmp_path_factory.mktemp("forks") / "said")
    found = own_server()
    assert found is not None
    return found


def forked(server: Path | None, *words: object) -> Forked:
    """A fork of the server with these words."""
    found = fork(server, [*map(str, words)], child_environment())
    assert found is not None
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_a_fork_has_the_arguments_environment_folder_and_streams_of_a_new_process_and_its_status_is_told(
    server: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open(tmp_path / "said", "wb") as said, open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), said.fileno(), said.fileno())
        ended = fork(server, [str(script), "0", "b c"], child_environment() | {"COLOUR": "blue"}, streams)
    assert ended is not None and ended.wait(600) == 7 == ended.poll()
    assert json.loads((tmp_path / "said").read_text()) == [["0", "b c"], str(tmp_path), "blue", True, "__main__"]


LOADED = """
import sys
assert "datasets" in sys.modules
import cpuinfo
if hasattr(cpuinfo.get_cpu_info, "cache_info"):
    cpuinfo.get_cpu_info()
    sys.exit(cpuinfo.get_cpu_info.cache_info().misses)
sys.exit(5)
"""


def test_a_fork_has_what_each_of_several_ranks_would_import_and_ask_of_the_processor(
    server: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(LOADED)
    is_compiled = (extension_cache() / "cpu_adam" / "cpu_adam.so").is_file()
    # The server has asked once, where it could load the operation that asks.
    assert forked(server, tmp_path / "script.py").wait(600) == (1 if is_compiled else 5)


def test_who_says_nothing_keeps_nobody_waiting_and_without_a_server_nothing_is_forked(
    server: Path, script: Path, tmp_path: Path
) -> None:
    endless = forked(server, script, 600)
    assert fork(server, [str(script), "0"], child_environment() | {"MUCH": "x" * 300_000}) is None
    assert fork(tmp_path / "none", [str(script), "0"], child_environment()) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(server))
        assert forked(server, script, 0).wait(600) == 7 and endless.poll() is None
    endless.send_signal(signal.SIGTERM)
    endless.wait(600)


def test_a_process_whose_libraries_would_read_something_else_gets_a_server_of_its_own(
    server: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "LD_PRELOAD", "PYTHONOPTIMIZE", "HF_HOME", "DS_ACCELERATOR"):
        assert fork(server, [str(script), "0"], child_environment() | {name: "other"}) is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    other = own_server()
    assert other not in (None, server)
    assert forked(other, script, 0).wait(600) == 7
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert own_server() == server


def test_a_fork_heeds_signals_and_ends_with_whoever_asked_for_it(server: Path, script: Path) -> None:
    endless = forked(server, script, 600)
    with pytest.raises(subprocess.TimeoutExpired):
        endless.wait(0.1)
    assert endless.poll() is None
    endless.send_signal(signal.SIGKILL)
    assert endless.wait(600) == -signal.SIGKILL
    left = forked(server, script, 600)
    pid = left.pid
    del left
    until(lambda: not psutil.pid_exists(pid))


def test_a_server_stays_where_forks_end_just_as_nobody_wants_them_any_more(
    server: Path, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text("import os; os._exit(0)")
    before = forked(server, script, 600)
    for number in range(40):
        ends = forked(server, tmp_path / "ends.py")
        if number % 2:
            ends.send_signal(signal.SIGKILL)
        del ends
    # It would have taken this one along.
    assert before.poll() is None
    before.send_signal(signal.SIGKILL)
    assert before.wait(600) == -signal.SIGKILL


def test_ranks_on_pods_are_forks_that_end_with_their_run_and_their_pod_and_a_launch_is_scored(
    home: Path, prepared: Path, tmp_path: Path
) -> None:
    """The one that is scored is of t5-3b at tiny widths, with ZeRO-3 offload."""
    folder = tmp_path / "run"
    assert zeropods("pods", "up", "--count", 2).returncode == 0
    flags = [*TINY, "--dataset_path", prepared, "--outputdir", folder, "--eval_steps", 0, "--deepspeed"]
    endless = ["dsconfig/zero1.json", "--max_steps", 100_000]
    launch = subprocess.Popen(command("launch", "--", "textsql_train.py", *flags, *endless), cwd=ROOT)
    until(lambda: [beat.step > 1 for beat in read_beats(folder).values()] == [True, True])
    ranks = [psutil.Process(beat.pid) for beat in read_beats(folder).values()]
    servers = [rank.parents()[0] for rank in ranks]
    assert len(set(servers)) == 2 and all("zeropods.launch.forks" in server.cmdline() for server in servers)
    launch.send_signal(signal.SIGINT)
    launch.wait(600)
    until(lambda: not any(rank.is_running() for rank in ranks))
    other = ["dsconfig/zero3_offload.json", "--model_id", "t5-3b-tiny", "--max_steps", 2, "--resume", "never"]
    again = subprocess.run(
        command("launch", "--questions", 2, "--json", "--", "textsql_train.py", *flags, *other),
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    record, score = read_record(folder), json.loads(again.stdout)["score"]
    assert (record.status, record.model_id, record.technique) == ("ok", "t5-3b-tiny", "zero3_offload")
    assert score["examples"] == 2 and json.loads((folder / "score.test.json").read_text()) == score
    assert all(server.is_running() for server in servers)
    assert zeropods("pods", "down").returncode == 0
    until(lambda: not any(server.is_running() for server in servers))
