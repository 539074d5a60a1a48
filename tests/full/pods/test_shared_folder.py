"""Sessions of one project share its folder, where clusters are kept; their process ids and addresses are their own."""

import json
import subprocess
from pathlib import Path

from tests.full.clusters import processes_of
from tests.full.launches import until
from tests.full.sessions import needs_sessions, session

PID = 4_711
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
        assert "pods, of another machine (one): " in two.zeropods("pods", "list").stdout
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
