"""What is kept of clusters on disk, who may change it, and what is refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.pods import cluster, processes, start, state
from zeropods.pods import cluster as cluster_files
from zeropods.pods import cluster as removal
from zeropods.pods import processes as signals
from zeropods.pods.backends import fleet, local, workers
from zeropods.pods.state import Pod, Settings, State

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
SETTINGS = Settings(
    count=2, slots=None, backend="local", network="loopback", lease="idle", lease_seconds=60.0,
    cpu=4, memory=32, nvidia_gpu=0,
)  # fmt: skip
HOLDER = """
import sys
from zeropods.pods import state
with state.locked(state.folder_of("one")):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without clusters."""
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def pod(number: int) -> Pod:
    return Pod(
        name=f"pod{number}", worker=f"w{number}", address=f"127.0.1.{number}", hostname="here", slots=2,
        host_key=KEY, control_port=40_000 + number,
    )  # fmt: skip


def whole(name: str) -> State:
    return State(name=name, settings=SETTINGS, workers=("w1", "w2"), ssh_port=2222, pods=(pod(1), pod(2)))


def keep(*names: str) -> None:
    """Write the state of clusters of which nothing runs."""
    for name in names:
        folder = state.folder_of(name)
        folder.mkdir(parents=True)
        state.write_state(folder, whole(name))
        (folder / "secret").write_text("00" * 32)


def test_a_state_is_read_back_as_it_was_written() -> None:
    keep("one")
    assert state.read_state(state.folder_of("one")) == whole("one")


def test_hosts_of_the_user_s_own_are_kept_with_the_cluster() -> None:
    own = replace(whole("own"), settings=replace(SETTINGS, backend="hosts", network="hosts", hosts=("gpu1 slots=2",)))
    folder = state.folder_of("own")
    folder.mkdir(parents=True)
    state.write_state(folder, own)
    assert state.read_state(folder) == own


def test_own_hosts_share_no_machine_unless_all_are_this_one() -> None:
    settings = replace(SETTINGS, backend="hosts", network="hosts")
    here = replace(whole("own"), settings=settings)
    apart = replace(here, pods=(pod(1), replace(pod(2), address="10.0.0.2")))
    found = [cluster.Cluster.of(Path("x"), each) for each in (here, apart)]
    assert [each.shared_machine for each in found] == [True, False]
    assert [each.environment for each in found] == [{"GLOO_SOCKET_IFNAME": "lo"}, {}]


def test_pods_under_different_accounts_are_logged_in_to_as_such(tmp_path: Path) -> None:
    (tmp_path / "id_ed25519").touch()
    both = cluster.Cluster.of(tmp_path, whole("one"))
    cluster_files.write_files(both, {"127.0.1.1": "ann", "127.0.1.2": "bob"}.__getitem__)
    asked = [["ssh", "-G", "-F", str(both.ssh_config), host.address] for host in both.hosts]
    said = [subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True).stdout for argv in asked]
    assert ["user ann\n" in said[0], "user bob\n" in said[1]] == [True, True]


def test_a_cluster_that_never_was_has_no_state() -> None:
    assert state.read_state(state.folder_of("none")) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pods": [], "settings": {"count": 1}, "workers": [], "name": "x"}'])
def test_a_file_that_is_no_state_is_named(text: str) -> None:
    keep("one")
    (state.folder_of("one") / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"one/state\.json: not a cluster's state"):
        cluster.find("one")


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", ".hidden", "a b", "x" * 41, "ä"])
def test_a_name_that_could_be_another_path_or_a_flag_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cluster name"):
        state.folder_of(name)


def test_a_cluster_gives_the_hostfile_s_hosts_and_what_ranks_need() -> None:
    keep("one")
    found = cluster.find("one")
    assert [host.line() for host in found.hosts] == ["127.0.1.1 slots=2", "127.0.1.2 slots=2"]
    assert (found.environment, found.shared_machine, found.secret) == ({"GLOO_SOCKET_IFNAME": "lo"}, True, bytes(32))


def test_the_only_cluster_is_meant_where_none_is_named() -> None:
    keep("one")
    assert cluster.find().name == "one"


def test_the_shell_s_cluster_is_meant_where_several_are_up() -> None:
    keep("one", "pods")
    assert cluster.find().name == "pods"


def test_which_of_several_clusters_has_to_be_said() -> None:
    keep("one", "two")
    with pytest.raises(UserError, match="clusters one, two: several are up; say which with --name"):
        cluster.find()


@pytest.mark.parametrize(
    ("name", "line"), [(None, "cluster pods: is not up, none is up"), ("x", "cluster x: is not up")]
)
def test_a_cluster_that_is_not_up_is_named(name: str | None, line: str) -> None:
    with pytest.raises(UserError, match=line):
        cluster.find(name)


def test_an_unfinished_cluster_is_not_found_but_cleared() -> None:
    folder = state.folder_of("half")
    folder.mkdir(parents=True)
    state.write_state(folder, State(name="half", settings=SETTINGS))
    assert cluster.clusters() == [] and removal.take_down("half") and not folder.exists()


def test_a_folder_that_is_no_cluster_s_is_never_emptied(home: Path) -> None:
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "thesis.txt").touch()
    assert not removal.take_down("mine")
    with pytest.raises(UserError, match="mine: holds something that is no cluster"):
        removal.clear(home / "mine")
    assert (home / "mine" / "thesis.txt").exists()


def test_the_remains_of_dead_clusters_are_swept(home: Path) -> None:
    keep("dead")
    removal.sweep()
    assert not list(home.iterdir())


def test_a_cluster_is_changed_by_one_process_at_a_time(home: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"in\n"
    with pytest.raises(UserError, match="one: another process"), state.locked(home / "one"):
        pass
    holder.communicate(timeout=10)
    with state.locked(home / "one", 5.0):
        assert (home / "one").stat().st_mode & 0o777 == 0o700
    assert not (home / "one").exists()


def test_a_lock_waits_for_its_time() -> None:
    folder, entered, leave = state.folder_of("one"), threading.Event(), threading.Event()

    def hold() -> None:
        with state.locked(folder):
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(10)
    threading.Timer(0.3, leave.set).start()
    with state.locked(folder, 10.0):
        assert leave.is_set()
    holder.join()


def test_two_starts_at_once_are_never_given_the_same_address() -> None:
    first, second = local.Loopback(set), local.Loopback(set)
    ours = first.claim(3)
    assert not set(ours) & set(second.claim(3))
    first.settled()
    assert set(ours) & set(local.Loopback(set).claim(200))


def test_an_address_that_another_cluster_has_is_not_given() -> None:
    (first,) = local.Loopback(set).claim(1)
    assert local.Loopback(lambda: {first}).claim(1) != [first]


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(start, "SYSTEM_FOLDERS", ())
    with pytest.raises(UserError, match=r"^sshd, ssh, ssh-keygen, pdsh: .* openssh-client openssh-server pdsh$"):
        start.require_programs()


def test_what_is_asked_for_differently_is_shown() -> None:
    other = Settings(**{**SETTINGS.__dict__, "count": 3, "slots": 2})
    assert fleet.differences(SETTINGS, other) == "count 2 -> 3, slots None -> 2"
    assert fleet.differences(SETTINGS, SETTINGS) == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--count", "0"], "count: 0; expected a positive number"),
        (["--count", "1", "--slots", "-1"], "slots: -1; expected a positive number"),
        (["--count", "1", "--seconds", "0"], "seconds: 0.0; expected a positive number"),
        (["--count", "1", "--name", "../x"], "cluster name '../x'"),
        (["--count", "1", "--backend", "cml", "--network", "namespaces"], "backend cml: neither"),
    ],
)
def test_what_cannot_come_up_is_refused_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert main(["pods", "up", *arguments]) == 1
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and not home.exists()


def test_a_home_with_blanks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "my home"))
    assert main(["pods", "up", "--count", "1"]) == 1


def test_down_and_list_without_clusters_say_so(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert (main(["pods", "down"]), main(["pods", "down", "--all"]), main(["pods", "list"])) == (0, 0, 0)
    assert capsys.readouterr().out == "nothing was up\nnothing was up\nno cluster is up\n" and not home.exists()


@pytest.mark.parametrize(
    ("listed", "ended", "pending"),
    [
        ({"status": "running"}, False, False),
        ({"status": "RUNNING", "exit_code": 0}, False, False),
        ({"status": "PENDING"}, False, True),
        ({"status": "scheduling"}, False, True),
        ({}, False, True),
        ({"status": "Failed"}, True, False),
        ({"status": "?", "finished_at": "2024-01-01"}, True, False),
    ],
)
def test_a_worker_s_status_is_read_in_any_version_s_words(
    listed: dict[str, object], ended: bool, pending: bool
) -> None:
    assert (workers.has_ended(listed), workers.is_pending(listed)) == (ended, pending)


def test_a_process_is_not_taken_for_another_with_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    known = processes.find_process(child.pid)
    assert known is not None
    processes.end([known], 10.0)
    assert not processes.is_alive(known) and child.wait(10) == -15


def test_a_process_on_disk_is_known_again_until_the_next_boot() -> None:
    known = processes.find_process(os.getpid())
    assert known is not None
    record = processes.to_record(known)
    assert processes.from_record(record) == known
    assert processes.from_record([*record[:2], "another boot"]) is None


def test_an_interrupt_waits_for_the_end_of_what_must_not_be_interrupted() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals.deferred():
        os.kill(os.getpid(), 2)
        time.sleep(0.05)
        done.append(True)
    assert done


def test_a_package_that_names_what_is_not_there_says_so() -> None:
    from zeropods import pods

    with pytest.raises(AttributeError, match=r"'zeropods\.pods' has no attribute 'down_with'"):
        _ = pods.down_with
