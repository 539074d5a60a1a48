"""Pods report in over real sockets: all at once, wrong ones, dying ones, strangers; nothing is left afterwards."""

from __future__ import annotations

import asyncio
import base64
import errno
import gc
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropods.errors import UserError
from zeropods.pods.registration import Registration, register
from zeropods.pods.rendezvous import Answer, MissingPods, Rendezvous
from zeropods.pods.wire import Channel, ChannelError, connect

HERE = "127.0.0.1"
QUIET = "127.0.61.61"
"""A loopback address where nobody else has taken the default port."""
SECRET = bytes(range(32))
SECONDS = 20.0
SSH_PORTS = (2_222, 40_022, 40_023)
ANSWER = Answer(cluster="c", authorized_key="ssh-ed25519 AAAA", lease="kernel", lease_seconds=30.0)
GREETING = b"zeropods 1 " + b"0" * 32 + b"\n"

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


def new_rendezvous(count: int, **changes: Any) -> Rendezvous:
    how: dict[str, Any] = {"address": HERE, "port": 0, "ssh_ports": SSH_PORTS}
    return Rendezvous(secret=SECRET, count=count, answer=ANSWER, **{**how, **changes})


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
    deadline = time.monotonic() + SECONDS
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"threads are left: {set(threading.enumerate()) - before}"
        time.sleep(0.01)


class Pods:
    """Pods in threads of their own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def start(
        self,
        rendezvous: Rendezvous,
        registration: Registration,
        serve: Any = serve_nothing,
        secret: bytes = SECRET,
        seconds: float = SECONDS,
    ) -> Future[dict[str, Any]]:
        master = (rendezvous._address, rendezvous.port)
        return self._pool.submit(lambda: asyncio.run(register(master, secret, registration, seconds, serve)))


@pytest.fixture
def pods() -> Iterator[Pods]:
    with ThreadPoolExecutor(16) as pool:
        yield Pods(pool)


@pytest.fixture
def listening(pods: Pods) -> Iterator[Opener]:
    """Opens a rendezvous; at the end each is closed before pods are waited for, and its port is free again."""
    opened: list[Rendezvous] = []
    with ExitStack() as stack:

        def listen(count: int, **changes: Any) -> Rendezvous:
            opened.append(stack.enter_context(new_rendezvous(count, **changes)))
            return opened[-1]

        yield listen
    for rendezvous in opened:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((rendezvous._address, rendezvous.port))
            again.listen()


class Seen:
    """What `watch` was told."""

    def __init__(self) -> None:
        self.ids: list[frozenset[str]] = []

    def __call__(self, ids: frozenset[str]) -> None:
        self.ids.append(ids)


@contextmanager
def gathering(rendezvous: Rendezvous, seconds: float = SECONDS) -> Iterator[tuple[Future[Any], Seen]]:
    """`gather` in a thread, and what it shows."""
    seen = Seen()
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(rendezvous.gather, seconds, seen), seen


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def registered(rendezvous: Rendezvous) -> set[str]:
    return {entry.registration.worker for entry in rendezvous._run(rendezvous._entries())}


def stranger(rendezvous: Rendezvous) -> socket.socket:
    return socket.create_connection((rendezvous._address, rendezvous.port), timeout=SECONDS)


def say_and_end(connection: socket.socket, sent: bytes) -> None:
    """Say something, as far as the listener lets it be said, and nothing more."""
    try:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        # ENOTCONN is what shutdown says of a connection that was reset.
        assert isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN


def is_dropped(connection: socket.socket) -> bool:
    """Whether the listener ends a connection (a timeout of the socket is an error)."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        pass
    return True


def proven(rendezvous: Rendezvous, then: Callable[[Channel], Any]) -> Any:
    """What `then` returns, on a connection of someone who knows the secret and is no well-behaved pod."""

    async def main() -> Any:
        channel = await connect(rendezvous._address, rendezvous.port, SECRET, "register", SECONDS)
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
    answers = [pods.start(rendezvous, registration) for registration in expected.values()]
    assert rendezvous.gather(SECONDS, lambda ids: None) == (expected[9], expected[10], expected[100])
    assert rendezvous.ssh_port == 40_022
    told = {"ssh_port": 40_022, "cluster": "c", "authorized_key": "ssh-ed25519 AAAA"}
    for answer in answers:
        assert answer.result(SECONDS) == {**told, "lease": "kernel", "lease_seconds": 30.0}
    assert rendezvous.rejected == 0


