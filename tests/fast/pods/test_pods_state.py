"""What is kept of clusters on disk, who may change it, what is refused; leases over real processes."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.full.launches import until
from tests.made import SETTINGS, a_pod
from zeropods import pods, programs
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.launch.notebook import pod_killed
from zeropods.pods import cluster, leases
from zeropods.pods.backends.cml import described
from zeropods.pods.backends.local import WorkerProcess
from zeropods.pods.cluster import Cluster
from zeropods.pods.leases import IDLE_LEASE, KERNEL_LEASE, Leases
from zeropods.pods.machine import LONG_SILENCE_SECONDS, Machine, this_machine
from zeropods.pods.processes import RUN, Process
from zeropods.pods.start import replace_lost_pods

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
PODS = tuple(a_pod(number, slots=2, host_key=KEY) for number in (1, 2))
HOLDER = """
import sys
from zeropods.pods import cluster
with cluster.locked(cluster.folder_of("one")):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without clusters."""
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def whole(name: str, **changes: Any) -> Cluster:
    told = {"settings": SETTINGS, "workers": ("w1", "w2"), "pods": PODS, "machine": this_machine(), **changes}
    return Cluster(folder=cluster.folder_of(name), **told)


def keep(*names: str) -> None:
    """Write the state of clusters of which nothing runs."""
    for name in names:
        cluster.folder_of(name).mkdir(parents=True)
        cluster.write_cluster(whole(name))
        (cluster.folder_of(name) / "secret").write_text("00" * 32)


def test_what_was_written_is_found_and_a_file_that_is_no_state_is_named() -> None:
    keep("one")
    assert cluster.find("one") == whole("one")
    state = cluster.folder_of("one") / "state.json"
    without_machine = json.loads(state.read_text())
    del without_machine["machine"]
    for document, key in (({}, "folder"), (without_machine, "machine")):
        state.write_text(json.dumps(document))
        line = rf"one/state\.json: {key}: .*; this is not a cluster's state; end its pods and remove .*/one$"
        with pytest.raises(UserError, match=line):
            cluster.find("one")


@pytest.mark.parametrize(
    ("backend", "second", "shared", "network"),
    [
        ("local", "127.0.1.2", True, "loopback"),
        ("hosts", "127.0.1.2", True, "hosts"),
        ("hosts", "10.0.0.2", False, "hosts"),
        ("cml", "127.0.1.2", False, "cml"),
        # Of another version, perhaps.
        ("unknown", "127.0.1.2", True, "unknown"),
    ],
)
def test_pods_of_one_machine_share_it_and_the_backend_names_their_network(
    backend: str, second: str, shared: bool, network: str
) -> None:
    pods = (PODS[0], replace(PODS[1], address=second))
    found = whole("one", settings=replace(SETTINGS, backend=backend), pods=pods)
    assert [host.line() for host in found.hosts] == ["127.0.1.1 slots=2", f"{second} slots=2"]
    assert (found.shared_machine, found.network) == (shared, network)


def test_a_pod_that_another_process_has_replaced_is_not_replaced_again_and_none_of_a_cluster_that_is_gone(
    home: Path,
) -> None:
    of_cml = replace(SETTINGS, backend="cml")
    before = whole("one", settings=of_cml)
    keep("one")
    now = replace(before, workers=("w1", "w3"), pods=(PODS[0], replace(PODS[1], worker="w3", control_port=4_000)))
    cluster.write_cluster(now)
    assert replace_lost_pods(before, ["pod2"]) == now == cluster.find("one")
    # Another cluster has the name by now.
    theirs = replace(now, pods=(replace(PODS[0], control_port=5_000),))
    for state in (theirs, None):
        if state is None:
            shutil.rmtree(home / "one")
        else:
            cluster.write_cluster(state)
        with pytest.raises(UserError, match="cluster one: was taken down meanwhile"):
            replace_lost_pods(before, ["pod2"])
        assert cluster.read_cluster(home / "one") == state
    assert not (home / "one").exists()


def test_only_a_pod_whose_whole_tree_is_here_is_killed_on_purpose(tmp_path: Path) -> None:
    for backend in ("hosts", "cml", "unknown"):
        elsewhere = whole("one", settings=replace(SETTINGS, backend=backend))
        refusal = f"pod 'pod1' of one, on {backend}; expected a local one: "
        with pytest.raises(UserError, match=refusal), pod_killed(elsewhere, "pod1", tmp_path):
            pass
    with pod_killed(whole("one"), "pod1", tmp_path):
        pass


def test_pods_under_different_accounts_are_logged_in_to_as_such() -> None:
    keep("one")
    both = whole("one")
    cluster.write_access_files(both, {"127.0.1.1": "ann", "127.0.1.2": "bob"})
    asked = [["ssh", "-G", "-F", str(both.ssh_config), host.address] for host in both.hosts]
    said = [subprocess.run(argv, capture_output=True, text=True, timeout=240, check=True).stdout for argv in asked]
    assert ["user ann\n" in said[0], "user bob\n" in said[1]] == [True, True]


@pytest.mark.parametrize(("up", "found"), [(["one"], "one"), (["one", "pods"], "pods")])
def test_the_only_cluster_or_the_shell_s_is_meant_where_none_is_named(up: list[str], found: str) -> None:
    keep(*up)
    assert cluster.find().name == found


@pytest.mark.parametrize(
    ("up", "name", "line"),
    [
        (["one", "two"], None, "clusters one, two: several are up; say which with --name"),
        ([], None, "cluster pods: is not up, and no other cluster is; zeropods pods up"),
        (["one"], "x", "cluster x: is not up; these are: one; zeropods pods up --count N --name x"),
    ],
)
def test_a_cluster_that_cannot_be_told_is_named(up: list[str], name: str | None, line: str) -> None:
    keep(*up)
    with pytest.raises(UserError, match=line):
        cluster.find(name)


def test_a_folder_that_is_no_cluster_s_is_never_emptied(home: Path) -> None:
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "thesis.txt").touch()
    assert not cluster.take_down("mine")
    with pytest.raises(UserError, match="mine: is not empty and holds no cluster"):
        cluster.clear(home / "mine")
    assert (home / "mine" / "thesis.txt").exists()


def test_a_cluster_is_changed_by_one_process_at_a_time(home: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline() == b"in\n"
    with pytest.raises(UserError, match="one: another process"), cluster.locked(home / "one"):
        pass
    threading.Timer(0.3, holder.stdin.close).start()
    with cluster.locked(home / "one", 10.0):
        assert (home / "one").stat().st_mode & 0o777 == 0o700
    assert holder.wait(600) == 0 and not (home / "one").exists()


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path),))
    with pytest.raises(UserError, match=r"^sshd, ssh, ssh-keygen, pdsh: .* openssh-client openssh-server pdsh$"):
        programs.required_programs(*programs.PROGRAMS)


def test_down_and_list_without_clusters_say_so(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert (main(["pods", "down"]), main(["pods", "down", "--all"]), main(["pods", "list"])) == (0, 0, 0)
    assert capsys.readouterr().out == "nothing was up\nnothing was up\nno cluster is up\n" and not home.exists()
    for name in ("one", "two"):
        (home / name).mkdir(parents=True)
        (home / name / cluster.STATE_FILE).write_text("{}")
    assert main(["pods", "down", "--name", "three"]) == 0
    assert capsys.readouterr() == ("nothing was up\n", "cluster three: is not up; these are: one, two\n")


# Clusters of other machines, which share the folder; tests/full/pods/test_shared_folder.py has them with real pods.

OTHER = Machine("f" * 10, "elsewhere")


def keep_of(machine: Machine, name: str) -> Path:
    """Write the state of a cluster that a machine has started, of which nothing runs; returns the secret's file."""
    keep(name)
    cluster.write_cluster(whole(name, machine=machine))
    return cluster.folder_of(name) / "secret"


