"""Nobody gets in: strangers of every kind at the two ports of a cluster, and honest ones among them.

2,000 conversations; 100,000 where `ZEROPODS_SOAK=1`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.attacked import GROWN_BYTES, HONEST_SECONDS, MORE_FILES, SECRET, SOAK, Port, a_pod, attacked
from tests.attacks import ATTACKS, SIEGE, SIEGES, Attack, Door
from tests.strangers import HERE, Strangers, assert_dropped, greeted, open_files, resident_bytes, visit, within
from zeropods.pods.registration import PURPOSE
from zeropods.pods.wire import MAX_MESSAGE_BYTES, ChannelError, connect

CONVERSATIONS = 50_000 if SOAK else 1_000
"""With each of the two ports."""
LIES = 2_000 if SOAK else 50


@pytest.fixture(params=["rendezvous", "agent"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    with attacked(request.param, tmp_path) as found:
        yield found


def test_no_stranger_gets_in_and_honest_ones_do_among_them(port: Port) -> None:
    strangers = Strangers(port.place, port.door)
    pid = port.listener.process.pid
    port.honest()
    memory, files, most_files = resident_bytes(pid), open_files(pid), 0

    @given(siege=SIEGES)
    @settings(
        max_examples=CONVERSATIONS // SIEGE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    def besiege(siege: list[tuple[Attack, str]]) -> None:
        nonlocal most_files
        for attack, ending in siege:
            strangers.attack(attack, ending)
        strangers.drip()
        port.honest()
        most_files = max(most_files, open_files(pid))

    besiege()
    assert strangers.count >= CONVERSATIONS
    assert resident_bytes(pid) - memory < GROWN_BYTES
    assert most_files - files < MORE_FILES
    strangers.leave()
    within(HONEST_SECONDS, lambda: open_files(pid) <= files + 1)
    port.assert_nobody_got_in(strangers.count)


def test_a_message_that_is_said_again_on_its_own_connection_is_heard_once(tmp_path: Path) -> None:
    with attacked("agent", tmp_path) as port, visit(port.place) as connection:
        door = replace(port.door, lure={"do": "status"})
        nonce = greeted(connection)
        connection.sendall(door.words(nonce) + door.line(nonce) + b"\n")
        assert b'"worker":"w1"' in connection.recv(1_000)
        assert_dropped(connection)
        port.assert_nobody_got_in(1)


def test_who_is_led_to_a_stranger_believes_nothing() -> None:
    door = Door(SECRET, PURPOSE, {"ssh_port": 2_222}, stranger_listens=True)

    async def ask_a_stranger(attack: Attack) -> None:
        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonce = (await reader.readline()).split()[2]
            writer.write(attack.words(door, nonce))
            writer.write_eof()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(lie, HERE, 0, limit=MAX_MESSAGE_BYTES)
        with pytest.raises(ChannelError):
            channel = await connect(HERE, server.sockets[0].getsockname()[1], SECRET, PURPOSE, HONEST_SECONDS)
            await channel.ask(a_pod(1).to_json(), HONEST_SECONDS)
        server.close()

    @given(attack=ATTACKS)
    @settings(max_examples=LIES, deadline=None, database=None)
    def lead_astray(attack: Attack) -> None:
        asyncio.run(ask_a_stranger(attack))

    lead_astray()
