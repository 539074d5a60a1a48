"""Launches by the pods' agents, with PATH without ssh and pdsh: real agents, DeepSpeed's launcher, real ranks.

They end in the ways in which launches over pdsh do, and leave the same records, and nothing else.
"""

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full.clusters import command, zeropods
from tests.full.conftest import TINY
from tests.full.launches import (
    RANK,
    ROOT,
    WAIT_SECONDS,
    left,
    of_processes,
    processes,
    processes_of_pod,
    record,
    train,
    until,
)
from tests.full.without_ssh import cluster_without_ssh
from zeropods import pods
from zeropods.errors import UserError
from zeropods.launch.command import AGENTS, PDSH, plan_launch
from zeropods.launch.outcome import failure
from zeropods.launch.probe import probe
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.supervisor import run_launch
from zeropods.pods.cluster import SECRET_FILE, Cluster
from zeropods.pods.wire import RefusedError, WireError, ask_all

BATCH = ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)
ODD = ["""it's $5; 50% "off" `id` * \\ äö""", "$HOME", "two\nlines", "%n", ""]
"""Arguments that a shell would change, or that could not pass through one."""


@pytest.fixture(scope="module")
def two(shared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pods that every test leaves as they are."""
    with cluster_without_ssh(tmp_path_factory.mktemp("programs"), 2, "agents") as cluster:
        yield cluster


@pytest.fixture
def mortal(shared_home: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Three pods of a test that harms them."""
    with cluster_without_ssh(tmp_path / "programs", 3, "mortal-agents") as cluster:
        yield cluster


def started(cluster: Cluster, folder: Path, *arguments: object, **flags: object) -> subprocess.Popen[str]:
    """A launch of `rank.py`; `flags`: of the launch, such as `restarts`."""
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    call = command("launch", "--name", cluster.name, *given, "--", RANK, "--outputdir", folder, *arguments)
    return subprocess.Popen(call, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=WAIT_SECONDS)[1]


def test_pods_come_up_without_ssh_and_say_so_and_nothing_of_ssh_is_there(
    shared_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster_without_ssh(tmp_path / "programs", 1, "plain") as cluster:
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cluster plain: ")]
        assert lines == [
            "cluster plain: there is no pdsh and no ssh here, so agents start the ranks (--launcher agents)"
        ]
        assert [pod.ssh_port for pod in cluster.pods] == [None]
        assert not {"id_ed25519", "ssh_config", "known_hosts"} & {path.name for path in cluster.folder.iterdir()}
        mode = (cluster.folder / SECRET_FILE).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
        assert not [pid for pid in processes("sshd") if str(cluster.folder) in str(of_processes("cmdline")[pid])]
        checked = cluster.check()
        verdicts = {check.check: check.verdict for check in checked.pods[0].checks}
        assert checked.ok and verdicts["agent"] == verdicts["project"] == "ok" and "ssh" not in verdicts
    assert "down: plain" in capsys.readouterr().out


def test_a_folder_that_pdsh_cannot_take_is_taken_where_there_is_no_pdsh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "my home"))
    with pytest.raises(UserError, match="my home/odd/ssh_config: pdsh cannot handle this path; set ZEROPODS_HOME to "):
        pods.up(1, backend="local", name="odd")
    with cluster_without_ssh(tmp_path / "programs", 1, "odd") as cluster:
        assert cluster.check().ok
    assert not list((tmp_path / "my home").iterdir())


