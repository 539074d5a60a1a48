"""What an environment offers: ports, the cache of compiled extensions, and turns at compiling one."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeropods.programs import EXTENSIONS, LISTENED, LOCK, Turn, extension_cache, free_port, is_held, prepare_compiling

HOLD = """
import sys
from zeropods.programs import Turn
Turn(sys.argv[1]).try_acquire()
print("taken", flush=True)
sys.stdin.read()
"""
SECONDS = 20.0


def test_free_ports_are_not_those_of_the_kernel_and_follow_no_seed() -> None:
    ports = set()
    for _ in range(3):
        random.seed(1)
        ports.add(free_port("127.0.0.1"))
    assert len(ports) > 1 and ports <= set(LISTENED)


def test_an_environment_has_a_cache_of_its_own_unless_one_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXTENSIONS, str(tmp_path))
    prepare_compiling()
    assert extension_cache() == tmp_path
    monkeypatch.delenv(EXTENSIONS)
    expected = extension_cache()
    prepare_compiling()
    assert extension_cache() == expected
    if sys.prefix != sys.base_prefix:
        assert expected == Path(sys.prefix) / "torch_extensions"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the turn until it ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_a_second_process_waits_for_the_first_and_no_longer(
    how: str, holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    turn = Turn(str(tmp_path / "lock"))
    waiting = threading.Thread(target=turn.try_acquire, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and is_held(tmp_path / LOCK)
    if how == "it is killed":
        holder.send_signal(signal.SIGKILL)
    else:
        holder.communicate("", timeout=SECONDS)
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    turn.release()
    assert not is_held(tmp_path / LOCK)
