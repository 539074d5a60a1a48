"""Pods report in over real sockets: all at once, wrong ones, dying ones; nothing is left afterwards."""

from __future__ import annotations

import asyncio
import base64
import gc
import re
import socket
import struct
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
from zeropods.pods.rendezvous import Answer, MissingPods, Registration, Rendezvous, register
from zeropods.pods.wire import Channel, ChannelError, connect

HERE = "127.0.0.1"
SECRET = bytes(range(32))
SECONDS = 20.0
SSH_PORTS = (2_222, 40_022, 40_023)
ANSWER = Answer(cluster="c", authorized_key="ssh-ed25519 AAAA", lease="kernel", lease_seconds=30.0)

Opener = Callable[..., Rendezvous]
Start = Callable[..., Future[dict[str, Any]]]


def host_key(number: int) -> str:
    kind = b"ssh-ed25519"
    blob = struct.pack(">I", len(kind)) + kind + struct.pack(">I", 32) + number.to_bytes(32, "big")
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


def pod(number: int, **changes: Any) -> Registration:
    values: dict[str, Any] = {
        "worker": f"w{number}",
        "address": f"127.0.1.{number}",
        "hostname": f"host-{number}",
        "slots": 1,
        "host_key": host_key(number),
        "control_port": 30_000 + number,
        "free_ports": SSH_PORTS,
    }
    return Registration(**{**values, **changes})


async def serve_nothing(answer: dict[str, Any]) -> None:
    pass


def serve_when(event: threading.Event) -> Callable[[dict[str, Any]], Any]:
    """A pod whose sshd is up once the event is set."""

    async def serve(answer: dict[str, Any]) -> None:
        async with asyncio.timeout(SECONDS):
            while not event.is_set():
                await asyncio.sleep(0.02)

    return serve


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
            port: int, registered: Registration, serve: Any = serve_nothing, **how: Any
        ) -> Future[dict[str, Any]]:
            told = {"secret": SECRET, "seconds": SECONDS, **how}
            registering = (HERE, port), told["secret"], registered, told["seconds"], serve
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


def registered(rendezvous: Rendezvous) -> set[str]:
    """Who has registered, as `watch` is told; nothing else is waited for."""
    seen: list[frozenset[str]] = []
    with pytest.raises((MissingPods, UserError)):
        rendezvous.gather(0.0, seen.append)
    return set(seen[-1])


def proven(port: int, then: Callable[[Channel], Any]) -> Any:
    """What `then` returns, on a connection of someone who knows the secret and is no well-behaved pod."""

    async def main() -> Any:
        channel = await connect(HERE, port, SECRET, "register", SECONDS)
        try:
            return await then(channel)
        finally:
            await channel.close()

    return asyncio.run(main())


# Pods that behave


def test_pods_are_gathered_by_numeric_address_and_told_the_first_port_that_all_have_free(
    listening: Opener, start: Start
) -> None:
    rendezvous = listening(3)
    free = {10: (40_023, 40_022), 9: SSH_PORTS, 100: (40_022, 2_222, 40_023)}
    expected = {number: pod(number, free_ports=ports) for number, ports in free.items()}
    answers = [start(rendezvous.port, registration) for registration in expected.values()]
    assert rendezvous.gather(SECONDS, lambda ids: None) == (expected[9], expected[10], expected[100])
    assert rendezvous.ssh_port == 40_022
    told = {"ssh_port": 40_022, "cluster": "c", "authorized_key": "ssh-ed25519 AAAA"}
    for answer in answers:
        assert answer.result(SECONDS) == {**told, "lease": "kernel", "lease_seconds": 30.0}


def test_pods_that_start_before_their_master_are_gathered(start: Start, listening: Opener) -> None:
    with socket.create_server((HERE, 0)) as reserved:
        port = reserved.getsockname()[1]
    early = start(port, pod(1))
    time.sleep(0.3)
    assert listening(1, port=port).gather(SECONDS, lambda ids: None) == (pod(1),)
    assert early.result(SECONDS)["cluster"] == "c"


def test_gather_waits_until_the_slowest_pod_is_ready_and_watch_is_told_who_is_there(
    listening: Opener, start: Start
) -> None:
    may_serve = threading.Event()
    rendezvous = listening(2)
    start(rendezvous.port, pod(1))
    until(lambda: registered(rendezvous) == {"w1"})
    seen: list[frozenset[str]] = []
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(rendezvous.gather, SECONDS, seen.append)
        start(rendezvous.port, pod(2), serve_when(may_serve))
        until(lambda: bool(seen) and seen[-1] == {"w1", "w2"})
        assert not gathered.done()
        may_serve.set()
        assert gathered.result(SECONDS) == (pod(1), pod(2))


