"""What a supervisor makes of what it sees, and what it reads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_pod
from zeropods.launch.outcome import (
    ABSENT_SECONDS,
    FAILED_SECONDS,
    GONE_SECONDS,
    SILENT_SECONDS,
    START_SECONDS,
    Ending,
    Observation,
    PdshLog,
    PodState,
    judge,
)


def pod(number: int, processes: int = 2, most: int = 2, absent: float | None = 0.0, silent: float = 1.0) -> PodState:
    return PodState(pod=a_pod(number), processes=processes, most=most, absent_seconds=absent, silent_seconds=silent)


SILENT = SILENT_SECONDS + 1
GONE = pod(2, processes=0, absent=ABSENT_SECONDS + 1)
NEVER = pod(2, processes=0, most=0, absent=None)


@pytest.mark.parametrize(
    ("seen", "others"),
    [
        ([pod(1), pod(2)], {"since_start": 1000.0}),
        ([pod(1), GONE], {}),
        ([pod(1), pod(2, processes=0, absent=1.0)], {}),
        ([pod(1), pod(2)], {"failed_sessions": {"pod2": 0.5}}),
        ([pod(1), NEVER], {"since_start": 5.0}),
        ([pod(1)], {"since_start": 60.0, "timeout_seconds": 60.0}),
    ],
    ids=["answering", "ended well", "a moment apart", "session just failed", "late", "in time"],
)
def test_a_run_goes_on(seen: list[PodState], others: dict[str, Any]) -> None:
    assert judge(Observation(pods=seen, **others)) is None


@pytest.mark.parametrize(
    ("seen", "others", "status", "blamed", "said"),
    [
        ([pod(1), pod(2, silent=SILENT)], {}, "pod_lost", "pod2", "127.0.1.2"),
        ([pod(1), pod(2, silent=GONE_SECONDS + 1)], {"failed_sessions": {"pod2": 1.0}}, "pod_lost", "pod2", ""),
        ([pod(1, silent=99.0)], {"launcher_status": 1, "signal": "SIGTERM"}, "interrupted", None, "SIGTERM"),
        ([pod(1)], {"launcher_status": -9}, None, None, "SIGKILL"),
        ([pod(1), replace(pod(2, silent=99.0), refused=True)], {}, "failed", "pod2", "longer than its lease"),
        ([pod(1), pod(2)], {"failed_sessions": {"pod2": FAILED_SECONDS + 1}}, None, "pod2", ""),
        ([replace(GONE, pod=pod(1).pod), GONE], {}, None, None, "ssh sessions open"),
        ([pod(1)], {"since_measured": ABSENT_SECONDS + 1}, None, None, "keeps the launcher waiting"),
        ([pod(1), NEVER], {"since_start": START_SECONDS + 1}, "failed", "pod2", "no process of the run within"),
        ([pod(1)], {"since_start": 61.0, "timeout_seconds": 60.0}, "timeout", None, "took longer than 60 s"),
        ([pod(1, silent=SILENT)], {"since_start": 61.0, "timeout_seconds": 60.0}, "pod_lost", "pod1", ""),
    ],
)
def test_a_run_is_ended(
    seen: list[PodState], others: dict[str, Any], status: str | None, blamed: str | None, said: str
) -> None:
    verdict = judge(Observation(pods=seen, **others))
    assert verdict is not None and (verdict.status, verdict.pod) == (status, blamed)
    assert said in (verdict.reason or "")


def test_a_launcher_that_ended_in_its_last_moment_leaves_the_word_to_the_ranks() -> None:
    state = Observation(pods=[pod(1)], launcher_status=0, since_start=61.0, timeout_seconds=60.0)
    assert judge(state) == Ending()


def test_lines_carry_the_pods_names_and_failed_sessions_are_known(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    shown: list[str] = []
    log = PdshLog(os.fdopen(reading, "rb"), tmp_path / "log", {f"127.0.1.{n}": f"pod{n}" for n in (2, 3)}, shown.append)
    failed = "pdsh@here: 127.0.1.2: ssh exited with exit code 255\npdsh@here: 127.0.1.3: ssh killed by signal 9\n"
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(f"127.0.1.2: hello\n{failed}last without end".encode())
    log.close()
    assert shown == ["pod2: hello", *failed.splitlines(), "last without end"]
    assert (tmp_path / "log").read_text().splitlines() == shown
    assert log.tail("pod2") == ["pod2: hello"] and log.tail("pod9") == shown
    assert list(log.failed_sessions()) == ["pod2", "pod3"]
