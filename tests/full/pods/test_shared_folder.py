"""Sessions of one project share its folder, where clusters are kept; their process ids and addresses are their own."""

import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.full.clusters import processes_of
from tests.full.launches import RANK, until
from tests.full.sessions import Session, needs_sessions, session

PID = 4_711
NAMES = ("one", "two", "three")
FEWEST_DEEDS = 6
"""Number of things that each of two sessions does at least, as they come to its mind."""
TRIAL_SECONDS = float(os.environ.get("ZEROPODS_TRIAL_SECONDS", 0.0))
"""Seconds for which they go on; `make soak` gives them an hour."""
KERNEL = """
import os, sys
from zeropods import pods
cluster = pods.up(2)
print(os.getpid(), cluster.name, flush=True)
for line in sys.stdin:
    if line == "check\\n":
        print(cluster.check().ok, flush=True)
    else:
        cluster.down()
        print("down", flush=True)
"""

pytestmark = needs_sessions


def asked(kernel: subprocess.Popen[str], request: str = "") -> str:
    """What a kernel answers to a line; without one, its next line."""
    assert kernel.stdin is not None and kernel.stdout is not None
    if request:
        kernel.stdin.write(f"{request}\n")
        kernel.stdin.flush()
    return kernel.stdout.readline().rstrip()


def files(home: Path, cluster: str) -> set[str]:
    """Names of a cluster's files."""
    return {path.name for path in (home / cluster).iterdir()}


def test_kernels_of_one_process_id_in_two_sessions_have_clusters_of_their_own(home: Path) -> None:
    with session("one") as one, session("two") as two:
        kernels = [each.program(KERNEL, PID) for each in (one, two)]
        (pid, first), (same_pid, second) = [asked(kernel).split() for kernel in kernels]
        assert pid == same_pid == str(PID) and first != second
        assert {path.name for path in home.iterdir()} == {first, second}
        assert [asked(kernel, "check") for kernel in kernels] == ["True", "True"]
        # Any command that starts pods sweeps first.
        assert two.zeropods("pods", "up", "--count", "1", "--name", "third").returncode == 0
        assert {"id_ed25519", "secret", "state.json"} <= files(home, first)
        assert asked(kernels[1], "down") == "down"
        assert asked(kernels[0], "check") == "True"
        assert asked(kernels[0], "down") == "down"
        assert two.zeropods("pods", "down").stdout == "down: third\n"
        assert not list(home.iterdir())
        for kernel in kernels:
            kernel.communicate(timeout=240)


def test_a_cluster_of_another_session_is_listed_as_such_and_neither_taken_nor_ended_where_it_is_out_of_reach(
    home: Path,
) -> None:
    with session("one") as one, session("two") as two:
        up = one.zeropods("pods", "up", "--count", "1")
        assert up.returncode == 0, up.stderr
        (listed,) = json.loads(two.zeropods("pods", "list", "--json").stdout)["clusters"]
        assert (listed["name"], listed["machine"], listed["here"]) == ("pods", "one", False)
        # A long path stands on a line of its own.
        assert "pods, of another machine (one):" in two.zeropods("pods", "list").stdout
        again = two.zeropods("pods", "up", "--count", "1")
        assert again.returncode == 1
        line = "cluster pods: another machine or session, one, started it; take another name, or end it with: "
        assert again.stderr == f"zeropods: {line}zeropods pods down --name pods\n"
        for words in (["down"], ["down", "--all"]):
            assert two.zeropods("pods", *words).stdout == "nothing was up\n"
        refused = two.zeropods("pods", "down", "--name", "pods")
        assert refused.returncode == 1 and "not all of its pods answer here (pod1: " in refused.stderr
        remedy = "; on one: zeropods pods down --name pods; once that machine is gone, here too after 10 minutes\n"
        assert refused.stderr.endswith(remedy)
        assert refused.stderr.count("\n") == 1
        check = one.zeropods("pods", "check")
        assert check.returncode == 0, check.stdout
        assert one.zeropods("pods", "down").stdout == "down: pods\n"
        assert not list(home.iterdir()) and not processes_of(home)


