"""Workers of CML, by its double: what CML is asked, what it says, and what is left of it in the end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.full.clusters import processes_of, ssh
from tests.full.cml_double import NO_LABEL, CmlDouble
from tests.full.launches import RANK, ROOT, train, until
from tests.full.over_pdsh import pdsh_argv
from tests.full.without_ssh import path_without_ssh
from zeropods import pods
from zeropods.errors import UserError
from zeropods.launch.command import AGENTS, PDSH, Launch, plan_launch, runner_argv
from zeropods.launch.notebook import launch
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.supervisor import Supervision, run_launch
from zeropods.measure.record import Record
from zeropods.pods.backends import cml as backend
from zeropods.pods.backends.base import WorkerProcess
from zeropods.pods.backends.cml import GIVEN_VARIABLES, RUNNER
from zeropods.pods.backends.local import WORKER_SCRIPT
from zeropods.pods.cluster import Cluster, read_cluster, take_down, workers_of
from zeropods.pods.start import replace_lost_pods
from zeropods.tables import LINE_SECONDS

SLEEPER = "import time; time.sleep(300)"


@pytest.fixture
def cml(home: Path, monkeypatch: pytest.MonkeyPatch) -> CmlDouble:
    """A CML session with room for two workers."""
    double = CmlDouble(quota=2)
    double.install(monkeypatch)
    return double


def test_a_session_of_cml_is_a_pod_beside_its_workers(cml: CmlDouble, home: Path) -> None:
    cluster = pods.up(3, cpu=1, memory=2)
    assert [pod.address for pod in cluster.pods] == ["127.0.2.1", "127.0.2.2", "127.0.2.254"]
    assert (cluster.backend, cluster.shared_machine) == ("cml", False)
    assert all(ssh(cluster, pod.address, "echo", "there") == "there" for pod in cluster.pods)
    cluster.down()
    assert {worker["status"] for worker in cml.list_workers()} <= {"stopped", "succeeded"}


def test_a_worker_that_stays_pending_is_in_the_progress_line_and_named_at_the_deadline(
    cml: CmlDouble, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = LINE_SECONDS + 4
    monkeypatch.setenv("ZEROPODS_POD_SECONDS", f"{seconds:g}")
    with pytest.raises(UserError, match=rf"[0-3] of 4 pods after {seconds:g} s: ") as ended:
        pods.up(4, cpu=1, memory=2)
    assert re.search(r"^pods: \d of 4 pods,.* scheduling 1\b.* \(10 s\)$", capfd.readouterr().err, re.MULTILINE)
    waits = "worker cml00000000003 is scheduling; CML looks for a machine with 1 cores, 2 GiB and 0 GPUs"
    assert waits in str(ended.value)
    assert all(worker["finished_at"] for worker in cml.list_workers())


def test_cml_is_asked_for_a_name_a_label_and_a_profile_and_given_what_agents_need_of_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = CmlDouble(labels=(3,))
    double.install(monkeypatch)
    monkeypatch.setenv("ZEROPODS_MIRROR", "https://user:word@mirror.example")
    pods.up(2, cpu=1, memory=2, name="asked", accelerator_label=3, resource_profile=7).down()
    (call,) = double.calls
    kinds = {key: call[key] for key in ("n", "name", "accelerator_label_id", "resource_profile_id")}
    assert kinds == {"n": 1, "name": "zeropods asked", "accelerator_label_id": 3, "resource_profile_id": 7}
    given = set(GIVEN_VARIABLES) & os.environ.keys()
    assert call["env"].keys() == {"ZEROPODS_ORDERS", *given}
    assert {"PATH", "ZEROPODS_HOME"} <= given
    refusal = rf"CML cannot create 1 of 1 workers: {NO_LABEL}; .* or another label than --accelerator-label 4,"
    with pytest.raises(UserError, match=refusal):
        pods.up(2, cpu=1, memory=2, accelerator_label=4)


def test_an_older_version_of_cml_is_asked_for_what_it_knows(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double = CmlDouble(is_old=True)
    double.install(monkeypatch)
    refusal = "--accelerator-label 3: this version of CML has no accelerator_label_id for its workers; leave it out"
    with pytest.raises(UserError, match=refusal):
        pods.up(2, cpu=1, memory=2, accelerator_label=3)
    assert not double.calls
    with pytest.raises(UserError, match="--resource-profile 7: is for CML workers; leave it out"):
        pods.up(2, backend="local", resource_profile=7)
    pods.up(2, cpu=1, memory=2).down()
    assert [call["name"] for call in double.calls] == [""]


@pytest.mark.parametrize(("script", "status"), [("raise SystemExit(3)", "failed"), ("pass", "succeeded")])
def test_a_worker_ends_for_cml_as_its_agent_does_whatever_is_in_its_path(
    cml: CmlDouble, home: Path, tmp_path: Path, script: str, status: str
) -> None:
    path = tmp_path / "{a,b} $HOME 'c'.py"
    path.write_text(script)
    (worker,) = cml.launch_workers(1, cpu=1, memory=1, code=RUNNER.format(argv=[sys.executable, str(path)]))
    until(lambda: cml.status(worker["id"]) in ("failed", "succeeded"))
    assert cml.status(worker["id"]) == status


def test_a_worker_that_ends_before_it_is_a_pod_is_told_as_cml_tells_it(
    cml: CmlDouble, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(backend, "WORKER_SCRIPT", script)
    with pytest.raises(UserError, match=r"did not come up: worker cml00000000001 ended with exit code 1; "):
        pods.up(2, cpu=1, memory=2)


@pytest.mark.parametrize("reason_in", ["message", "k8sMessage"])
def test_a_worker_that_cml_cannot_create_is_told_with_cml_s_reason_and_the_others_are_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch, reason_in: str
) -> None:
    double = CmlDouble(limit=1, reason_in=reason_in)
    double.install(monkeypatch)
    with pytest.raises(UserError, match=r"^cluster \S+: CML cannot create 2 of 3 workers: ") as ended:
        pods.up(4, cpu=1, memory=2)
    reason = "workers.cml.example is forbidden: exceeded quota: requests.cpu=1, limited: requests.cpu=2"
    remedy = "ask for fewer pods or less than 1 cores, 2 GiB and 0 GPUs each, or have the quota raised"
    assert str(ended.value).endswith(f": {reason}; {remedy}")
    assert double.status("cml00000000001") == "stopped"
    assert not processes_of(home) and not list(home.iterdir())


def failing(numbers: str) -> str:
    """A worker that fails as one of those with these numbers; any other one is a pod."""
    return f"""