def test_pods_that_start_before_their_master_are_gathered(pods: Pods, listening: Opener) -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HERE, 0))
        port = reserved.getsockname()[1]
        early = pods._pool.submit(lambda: asyncio.run(register((HERE, port), SECRET, pod(1), SECONDS, serve_nothing)))
        time.sleep(0.3)
    rendezvous = listening(1, port=port)
    assert rendezvous.gather(SECONDS, lambda ids: None) == (pod(1),)
    assert early.result(SECONDS)["cluster"] == "c"


def test_gather_works_inside_a_running_event_loop(listening: Opener, pods: Pods) -> None:
    async def notebook() -> tuple[Registration, ...]:
        rendezvous = listening(1)
        pods.start(rendezvous, pod(1))
        return rendezvous.gather(SECONDS, lambda ids: None)

    assert asyncio.run(notebook()) == (pod(1),)


def test_gather_waits_until_the_slowest_pod_is_ready(listening: Opener, pods: Pods) -> None:
    may_serve = threading.Event()
    rendezvous = listening(2)
    pods.start(rendezvous, pod(1))
    pods.start(rendezvous, pod(2), serve_when(may_serve))
    with gathering(rendezvous) as (gathered, seen):
        until(lambda: bool(seen.ids) and seen.ids[-1] == {"w1", "w2"})
        assert not gathered.done()
        may_serve.set()
        assert gathered.result(SECONDS) == (pod(1), pod(2))


def test_a_pod_that_dies_before_the_answer_is_taken_out_and_may_come_back(listening: Opener, pods: Pods) -> None:
    async def die(channel: Channel) -> None:
        await channel.send(pod(1).to_json())
        until_seen = asyncio.get_running_loop().time() + SECONDS
        while "w1" not in registered(rendezvous):
            assert asyncio.get_running_loop().time() < until_seen
            await asyncio.sleep(0.02)

    rendezvous = listening(2)
    proven(rendezvous, die)
    until(lambda: registered(rendezvous) == set())
    with gathering(rendezvous) as (gathered, _):
        pods.start(rendezvous, pod(2))
        pods.start(rendezvous, pod(1))
        assert gathered.result(SECONDS) == (pod(1), pod(2))


def test_a_pod_that_registers_again_with_its_own_key_counts_once(listening: Opener, pods: Pods) -> None:
    async def come_back(channel: Channel) -> dict[str, Any]:
        await channel.send(pod(1).to_json())
        again = await connect(HERE, rendezvous.port, SECRET, "register", SECONDS)
        await again.send(pod(1).to_json())
        with pytest.raises(ChannelError, match="closed"):
            await channel.receive(SECONDS)
        assert registered(rendezvous) == {"w1"}
        last = pods.start(rendezvous, pod(2))
        answer = await again.receive(SECONDS)
        await again.send({"ready": True})
        last.result(SECONDS)
        await again.close()
        return answer

    rendezvous = listening(2)
    with gathering(rendezvous) as (gathered, _):
        assert proven(rendezvous, come_back)["ssh_port"] == 2_222
        assert gathered.result(SECONDS) == (pod(1), pod(2))


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
    pods.start(rendezvous, pod(1))
    until(lambda: registered(rendezvous) == {"w1"})
    refused = pods.start(rendezvous, second)
    with pytest.raises(UserError, match=re.escape(message)):
        rendezvous.gather(SECONDS, lambda ids: None)
    with pytest.raises(UserError, match="refused by the master: " + re.escape(message)):
        refused.result(SECONDS)
    assert registered(rendezvous) == {"w1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"worker": "a b"}, "worker: 'a b'; expected letters"),
        ({"worker": "-oProxyCommand=x"}, "worker: "),
        ({"address": "pod-1"}, "address: 'pod-1'; expected an IPv4 address"),
        ({"address": "0.0.0.0"}, "address: "),
        ({"address": "127.0.1.1\n127.0.1.2"}, "address: "),
        ({"address": 1}, "address: 1; "),
        ({"hostname": "a\nb"}, "hostname: "),
        ({"slots": 0}, "slots: 0; expected a number from 1 to 9999"),
        ({"slots": True}, "slots: True; "),
        ({"slots": 1.0}, "slots: 1.0; "),
        ({"host_key": "ssh-rsa AAAA"}, "host_key: 'ssh-rsa AAAA'; "),
        ({"host_key": host_key(1) + "\n* ssh-ed25519 AAAA"}, "host_key: "),
        ({"host_key": None}, "host_key: None; "),
        ({"control_port": 65_536}, "control_port: 65536; expected a port"),
        ({"free_ports": [0]}, "free_ports: "),
        ({"free_ports": 2_222}, "free_ports: 2222; "),
        ({"free_ports": [2_222] * 2_000}, "free_ports: "),
        ({"more": 1}, "a registration: more: missing or unknown"),
    ],
)
def test_nonsense_in_a_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        Registration.from_json({**pod(1).to_json(), **changes})


