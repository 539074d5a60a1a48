"""What a supervisor makes of what it sees, and what it reads."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made import a_config, a_rank
from zeropods.launch.heartbeat import SILENT_SECONDS, Pulse
from zeropods.launch.outcome import (
    ABSENT_SECONDS,
    FAILED_SECONDS,
    FIRST_SECONDS,
    GONE_SECONDS,
    START_SECONDS,
    Ranks,
    Sight,
    Verdict,
    judge,
    record_run,
)
from zeropods.launch.supervisor import Output
from zeropods.pods.state import Pod


def pulse(number: int, processes: int = 2, most: int = 2, absent: float | None = 0.0, silent: float = 1.0) -> Pulse:
    pod = Pod(
        name=f"pod{number}",
        worker=f"w{number}",
        address=f"127.0.1.{number}",
        hostname="here",
        slots=1,
        host_key="ssh-ed25519 A",
        control_port=1,
    )
    return Pulse(pod=pod, processes=processes, most=most, absent_seconds=absent, silent_seconds=silent, error=None)


def test_a_run_whose_pods_answer_goes_on() -> None:
    assert judge(Sight(pulses=[pulse(1), pulse(2)], since_first_rank=100.0)) is None


def test_a_silent_pod_is_lost_and_named() -> None:
    verdict = judge(Sight(pulses=[pulse(1), pulse(2, silent=SILENT_SECONDS + 1)]))
    assert verdict is not None and (verdict.status, verdict.pod) == ("pod_lost", "pod2")
    assert "127.0.1.2" in (verdict.reason or "")


def test_a_pod_whose_ssh_is_gone_too_is_lost_sooner() -> None:
    verdict = judge(Sight(pulses=[pulse(1), pulse(2, silent=GONE_SECONDS + 1)], failed_sessions={"pod2": 1.0}))
    assert verdict is not None and (verdict.status, verdict.pod) == ("pod_lost", "pod2")


def test_a_signal_ends_the_run_before_anything_else() -> None:
    verdict = judge(Sight(pulses=[pulse(1, silent=99.0)], launcher_status=1, signal="SIGTERM"))
    assert verdict is not None and (verdict.status, verdict.reason) == ("interrupted", "SIGTERM")


def test_a_launcher_that_ended_leaves_the_word_to_the_ranks() -> None:
    assert judge(Sight(pulses=[pulse(1)], launcher_status=0)) == Verdict()


def test_how_a_launcher_ended_is_told() -> None:
    killed = judge(Sight(pulses=[pulse(1)], launcher_status=-9))
    assert killed is not None and killed.status is None and "SIGKILL" in (killed.reason or "")


def test_a_pod_that_has_ended_the_run_is_not_lost() -> None:
    verdict = judge(Sight(pulses=[pulse(1), replace(pulse(2, silent=99.0), refused=True)]))
    assert verdict is not None and (verdict.status, verdict.pod) == ("failed", "pod2")


def test_a_pod_that_lost_its_ranks_ends_the_run() -> None:
    verdict = judge(Sight(pulses=[pulse(1), pulse(2, processes=0, absent=ABSENT_SECONDS + 1)]))
    assert verdict is not None and (verdict.status, verdict.pod) == (None, "pod2")


def test_ranks_that_ended_well_may_leave_before_others() -> None:
    pulses = [pulse(1), pulse(2, processes=0, absent=ABSENT_SECONDS + 1)]
    assert judge(Sight(pulses=pulses, done=frozenset({"pod2"}))) is None


def test_ranks_that_leave_a_moment_apart_are_no_fault() -> None:
    assert judge(Sight(pulses=[pulse(1), pulse(2, processes=0, absent=1.0)])) is None


def test_a_pod_whose_session_failed_ends_the_run_after_a_moment() -> None:
    early = judge(Sight(pulses=[pulse(1), pulse(2)], failed_sessions={"pod2": 0.5}))
    late = judge(Sight(pulses=[pulse(1), pulse(2)], failed_sessions={"pod2": FAILED_SECONDS + 1}))
    assert early is None and late is not None and (late.status, late.pod) == (None, "pod2")


def test_ranks_that_left_something_behind_do_not_hold_the_launcher() -> None:
    gone = [pulse(number, processes=0, absent=ABSENT_SECONDS + 1) for number in (1, 2)]
    verdict = judge(Sight(pulses=gone))
    assert verdict is not None and verdict.status is None and "ssh sessions open" in (verdict.reason or "")


def test_a_daemon_of_a_rank_does_not_hold_the_launcher() -> None:
    sight = Sight(pulses=[pulse(1)], done=frozenset({"pod1"}), since_measured=ABSENT_SECONDS + 1)
    verdict = judge(sight)
    assert verdict is not None and verdict.status is None and "keeps the launcher waiting" in (verdict.reason or "")


def test_a_pod_whose_ranks_never_come_ends_the_run() -> None:
    pulses = [pulse(1), pulse(2, processes=0, most=0, absent=None)]
    late = judge(Sight(pulses=pulses, since_first_rank=START_SECONDS + 1))
    assert late is not None and (late.status, late.pod) == ("failed", "pod2")
    assert judge(Sight(pulses=pulses, since_first_rank=5.0)) is None


def test_ranks_that_never_come_anywhere_end_the_run() -> None:
    pulses = [pulse(number, processes=0, most=0, absent=None) for number in (1, 2)]
    late = judge(Sight(pulses=pulses, since_start=FIRST_SECONDS + 1))
    assert late is not None and (late.status, late.pod) == ("failed", None)
    assert judge(Sight(pulses=pulses, since_start=5.0)) is None


def test_a_run_that_takes_too_long_has_timed_out() -> None:
    verdict = judge(Sight(pulses=[pulse(1)], since_start=61.0, timeout_seconds=60.0))
    assert verdict == Verdict("timeout", "took longer than 60 s")


def test_a_run_within_its_time_goes_on() -> None:
    assert judge(Sight(pulses=[pulse(1)], since_start=60.0, since_first_rank=50.0, timeout_seconds=60.0)) is None


def test_a_run_that_has_ended_in_its_last_moment_has_not_timed_out() -> None:
    assert judge(Sight(pulses=[pulse(1)], launcher_status=0, since_start=61.0, timeout_seconds=60.0)) == Verdict()


def test_a_lost_pod_is_told_before_the_time_that_it_cost() -> None:
    verdict = judge(Sight(pulses=[pulse(1, silent=SILENT_SECONDS + 1)], since_start=61.0, timeout_seconds=60.0))
    assert verdict is not None and verdict.status == "pod_lost"


@pytest.mark.parametrize(
    ("ranks", "status"),
    [
        (["interrupted", "interrupted"], "timeout"),
        (["interrupted", "failed"], "timeout"),
        (["interrupted", None], "timeout"),
        (["oom", "interrupted"], "oom"),
        (["ok", "ok"], "ok"),
    ],
)
def test_what_ranks_say_because_their_time_was_over_is_no_cause(
    ranks: list[str | None], status: str, tmp_path: Path
) -> None:
    written = {number: a_rank(number, status=each) for number, each in enumerate(ranks) if each is not None}
    launched = Ranks(tmp_path, ["pod1", "pod2"])
    (tmp_path / "ranks").mkdir()
    for number, rank in written.items():
        (tmp_path / "ranks" / f"{number}.json").write_text(json.dumps(rank))
    (tmp_path / "config.json").write_text(json.dumps(a_config(pods=2)))
    reading, writing = os.pipe()
    os.close(writing)
    output = Output(os.fdopen(reading, "rb"), tmp_path / "log", {}, lambda line: None)
    record = record_run(tmp_path, Verdict("timeout", "took longer than 60 s"), output, launched)
    assert record.status == status


def test_lines_carry_the_pods_names(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    shown: list[str] = []
    output = Output(os.fdopen(reading, "rb"), tmp_path / "log", {"127.0.1.2": "pod2"}, shown.append)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"127.0.1.2: hello\n[info] no pod: here\nlast without end")
    output.close()
    assert shown == ["pod2: hello", "[info] no pod: here", "last without end"]
    assert (tmp_path / "log").read_text().splitlines() == shown
    assert output.tail("pod2") == ["pod2: hello"]


@pytest.mark.parametrize("how", ["ssh exited with exit code 255", "ssh killed by signal 9"])
def test_a_failed_session_is_known_by_its_pod(how: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    output = Output(os.fdopen(reading, "rb"), tmp_path / "log", {"127.0.1.2": "pod2"}, lambda line: None)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(f"pdsh@here: 127.0.1.2: {how}\n".encode())
    output.close()
    assert list(output.failed_sessions()) == ["pod2"]