def test_a_run_that_ends_well_has_the_record_the_log_and_the_environment_of_one_over_pdsh(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    folder = tmp_path / "run"
    process = started(two, folder, "--said", *ODD)
    said = ended(process)
    assert process.returncode == 0 and record(folder)["status"] == "ok", said
    assert "there is no pdsh and no ssh here, so the pods' agents start the ranks" in said
    assert [rank["host"] for rank in record(folder)["ranks"]] == [pod.address for pod in two.pods]
    assert record(folder)["argv"] == ["rank.py", *ODD]
    log = (folder / "launch.log").read_text()
    assert all(f"{pod.address}: rank {rank} trains" in log for rank, pod in enumerate(two.pods))
    assert "pod1: rank 0 trains" in said and "pod2: rank 1 trains" in said
    # DeepSpeed's own launcher ran on both pods, and its runner nowhere.
    imported = [line.rpartition("|")[2].strip() for line in log.splitlines()]
    assert imported.count("deepspeed.constants") == 2 and "torch" not in imported
    seen = json.loads((folder / "config.json").read_text())["identity"]["seen"]
    assert seen["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert seen["ZEROPODS_POD"] == two.pods[0].address
    assert not [name for name in seen if "SECRET" in name or "ORDERS" in name] and not left(folder)
    again = started(two, folder, "--said", *ODD)
    assert "this run is finished; nothing to do" in ended(again) and again.returncode == 0


def test_what_ended_a_run_is_said_with_its_pod_and_nothing_of_it_is_left(two: Cluster, tmp_path: Path) -> None:
    runs = {
        "rank": started(two, tmp_path / "rank", "--seconds", 600),
        "runner": started(two, tmp_path / "runner", "--seconds", 600),
        "interrupted": started(two, tmp_path / "interrupted", "--seconds", 600),
        "fails": started(two, tmp_path / "fails", "--fail_rank", 1),
        "leaves": started(two, tmp_path / "leaves", "--leave_behind"),
    }
    ranks = {name: train(tmp_path / name, 2) for name in runs}
    os.kill(ranks["rank"][1], signal.SIGKILL)
    (runner,) = processes("zeropods.launch.over_agents", tmp_path / "runner")
    os.kill(runner, signal.SIGKILL)
    runs["interrupted"].send_signal(signal.SIGINT)
    expected: dict[str, tuple[int, str, str | None, str]] = {
        "rank": (1, "failed", "pod2", "rank 1 left no measurement: killed by SIGKILL"),
        "runner": (1, "failed", None, "SIGKILL"),
        "interrupted": (130, "interrupted", None, "SIGINT"),
        "fails": (1, "oom", "pod2", "rank 1: no memory left"),
        "leaves": (0, "ok", None, ""),
    }
    for name, (status, word, pod, reason) in expected.items():
        said = ended(runs[name])
        found = record(tmp_path / name)
        assert (runs[name].returncode, found["status"]) == (status, word), said
        assert pod in (None, found["pod"]) and reason in (found["reason"] or "")
        until(lambda name=name: not left(tmp_path / name))


def test_a_killed_supervisor_leaves_nothing_and_its_run_goes_on_when_it_is_called_again(
    two: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = started(two, folder, "--seconds", 600)
    first = train(folder, 2)
    process.kill()
    until(lambda: not left(folder))
    again = started(two, folder, "--seconds", 600)
    until(lambda: not set(train(folder, 2)) & set(first))
    (folder / "enough").touch()
    said = ended(again)
    assert (record(folder)["status"], record(folder)["attempt"]) == ("ok", 1), said


def test_a_run_that_lost_a_pod_ends_well_on_the_two_that_are_left(mortal: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    how = ("--seconds", 600, "--seconds_again", 3, *BATCH)
    process = started(mortal, folder, *how, restarts=1, min_pods=2)
    train(folder)
    for pid in processes_of_pod(mortal, 1):
        os.kill(pid, signal.SIGKILL)
    said = ended(process)
    found = record(folder)
    assert (process.returncode, found["status"], found["pods"], found["restarts"]) == (0, "ok", 2, 1), said
    (entry,) = json.loads((folder / "restarts.json").read_text())["restarts"]
    assert (entry["status"], entry["pod"], entry["rank"], entry["pods"]) == ("pod_lost", "pod2", 1, ["pod1", "pod3"])
    assert not left(folder)


def test_an_agent_starts_nothing_for_who_lacks_the_secret_and_no_program_but_ours(two: Cluster, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.py"
    stranger.write_text("open('here', 'w')")
    order: dict[str, Any] = {
        "world": {"127.0.0.1": [0]}, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 1,
        "folder": str(tmp_path), "script": str(stranger), "arguments": [], "variables": {},
    }  # fmt: skip
    launch = {"do": "launch", "run": "f00d", "launcher": order}
    module = {"do": "check", "module": "http.server", "arguments": [], "folder": "/", "seconds": 60.0}
    older = {**launch, "launcher": {"argv": ["sh"]}}
    shell = {"do": "launch", "run": "f00d", "argv": ["sh"]}
    long = {"do": "x" * 9_999}
    for request, reason in (
        (launch, "agents start scripts of the project folder only"),
        (module, "module http.server: is none that checks a pod"),
        (older, "not a known order: .*is the sender's zeropods a different version?"),
        (shell, "not a known request; is the sender's zeropods a different version?"),
        (long, r"^\S+: \{'do': 'x{192}: not a known request; is the sender's zeropods a different version\?$"),
        # Neither ends the pod.
        ({"do": "end", "run": 5}, "not a known request"),
        ({"do": "end", "run": None}, "not a known request"),
        ({**launch, "launcher": {**order, "script": 5}}, "order: script is 5, expected a text without NUL; "),
        ({"do": "output", "run": "f00d", "received": 0}, "run f00d: has no launcher here"),
    ):
        for answer in ask_all(two.agents, two.secret, request, WAIT_SECONDS):
            assert isinstance(answer, RefusedError) and re.search(reason, str(answer)), answer
    for answer in ask_all(two.agents, bytes(32), launch, WAIT_SECONDS):
        assert isinstance(answer, WireError) and not isinstance(answer, RefusedError)
    assert not (tmp_path / "here").exists()
    script = tmp_path / "rank.py"
    script.write_text(RANK.read_text())
    done = zeropods("launch", "--name", two.name, "--", script, "--outputdir", tmp_path / "run")
    assert done.returncode == 1
    reason = "agents start scripts of the project folder only"
    assert reason in done.stderr.splitlines()[-1], done.stderr


def test_pdsh_is_refused_in_one_line_where_it_is_not(two: Cluster, tmp_path: Path) -> None:
    call = ScriptCall.of(RANK, ["--outputdir", str(tmp_path / "run")])
    with pytest.raises(UserError, match="--launcher pdsh: there is no pdsh and no ssh here; leave it out"):
        plan_launch(two, call, launcher=PDSH)
    assert plan_launch(two, call).launcher == AGENTS


def test_machines_are_probed_by_agents_with_variables_that_a_shell_would_change(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", """/my "50%" $HOME `id`""")
    probed = probe(two)
    assert (probed.processes, probed.machines) == (2, 1) and probed.bandwidth > 0


@pytest.mark.skipif(os.environ.get("ZEROPODS_SOAK") != "1", reason="trains on 16 pods; see make soak")
def test_sixteen_pods_train_without_ssh(shared_home: Path, prepared: Path, tmp_path: Path) -> None:
    with cluster_without_ssh(tmp_path / "programs", 16, "sixteen") as cluster:
        given = [*TINY, "--max_steps", 2, "--eval_steps", 2, "--threads", 1, "--per_device_train_batch_size", 1]
        where = ["--dataset_path", prepared, "--outputdir", tmp_path / "run"]
        call = ScriptCall.of("textsql_train.py", [str(word) for word in (*given, *where)])
        run = run_launch(plan_launch(cluster, call), cluster)
        assert (run.status, run.pods, len(run.ranks)) == ("ok", 16, 16), failure(tmp_path / "run", run)


def test_thirty_two_pods_come_up_without_ssh_and_are_checked(shared_home: Path, tmp_path: Path) -> None:
    with cluster_without_ssh(tmp_path / "programs", 32, "many") as cluster:
        assert len({pod.address for pod in cluster.pods}) == 32
        checked = cluster.check()
        assert [pod.checks[0].value for pod in checked.pods] == ["reached"] * 32, checked.remedies()
        assert pods.find("many").is_ready()