def test_a_registration_is_read_as_it_was_written() -> None:
    assert Registration.from_json(pod(1).to_json()) == pod(1)


def test_a_proven_registration_with_nonsense_is_refused_and_ends_gather(listening: Opener) -> None:
    rendezvous = listening(2)
    told = proven(rendezvous, lambda channel: channel.ask({**pod(1).to_json(), "slots": -1}, SECONDS))
    assert told == {"refused": f"pod at {HERE}: slots: -1; expected a number from 1 to 9999"}
    with pytest.raises(UserError, match=f"pod at {HERE}: slots: -1"):
        rendezvous.gather(SECONDS, lambda ids: None)


def test_a_pod_that_cannot_serve_is_named_with_what_it_said(listening: Opener, pods: Pods) -> None:
    async def fail(answer: dict[str, Any]) -> None:
        raise UserError("sshd: not\n found\x1b[2J")

    rendezvous = listening(2)
    pods.start(rendezvous, pod(1))
    failed = pods.start(rendezvous, pod(2), fail)
    with pytest.raises(UserError) as caught:
        rendezvous.gather(SECONDS, lambda ids: None)
    assert str(caught.value) == "w2 (127.0.1.2): sshd: not found?[2J"
    with pytest.raises(UserError, match="sshd: not"):
        failed.result(SECONDS)


def test_a_pod_that_dies_after_the_answer_is_named(listening: Opener, pods: Pods) -> None:
    rendezvous = listening(2)
    pods.start(rendezvous, pod(1))
    proven(rendezvous, lambda channel: channel.ask(pod(2).to_json(), SECONDS))
    with pytest.raises(UserError, match=re.escape("w2 (127.0.1.2): lost before its sshd was up")):
        rendezvous.gather(SECONDS, lambda ids: None)


def test_a_pod_that_is_ready_before_it_was_told_is_named(listening: Opener) -> None:
    async def hurry(channel: Channel) -> None:
        await channel.send(pod(1).to_json())
        await channel.send({"ready": True})

    rendezvous = listening(2)
    proven(rendezvous, hurry)
    with pytest.raises(UserError, match=re.escape("w1 (127.0.1.1): said {'ready': True}")):
        rendezvous.gather(SECONDS, lambda ids: None)


def test_a_pod_too_many_is_refused_and_harms_nobody(listening: Opener, pods: Pods) -> None:
    may_serve = threading.Event()
    rendezvous = listening(1)
    pods.start(rendezvous, pod(1), serve_when(may_serve))
    until(lambda: registered(rendezvous) == {"w1"})
    with pytest.raises(UserError, match="all 1 pods of the cluster have registered"):
        pods.start(rendezvous, pod(2)).result(SECONDS)
    may_serve.set()
    assert rendezvous.gather(SECONDS, lambda ids: None) == (pod(1),)


def test_no_port_for_sshd_in_common_is_said_with_the_ports(listening: Opener, pods: Pods) -> None:
    rendezvous = listening(2)
    pods.start(rendezvous, pod(1, free_ports=(2_222,)))
    pods.start(rendezvous, pod(2, free_ports=(40_022,)))
    with pytest.raises(UserError, match="ssh: none of the ports 2222, 40022, 40023 is free on every pod"):
        rendezvous.gather(SECONDS, lambda ids: None)


