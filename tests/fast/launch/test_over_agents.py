"""What follows the launchers of pods: its answers come over real connections, some of which break."""

import asyncio
import base64
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from zeropods.launch import over_agents
from zeropods.pods.wire import Message, Server, control_purpose, listening_socket

SECRET = bytes(32)
ADDRESS = "127.0.0.1"


class Agent:
    """An agent whose launcher writes the given pieces and ends well.

    Args:
        broken: the number of the request about output, from 1, that is held and then has no answer; None for none.
        held_seconds: how long it is held.
    """

    def __init__(self, pieces: list[bytes], broken: int | None = None, held_seconds: float = 0.0) -> None:
        self._pieces = pieces
        self._broken = broken
        self._held_seconds = held_seconds
        self._requests = 0
        self._sock = listening_socket(ADDRESS, 0)
        self.port: int = self._sock.getsockname()[1]

    async def answer(self, request: Message, peer: str) -> Message:
        if request["do"] == "launch":
            return {}
        self._requests += 1
        if self._requests == self._broken:
            await asyncio.sleep(self._held_seconds)
            # The server drops the connection.
            raise asyncio.CancelledError
        received = request["received"]
        if received == len(self._pieces):
            return {"number": received, "output": "", "status": 0}
        piece = base64.b64encode(self._pieces[received]).decode()
        return {"number": received + 1, "output": piece, "status": None}

    async def serve(self, ended: threading.Event) -> None:
        server = Server(SECRET, control_purpose(ADDRESS, self.port), self.answer)
        await server.open(self._sock)
        await asyncio.to_thread(ended.wait)
        await server.close()


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Agent], int]:
    """Follows the launcher of an agent as a run does; returns the exit status."""

    def follow(agent: Agent) -> int:
        files = {"hostfile": f"{ADDRESS} slots=1\n", "secret": SECRET.hex(), "variables": "ZEROPODS_RUN=f00d\n"}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "variables"))
        words = ["--hostfile", str(tmp_path / "hostfile"), "--control_ports", str(agent.port)]
        words += ["--secret_file", str(tmp_path / "secret"), "--master_port", "1", "rank.py"]
        monkeypatch.setattr(sys, "argv", ["over_agents", *words])
        ended = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(agent.serve(ended)))
        thread.start()
        try:
            return over_agents.main()
        finally:
            ended.set()
            thread.join()

    return follow


def test_a_connection_that_breaks_while_nothing_is_written_is_made_again(
    followed: Callable[[Agent], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(over_agents, "AGENT_GONE_SECONDS", 0.2)
    agent = Agent([b"one\n", b"two\n"], broken=2, held_seconds=2 * over_agents.AGENT_GONE_SECONDS)
    assert followed(agent) == 0
    assert capfd.readouterr().out == f"{ADDRESS}: one\n{ADDRESS}: two\n"


def test_a_line_without_an_end_is_written_in_parts(
    followed: Callable[[Agent], int], capfd: pytest.CaptureFixture[str]
) -> None:
    piece = b"\rat work" * 4_000
    assert followed(Agent([piece] * 10)) == 0
    written = capfd.readouterr().out.removesuffix("\n").split("\n")
    assert max(map(len, written)) < over_agents.MOST_LINE_BYTES + 2 * len(piece)
    assert "".join(line.removeprefix(f"{ADDRESS}: ") for line in written).encode() == piece * 10