import os, re, runpy, sys
if re.fullmatch("cml0+[{numbers}]", os.environ["CDSW_ENGINE_ID"]):
    raise SystemExit(3)
sys.path.insert(0, {str(ROOT)!r})
runpy.run_path({str(WORKER_SCRIPT)!r}, run_name="__main__")
"""


def test_a_worker_that_is_lost_is_replaced_if_that_was_asked_for(
    cml: CmlDouble, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(failing("1"))
    monkeypatch.setattr(backend, "WORKER_SCRIPT", script)
    cluster = pods.up(3, cpu=1, memory=2, replace_lost=True)
    assert [call["n"] for call in cml.calls] == [2, 1]
    line = "worker cml00000000001 ended with exit code 1; it wrote nothing; a new one takes its place\n"
    assert capfd.readouterr().err.count(line) == 1
    assert {pod.worker for pod in cluster.pods} == set(cluster.workers) >= {"cml00000000002", "cml00000000003"}
    assert cluster.is_ready() and [pod.name for pod in cluster.pods] == ["pod1", "pod2", "pod3"]
    cluster.down()
    assert not processes_of(home) and not list(home.iterdir())


def test_a_worker_is_replaced_once_and_only_where_cml_has_workers(
    cml: CmlDouble, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(failing("123"))
    monkeypatch.setattr(backend, "WORKER_SCRIPT", script)
    with pytest.raises(UserError, match=r"did not come up: worker cml00000000002 ended with exit code 1; "):
        pods.up(2, cpu=1, memory=2, replace_lost=True)
    assert len(cml.calls) == 2 and not processes_of(home) and not list(home.iterdir())
    cml.limit = 3
    with pytest.raises(UserError, match=r"worker cml00000000003 ended .*; CML cannot create 1 of 1 workers: "):
        pods.up(2, cpu=1, memory=2, replace_lost=True)
    with pytest.raises(UserError, match="--replace: is for CML workers; leave it out"):
        pods.up(1, backend="local", replace_lost=True)


@dataclass
class Loss:
    """A run on two pods of which the second loses its worker once it trains."""

    cml: CmlDouble
    cluster: Cluster
    folder: Path
    path: str | None = None
    """PATH of this session from the loss on, if it then is another."""

    @property
    def worker(self) -> str:
        """The worker that is lost."""
        (worker,) = {pod.worker for pod in self.cluster.pods} - {record.id for record in self.of_this_session()}
        return worker

    def of_this_session(self) -> Sequence[WorkerProcess]:
        return workers_of(self.cluster).processes()

    def run(self, launcher: str | None) -> Record:
        """Run with a restart; the second attempt takes longer than the lease, which is renewed meanwhile."""

        def argv(planned: Launch, hostfile: Path) -> list[str]:
            if planned.launcher == PDSH:
                return pdsh_argv(planned, hostfile)
            return runner_argv(planned, hostfile)

        again = 2.5 * self.cluster.settings.lease_seconds
        words = ["--outputdir", str(self.folder), "--seconds", "600", "--seconds_again", str(again)]
        batch = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
        planned = plan_launch(self.cluster, ScriptCall.of(RANK, [*words, *batch]), launcher=launcher)
        loser = threading.Thread(target=self._lose)
        loser.start()
        record = run_launch(planned, self.cluster, Supervision(argv=argv, restarts=1, replace_lost=True))
        loser.join()
        return record

    def _lose(self) -> None:
        train(self.folder, 2)
        if self.path is not None:
            os.environ["PATH"] = self.path
        self.cml.lose(self.worker)


@pytest.fixture
def loss(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loss:
    double = CmlDouble()
    double.install(monkeypatch)
    return Loss(double, pods.up(2, cpu=1, memory=2, lease_seconds=10), tmp_path / "run")


@pytest.mark.parametrize("launcher", [PDSH, AGENTS, None])
def test_a_run_whose_worker_is_lost_goes_on_with_a_new_one_in_its_place_as_does_its_cluster(
    loss: Loss, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    launcher: str | None,
) -> None:  # fmt: skip
    cluster = loss.cluster
    if launcher is None:
        # pdsh is taken, and is gone once a worker is lost.
        monkeypatch.setenv("PATH", os.environ["PATH"])
        loss.path = path_without_ssh(tmp_path / "programs")
    (lost,) = [pod for pod in cluster.pods if pod.worker == loss.worker]
    record = loss.run(launcher)
    assert (record.status, record.pods, record.restarts) == ("ok", 2, 1)
    written = capfd.readouterr().err
    assert f"{lost.name} ({lost.address}) is lost; a new one takes its place\n" in written
    by_agents = f"{loss.folder}: there is no pdsh and no ssh here, so the pods' agents start the ranks\n"
    assert (by_agents in written) == (launcher is None)
    (entry,) = json.loads((loss.folder / "restarts.json").read_text())["restarts"]
    assert (entry["pod"], entry["pods"]) == (lost.name, ["pod1", "pod2"])
    now = read_cluster(cluster.folder)
    assert now is not None and now.is_ready() and [pod.name for pod in now.pods] == ["pod1", "pod2"]
    assert {pod.worker for pod in now.pods} == set(now.workers) and lost.worker not in now.workers
    # Whoever has the cluster as it was, such as a notebook, goes on with it.
    assert cluster.is_ready() and cluster.check().ok and "no answer" not in str(cluster.list())
    again = launch(cluster, RANK, outputdir=tmp_path / "again")
    assert again.record.pods == 2
    cluster.down()
    assert not processes_of(home) and not list(home.iterdir())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (ConnectionError("CML:\nconnection refused"), "ConnectionError: CML: connection refused"),
        # Neither an error of the system nor one of ours, as an answer that is not JSON ends in.
        (json.JSONDecodeError("Expecting value", "<html>", 0), "JSONDecodeError: Expecting value: line 1 column 1"),
        (KeyError(), "KeyError: it does not say why"),
        ({"message": "try later"}, "gave {'message': 'try later'}, no list of workers"),
    ],
)
def test_a_run_goes_on_without_its_lost_worker_where_cml_fails_in_whatever_way(
    loss: Loss, capfd: pytest.CaptureFixture[str], given: object, reason: str
) -> None:
    (lost,) = [pod for pod in loss.cluster.pods if pod.worker == loss.worker]
    loss.cml.launching_gives = given
    record = loss.run(AGENTS)
    assert (record.status, record.pods, record.restarts) == ("ok", 1, 1)
    written = capfd.readouterr().err
    (line,) = [line for line in written.splitlines() if "not replaced" in line]
    assert line.startswith(f"{loss.folder}: {lost.name}: not replaced: CML's launch_workers: {reason}")
    assert line.endswith("; call again once CML answers") and "Traceback" not in written
    loss.cluster.down()
    assert not processes_of(loss.cluster.folder.parent)


def test_a_new_worker_that_does_not_come_is_ended_and_the_session_s_own_pod_is_not_replaced(loss: Loss) -> None:
    cluster = loss.cluster
    (of_session,) = [pod for pod in cluster.pods if pod.worker != loss.worker]
    (lost,) = [pod for pod in cluster.pods if pod.worker == loss.worker]
    loss.cml.lose(lost.worker)
    place = rf"{of_session.name} \({of_session.address}\)"
    refusal = rf"cluster \S+: {place} is the session's own pod, which no worker can replace"
    with pytest.raises(UserError, match=refusal):
        replace_lost_pods(cluster, [lost.name, of_session.name])
    assert len(loss.cml.calls) == 1
    loss.cml.quota = 0
    with pytest.raises(UserError, match=r"cluster \S+: 0 of 1 pods after 3 s: worker cml00000000002 is scheduling"):
        replace_lost_pods(cluster, [lost.name], seconds=3.0)
    assert loss.cml.status("cml00000000002") == "stopped"
    assert read_cluster(cluster.folder) == cluster
    cluster.down()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_is_ended_while_workers_are_pending_leaves_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    double = CmlDouble(quota=1)
    double.install(monkeypatch)

    def end() -> None:
        until(lambda: {worker["status"] for worker in double.list_workers()} == {"running", "scheduling"})
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        pods.up(3, cpu=1, memory=2)
    thread.join()
    assert [worker["status"] for worker in double.list_workers()] == ["stopped", "stopped"]
    assert not processes_of(home) and not list(home.iterdir())


STARTER = """
import json, threading
import pytest
from tests.full.cml_double import CmlDouble
from tests.full.launches import until
from zeropods import pods

