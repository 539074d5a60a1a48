"""Pods report in over real sockets: all at once, wrong ones, late ones; nothing is left afterwards."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest

from tests.full.launches import until
from zeropods.errors import UserError
from zeropods.pods.rendezvous import Pod, Rendezvous, register
from zeropods.pods.wire import WireError, ask

HERE = "127.0.0.1"
SECRET = bytes(range(32))
SECONDS = 20.0

Opener = Callable[..., Rendezvous]
Start = Callable[..., Future[None]]


def pod(number: int, **changes: Any) -> Pod:
    values: dict[str, Any] = {
        "worker": f"w{number}",
        "address": f"127.0.1.{number}",
        "hostname": f"host-{number}",
        "slots": 1,
        "ssh_port": 2_222,
        "host_key": f"ssh-ed25519 {number}",
        "control_port": 30_000 + number,
    }
    return Pod(**{**values, **changes})


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


def gathered(rendezvous: Rendezvous) -> tuple[Pod, ...]:
    return rendezvous.gather(SECONDS, lambda ids: None)


def test_pods_are_gathered_by_numeric_address_and_told_when_all_are_there(listening: Opener, start: Start) -> None:
    with socket.create_server((HERE, 0)) as reserved:
        port = reserved.getsockname()[1]
    # One starts before its master, and one loses its connection and comes again.
    early = start(port, pod(10))
    rendezvous = listening(3, port=port)
    with pytest.raises(WireError, match="timed out"):
        asyncio.run(ask(HERE, port, SECRET, "register", asdict(pod(9)), 0.5))
    until(lambda: rendezvous.there == {"w9", "w10"})
    assert not early.done()
    others = [start(port, pod(number)) for number in (9, 100)]
    seen: list[frozenset[str]] = []
    assert rendezvous.gather(SECONDS, seen.append) == (pod(9), pod(10), pod(100))
    assert seen[-1] == {"w9", "w10", "w100"}
    for answered in (early, *others):
        answered.result(SECONDS)


def test_two_pods_with_one_address_are_refused_with_both_names(listening: Opener, start: Start) -> None:
    rendezvous = listening(3)
    start(rendezvous.port, pod(1))
    until(lambda: rendezvous.there == {"w1"})
    refused = start(rendezvous.port, pod(2, address="127.0.1.1"))
    message = re.escape("127.0.1.1: two pods have this address, w1 and w2;")
    with pytest.raises(UserError, match=message):
        gathered(rendezvous)
    with pytest.raises(UserError, match="refused by the master: " + message):
        refused.result(SECONDS)


def test_a_pod_of_another_version_is_named(listening: Opener) -> None:
    rendezvous = listening(2)
    asyncio.run(ask(HERE, rendezvous.port, SECRET, "register", {**asdict(pod(1)), "more\x1b": 1}, SECONDS))
    with pytest.raises(UserError, match=rf"^pod at {HERE}: a registration: .*'more\?'; is one version of zeropods on"):
        gathered(rendezvous)


def test_a_pod_that_cannot_serve_says_why(listening: Opener) -> None:
    rendezvous = listening(2)
    asyncio.run(ask(HERE, rendezvous.port, SECRET, "register", {"failed": "sshd ended\x1b at its start"}, SECONDS))
    with pytest.raises(UserError, match=rf"^pod at {HERE}: sshd ended\? at its start$"):
        gathered(rendezvous)


def test_missing_pods_are_known_those_that_are_there_are_told_and_watch_ends_the_wait(start: Start) -> None:
    def watch(ids: frozenset[str]) -> None:
        raise UserError("a worker has ended")

    with Rendezvous(secret=SECRET, count=3, address=HERE, port=0) as rendezvous:
        waiting = start(rendezvous.port, pod(2))
        until(lambda: rendezvous.there == {"w2"})
        with pytest.raises(TimeoutError):
            rendezvous.gather(0.2, lambda ids: None)
        with pytest.raises(UserError, match="a worker has ended"):
            rendezvous.gather(SECONDS, watch)
    with pytest.raises(UserError, match="refused by the master: the cluster did not come up"):
        waiting.result(SECONDS)


def test_a_pod_of_another_cluster_does_not_get_in(listening: Opener, start: Start) -> None:
    rendezvous = listening(1)
    with pytest.raises(UserError, match="has this pod its cluster's secret"):
        start(rendezvous.port, pod(1), secret=bytes(32), seconds=0.5).result(SECONDS)
    assert not rendezvous.there
