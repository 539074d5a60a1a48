"""Preflight: every pod is looked at, all at once, before anything is started on it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods.hostfile import Host
from zeropods.pods.preflight.check import Check, PodChecks, Preflight
from zeropods.pods.preflight.examine import Access, examine, examine_self
from zeropods.pods.preflight.expectation import Expectation

MAX_AT_ONCE = 64


def preflight(
    hosts: Sequence[Host],
    expected: Expectation,
    *,
    names: Sequence[str] | None = None,
    ssh_config: Path | None = None,
    port: int | None = None,
    watch: Callable[[PodChecks], object] = lambda checked: None,
) -> Preflight:
    """Check all hosts in parallel; a dead one is given up before 3 s, a living one after its probe's deadline.

    Args:
        names: the pods', for people; their addresses where there are none.
        ssh_config: the cluster's; None for the user's own configuration.
        port: of the pods' sshd; None where the user's own configuration says it.
        watch: told of each pod as soon as it is checked, in the caller's thread.

    Raises:
        UserError: there is no ssh here, or no host to check.
    """
    if not hosts:
        raise UserError("preflight: no host to check; start pods with 'zeropods pods up', or name a hostfile")
    if shutil.which("ssh") is None:
        raise UserError("ssh: not found; install it (Debian: apt-get install openssh-client)")
    shown = names if names is not None else [host.address for host in hosts]
    # The run's port is wanted on the first pod only: there its first rank listens.
    wanted = [expected, *[replace(expected, master_port=None)] * (len(hosts) - 1)]
    access = Access(ssh_config=ssh_config, port=port)
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=min(len(hosts), MAX_AT_ONCE)) as threads:
        jobs = [
            threads.submit(examine, name, host, expectation, access, stop)
            for name, host, expectation in zip(shown, hosts, wanted, strict=True)
        ]
        _follow(jobs, watch, stop)
    return Preflight(pods=tuple(job.result() for job in jobs))


def preflight_self(expected: Expectation, *, slots: int = 1) -> Preflight:
    """Check this machine alone, without ssh."""
    return Preflight(pods=(examine_self(expected, slots, threading.Event()),))


def require(found: Preflight) -> None:
    """Raise `UserError` with the first pod and check that failed, and its remedy."""
    for pod in found.pods:
        for check in pod.not_ok():
            if check.verdict == "failed":
                raise UserError(_mending_line(pod, check))


def pods_check_table(found: Preflight) -> list[dict[str, str]]:
    """A row for each pod, a column for each check that was made of any pod, fit for `Table.of`."""
    headings = list(dict.fromkeys(check.check for pod in found.pods for check in pod.checks))
    return [_row(pod, headings) for pod in found.pods]


def mending_lines(found: Preflight) -> list[str]:
    """For each check that is not ok: pod, check, value, remedy."""
    return [_mending_line(pod, check) for pod in found.pods for check in pod.not_ok()]


def _follow(jobs: Sequence[Future[PodChecks]], watch: Callable[[PodChecks], object], stop: threading.Event) -> None:
    try:
        for job in as_completed(jobs):
            watch(job.result())
    except BaseException:
        stop.set()
        for job in jobs:
            job.cancel()
        raise


def _row(pod: PodChecks, headings: Sequence[str]) -> dict[str, str]:
    shown = {c.check: c.value if c.verdict == "ok" else f"{c.verdict.upper()}: {c.value}" for c in pod.checks}
    return {"pod": pod.pod, **{heading: shown.get(heading, "-") for heading in headings}}


def _mending_line(pod: PodChecks, check: Check) -> str:
    place = pod.pod if pod.address in ("", pod.pod) else f"{pod.pod} ({pod.address})"
    return f"{place}: {check.check} {check.verdict}: {check.value}; {check.remedy}"
