"""Pods report in over real sockets: all at once, wrong ones, dying ones; nothing is left afterwards."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest

from tests.full.launches import until
from zeropods.errors import UserError
from zeropods.pods.rendezvous import Answer, Pod, Rendezvous, register
from zeropods.pods.wire import connected

HERE = "127.0.0.1"
SECRET = bytes(range(32))
SECONDS = 20.0
SSH_PORTS = (2_222, 40_022, 40_023)
ANSWER = Answer(authorized_key="ssh-ed25519 AAAA", lease="kernel", lease_seconds=30.0)

Opener = Callable[..., Rendezvous]
Start = Callable[..., Future[Answer]]


def pod(number: int, **changes: Any) -> Pod:
    values: dict[str, Any] = {
        "worker": f"w{number}",
        "address": f"127.0.1.{number}",
        "hostname": f"host-{number}",
        "slots": 1,
        "host_key": f"ssh-ed25519 {number}",
        "control_port": 30_000 + number,
    }
    return Pod(**{**values, **changes})


async def serve_nothing(answer: Answer) -> None:
    pass


@pytest.fixture(autouse=True)
def _nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread is left, and the event loops had nothing to complain about."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.get_records("call") + caplog.get_records("teardown")] == []
    until(lambda: not set(threading.enumerate()) - before)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts pods in threads of their own."""
    with ThreadPoolExecutor(16) as pool:

        def begin(
            port: int, registered: Pod, serve: Any = serve_nothing, free: Any = SSH_PORTS, **how: Any
        ) -> Future[Answer]:
            told = {"secret": SECRET, "seconds": SECONDS, **how}
            registering = (HERE, port), told["secret"], registered, free, told["seconds"], serve
            return pool.submit(lambda: asyncio.run(register(*registering)))

        yield begin


def new_rendezvous(count: int, port: int = 0) -> Rendezvous:
    return Rendezvous(secret=SECRET, count=count, answer=ANSWER, address=HERE, port=port, ssh_ports=SSH_PORTS)


@pytest.fixture
def listening(start: Start) -> Iterator[Opener]:
    """Opens a rendezvous; at the end each is closed before pods are waited for, and its port is free again."""
    opened: list[int] = []
    with ExitStack() as stack:

        def listen(count: int, port: int = 0) -> Rendezvous:
            rendezvous = stack.enter_context(new_rendezvous(count, port))
            opened.append(rendezvous.port)
            return rendezvous

        yield listen
    for port in opened:
        socket.create_server((HERE, port)).close()


def gathered(rendezvous: Rendezvous) -> tuple[Pod, ...]:
    return rendezvous.gather(SECONDS, lambda ids: None)


# Pods that behave


def test_pods_are_gathered_by_numeric_address_and_told_the_first_port_that_all_have_free(
    listening: Opener, start: Start
) -> None:
    rendezvous = listening(3)
    free = {10: (40_023, 40_022), 9: SSH_PORTS, 100: (40_022, 2_222, 40_023)}
    answers = [start(rendezvous.port, pod(number), free=ports) for number, ports in free.items()]
    assert gathered(rendezvous) == (pod(9), pod(10), pod(100))
    assert rendezvous.answer.ssh_port == 40_022
    assert [answer.result(SECONDS) for answer in answers] == [rendezvous.answer] * 3


def test_pods_that_start_before_their_master_are_gathered(start: Start, listening: Opener) -> None:
    with socket.create_server((HERE, 0)) as reserved:
        port = reserved.getsockname()[1]
    early = start(port, pod(1))
    time.sleep(0.3)
    assert gathered(listening(1, port=port)) == (pod(1),)
    assert early.result(SECONDS).ssh_port == 2_222


def test_gather_waits_until_the_slowest_pod_is_ready_and_watch_is_told_who_is_there(
    listening: Opener, start: Start
) -> None:
    may_serve = threading.Event()

    async def serve(answer: Answer) -> None:
        await asyncio.to_thread(may_serve.wait, SECONDS)

    rendezvous = listening(2)
    start(rendezvous.port, pod(1))
    until(lambda: rendezvous.there == {"w1"})
    seen: list[frozenset[str]] = []
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(rendezvous.gather, SECONDS, seen.append)
        start(rendezvous.port, pod(2), serve)
        until(lambda: bool(seen) and seen[-1] == {"w1", "w2"} and rendezvous.there == {"w1"})
        assert not gathering.done()
        may_serve.set()
        assert gathering.result(SECONDS) == (pod(1), pod(2))


