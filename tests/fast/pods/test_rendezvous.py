"""Pods report in over real sockets: all at once, wrong ones, late ones; nothing is left afterwards."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict

import pytest

from tests.full.launches import until
from tests.made import a_pod
from zeropods.errors import UserError
from zeropods.pods.rendezvous import Pod, Rendezvous, register
from zeropods.pods.wire import WireError, ask

HERE = "127.0.0.1"
SECRET = bytes(range(32))
SECONDS = 20.0

Opener = Callable[..., Rendezvous]
Start = Callable[..., Future[None]]


@pytest.fixture(autouse=True)
def _nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread is left, and the event loops had nothing to complain about."""
    before = set(threading.enumerate())
    yield
    assert [record.getMessage() for record in caplog.get_records("call") + caplog.get_records("teardown")] == []
    until(lambda: not set(threading.enumerate()) - before)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts pods in threads of their own."""
    with ThreadPoolExecutor(16) as pool:

        def begin(port: int, registered: Pod, secret: bytes = SECRET, seconds: float = SECONDS) -> Future[None]:
            return pool.submit(lambda: asyncio.run(register((HERE, port), secret, registered, seconds)))

        yield begin


@pytest.fixture
def listening(start: Start) -> Iterator[Opener]:
    """Opens a rendezvous; at the end each is closed before pods are waited for, and its port is free again."""
    opened: list[int] = []
    with ExitStack() as stack:

        def listen(count: int, port: int = 0) -> Rendezvous:
            rendezvous = stack.enter_context(Rendezvous(secret=SECRET, count=count, address=HERE, port=port))
            opened.append(rendezvous.port)
            return rendezvous

        yield listen
    for port in opened:
        socket.create_server((HERE, port)).close()


def test_pods_are_gathered_by_numeric_address_and_told_when_all_are_there(listening: Opener, start: Start) -> None:
    with socket.create_server((HERE, 0)) as reserved:
        port = reserved.getsockname()[1]
    # One starts before its master, and one loses its connection and comes again.
    early = start(port, a_pod(10))
    rendezvous = listening(3, port=port)
    with pytest.raises(WireError, match="timed out"):
        asyncio.run(ask(HERE, port, SECRET, "register", asdict(a_pod(9)), 0.5))
    until(lambda: rendezvous.registered == {"w9", "w10"})
    assert not early.done() and rendezvous.gather(0.0) is None
    others = [start(port, a_pod(number)) for number in (9, 100)]
    assert rendezvous.gather(SECONDS) == (a_pod(9), a_pod(10), a_pod(100))
    for answered in (early, *others):
        answered.result(SECONDS)


@pytest.mark.parametrize(
    ("registration", "said"),
    [
        ({**asdict(a_pod(1)), "more": 1}, "bad registration: .*'more'; do master and pods run"),
        ({"failed": "sshd ended as soon as it was started"}, "sshd ended as soon as it was started$"),
    ],
)
def test_a_pod_of_another_version_and_one_that_cannot_serve_are_named(
    listening: Opener, registration: dict[str, object], said: str
) -> None:
    rendezvous = listening(2)
    asyncio.run(ask(HERE, rendezvous.port, SECRET, "register", registration, SECONDS))
    with pytest.raises(UserError, match=rf"^pod at {HERE}: {said}"):
        rendezvous.gather(SECONDS)


def test_a_pod_whose_master_is_gone_does_not_wait_as_long_as_for_the_other_pods() -> None:
    with socket.create_server((HERE, 0)) as reserved:
        port = reserved.getsockname()[1]
    with pytest.raises(UserError, match=r"no answer from the master in 0\.\d s \(.* refused\)"):
        asyncio.run(register((HERE, port), SECRET, a_pod(1), 1000.0, gone_seconds=0.5))


def test_a_pod_of_another_cluster_does_not_get_in(listening: Opener, start: Start) -> None:
    rendezvous = listening(1)
    with pytest.raises(UserError, match="does this pod have its cluster's secret"):
        start(rendezvous.port, a_pod(1), secret=bytes(32), seconds=0.5).result(SECONDS)
    assert not rendezvous.registered
