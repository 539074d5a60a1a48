"""One pod looked at: the probe is run on it, and what it says is judged."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from zeropods.pods.hostfile import Host
from zeropods.pods.preflight import resource_checks, software_checks
from zeropods.pods.preflight.bounded import Ended, run_bounded
from zeropods.pods.preflight.check import Check, PodChecks
from zeropods.pods.preflight.expectation import Expectation
from zeropods.pods.preflight.probe import SECONDS as PROBE_SECONDS
from zeropods.pods.preflight.probe import Facts
from zeropods.pods.preflight.reach import LOGGED_IN, said, ssh_check
from zeropods.pods.ssh import ssh_argv

LOGIN_SECONDS = 2.7
"""A dead pod is named after this time; a living one logs us in within a fraction of a second."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How ssh gets to the pods."""

    ssh_config: Path | None
    """The cluster's; None for the user's own configuration."""
    port: int | None
    """Of the pods' sshd; None where the user's own configuration says it."""


def examine(name: str, host: Host, expected: Expectation, access: Access, stop: threading.Event) -> PodChecks:
    """Check a pod over ssh.

    Args:
        stop: ends the examination within a tenth of a second once it is set.
    """
    command = ["sh", "-c", _probe_command(expected)]
    argv = ssh_argv(access.ssh_config, host.address, command, port=access.port, log_level="VERBOSE")
    asked = time.time()
    ended = _run(argv, LOGIN_SECONDS, stop)
    clocks = asked, time.time()
    reached = ssh_check(ended, host.address, access.port, LOGIN_SECONDS)
    checks = [reached]
    if reached.verdict == "ok":
        checks += _judged(_read(ended), expected, host, clocks)
    return PodChecks(pod=name, address=host.address, checks=tuple(checks))


def examine_self(expected: Expectation, slots: int, stop: threading.Event) -> PodChecks:
    """Check this machine, without ssh; also for the programs with which it serves and starts others."""
    asked = time.time()
    ended = _run(["sh", "-c", _probe_command(expected)], PROBE_SECONDS, stop)
    clocks = asked, time.time()
    answer = _read(ended)
    checks = _judged(answer, expected, Host("localhost", slots), clocks)
    if isinstance(answer, Facts):
        checks = [software_checks.programs(answer), *checks]
    return PodChecks(pod="self", address="", checks=tuple(checks))


def _run(argv: list[str], login_seconds: float, stop: threading.Event) -> Ended:
    return run_bounded(
        argv,
        alive=lambda output, errors: bool(output) or LOGGED_IN in errors,
        alive_seconds=login_seconds,
        seconds=login_seconds + PROBE_SECONDS,
        stop=stop,
    )


def _probe_command(expected: Expectation) -> str:
    """For a shell; as DeepSpeed starts its ranks: in the project folder, with this interpreter."""
    argv = [sys.executable, "-m", "zeropods.pods.preflight.probe", "--project", str(expected.project)]
    for name in expected.digests:
        argv += ["--file", name]
    if expected.master_port is not None:
        argv += ["--port", str(expected.master_port)]
    return f"cd {shlex.quote(str(expected.project))} 2>/dev/null; exec {shlex.join(argv)}"


def _read(ended: Ended) -> Facts | Check:
    """The probe's facts, or the check that says why there are none."""
    if ended.status is None:
        remedy = "is the pod overloaded, or the storage of its project folder gone?"
        return Check("python", "failed", f"no answer in {PROBE_SECONDS} s", remedy)
    if ended.status in (126, 127):
        return Check("python", "failed", "missing", f"{sys.executable} is not on the pod; share the project folder")
    try:
        if ended.status != 0:
            raise ValueError("the probe failed")
        return Facts.from_json(json.loads(_last_object(ended.output)))
    except ValueError:
        value = said(ended.errors) or "not understood"
        return Check("python", "failed", value, "install the same zeropods with its requirements on the pod")


def _last_object(output: str) -> str:
    """The last line that could be an object: a shell's start-up files may have written others before it."""
    return next((line for line in reversed(output.splitlines()) if line.startswith("{")), "")


def _judged(answer: Facts | Check, expected: Expectation, host: Host, clocks: tuple[float, float]) -> list[Check]:
    if isinstance(answer, Check):
        return [answer]
    checks = [
        software_checks.python(answer, expected),
        *(software_checks.package(name, answer, expected) for name in software_checks.PACKAGES),
        software_checks.operations(answer, expected),
        software_checks.project(answer, expected),
        resource_checks.disk(answer, expected),
        resource_checks.memory(answer),
        resource_checks.gpu_memory(answer, expected),
        resource_checks.slots(answer, host.slots),
        resource_checks.clock(answer, *clocks),
    ]
    if expected.master_port is not None:
        checks.append(resource_checks.port(answer, expected.master_port))
    if expected.cml:
        checks.append(software_checks.cml(answer, None if host.address == "localhost" else host.address))
    return checks