def test_a_pod_that_loses_its_connection_comes_again(listening: Opener, start: Start) -> None:
    async def ask_and_go() -> None:
        async with connected(HERE, rendezvous.port, SECRET, "register", SECONDS) as channel:
            await channel.send({"do": "register", "pod": asdict(pod(1)), "free_ports": SSH_PORTS})

    rendezvous = listening(2)
    asyncio.run(ask_and_go())
    start(rendezvous.port, pod(1))
    start(rendezvous.port, pod(2))
    assert gathered(rendezvous) == (pod(1), pod(2))


def test_watch_ends_the_wait(listening: Opener) -> None:
    def watch(ids: frozenset[str]) -> None:
        raise UserError("a worker has ended")

    with pytest.raises(UserError, match="a worker has ended"):
        listening(1).gather(SECONDS, watch)


# Pods that cannot be


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (pod(1, address="127.0.1.2", host_key="another"), "w1: two pods have this name, at 127.0.1.1 and"),
        (pod(2, address="127.0.1.1"), "127.0.1.1: two pods have this address, w1 and w2;"),
    ],
    ids=["the same pod twice", "two pods with one address"],
)
def test_a_contradiction_refuses_the_second_pod_and_names_both(
    listening: Opener, start: Start, second: Pod, message: str
) -> None:
    rendezvous = listening(3)
    start(rendezvous.port, pod(1))
    until(lambda: rendezvous.there == {"w1"})
    refused = start(rendezvous.port, second)
    with pytest.raises(UserError, match=re.escape(message)):
        gathered(rendezvous)
    with pytest.raises(UserError, match="refused by the master: " + re.escape(message)):
        refused.result(SECONDS)


def test_a_pod_too_many_is_refused_and_harms_nobody(listening: Opener, start: Start) -> None:
    rendezvous = listening(1)
    start(rendezvous.port, pod(1)).result(SECONDS)
    with pytest.raises(UserError, match=r"w2 \(127\.0\.1\.2\): all 1 pods of the cluster have registered"):
        start(rendezvous.port, pod(2)).result(SECONDS)
    assert gathered(rendezvous) == (pod(1),)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"do": "register", "pod": {**asdict(pod(1)), "more": 1}, "free_ports": []}, "a registration: .*'more'"),
        ({"do": "greet"}, "said .*greet"),
    ],
)
def test_a_pod_of_another_version_is_named(listening: Opener, request_: dict[str, Any], message: str) -> None:
    async def ask() -> None:
        async with connected(HERE, rendezvous.port, SECRET, "register", SECONDS) as channel:
            await channel.ask(request_, SECONDS)

    rendezvous = listening(2)
    asyncio.run(ask())
    with pytest.raises(UserError, match=f"^pod at {HERE}: {message}.*; is one version of zeropods on master and pods"):
        gathered(rendezvous)


def test_a_pod_that_cannot_serve_is_named_with_what_it_said(listening: Opener, start: Start) -> None:
    async def fail(answer: Answer) -> None:
        raise UserError("sshd: not\n found\x1b[2J")

    rendezvous = listening(2)
    start(rendezvous.port, pod(1))
    failed = start(rendezvous.port, pod(2), fail)
    with pytest.raises(UserError) as caught:
        gathered(rendezvous)
    assert str(caught.value) == "w2 (127.0.1.2): sshd: not found?[2J"
    with pytest.raises(UserError, match="sshd: not"):
        failed.result(SECONDS)


def test_no_port_for_sshd_in_common_is_said_with_the_ports(listening: Opener, start: Start) -> None:
    rendezvous = listening(2)
    start(rendezvous.port, pod(1), free=(2_222,))
    start(rendezvous.port, pod(2), free=(40_022,))
    with pytest.raises(UserError, match="ssh: none of the ports 2222, 40022, 40023 is free on every pod"):
        gathered(rendezvous)


# Who does not come, and who may not


def test_missing_pods_are_known_and_those_that_are_there_are_told(start: Start) -> None:
    with new_rendezvous(3) as rendezvous:
        waiting = start(rendezvous.port, pod(2))
        until(lambda: rendezvous.there == {"w2"})
        with pytest.raises(TimeoutError):
            rendezvous.gather(0.2, lambda ids: None)
    with pytest.raises(UserError, match="refused by the master: the cluster did not come up"):
        waiting.result(SECONDS)


def test_a_pod_of_another_cluster_does_not_get_in(listening: Opener, start: Start) -> None:
    rendezvous = listening(1)
    with pytest.raises(UserError, match="has this pod its cluster's secret"):
        start(rendezvous.port, pod(1), secret=bytes(32), seconds=0.5).result(SECONDS)
    assert not rendezvous.there
