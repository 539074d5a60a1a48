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

from zeropods.errors import UserError
from zeropods.pods.rendezvous import Answer, MissingPods, Registration, Rendezvous, register
from zeropods.pods.wire import Channel, ChannelError, connect

HERE = "127.0.0.1"
SECRET = bytes(range(32))
SECONDS = 20.0
SSH_PORTS = (2_222, 40_022, 40_023)
ANSWER = Answer(cluster="c", authorized_key="ssh-ed25519 AAAA", lease="kernel", lease_seconds=30.0)

Opener = Callable[..., Rendezvous]


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


class Pods:
    """Pods in threads of their own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def start(
        self,
        port: int,
        registration: Registration,
        serve: Any = serve_nothing,
        secret: bytes = SECRET,
        seconds: float = SECONDS,
    ) -> Future[dict[str, Any]]:
        registering = (HERE, port), secret, registration, seconds, serve
        return self._pool.submit(lambda: asyncio.run(register(*registering)))


@pytest.fixture
def pods() -> Iterator[Pods]:
    with ThreadPoolExecutor(16) as pool:
        yield Pods(pool)


def new_rendezvous(count: int, port: int = 0) -> Rendezvous:
    return Rendezvous(secret=SECRET, count=count, answer=ANSWER, address=HERE, port=port, ssh_ports=SSH_PORTS)


@pytest.fixture
def listening(pods: Pods) -> Iterator[Opener]:
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


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


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
    listening: Opener, pods: Pods
) -> None:
    rendezvous = listening(3)
    free = {10: (40_023, 40_022), 9: SSH_PORTS, 100: (40_022, 2_222, 40_023)}
    expected = {number: pod(number, free_ports=ports) for number, ports in free.items()}
    answers = [pods.start(rendezvous.port, registration) for registration in expected.values()]
    assert rendezvous.gather(SECONDS, lambda ids: None) == (expected[9], expected[10], expected[100])
    assert rendezvous.ssh_port == 40_022
    told = {"ssh_port": 40_022, "cluster": "c", "authorized_key": "ssh-ed25519 AAAA"}
    for answer in answers:
        assert answer.result(SECONDS) == {**told, "lease": "kernel", "lease_seconds": 30.0}


def test_pods_that_start_before_their_master_are_gathered(pods: Pods, listening: Opener) -> None:
    with socket.create_server((HERE, 0)) as reserved:
        port = reserved.getsockname()[1]
    early = pods.start(port, pod(1))
    time.sleep(0.3)
    assert listening(1, port=port).gather(SECONDS, lambda ids: None) == (pod(1),)
    assert early.result(SECONDS)["cluster"] == "c"


def test_gather_works_inside_a_running_event_loop(listening: Opener, pods: Pods) -> None:
    async def notebook() -> tuple[Registration, ...]:
        rendezvous = listening(1)
        pods.start(rendezvous.port, pod(1))
        return rendezvous.gather(SECONDS, lambda ids: None)

    assert asyncio.run(notebook()) == (pod(1),)


def test_gather_waits_until_the_slowest_pod_is_ready_and_watch_is_told_who_is_there(
    listening: Opener, pods: Pods
) -> None:
    may_serve = threading.Event()
    rendezvous = listening(2)
    pods.start(rendezvous.port, pod(1))
    until(lambda: registered(rendezvous) == {"w1"})
    seen: list[frozenset[str]] = []
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(rendezvous.gather, SECONDS, seen.append)
        pods.start(rendezvous.port, pod(2), serve_when(may_serve))
        until(lambda: bool(seen) and seen[-1] == {"w1", "w2"})
        assert not gathered.done()
        may_serve.set()
        assert gathered.result(SECONDS) == (pod(1), pod(2))


def test_a_pod_that_dies_before_the_answer_is_taken_out_and_may_come_back(listening: Opener, pods: Pods) -> None:
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
    pods.start(rendezvous.port, pod(2))
    pods.start(rendezvous.port, pod(1))
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
    listening: Opener, pods: Pods, second: Registration, message: str
) -> None:
    rendezvous = listening(3)
    pods.start(rendezvous.port, pod(1))
    until(lambda: registered(rendezvous) == {"w1"})
    refused = pods.start(rendezvous.port, second)
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


def test_a_pod_that_cannot_serve_is_named_with_what_it_said(listening: Opener, pods: Pods) -> None:
    async def fail(answer: dict[str, Any]) -> None:
        raise UserError("sshd: not\n found\x1b[2J")

    rendezvous = listening(2)
    pods.start(rendezvous.port, pod(1))
    failed = pods.start(rendezvous.port, pod(2), fail)
    with pytest.raises(UserError) as caught:
        rendezvous.gather(SECONDS, lambda ids: None)
    assert str(caught.value) == "w2 (127.0.1.2): sshd: not found?[2J"
    with pytest.raises(UserError, match="sshd: not"):
        failed.result(SECONDS)


async def hurry(channel: Channel) -> None:
    await channel.send(asdict(pod(2)))
    await channel.send({"ready": True})


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda channel: channel.ask(asdict(pod(2)), SECONDS), "w2 (127.0.1.2): lost before its sshd was up"),
        (hurry, "w2 (127.0.1.2): said {'ready': True}"),
    ],
    ids=["dies after the answer", "is ready before it was told"],
)
def test_a_pod_that_does_not_keep_to_the_order_is_named(
    listening: Opener, pods: Pods, does: Callable[[Channel], Any], message: str
) -> None:
    rendezvous = listening(2)
    if does is not hurry:
        pods.start(rendezvous.port, pod(1))
    proven(rendezvous.port, does)
    with pytest.raises(UserError, match=re.escape(message)):
        rendezvous.gather(SECONDS, lambda ids: None)


def test_a_pod_too_many_is_refused_and_harms_nobody(listening: Opener, pods: Pods) -> None:
    may_serve = threading.Event()
    rendezvous = listening(1)
    pods.start(rendezvous.port, pod(1), serve_when(may_serve))
    until(lambda: registered(rendezvous) == {"w1"})
    with pytest.raises(UserError, match="all 1 pods of the cluster have registered"):
        pods.start(rendezvous.port, pod(2)).result(SECONDS)
    may_serve.set()
    assert rendezvous.gather(SECONDS, lambda ids: None) == (pod(1),)


def test_no_port_for_sshd_in_common_is_said_with_the_ports(listening: Opener, pods: Pods) -> None:
    rendezvous = listening(2)
    pods.start(rendezvous.port, pod(1, free_ports=(2_222,)))
    pods.start(rendezvous.port, pod(2, free_ports=(40_022,)))
    with pytest.raises(UserError, match="ssh: none of the ports 2222, 40022, 40023 is free on every pod"):
        rendezvous.gather(SECONDS, lambda ids: None)


# Who does not come, and who may not


def test_missing_pods_are_counted_and_the_others_known(pods: Pods) -> None:
    with new_rendezvous(3) as rendezvous:
        waiting = pods.start(rendezvous.port, pod(2))
        until(lambda: registered(rendezvous) == {"w2"})
        with pytest.raises(MissingPods) as caught:
            rendezvous.gather(0.2, lambda ids: None)
    assert str(caught.value) == "1 of 3 pods have registered in 0.2 s"
    assert caught.value.registered == (pod(2),)
    with pytest.raises(UserError, match="refused by the master: the cluster did not come up"):
        waiting.result(SECONDS)


def test_a_pod_that_never_gets_ready_is_missing_at_the_deadline(listening: Opener, pods: Pods) -> None:
    over = threading.Event()
    rendezvous = listening(2)
    pods.start(rendezvous.port, pod(1)), pods.start(rendezvous.port, pod(2), serve_when(over))
    until(lambda: registered(rendezvous) == {"w1", "w2"})
    with pytest.raises(MissingPods, match="1 of 2 pods are ready in 1 s") as caught:
        rendezvous.gather(1.0, lambda ids: None)
    assert caught.value.registered == (pod(1),)
    over.set()


def test_what_watch_raises_ends_gather(listening: Opener) -> None:
    def watch(ids: frozenset[str]) -> None:
        raise UserError("worker w9: ended")

    with pytest.raises(UserError, match="worker w9: ended"):
        listening(2).gather(SECONDS, watch)


def test_a_pod_without_a_master_says_where_it_looked() -> None:
    with socket.socket() as nobody:
        nobody.bind((HERE, 0))
        port = nobody.getsockname()[1]
        with pytest.raises(UserError, match=f"{HERE}:{port}: no answer of the master in 0.3 s"):
            asyncio.run(register((HERE, port), SECRET, pod(1), 0.3, serve_nothing))


def test_a_pod_of_another_cluster_does_not_get_in(listening: Opener, pods: Pods) -> None:
    rendezvous = listening(1)
    with pytest.raises(UserError, match="has this pod its cluster's secret"):
        pods.start(rendezvous.port, pod(1), secret=bytes(32), seconds=0.5).result(SECONDS)
    assert registered(rendezvous) == set()


def test_a_rendezvous_ends_in_the_midst_of_a_flood() -> None:
    with new_rendezvous(1) as rendezvous:
        flood = [socket.create_connection((HERE, rendezvous.port), timeout=SECONDS) for _ in range(200)]
    for connection in flood:
        connection.close()