# Deadlines and watching


def test_missing_pods_are_counted_and_the_others_named(pods: Pods) -> None:
    with new_rendezvous(3) as rendezvous:
        waiting = pods.start(rendezvous, pod(2))
        until(lambda: registered(rendezvous) == {"w2"})
        with pytest.raises(MissingPods) as caught:
            rendezvous.gather(0.2, lambda ids: None)
    assert str(caught.value) == "1 of 3 pods have registered in 0.2 s: w2 (127.0.1.2)"
    assert caught.value.registered == (pod(2),)
    with pytest.raises(UserError, match="refused by the master: the cluster did not come up"):
        waiting.result(SECONDS)


def test_a_pod_that_never_gets_ready_is_named_at_the_deadline(listening: Opener, pods: Pods) -> None:
    over = threading.Event()
    rendezvous = listening(2)
    pods.start(rendezvous, pod(1)), pods.start(rendezvous, pod(2), serve_when(over))
    until(lambda: registered(rendezvous) == {"w1", "w2"})
    with pytest.raises(MissingPods, match=re.escape("1 of 2 pods have no sshd in 1 s: w2 (127.0.1.2)")) as caught:
        rendezvous.gather(1.0, lambda ids: None)
    assert caught.value.registered == (pod(1),)
    over.set()


def test_what_watch_raises_ends_gather(listening: Opener) -> None:
    def watch(ids: frozenset[str]) -> None:
        raise UserError("worker w9: ended")

    with pytest.raises(UserError, match="worker w9: ended"):
        listening(2).gather(SECONDS, watch)


def test_watch_is_told_who_has_registered_and_at_the_end_all(listening: Opener, pods: Pods) -> None:
    rendezvous = listening(2)
    with gathering(rendezvous) as (gathered, seen):
        pods.start(rendezvous, pod(1))
        until(lambda: bool(seen.ids) and seen.ids[-1] == {"w1"})
        pods.start(rendezvous, pod(2))
        gathered.result(SECONDS)
        assert seen.ids[-1] == {"w1", "w2"}


def test_a_pod_without_a_master_says_where_it_looked(pods: Pods) -> None:
    with socket.socket() as nobody:
        nobody.bind((HERE, 0))
        port = nobody.getsockname()[1]
        with pytest.raises(UserError, match=f"{HERE}:{port}: no answer of the master in 0.3 s"):
            asyncio.run(register((HERE, port), SECRET, pod(1), 0.3, serve_nothing))


# The port


def test_a_port_that_is_taken_is_said(listening: Opener) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"{HERE}:{port}: cannot listen there"):
            listening(1, port=port)


def test_the_default_port_is_6000_and_gives_way(listening: Opener) -> None:
    first = listening(1, address=QUIET, port=None)
    second = listening(1, address=QUIET, port=None)
    assert first.port == 6_000
    assert second.port not in (0, 6_000)


def test_an_address_of_another_machine_is_said(listening: Opener) -> None:
    with pytest.raises(UserError, match="an address of this machine"):
        listening(1, address="203.0.113.1")


# Strangers


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"zeropods 1 ", GREETING + b"half a mess", b"x" * 2**20, GREETING + b"y" * 2**20,
     GREETING + b"0" * 64 + b" {}\n", b"\n\n\n", bytes(range(256))],
    ids=["garbage", "half a greeting", "half a message", "1 MB", "1 MB after the greeting", "wrong proof", "blank",
         "every byte"],
)  # fmt: skip
def test_a_stranger_is_dropped_and_counted(listening: Opener, sent: bytes) -> None:
    rendezvous = listening(1)
    with stranger(rendezvous) as connection:
        say_and_end(connection, sent)
        assert is_dropped(connection)
    until(lambda: rendezvous.rejected == 1)
    assert registered(rendezvous) == set()


