"""What an agent starts for its master: real processes, and how their output is handed out."""

import asyncio
import base64
import json
import os
import resource
import runpy
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zeropods.files import ROOT
from zeropods.launch import light
from zeropods.pods import processes
from zeropods.pods import started as started_module
from zeropods.pods.started import Modules, RefusedOrderError, StartedProcesses

MODULES = Modules(fork_server="none", launcher=("tests.said", "launcher"), checks=("tests.said",))
"""`tests/said.py` prints its arguments and does what they ask for."""
SCRIPT = ROOT / "textsql_train.py"
ORDER = {
    "world": {"127.0.0.1": [0, 1], "127.0.0.2": [0]},
    "node_rank": 1,
    "master_addr": "127.0.0.1",
    "master_port": 29_500,
    "folder": str(ROOT),
    "script": str(SCRIPT),
    "arguments": [],
    "variables": {"GIVEN": "by the order", "ZEROPODS_RUN": "another"},
}


def on_a_pod(work: Callable[[StartedProcesses], Awaitable[None]]) -> None:
    """Let some work use what an agent has, which reaps its children as an agent does."""

    async def live() -> None:
        started = StartedProcesses(MODULES, {"PATH": os.environ["PATH"]})
        with reaped(started):
            await work(started)

    asyncio.run(live())


@contextmanager
def reaped(started: StartedProcesses) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, lambda: started.note_ended(processes.reap()))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)


def processes_of_this_one() -> set[processes.Process]:
    """The children of this process that have not been reaped."""
    return set(processes.Process().children())


async def written(started: StartedProcesses, run: str) -> tuple[bytes, int]:
    """All that a launcher writes, and its exit status."""
    received = 0
    text = b""
    while True:
        answer = await started.output(run, received)
        if answer["number"] > received:
            received = answer["number"]
            text += base64.b64decode(answer["output"])
        if answer["status"] is not None:
            return text, answer["status"]


def test_a_launcher_is_deepspeeds_for_this_pod_with_the_mark_of_its_run_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CDSW_API_KEY", "secret")

    async def work(started: StartedProcesses) -> None:
        await started.launch("f00d", {**ORDER, "arguments": ["two\nwords", "$HOME"]})
        text, status = await written(started, "f00d")
        said = json.loads(text)
        assert status == 0 and said["folder"] == str(ROOT)
        name, world, *place = said["argv"][:5]
        assert name == "launcher"
        encoded = world.removeprefix("--world_info=")
        assert json.loads(base64.urlsafe_b64decode(encoded)) == ORDER["world"]
        assert place == ["--node_rank=1", "--master_addr=127.0.0.1", "--master_port=29500"]
        assert said["argv"][5:] == [str(SCRIPT), "two\nwords", "$HOME"]
        assert (said["environment"]["GIVEN"], said["environment"]["ZEROPODS_RUN"]) == ("by the order", "f00d")
        assert "CDSW_API_KEY" not in said["environment"]

    on_a_pod(work)


def test_nothing_is_lost_with_an_answer_that_did_not_arrive_and_much_is_kept_in_pieces() -> None:
    async def work(started: StartedProcesses) -> None:
        await started.launch("f00d", {**ORDER, "arguments": ["write", "300000"]})
        first = await started.output("f00d", 0)
        assert await started.output("f00d", 0) == first
        text, status = await written(started, "f00d")
        assert (text.count(b"x"), len(text), status) == (300_000, 300_000 + len("an error\n"), 3)

    on_a_pod(work)


