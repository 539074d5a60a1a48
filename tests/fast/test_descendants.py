"""Real processes below this one: found, sorted by run, and signalled without hitting another."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from zeropods.pods.leases import RUN_VARIABLE, take_census, takes_sigterm
from zeropods.pods.processes import Process, Tree, arguments, child_pids, is_there, read_process, send, variable

WAIT_SECONDS = 20.0
BINARY_SLEEP = shutil.which("sleep") or "sleep"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that are killed, with all below them, when the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, run: str | None = None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **({RUN_VARIABLE: run} if run else {})}
        started.append(subprocess.Popen(argv, env=environment))
        return started[-1]

    yield begin
    for child in started:
        for process in Tree.read().below(child.pid):
            send(process, signal.SIGKILL)
        child.kill()
        child.wait(WAIT_SECONDS)


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def known(pid: int) -> Process:
    process = read_process(pid)
    assert process is not None
    return process


def names_below(pid: int) -> list[str]:
    return [process.name for process in Tree.read().below(pid)]


def test_descendants_are_found_parents_first(start) -> None:
    child = start("sh", "-c", f"sh -c '{BINARY_SLEEP} 600; true'; true")
    until(lambda: names_below(child.pid) == ["sh", "sleep"])
    tree = Tree.read()
    family = [child.pid, *[process.pid for process in tree.below(child.pid)]]
    assert [process.pid for process in tree.below(os.getpid()) if process.pid in family] == family


def test_a_name_with_brackets_and_blanks_is_read_whole(start, tmp_path) -> None:
    program = tmp_path / "a) b (c"
    shutil.copy(BINARY_SLEEP, program)
    child = start(str(program), "600")
    until(lambda: known(child.pid).name == "a) b (c")
    assert known(child.pid).parent == os.getpid()


def test_a_zombie_is_not_there(start) -> None:
    child = start("true")
    process = known(child.pid)
    until(lambda: known(child.pid).zombie)
    assert not is_there(process)


def test_a_number_that_belongs_to_another_process_now_is_not_signalled(start) -> None:
    child = start(BINARY_SLEEP, "600")
    process = known(child.pid)
    earlier = replace(process, start_ticks=process.start_ticks - 1)
    assert send(earlier, signal.SIGKILL) is False
    assert is_there(process)
    assert send(process, signal.SIGKILL) is True
    assert child.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert send(process, signal.SIGKILL) is False


def test_environment_and_arguments_are_those_of_the_start(start) -> None:
    child = start(BINARY_SLEEP, "600", run="r1")
    process = known(child.pid)
    until(lambda: arguments(process) == [BINARY_SLEEP, "600"])
    assert variable(process, RUN_VARIABLE) == "r1"
    assert variable(process, RUN_VARIABLE[:-1]) is None


def test_of_a_process_that_has_ended_nothing_is_known(start) -> None:
    child = start("true", run="r1")
    process = known(child.pid)
    child.wait(WAIT_SECONDS)
    assert (variable(process, RUN_VARIABLE), arguments(process), read_process(child.pid)) == (None, [], None)


def test_children_are_told_without_a_tree_where_the_kernel_does(start) -> None:
    child = start("sh", "-c", f"{BINARY_SLEEP} 600; true")
    if child_pids(child.pid) is None:
        pytest.skip("this kernel has no /proc/PID/task/TID/children")
    until(lambda: [process.pid for process in Tree.read().below(child.pid)] == child_pids(child.pid) != [])


def test_a_census_sorts_processes_by_their_run(start) -> None:
    first = start(BINARY_SLEEP, "600", run="first")
    second = start("sh", "-c", f"env -i {BINARY_SLEEP} 600; true", run="second")
    unmarked = start(BINARY_SLEEP, "600")
    until(lambda: names_below(second.pid) == ["sleep"])
    census = take_census(os.getpid(), sshd=None)
    assert [process.pid for process in census.runs["first"]] == [first.pid]
    assert [process.name for process in census.runs["second"]] == ["sh", "sleep"]
    assert known(unmarked.pid) in census.orphans
    assert known(first.pid) not in census.orphans


def test_what_leads_to_a_run_only_is_told_from_what_leads_to_more(start) -> None:
    marked = f"{RUN_VARIABLE}=r {BINARY_SLEEP} 600"
    only = start("sh", "-c", f"sh -c '{marked}; true'; true")
    census = awaited_census({"r": 1})
    assert [process.pid for process in census.leading["r"]][-1] == only.pid
    assert len(census.leading["r"]) == 2
    start("sh", "-c", f"{BINARY_SLEEP} 600 & {marked.replace('=r', '=shared')}; true")
    assert awaited_census({"r": 1, "shared": 1}).leading["shared"] == ()


def awaited_census(processes: dict[str, int]):
    until(lambda: {run: len(found) for run, found in take_census(os.getpid(), None).runs.items()} == processes)
    return take_census(os.getpid(), None)


def test_shells_and_the_deepspeed_launcher_are_not_asked_to_end(start, tmp_path) -> None:
    (tmp_path / "rank.py").write_text("import time; time.sleep(600)")
    shell = start("sh", "-c", f"{BINARY_SLEEP} 600; true")
    rank = start(sys.executable, str(tmp_path / "rank.py"))
    launcher = start(sys.executable, "-c", "import time; time.sleep(600)", "-m", "deepspeed.launcher.launch")
    until(lambda: all(arguments(known(child.pid)) for child in (shell, rank, launcher)))
    assert [takes_sigterm(known(child.pid)) for child in (shell, rank, launcher)] == [False, True, False]
