"""How long clusters and runs live without being renewed, at times that the tests choose."""

from __future__ import annotations

import pytest

from zeropods.pods.leases import IDLE, KERNEL, STRANGER_SECONDS, ClusterLease, RunEndedError, RunLeases


def test_a_kernel_lease_is_prolonged_by_a_renewal() -> None:
    lease = ClusterLease(KERNEL, 30.0, now=100.0)
    lease.renew(120.0)
    assert lease.seconds_left(125.0) == 25.0


def test_a_kernel_lease_is_not_prolonged_by_use() -> None:
    lease = ClusterLease(KERNEL, 30.0, now=100.0)
    lease.use(125.0)
    assert lease.seconds_left(130.0) == 0.0


@pytest.mark.parametrize("prolong", [ClusterLease.renew, ClusterLease.use])
def test_an_idle_lease_is_prolonged_by_renewals_and_by_use(prolong) -> None:
    lease = ClusterLease(IDLE, 7200.0, now=0.0)
    prolong(lease, 7000.0)
    assert lease.seconds_left(7300.0) == 6900.0


@pytest.mark.parametrize("kind", [KERNEL, IDLE])
def test_idle_seconds_count_from_the_last_use(kind: str) -> None:
    lease = ClusterLease(kind, 30.0, now=0.0)
    lease.use(4.0)
    assert lease.idle_seconds(10.0) == 6.0


def test_the_first_renewal_opens_a_run() -> None:
    leases = RunLeases()
    leases.renew("r", 10.0, now=0.0)
    assert leases.open == {"r"}
    assert leases.seconds_to_next_end(4.0) == 6.0


def test_a_renewed_run_is_not_condemned() -> None:
    leases = RunLeases()
    for now in range(0, 100, 8):
        leases.renew("r", 10.0, now)
        assert leases.condemned({"r"}, now + 7.9) == set()


def test_a_run_whose_lease_ran_out_is_condemned_and_has_ended() -> None:
    leases = RunLeases()
    leases.renew("late", 10.0, now=0.0)
    leases.renew("other", 30.0, now=0.0)
    assert leases.condemned(set(), 10.0) == {"late"}
    assert leases.open == {"other"}
    with pytest.raises(RunEndedError, match="late"):
        leases.renew("late", 10.0, now=11.0)


def test_a_renewal_that_comes_before_the_check_keeps_the_run() -> None:
    leases = RunLeases()
    leases.renew("r", 10.0, now=0.0)
    leases.renew("r", 10.0, now=10.5)
    assert leases.condemned({"r"}, 11.0) == set()


def test_an_ended_run_stays_ended_whatever_time_it_is() -> None:
    leases = RunLeases()
    leases.end("unknown")
    with pytest.raises(RunEndedError):
        leases.renew("unknown", 10.0, now=1e9)


def test_processes_of_an_ended_run_are_condemned_whenever_they_are_seen() -> None:
    leases = RunLeases()
    leases.end("r")
    assert leases.condemned(set(), 0.0) == set()
    assert leases.condemned({"r"}, 1.0) == leases.condemned({"r"}, 1e6) == {"r"}


def test_a_run_that_nobody_opens_is_condemned_after_some_seconds() -> None:
    leases = RunLeases()
    assert leases.condemned({"stranger"}, 5.0) == set()
    assert leases.condemned({"stranger"}, 5.0 + STRANGER_SECONDS - 0.1) == set()
    assert leases.condemned({"stranger"}, 5.0 + STRANGER_SECONDS) == {"stranger"}
    with pytest.raises(RunEndedError):
        leases.renew("stranger", 10.0, now=20.0)


def test_a_run_may_be_opened_after_its_first_process() -> None:
    leases = RunLeases()
    assert leases.condemned({"r"}, 0.0) == set()
    leases.renew("r", 60.0, now=5.0)
    assert leases.condemned({"r"}, 5.0 + STRANGER_SECONDS) == set()


def test_without_runs_there_is_no_next_end() -> None:
    leases = RunLeases()
    leases.renew("r", 10.0, now=0.0)
    leases.end("r")
    assert leases.seconds_to_next_end(1.0) is None