double = CmlDouble(quota=0)
double.install(pytest.MonkeyPatch())

def tell():
    until(lambda: double.calls)
    print(json.dumps(double.calls[0]), flush=True)

threading.Thread(target=tell).start()
pods.up(2, cpu=1, memory=2, name="killed", lease_seconds=3)
"""
"""A session that waits for its pending worker, and says what it has asked CML for."""


def test_a_worker_that_starts_once_its_session_was_killed_ends_by_itself_as_does_the_session_s_pod(
    home: Path, cml: CmlDouble
) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        call = json.loads(session.stdout.readline())
        session.kill()
    # CML goes on with what it was asked for.
    (worker,) = cml.launch_workers(call["n"], cpu=1, memory=1, code=call["code"], env=call["env"])
    until(lambda: cml.status(worker["id"]) == "failed" and not processes_of(home))
    assert take_down("killed") and not list(home.iterdir())


def test_where_cml_fails_no_pod_comes_up_and_the_session_s_own_is_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = CmlDouble()
    double.install(monkeypatch)
    double.launching_gives = RuntimeError("401:\nunauthorized")
    line = "^CML's launch_workers: RuntimeError: 401: unauthorized; call again once CML answers$"
    with pytest.raises(UserError, match=line):
        pods.up(3, cpu=1, memory=2)
    assert not processes_of(home) and not list(home.iterdir())


def test_workers_that_could_not_be_stopped_are_kept_and_stopped_by_down(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = CmlDouble(limit=1)
    double.install(monkeypatch)
    double.is_broken = True
    with pytest.raises(UserError, match="CML's stop_workers: ConnectionError: CML does not answer; call again"):
        pods.up(3, cpu=1, memory=2, name="kept")
    kept = read_cluster(home / "kept")
    assert kept is not None and "cml00000000001" in kept.workers
    until(lambda: double.status("cml00000000001") == "running")
    double.is_broken = False
    assert take_down("kept") and double.status("cml00000000001") == "stopped"


def test_a_cluster_without_workers_of_cml_stops_none_of_the_user_s(cml: CmlDouble, home: Path) -> None:
    (theirs,) = cml.launch_workers(1, cpu=1, memory=1, code=RUNNER.format(argv=[sys.executable, "-c", SLEEPER]))
    until(lambda: cml.status(theirs["id"]) == "running")
    pods.up(1, cpu=1, memory=2).down()
    assert cml.status(theirs["id"]) == "running"
    cml.stop_workers()
