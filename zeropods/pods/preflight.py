"""Preflight: every pod is looked at, all at once, before anything is started on it."""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods import preflight_checks
from zeropods.pods.hostfile import Host
from zeropods.pods.preflight_checks import Check, Expectation, PodChecks, Preflight
from zeropods.pods.probe import SECONDS as PROBE_SECONDS
from zeropods.pods.probe import Facts
from zeropods.pods.ssh import ssh_argv

# Run a command that must show life soon and end in time; it is killed with all that it started otherwise.

POLL_SECONDS = 0.05
MAX_OUTPUT_BYTES = 1_048_576
"""Of each stream; the last ones are kept."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a bounded command ended."""

    status: int | None
    """Its exit status, negative for a signal; None where it was killed by us."""
    alive_seconds: float | None
    """From the start to the first sign of life; None where there was none."""
    output: str
    errors: str


class _Pipes:
    """What a process has written so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.output = bytearray()
        self.errors = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(process.stdout, selectors.EVENT_READ, self.output)
        self._selector.register(process.stderr, selectors.EVENT_READ, self.errors)

    def read(self, seconds: float) -> bool:
        """Wait that long for output; whether some came."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        came = False
        for key, _ in self._selector.select(seconds):
            block = os.read(key.fd, 65_536)
            key.data.extend(block)
            del key.data[:-MAX_OUTPUT_BYTES]
            came = came or bool(block)
            if not block:
                self._selector.unregister(key.fileobj)
        return came

    def close(self) -> None:
        self._selector.close()

    def texts(self) -> tuple[str, str]:
        return self.output.decode(errors="replace"), self.errors.decode(errors="replace")


def run_bounded(
    argv: list[str],
    *,
    alive: Callable[[str, str], bool],
    alive_seconds: float,
    seconds: float,
    stop: threading.Event,
) -> Ended:
    """Run a command in a process group of its own.

    Args:
        alive: whether what was written so far, (stdout, stderr), shows that the other side is alive.
        alive_seconds: the command is killed if it has not shown life by then.
        seconds: the command is killed if it has not ended by then.
        stop: the command is killed once this is set.
    """
    started = time.monotonic()
    life: float | None = None
    with _started(argv) as process, closing(_Pipes(process)) as pipes:
        try:
            while not (ended := _has_ended(process)) and not stop.is_set():
                if time.monotonic() - started > (alive_seconds if life is None else seconds):
                    break
                if pipes.read(POLL_SECONDS) and life is None and alive(*pipes.texts()):
                    life = time.monotonic() - started
            while ended and pipes.read(0):
                pass
        finally:
            # The leader is not reaped yet, so the group's number is still its own.
            os.killpg(process.pid, signal.SIGKILL)
    output, errors = pipes.texts()
    if life is None and ended and alive(output, errors):
        life = time.monotonic() - started
    return Ended(status=process.returncode if ended else None, alive_seconds=life, output=output, errors=errors)


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended, which leaves it to be reaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# Why ssh did not reach a pod, in a few words, and what mends it.

SSH_STATUS = 255
"""ssh's own exit status where the connection failed; any other is the command's."""
LOGGED_IN = "Authenticated to "
"""What ssh says at log level VERBOSE; a shell's start-up files may take their time after that."""
CHATTER = (LOGGED_IN, "Transferred: ", "Bytes per second: ")
"""What ssh says at that level where all is well."""
ANEW = "'zeropods pods down' and 'zeropods pods up'"


@dataclass(frozen=True)
class _Failure:
    said: str
    """In ssh's words: a regular expression."""
    value: str
    remedy: str


FAILURES = (
    _Failure(
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host key changed",
        "another machine answers at {place}, or the pod was made anew: "
        + ANEW
        + "; a host of your own that you trust: ssh-keygen -R {known}",
    ),
    _Failure(
        "host key is known|Host key verification failed",
        "host key unknown",
        "start the cluster anew: " + ANEW + "; a host of your own: log in once by hand, and compare its key",
    ),
    _Failure(
        "Permission denied|Too many authentication failures",
        "key refused",
        "the pod belongs to another cluster: " + ANEW + "; a host of your own: ssh-copy-id {address}",
    ),
    _Failure("Connection refused", "nothing listens", "no sshd at {place}; see 'zeropods pods list', then " + ANEW),
    _Failure(
        "Could not resolve hostname", "unknown name", "correct '{address}' in the hostfile, or add it to /etc/hosts"
    ),
    _Failure("No route to host|Network is unreachable", "unreachable", "no network to {place}; is the pod running?"),
    _Failure("timed out|imeout", "no answer", "{place} is cut off or its sshd hangs; see 'zeropods pods list'"),
    _Failure(
        "closed by|reset by|Broken pipe|kex_exchange|banner",
        "connection closed",
        "what answers at {place} is no sshd, or it refuses this machine; see the pod's log",
    ),
)


def ssh_check(ended: Ended, address: str, port: int | None, login_seconds: float) -> Check:
    """Whether ssh logged in.

    Args:
        login_seconds: how long it was given.
    """
    alive = ended.alive_seconds
    if alive is not None and ended.status != SSH_STATUS:
        return Check("ssh", "ok", f"{alive:.1f} s")
    place = address if port is None else f"{address}:{port}"
    known = address if port in (None, 22) else f"'[{address}]:{port}'"
    hangs = f"{place} is cut off or hangs; see 'zeropods pods list'"
    if alive is not None:
        return Check("ssh", "failed", "lost after login", hangs)
    if ended.status is None:
        return Check("ssh", "failed", f"no answer in {login_seconds:.1f} s", hangs)
    for failure in FAILURES:
        if re.search(failure.said, ended.errors):
            remedy = failure.remedy.format(address=address, place=place, known=known)
            return Check("ssh", "failed", failure.value, remedy)
    return Check("ssh", "failed", said(ended.errors) or "ssh failed", f"see what 'ssh -v {address}' says")


def said(errors: str) -> str:
    """The last line on stderr that says something, cut to what a cell can show."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith(CHATTER)]
    return "".join(filter(str.isprintable, lines[-1]))[:200] if lines else ""


# One pod looked at: the probe is run on it, and what it says is judged.

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
        checks = [preflight_checks.programs(answer), *checks]
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
    argv = [sys.executable, "-m", "zeropods.pods.probe", "--project", str(expected.project)]
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
        preflight_checks.python(answer, expected),
        *(preflight_checks.package(name, answer, expected) for name in preflight_checks.PACKAGES),
        preflight_checks.operations(answer, expected),
        preflight_checks.project(answer, expected),
        preflight_checks.disk(answer, expected),
        preflight_checks.memory(answer),
        preflight_checks.gpu_memory(answer, expected),
        preflight_checks.slots(answer, host.slots),
        preflight_checks.clock(answer, *clocks),
    ]
    if expected.master_port is not None:
        checks.append(preflight_checks.port(answer, expected.master_port))
    if expected.cml:
        checks.append(preflight_checks.cml(answer, None if host.address == "localhost" else host.address))
    return checks


# Preflight: every pod is looked at, all at once, before anything is started on it.

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
