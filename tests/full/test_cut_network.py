"""A pod's network is cut in mid-run and restored: the run ends everywhere, and nobody comes back to it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full.launches import ended, left, record, started, train, until
from tests.namespaces import Namespaces, are_possible
from zeropods import pods
from zeropods.pods.cluster import BACKENDS, Cluster
from zeropods.pods.wire import WireError, ask_all

pytestmark = pytest.mark.skipif(not are_possible(), reason="network namespaces need root and iproute2")
LEFT_SECONDS, STOPPED_SECONDS = 15, 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three pods on networks of their own."""
    with pytest.MonkeyPatch.context() as own:
        own.setenv("ZEROPODS_HOME", str(tmp_path_factory.mktemp("home")))
        own.setitem(BACKENDS, "namespaces", Namespaces)
        up = pods.up(3, name="apart", backend="namespaces")
        yield up
        up.down()


def test_a_pod_that_is_cut_off_is_lost_and_does_not_come_back(cluster: Cluster, tmp_path: Path) -> None:
    network, cut = Namespaces(cluster.folder, cluster.settings), cluster.pods[0]  # with rank 0, who holds the lock
    process = started(cluster, tmp_path / "run", "--seconds", 600)
    ranks = train(tmp_path / "run")
    network.cut(cut.address)
    seconds = until(lambda: process.poll() is not None, STOPPED_SECONDS)
    said = ended(process)
    found = record(tmp_path / "run")
    assert (found["status"], found["pod"]) == ("pod_lost", cut.name), said
    assert seconds < STOPPED_SECONDS
    until(lambda: not left(tmp_path / "run"), LEFT_SECONDS)  # the pod that was cut off ended its ranks by itself
    network.restore(cut.address)
    run = found["identity"]["seen"]["ZEROPODS_RUN"]
    until(lambda: not isinstance(asked(cluster, run), OSError))
    assert isinstance(asked(cluster, run), WireError)
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    again = started(cluster, tmp_path / "again")
    assert ended(again) and again.returncode == 0


def asked(cluster: Cluster, run: str) -> object:
    """What the pod that was cut off answers to a supervisor that wants to go on with the run."""
    request = {"do": "renew", "run": run, "seconds": 10}
    (answer,) = ask_all(cluster.agents[:1], cluster.secret, request, 5.0)
    return answer


def test_a_short_interruption_of_the_network_ends_nothing(cluster: Cluster, tmp_path: Path) -> None:
    network, cut = Namespaces(cluster.folder, cluster.settings), cluster.pods[1]
    process = started(cluster, tmp_path / "run", "--seconds", 12)
    train(tmp_path / "run")
    network.cut(cut.address)
    signal.sigtimedwait([], 2.0)
    network.restore(cut.address)
    said = ended(process)
    assert process.returncode == 0 and record(tmp_path / "run")["status"] == "ok", said