def test_a_launcher_has_ended_even_if_what_it_left_behind_keeps_its_output_open() -> None:
    async def work(started: StartedProcesses) -> None:
        await started.launch("f00d", {**ORDER, "arguments": ["leave"]})
        text, status = await written(started, "f00d")
        os.kill(int(text), signal.SIGKILL)
        assert status == -signal.SIGTERM

    on_a_pod(work)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"script": "/etc/passwd"}, "/etc/passwd: agents start scripts of the project folder only, which is "),
        ({"script": f"{ROOT}/../rank.py"}, "agents start scripts of the project folder only"),
        ({"script": f"{ROOT}/nothing.py"}, "agents start scripts of the project folder only"),
        ({"folder": "/nowhere"}, "/nowhere: No such file or directory on this pod"),
        ({"arguments": ["a\0b"]}, r"order: arguments is \['a\\x00b'\], expected a list of texts without NUL; is the "),
        ({"arguments": "ab"}, "order: arguments is 'ab', expected a list of texts without NUL; is the sender's "),
        ({"script": 5}, "order: script is 5, expected a text without NUL; is the sender's zeropods a different "),
        ({"script": f"{SCRIPT}\0"}, "order: script is '.*', expected a text without NUL; "),
        ({"folder": None}, "order: folder is None, expected a text without NUL; "),
        ({"node_rank": "1"}, "order: node_rank is '1', expected a whole number; "),
        ({"world": {"127.0.0.1": 2}}, r"order: world is \{'127.0.0.1': 2\}, expected lists of slots, by addresses; "),
        ({"variables": {"A": 1}}, r"order: variables is \{'A': 1\}, expected texts without NUL, by names; "),
        (
            {"variables": {"A": ["x" * 999]}},
            r"^order: variables is \{'A': \['x{1,200}, expected texts without NUL, by ",
        ),
        ({"argv": ["sh"]}, "not a known order: .* is the sender's zeropods a different version?"),
    ],
)
def test_an_order_that_is_not_for_one_of_our_scripts_is_refused(changes: dict[str, Any], reason: str) -> None:
    async def work(started: StartedProcesses) -> None:
        with pytest.raises(RefusedOrderError, match=reason):
            await started.launch("f00d", {**ORDER, **changes})
        with pytest.raises(RefusedOrderError, match="run f00d: has no launcher here"):
            await started.output("f00d", 0)

    on_a_pod(work)


def test_a_run_has_one_launcher() -> None:
    async def work(started: StartedProcesses) -> None:
        await started.launch("f00d", ORDER)
        with pytest.raises(RefusedOrderError, match="its launcher was started before"):
            await started.launch("f00d", ORDER)
        await written(started, "f00d")

    on_a_pod(work)


def test_what_a_launcher_wrote_can_be_fetched_for_a_while_after_another_run_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(started: StartedProcesses) -> None:
        # Other tests may have left processes that end with this one, such as multiprocessing's servers.
        others = processes_of_this_one()
        await started.launch("f00d", {**ORDER, "arguments": ["write", "5"]})
        # It ends without anybody to ask for its output.
        while processes_of_this_one() - others:
            await asyncio.sleep(0.01)
        await started.launch("beef", ORDER)
        assert await written(started, "f00d") == (b"an error\nxxxxx", 3)
        await written(started, "beef")
        monkeypatch.setattr(started_module, "KEEP_SECONDS", 0.0)
        await started.launch("cafe", ORDER)
        with pytest.raises(RefusedOrderError, match="run f00d: has no launcher here"):
            await started.output("f00d", 0)
        await written(started, "cafe")

    on_a_pod(work)


def test_a_check_says_what_it_wrote_and_is_killed_when_its_time_is_up(tmp_path: Path) -> None:
    async def work(started: StartedProcesses) -> None:
        answer = await started.check("tests.said", ["write", "5"], str(ROOT), {}, 60.0)
        assert answer == {"status": 3, "output": "xxxxx", "errors": "an error\n"}
        answer = await started.check("tests.said", ["hang"], str(ROOT), {}, 0.5)
        assert answer["status"] == -signal.SIGKILL
        # A pod without the folder is checked all the same.
        away = {"PYTHONPATH": str(ROOT)}
        answer = await started.check("tests.said", [], str(tmp_path / "nowhere"), away, 60.0)
        assert json.loads(answer["output"])["folder"] == "/"
        with pytest.raises(RefusedOrderError, match=r"module os: is none that checks a pod; expected tests\.said"):
            await started.check("os", [], "/", {}, 60.0)
        with pytest.raises(RefusedOrderError, match=r"order: folder is '/..00', expected a text without NUL; "):
            await started.check("tests.said", [], "/\0", {}, 60.0)

    on_a_pod(work)


def test_of_much_that_a_check_wrote_the_end_is_kept_and_a_pod_that_can_start_nothing_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(started: StartedProcesses) -> None:
        answer = await started.check("tests.said", ["complain", "300000"], str(ROOT), {}, 60.0)
        assert answer["errors"] == "y" * (started_module.MOST_ERROR_BYTES - 1) + "\n"
        free = os.dup(0)
        os.close(free)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        # One file can be opened, which is /dev/null, and no pipe.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))
        try:
            with pytest.raises(RefusedOrderError, match=f"^{sys.executable}: Too many open files on this pod$"):
                await started.launch("f00d", ORDER)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    on_a_pod(work)


def test_the_modules_of_a_pod_are_there() -> None:
    worker = runpy.run_path(str(ROOT / "worker_p.py"))
    launcher, of_deepspeed = worker["LAUNCHER"]
    assert of_deepspeed == light.POD_LAUNCHER
    for name in (worker["FORK_SERVER"], launcher, *worker["CHECKS"]):
        assert find_spec(name) is not None