def test_what_this_machine_left_is_swept_and_no_other_s() -> None:
    for machine, name in ((this_machine(), "mine"), (OTHER, "theirs")):
        keep_of(machine, name)
    cluster.remove_ended_clusters()
    assert cluster.names() == ["theirs"]
    assert cluster.find("theirs").machine == OTHER


def test_a_process_is_a_worker_on_its_own_machine_alone() -> None:
    began = Process().create_time()
    here = this_machine().id
    found = [WorkerProcess("w", "127.0.1.1", os.getpid(), began, machine).find() for machine in (here, OTHER.id)]
    assert found == [Process(), None]


def test_another_machine_s_cluster_is_removed_by_down_once_its_pods_have_long_shown_no_life(
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = keep_of(OTHER, "theirs")
    with pytest.raises(UserError, match="cluster theirs: another machine or session, elsewhere, started it, and not"):
        cluster.take_down("theirs")
    assert main(["pods", "down", "--all"]) == 0
    assert capsys.readouterr().out == "nothing was up\n" and secret.exists()
    long_ago = time.time() - LONG_SILENCE_SECONDS - 60
    for path in (*secret.parent.iterdir(), secret.parent):
        os.utime(path, (long_ago, long_ago))
    assert main(["pods", "down", "--all"]) == 0
    assert capsys.readouterr().out == "down: theirs\n" and not secret.parent.exists()


def test_of_two_machines_that_start_a_cluster_of_one_name_one_gets_it() -> None:
    folder = cluster.folder_of("one")
    folder.mkdir(parents=True)
    theirs, mine = (whole("one", pods=(), machine=machine) for machine in (OTHER, this_machine()))
    cluster.claim(theirs)
    with pytest.raises(UserError, match="cluster one: another machine is starting it; take another name"):
        cluster.claim(mine)
    assert cluster.read_cluster(folder) == theirs and os.listdir(folder.parent) == ["one"]


@pytest.mark.parametrize(
    ("listed", "ended", "pending"),
    [
        ({"status": "RUNNING", "exit_code": 0}, False, False),
        ({}, False, True),
        ({"status": "Failed"}, True, False),
        ({"status": "?", "finished_at": "2024-01-01"}, True, False),
    ],
)
def test_a_cml_worker_s_status_is_read_in_any_version_s_words(
    listed: dict[str, object], ended: bool, pending: bool
) -> None:
    worker = described({"id": "a", **listed}, SETTINGS)
    assert (worker.has_ended, "it waits for 1 cores, 1 GiB" in worker.description) == (ended, pending)


@pytest.mark.parametrize(
    ("listed", "line"),
    [
        ({"status": "scheduling"}, "worker a is scheduling; CML looks for a machine with 1 cores, 1 GiB and 0 GPUs"),
        ({"status": "Starting", "ip_address": "unknown"}, "worker a is starting; its machine fetches the runtime's"),
        ({"status": "scheduling", "message": "no\n room"}, "worker a is scheduling; no room"),
        ({"status": "timedout"}, "worker a ended with status timedout; it wrote nothing"),
        (
            {"status": "timedout", "message": "no\n room", "app_url": "https://a"},
            "worker a ended with status timedout; no room; see https://a",
        ),
    ],
)
def test_what_a_cml_worker_waits_for_is_told(listed: dict[str, object], line: str) -> None:
    worker = described({"id": "a", **listed}, SETTINGS)
    assert worker.description.startswith(line) and worker.has_ended == (listed["status"] == "timedout")
    word = str(listed["status"]).lower()
    assert worker.status == (f"{word} (no room)" if "message" in listed else word)


@pytest.mark.parametrize("text", ["soon", "0", "inf", "nan"])
def test_a_time_to_wait_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ZEROPODS_POD_SECONDS", text)
    with pytest.raises(UserError, match=f"ZEROPODS_POD_SECONDS: '{text}'; expected a positive number of seconds"):
        pods.up(1)


# Leases: what is found below an agent, and what ends when.

SLEEP = "import time; time.sleep(600)"
SECONDS = 120.0


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process below this one, which is the agent here; checks come ten times as often."""
    monkeypatch.setattr(leases, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(leases, "STRANGER_SECONDS", 1.0)
    started: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, run: str | None = None) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, **({RUN: run} if run else {})}))
        until(lambda: Process(started[-1].pid).cmdline() == list(argv))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def lived(work: Callable[[Leases], object], seconds: float, happens: Callable[[], bool] = lambda: False) -> list[str]:
    """Why a pod was ended within so long, or before something happened; its leases were used so when they began."""
    ended: list[str] = []

    async def main() -> None:
        pod = Leases(list, ended.append)
        work(pod)
        watching = asyncio.create_task(pod.watch())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ended and not happens():
            await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(main())
    return ended[:1]


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(("kind", "ends"), [(KERNEL_LEASE, True), (IDLE_LEASE, False)])
def test_an_open_run_holds_an_idle_lease_only(kind: str, ends: bool) -> None:
    def use(pod: Leases) -> None:
        pod.open(kind, 0.3)
        pod.renew_run("r", 60.0)

    assert bool(lived(use, 0.9)) == ends


def test_a_run_that_nobody_opens_and_a_late_process_of_an_ended_one_are_ended(start) -> None:
    stranger, late = (start(sys.executable, "-c", SLEEP, run=run) for run in ("stranger", "ended"))

    async def end(pod: Leases) -> None:
        await pod.end_run("ended", 0.0)

    lived(lambda pod: asyncio.ensure_future(end(pod)), SECONDS, lambda: late.poll() is not None)
    assert late.poll() is not None and stranger.poll() is None
    lived(lambda pod: None, SECONDS, lambda: stranger.poll() is not None)
    assert stranger.poll() is not None