def test_a_cluster_of_another_session_is_ended_through_its_agents_where_they_can_be_reached(home: Path) -> None:
    with session("one", has_network=False) as one, session("two", has_network=False) as two:
        up = one.zeropods("pods", "up", "--count", "2")
        assert up.returncode == 0, up.stderr
        down = two.zeropods("pods", "down", "--name", "pods")
        assert down.stdout == "down: pods\n", down.stderr
        until(lambda: not processes_of(home))
        assert not list(home.iterdir())


class Trial:
    """What a session does at random with clusters of a few names, which another session wants too.

    Args:
        home: the folder that both share.
        runs: folder of this session's runs.
    """

    def __init__(self, where: Session, home: Path, runs: Path, seed: int) -> None:
        self.where, self.home, self.runs = where, home, runs
        self.clusters: dict[str, dict[Path, bytes]] = {}
        """The session's own clusters, each with the content of its files as they were when it was up."""
        self.done: list[str] = []
        """Names of the things that it did, in their order."""
        self._random = random.Random(seed)

    def go_on(self, seconds: float) -> None:
        """Do one thing after the other for so long, an `up` first, look after each whether the clusters are as they
        were, and end them."""
        deadline = time.monotonic() + seconds
        self.up(self._random.choice(NAMES))
        while len(self.done) < FEWEST_DEEDS or time.monotonic() < deadline:
            others = [name for name in NAMES if name not in self.clusters]
            choices: list[tuple[Callable[[str], None], list[str]]] = [
                (self.up, others), (self.meddle, others), (self.launch, list(self.clusters)),
                (self.down, list(self.clusters)),
            ]  # fmt: skip
            do, names = self._random.choice([choice for choice in choices if choice[1]])
            do(self._random.choice(names))
            self.done.append(do.__name__)
            for name, files_before in self.clusters.items():
                assert content(self.home / name) == files_before, name
        for name in list(self.clusters):
            self.down(name)

    def up(self, name: str) -> None:
        """Start a cluster, unless the other session has one of this name."""
        started = self.where.zeropods("pods", "up", "--count", 1, "--name", name)
        if started.returncode == 0:
            self.clusters[name] = content(self.home / name)
        else:
            assert started.stderr.count("\n") == 1 and "another machine" in started.stderr, started.stderr

    def meddle(self, name: str) -> None:
        """Try to end a cluster that is the other session's, if it is there."""
        ended = self.where.zeropods("pods", "down", "--name", name)
        if ended.returncode:
            assert ended.stderr.count("\n") == 1 and "another machine" in ended.stderr, ended.stderr
        else:
            assert ended.stdout == "nothing was up\n"

    def launch(self, name: str) -> None:
        """Run something on a cluster of one's own."""
        folder = self.runs / str(len(self.done))
        launched = self.where.zeropods("launch", "--name", name, "--", RANK, "--outputdir", folder, "--seconds", 0.1)
        # A machine that is very busy may not check its pod in time.
        is_busy = "no answer in" in launched.stderr
        assert launched.returncode == 0 or is_busy, launched.stderr

    def down(self, name: str) -> None:
        """End a cluster of one's own."""
        del self.clusters[name]
        ended = self.where.zeropods("pods", "down", "--name", name)
        assert ended.stdout == f"down: {name}\n", ended.stderr


def content(folder: Path) -> dict[Path, bytes]:
    """The content of a cluster's files, but for its workers' logs, which grow."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"}


@pytest.mark.timeout(TRIAL_SECONDS + 1_800)
def test_two_sessions_that_do_what_comes_to_their_minds_touch_nothing_of_each_other_s(
    home: Path, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with session("one") as one, session("two") as two:
        trials = [Trial(where, home, tmp_path / str(number), seed + number) for number, where in enumerate((one, two))]
        with ThreadPoolExecutor() as threads:
            for running in [threads.submit(trial.go_on, TRIAL_SECONDS) for trial in trials]:
                running.result()
        print([trial.done for trial in trials])
        assert not processes_of(home) and not list(home.iterdir())
