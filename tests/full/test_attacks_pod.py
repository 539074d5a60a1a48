"""Strangers at a real pod that holds a run, and crowds of them: honest ones are heard, nothing is left of the rest."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.attacked import GROWN_BYTES, HONEST_SECONDS, MORE_FILES, SOAK, Port, attacked
from tests.attacks import SIEGE, SIEGES, Attack, Door, Truncated
from tests.full.one_pod import OnePod
from tests.strangers import Strangers, crowd, open_files, resident_bytes, within
from zeropods.launch.heartbeat import Heartbeat
from zeropods.pods.control import purpose
from zeropods.pods.state import Pod

FLOOD = 2_000
CONVERSATIONS = 10_000 if SOAK else 300
MORE_IN_A_FLOOD = 128
"""As MORE_FILES, and those that are just being accepted or cut: 16 in each turn of the event loop."""
SLOW_SECONDS = 12.0
"""Whoever has not proven himself after so long was dropped; the agent gives 5 s to each of two steps."""
RUN = "r"


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """As many open files as a flood takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * FLOOD:
        pytest.skip(f"this user may open {hard} files, and the flood takes {2 * FLOOD}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FLOOD), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=["rendezvous", "agent"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    with attacked(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[OnePod]:
    found = OnePod(tmp_path)
    yield found
    found.clean_up()
    assert not found.processes()


def left(flood: list[socket.socket]) -> None:
    for connection in flood:
        connection.close()


def test_a_flood_keeps_no_honest_one_out(port: Port) -> None:
    pid = port.listener.process.pid
    port.honest()
    memory, files = resident_bytes(pid), open_files(pid)
    flood = crowd(port.place, FLOOD)
    within(HONEST_SECONDS, lambda: heard(port))
    assert open_files(pid) - files < MORE_IN_A_FLOOD
    assert resident_bytes(pid) - memory < GROWN_BYTES
    left(flood)
    within(HONEST_SECONDS, lambda: heard(port))
    within(HONEST_SECONDS, lambda: open_files(pid) <= files + 1)
    port.assert_nobody_got_in(3 * FLOOD)


def heard(port: Port) -> bool:
    """Whether an honest one got through; he may be pushed out by the crowd, and then comes again."""
    try:
        port.honest()
    except (AssertionError, OSError):
        return False
    return True


def test_every_place_held_in_silence_keeps_no_honest_one_out(port: Port) -> None:
    flood = crowd(port.place, 200)
    port.honest()
    left(flood)
    port.assert_nobody_got_in(len(flood))


def test_a_run_goes_on_under_attack_and_its_pod_hears_its_master(pod: OnePod, tmp_path: Path) -> None:
    place = (pod.address, pod.registration.control_port)
    door = Door(pod.secret, purpose(*place), {"do": "stop_run", "run": RUN, "grace_seconds": 0})
    strangers = Strangers(place, door)
    agent = pod.agent.pid
    told = as_pod(pod)
    with Heartbeat([told], pod.secret, RUN) as heartbeat:
        pod.ssh_session(f"export ZEROPODS_RUN={RUN}; sleep 600; true")
        within(HONEST_SECONDS, lambda: pod.ask(do="status")["runs"] == {RUN: 1})
        memory, files = resident_bytes(agent), open_files(agent)
        besiege(strangers, pod)
        assert open_files(agent) - files < MORE_FILES
        flood = crowd(place, FLOOD)
        assert pod.ask(do="status")["runs"] == {RUN: 1}
        left(flood)
        strangers.leave()
        within(HONEST_SECONDS, lambda: open_files(agent) <= files + 1)
        outstay_all_who_are_slow(strangers)
        (pulse,) = heartbeat.pulses()
        assert (pulse.processes, pulse.error) == (1, None)
        assert pulse.silent_seconds < HONEST_SECONDS
        assert resident_bytes(agent) - memory < GROWN_BYTES
        assert heartbeat.stop_run(0.0) == {}
    assert pod.said() == f"pod {pod.address}: ready, ssh port {pod.ssh_port}\n"


def outstay_all_who_are_slow(strangers: Strangers) -> None:
    """Those who stop in the middle of a greeting or of a message, or take their time, are dropped by the clock."""
    for ending in ("waits", "drips"):
        strangers.attack(Truncated(0.1), ending)
        strangers.attack(Truncated(0.9), ending)
    strangers.drip()
    strangers.outstay(SLOW_SECONDS)


def besiege(strangers: Strangers, pod: OnePod) -> None:
    """Hostile conversations, and a question of the master after every twenty."""

    @given(siege=SIEGES)
    @settings(
        max_examples=CONVERSATIONS // SIEGE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    def carry_out(siege: list[tuple[Attack, str]]) -> None:
        for attack, ending in siege:
            strangers.attack(attack, ending)
        strangers.drip()
        assert pod.ask(do="status")["runs"] == {RUN: 1}

    carry_out()
    assert strangers.count >= CONVERSATIONS


def as_pod(pod: OnePod) -> Pod:
    """What a cluster knows of it."""
    known = pod.registration
    return Pod(
        name="pod1",
        worker=known.worker,
        address=known.address,
        hostname=known.hostname,
        slots=known.slots,
        host_key=known.host_key,
        control_port=known.control_port,
    )