def test_a_slow_stranger_is_dropped_in_time_though_he_never_stops(listening: Opener) -> None:
    rendezvous = listening(1, handshake_seconds=0.5)
    began = time.monotonic()
    with stranger(rendezvous) as connection, pytest.raises(ConnectionError):
        while time.monotonic() - began < SECONDS:
            connection.sendall(b"z")
            time.sleep(0.1)
    until(lambda: rendezvous.rejected == 1)
    assert time.monotonic() - began < SECONDS


def test_a_flood_of_idle_connections_keeps_no_honest_pod_out(listening: Opener, pods: Pods) -> None:
    rendezvous = listening(2, handshake_seconds=SECONDS)
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(stranger(rendezvous))
        pods.start(rendezvous, pod(1)), pods.start(rendezvous, pod(2))
        assert rendezvous.gather(SECONDS, lambda ids: None) == (pod(1), pod(2))
        assert len(rendezvous._reception._strangers) <= 68
        assert rendezvous.rejected >= 200 - 68


def test_a_rendezvous_ends_in_the_midst_of_a_flood() -> None:
    with ExitStack() as stack:
        with new_rendezvous(1) as rendezvous:
            flood = [stack.enter_context(stranger(rendezvous)) for _ in range(200)]
        for connection in flood:
            assert is_dropped(connection)


def test_a_pod_of_another_cluster_does_not_get_in(listening: Opener, pods: Pods) -> None:
    rendezvous = listening(1)
    with pytest.raises(UserError, match="has this pod its cluster's secret"):
        pods.start(rendezvous, pod(1), secret=bytes(32), seconds=0.5).result(SECONDS)
    assert rendezvous.rejected >= 1
    assert registered(rendezvous) == set()


def test_recorded_bytes_of_a_real_registration_do_not_get_in(listening: Opener) -> None:
    rendezvous = listening(2)
    recorded = record_registration(rendezvous, pod(1))
    until(lambda: registered(rendezvous) == set())
    assert recorded.startswith(b"zeropods 1 ") and b'"worker":"w1"' in recorded
    with stranger(rendezvous) as replayed:
        replayed.sendall(recorded)
        assert is_dropped(replayed)
    assert registered(rendezvous) == set()
    assert rendezvous.rejected == 1


def record_registration(rendezvous: Rendezvous, registration: Registration) -> bytes:
    """What a pod says until it has registered, as someone on the line hears it; then the line breaks."""
    with socket.create_server((HERE, 0)) as tap, ThreadPoolExecutor(1) as pool:
        master = tap.getsockname()

        async def come() -> None:
            channel = await connect(*master, SECRET, "register", SECONDS)
            await channel.send(registration.to_json())
            with pytest.raises(ChannelError):
                await channel.receive(SECONDS)

        coming = pool.submit(lambda: asyncio.run(come()))
        near, _ = tap.accept()
        with near, stranger(rendezvous) as far:
            near.settimeout(SECONDS)
            near.sendall(far.recv(1_000))
            said = b""
            while said.count(b"\n") < 2:
                part = near.recv(65_536)
                far.sendall(part)
                said += part
            until(lambda: registered(rendezvous) == {registration.worker})
        coming.result(SECONDS)
    return said


@pytest.fixture(scope="module")
def besieged() -> Iterator[Rendezvous]:
    with new_rendezvous(1) as rendezvous:
        yield rendezvous


@given(
    sent=st.binary(max_size=300)
    | st.builds(lambda text: GREETING + text, st.binary(max_size=300))
    | st.builds(
        lambda proof, text: GREETING + proof.hex().encode() + b" " + text + b"\n",
        st.binary(min_size=32, max_size=32),
        st.sampled_from([b"{}", b"[]", b'{"worker":"w1"}']) | st.binary(max_size=100),
    )
)
@settings(max_examples=200, deadline=None)
def test_random_bytes_never_get_in(besieged: Rendezvous, sent: bytes) -> None:
    before = besieged.rejected
    with stranger(besieged) as connection:
        say_and_end(connection, sent)
        assert is_dropped(connection)
    until(lambda: besieged.rejected == before + 1)
    assert registered(besieged) == set()


def test_after_random_bytes_an_honest_pod_still_gets_in(besieged: Rendezvous, pods: Pods) -> None:
    pods.start(besieged, pod(1))
    assert besieged.gather(SECONDS, lambda ids: None) == (pod(1),)
