"""What a supervisor makes of what it sees, and what it reads."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_pod, a_rank
from zeropods.launch.logs import PdshLog
from zeropods.launch.lost_pods_and_hangs import (
    FAILED_SECONDS,
    GONE_SECONDS,
    MEASURED_SECONDS,
    SILENT_SECONDS,
    START_SECONDS,
    Ending,
    Observation,
    PodState,
    judge,
)
from zeropods.launch.outcome import Ranks, UnopenedError, verdict_of_ranks

Seen = Callable[[], PodState]


def pod(number: int, most: int = 2, silent: float = 1.0, error: str | None = None, absent: float | None = None) -> Seen:
    """A pod that has been silent for so long when it is looked at, and without a process of the run for `absent`."""

    def seen() -> PodState:
        answered = time.monotonic() - silent
        return PodState(a_pod(number), answered, most, None if absent is None else answered - absent, error=error)

    return seen


SILENT = SILENT_SECONDS + 1
NEVER = pod(2, most=0)


@pytest.mark.parametrize(
    ("seen", "others"),
    [
        ([pod(1), pod(2)], {"since_start": 1000.0}),
        ([pod(1)], {"since_measured": 1.0}),
        ([pod(1), pod(2)], {"failed_sessions": {"pod2": 0.5}}),
        ([pod(1), NEVER], {"since_start": 5.0}),
        ([pod(1)], {"since_start": 60.0, "timeout_seconds": 60.0}),
        ([pod(1), pod(2, absent=MEASURED_SECONDS + 1)], {}),
        ([pod(1, absent=1.0), pod(2, absent=1.0)], {}),
    ],
    ids=["answering", "ended well", "session just failed", "late", "in time", "one absent", "absent a moment"],
)
def test_a_run_goes_on(seen: list[Seen], others: dict[str, Any]) -> None:
    assert judge(Observation(pods=[each() for each in seen], **others)) is None


@pytest.mark.parametrize(
    ("seen", "others", "status", "blamed", "said"),
    [
        ([pod(1), pod(2, silent=SILENT)], {}, "pod_lost", "pod2", "127.0.1.2"),
        ([pod(1), pod(2, silent=GONE_SECONDS + 1)], {"failed_sessions": {"pod2": 1.0}}, "pod_lost", "pod2", ""),
        ([pod(1, silent=99.0)], {"launcher_status": 1, "signal": "SIGTERM"}, "interrupted", None, "SIGTERM"),
        ([pod(1)], {"launcher_status": -9}, None, None, "SIGKILL"),
        (
            [pod(1), pod(2, silent=99.0, error="run r has ended")],
            {},
            "failed",
            "pod2",
            "longer than its lease",
        ),
        ([pod(1), pod(2)], {"failed_sessions": {"pod2": FAILED_SECONDS + 1}}, None, "pod2", ""),
        ([pod(1)], {"since_measured": MEASURED_SECONDS + 1}, None, None, "keeps the launcher waiting"),
        ([pod(number, absent=MEASURED_SECONDS + 1) for number in (1, 2)], {}, None, None, "ssh sessions open"),
        ([pod(1), NEVER], {"since_start": START_SECONDS + 1}, "failed", "pod2", "no process of the run within"),
        ([pod(1)], {"since_start": 61.0, "timeout_seconds": 60.0}, "timeout", None, "took longer than 60 s"),
        ([pod(1, silent=SILENT)], {"since_start": 61.0, "timeout_seconds": 60.0}, "pod_lost", "pod1", ""),
    ],
)
def test_a_run_is_ended(
    seen: list[Seen], others: dict[str, Any], status: str | None, blamed: str | None, said: str
) -> None:
    verdict = judge(Observation(pods=[each() for each in seen], **others))
    assert verdict is not None and (verdict.status, verdict.pod) == (status, blamed)
    assert said in (verdict.reason or "")


def test_a_launcher_that_ended_in_its_last_moment_leaves_the_word_to_the_ranks() -> None:
    state = Observation(pods=[pod(1)()], launcher_status=0, since_start=61.0, timeout_seconds=60.0)
    assert judge(state) == Ending()


@pytest.mark.parametrize(
    ("ranks", "status"),
    [(("interrupted", "failed"), "timeout"), (("interrupted",), "timeout"), (("oom", "interrupted"), "oom")],
)
def test_what_ranks_say_because_of_a_time_out_is_not_its_cause(tmp_path: Path, ranks: Any, status: str) -> None:
    launched = Ranks(tmp_path, ["pod1", "pod2"])
    (tmp_path / "ranks").mkdir()
    (tmp_path / "config.json").touch()
    for number, ended in enumerate(ranks):
        (tmp_path / "ranks" / f"{number}.json").write_text(json.dumps(a_rank(number, status=ended, reason=ended)))
    assert verdict_of_ranks(launched, Ending("timeout", "took longer than 60 s")).status == status


def test_lines_carry_the_pods_names_and_failed_sessions_are_known(tmp_path: Path) -> None:
    shown: list[str] = []
    (tmp_path / "launch.log").write_text("127.0.1.2: of an earlier attempt\n")
    log = PdshLog(tmp_path, shown.append, {f"127.0.1.{n}": f"pod{n}" for n in (2, 3)})
    failed = "pdsh@here: 127.0.1.2: ssh exited with exit code 255\npdsh@here: 127.0.1.3: ssh killed by signal 9\n"
    with open(tmp_path / "launch.log", "a") as file:
        file.write(f"127.0.1.2: hello\n{failed}last without end")
    log.read()
    assert log.tail("pod9") == ["pod2: hello", *failed.splitlines()]
    log.read(ended=True)
    assert shown == ["pod2: hello", *failed.splitlines(), "last without end"]
    assert log.tail("pod2") == ["pod2: hello"] and log.tail("pod9") == shown
    assert list(log.failed_sessions()) == ["pod2", "pod3"]


def test_a_terminal_that_takes_nothing_keeps_no_supervisor_waiting(tmp_path: Path) -> None:
    taken = threading.Event()
    log = PdshLog(tmp_path, lambda line: taken.wait(), {})
    (tmp_path / "launch.log").write_text("pod1: a line\n" * 1_000)
    reader = threading.Thread(target=log.read, daemon=True)
    reader.start()
    reader.join(30)
    assert not reader.is_alive() and len(log.tail()) == 8
    taken.set()


def test_why_a_run_never_began_is_said_in_one_line_whatever_pdsh_says_after_it() -> None:
    folder, refused = Path("runs/a"), "runs/a: in use by process 7 on vm; wait for it"
    lines = [f"pod1: zeropods: {refused}", "pod2: zeropods: interrupted"]
    lines.append("pdsh@vm: 127.0.1.1: ssh exited with exit code 1")
    assert str(UnopenedError(folder, Ending(None, "the launcher ended with status 1"), lines)) == refused
    interrupted = UnopenedError(folder, Ending("interrupted", "SIGINT"), lines)
    assert (str(interrupted), interrupted.exit_status) == ("runs/a: interrupted: SIGINT", 130)
