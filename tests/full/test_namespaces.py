"""Pods with a network each: separate, cut off and restored at will, removed without a trace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.full.clusters import SECONDS, await_that, processes_of, program, ssh, zeropods
from zeropods import pods
from zeropods.pods.backends.namespaces import Namespaces

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need iproute2"),
]


def mark(home: Path, name: str) -> str:
    """How the names of a cluster's links and namespaces begin."""
    return json.loads((home / name / "network.json").read_text())["name"]


def made_by(mark: str) -> list[str]:
    """Links and namespaces of a cluster."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, timeout=10, check=True).stdout
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, timeout=10, check=True).stdout
    found = [line.split(": ")[1].partition("@")[0] for line in links.splitlines()]
    found += [line.split()[0] for line in spaces.splitlines()]
    return sorted(name for name in found if name.startswith(mark))


def test_each_pod_has_its_own_network(home: Path) -> None:
    cluster = pods.up(2, name="one", network="namespaces")
    ours = mark(home, "one")
    assert made_by(ours) == [ours, *[f"{ours}-1"] * 2, *[f"{ours}-2"] * 2]
    shown = [ssh(cluster, pod.address, "ip", "-4", "-o", "addr", "show", "eth0") for pod in cluster.pods]
    assert all(pod.address in text for pod, text in zip(cluster.pods, shown, strict=True))
    assert cluster.environment == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert len({ssh(cluster, pod.address, "readlink", "/proc/self/ns/net") for pod in cluster.pods}) == 2
    cluster.down()
    assert not made_by(ours) and not processes_of(home)


def test_a_pod_that_is_cut_off_does_not_answer_until_it_is_restored(home: Path) -> None:
    cluster = pods.up(2, network="namespaces")
    network, address = Namespaces(cluster.folder), cluster.pods[1].address
    network.cut(address)
    first, second = cluster.statuses()
    assert first["status"] == "ready" and second["status"].startswith("no answer")
    network.restore(address)
    await_that(lambda: cluster.statuses()[1]["status"] == "ready")
    assert ssh(cluster, address, "echo", "back") == "back"


def test_two_clusters_have_different_addresses(home: Path) -> None:
    first, second = pods.up(1, name="a", network="namespaces"), pods.up(1, name="b", network="namespaces")
    assert first.pods[0].address != second.pods[0].address
    first.down()
    assert second.statuses()[0]["status"] == "ready"


def test_networks_of_a_cluster_whose_up_was_killed_are_removed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(300)")
    start = program(f"""
from pathlib import Path
from zeropods import pods
from zeropods.pods.backends import fleet
fleet.WORKER_SCRIPT = Path({str(tmp_path / "sleeper.py")!r})
pods.up(2, name="dead", network="namespaces")
""")
    await_that(lambda: len(list(home.glob("dead/workers/*.json"))) == 2)
    ours = mark(home, "dead")
    assert made_by(ours)
    start.kill()
    start.communicate(timeout=SECONDS)
    assert zeropods("pods", "down", "--name", "dead").stdout == "down: dead\n"
    assert not made_by(ours) and not list(home.iterdir())