def test_a_pod_that_dies_before_the_answer_is_taken_out_and_may_come_back(listening: Opener, start: Start) -> None:
    async def come_twice_and_die(channel: Channel) -> None:
        await channel.send(asdict(pod(1)))
        again = await connect(HERE, rendezvous.port, SECRET, "register", SECONDS)
        await again.send(asdict(pod(1)))
        with pytest.raises(ChannelError, match="closed"):
            await channel.receive(SECONDS)
        assert await asyncio.to_thread(registered, rendezvous) == {"w1"}
        await again.close()

    rendezvous = listening(2)
    proven(rendezvous.port, come_twice_and_die)
    until(lambda: registered(rendezvous) == set())
    start(rendezvous.port, pod(2))
    start(rendezvous.port, pod(1))
    assert rendezvous.gather(SECONDS, lambda ids: None) == (pod(1), pod(2))


# Pods that contradict each other, or fail


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (pod(1, host_key=host_key(7), address="127.0.1.7"), "w1: two pods call themselves so, at 127.0.1.1 and"),
        (pod(2, address="127.0.1.1"), "127.0.1.1: two pods have this address, w1 and w2;"),
    ],
    ids=["the same pod twice", "two pods with one address"],
)
def test_a_contradiction_refuses_the_second_pod_and_names_both(
    listening: Opener, start: Start, second: Registration, message: str
) -> None:
    rendezvous = listening(3)
    start(rendezvous.port, pod(1))
    until(lambda: registered(rendezvous) == {"w1"})
    refused = start(rendezvous.port, second)
    with pytest.raises(UserError, match=re.escape(message)):
        rendezvous.gather(SECONDS, lambda ids: None)
    with pytest.raises(UserError, match="refused by the master: " + re.escape(message)):
        refused.result(SECONDS)


def test_a_pod_of_another_version_is_refused_with_the_field(listening: Opener) -> None:
    rendezvous = listening(2)
    told = proven(rendezvous.port, lambda channel: channel.ask({**asdict(pod(1)), "more": 1}, SECONDS))
    message = f"pod at {HERE}: a registration: more: missing or unknown; is one version of zeropods on master and pods?"
    assert told["refused"] == message
    with pytest.raises(UserError, match="^" + re.escape(message)):
        rendezvous.gather(SECONDS, lambda ids: None)


def test_a_pod_that_cannot_serve_is_named_with_what_it_said(listening: Opener, start: Start) -> None:
    async def fail(answer: dict[str, Any]) -> None:
        raise UserError("sshd: not\n found\x1b[2J")

    rendezvous = listening(2)
    start(rendezvous.port, pod(1))
    failed = start(rendezvous.port, pod(2), fail)
    with pytest.raises(UserError) as caught:
        rendezvous.gather(SECONDS, lambda ids: None)
    assert str(caught.value) == "w2 (127.0.1.2): sshd: not found?[2J"
    with pytest.raises(UserError, match="sshd: not"):
        failed.result(SECONDS)


def test_no_port_for_sshd_in_common_is_said_with_the_ports(listening: Opener, start: Start) -> None:
    rendezvous = listening(2)
    start(rendezvous.port, pod(1, free_ports=(2_222,)))
    start(rendezvous.port, pod(2, free_ports=(40_022,)))
    with pytest.raises(UserError, match="ssh: none of the ports 2222, 40022, 40023 is free on every pod"):
        rendezvous.gather(SECONDS, lambda ids: None)


# Who does not come, and who may not


def test_missing_pods_are_counted_and_the_others_known(start: Start) -> None:
    with new_rendezvous(3) as rendezvous:
        waiting = start(rendezvous.port, pod(2))
        until(lambda: registered(rendezvous) == {"w2"})
        with pytest.raises(MissingPods) as caught:
            rendezvous.gather(0.2, lambda ids: None)
    assert str(caught.value) == "1 of 3 pods have registered in 0.2 s"
    assert caught.value.registered == (pod(2),)
    with pytest.raises(UserError, match="refused by the master: the cluster did not come up"):
        waiting.result(SECONDS)


def test_a_pod_of_another_cluster_does_not_get_in(listening: Opener, start: Start) -> None:
    rendezvous = listening(1)
    with pytest.raises(UserError, match="has this pod its cluster's secret"):
        start(rendezvous.port, pod(1), secret=bytes(32), seconds=0.5).result(SECONDS)
    assert registered(rendezvous) == set()
