"""Preflight: every pod is looked at over ssh, all at once, before anything is started on it."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.checks import SECONDS as PROBE_SECONDS
from zeropods.pods.checks import Check, Expectation, check_clock
from zeropods.pods.hostfile import Host
from zeropods.pods.ssh import ssh_argv
from zeropods.tables import Table

MAX_AT_ONCE = 64
LOGIN_SECONDS = 2.7
"""A dead pod is named after this time; a living one logs us in within a fraction of a second."""
POLL_SECONDS = 0.05
MAX_OUTPUT_BYTES = 1_048_576
"""Bytes that are read of each stream; what comes after them is not."""
SSH_STATUS = 255
"""ssh's own exit status where the connection failed; any other is the command's."""
LOGGED_IN = "Authenticated to "
"""What ssh says at log level VERBOSE; a shell's start-up files may take their time after that."""
CHATTER = (LOGGED_IN, "Transferred: ", "Bytes per second: ")
"""What ssh says at that level where all is well."""
ANEW = "'zeropods pods down' and 'zeropods pods up'"
FAILURES = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host key changed",
        "another machine answers at {place}, or the pod was made anew: "
        + ANEW
        + "; a host of your own that you trust: ssh-keygen -R {known}",
    ),
    (
        "host key is known|Host key verification failed",
        "host key unknown",
        "start the cluster anew: " + ANEW + "; a host of your own: log in once by hand, and compare its key",
    ),
    (
        "Permission denied|Too many authentication failures",
        "key refused",
        "the pod belongs to another cluster: " + ANEW + "; a host of your own: ssh-copy-id {address}",
    ),
    ("Connection refused", "nothing listens", "no sshd at {place}; see 'zeropods pods list', then " + ANEW),
    ("Could not resolve hostname", "unknown name", "correct '{address}' in the hostfile, or add it to /etc/hosts"),
    ("No route to host|Network is unreachable", "unreachable", "no network to {place}; is the pod running?"),
    ("timed out|imeout", "no answer", "{place} is cut off or its sshd hangs; see 'zeropods pods list'"),
    (
        "closed by|reset by|Broken pipe|kex_exchange|banner",
        "connection closed",
        "what answers at {place} is no sshd, or it refuses this machine; see the pod's log",
    ),
)
"""What ssh says, as a regular expression; the value in a few words; the remedy."""


@dataclass(frozen=True, kw_only=True)
class PodChecks:
    """What was found on one pod."""

    pod: str
    address: str
    checks: tuple[Check, ...]

    def not_ok(self) -> list[Check]:
        """Failures, then warnings."""
        return sorted((c for c in self.checks if c.verdict != "ok"), key=lambda c: c.verdict != "failed")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was found on all pods, in the order of the hostfile."""

    pods: tuple[PodChecks, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings are let pass."""
        return all(check.verdict != "failed" for pod in self.pods for check in pod.checks)

    def to_json(self) -> dict[str, Any]:
        """As `zeropods pods check --json` prints it."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True, repr=False)
class CheckTable(Table):
    """Pods x checks, and below them a line for each check that is not ok."""

    remedies: tuple[str, ...] = ()

    def to_html(self) -> str:
        """The table, then what is to be done."""
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.remedies)
        return super().to_html() + (f"<ul>{lines}</ul>" if lines else "")

    def to_markdown(self) -> str:
        """The table, then what is to be done."""
        return "\n".join([super().to_markdown(), *self.remedies])


def preflight(
    hosts: Sequence[Host],
    expected: Expectation,
    *,
    names: Sequence[str] | None = None,
    ssh_config: Path | None = None,
    port: int | None = None,
) -> Preflight:
    """Check all hosts in parallel; a dead one is given up before 3 s, a living one after its probe's deadline.

    Args:
        names: the pods', for people; their addresses where there are none.
        ssh_config: the cluster's; None for the user's own configuration.
        port: of the pods' sshd; None where the user's own configuration says it.

    Raises:
        UserError: there is no ssh here, or no host to check.
    """
    if not hosts:
        raise UserError("preflight: no host to check; start pods with 'zeropods pods up', or name a hostfile")
    if shutil.which("ssh") is None:
        raise UserError("ssh: not found; install it (Debian: apt-get install openssh-client)")
    shown = names if names is not None else [host.address for host in hosts]
    # The run's port is wanted on the first pod only: there its first rank listens.
    wanted = [
        replace(expected, slots=host.slots, address=host.address, master_port=None if number else expected.master_port)
        for number, host in enumerate(hosts)
    ]
    stop = threading.Event()
    with ThreadPoolExecutor(min(len(hosts), MAX_AT_ONCE)) as threads:
        try:
            examine = partial(_examine, ssh_config=ssh_config, port=port, stop=stop)
            return Preflight(pods=tuple(threads.map(examine, shown, wanted)))
        finally:
            stop.set()


def preflight_self(expected: Expectation) -> Preflight:
    """Check this machine alone, without ssh; also for the programs with which it serves and starts others."""
    asked = time.time()
    ended = run_bounded(["sh", "-c", _probe_command(expected)], threading.Event(), over_ssh=False)
    return Preflight(pods=(PodChecks(pod="self", address="", checks=_judged(ended, asked)),))


def require(found: Preflight) -> None:
    """Raise `UserError` with the first pod and check that failed, and its remedy."""
    for pod in found.pods:
        for check in pod.not_ok():
            if check.verdict == "failed":
                raise UserError(_line(pod, check))


def check_table(found: Preflight, title: str = "") -> CheckTable:
    """A preflight to be shown: a row for each pod, a column for each check that was made of any pod."""
    headings = list(dict.fromkeys(check.check for pod in found.pods for check in pod.checks))
    rows = []
    for pod in found.pods:
        shown = {c.check: c.value if c.verdict == "ok" else f"{c.verdict.upper()}: {c.value}" for c in pod.checks}
        rows.append((pod.pod, *(shown.get(heading, "-") for heading in headings)))
    return CheckTable(("pod", *headings), tuple(rows), title, tuple(remedies(found)))


def remedies(found: Preflight) -> list[str]:
    """A line for each check that is not ok: pod, check, value, remedy."""
    return [_line(pod, check) for pod in found.pods for check in pod.not_ok()]


def _line(pod: PodChecks, check: Check) -> str:
    place = pod.pod if pod.address in ("", pod.pod) else f"{pod.pod} ({pod.address})"
    return f"{place}: {check.check} {check.verdict}: {check.value}; {check.remedy}"


# One pod: the probe is run there, and what it says is judged.


@dataclass(frozen=True, kw_only=True)
class ProbeEnd:
    """How a command ended."""

    status: int | None
    """Its exit status, negative for a signal; None where it was killed by us."""
    login_seconds: float | None
    """Seconds from the start to the login; None where there was none."""
    output: str
    errors: str


def run_bounded(argv: list[str], stop: threading.Event, *, over_ssh: bool = True) -> ProbeEnd:
    """Run the probe. It is killed with its process group if it takes too long, to log in or altogether.

    Args:
        stop: it is killed as well once this is set.
        over_ssh: False where there is nobody to log in to.
    """
    # Files, not pipes: nothing has to be read while it runs.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:

        def written(file: int) -> str:
            return os.pread(file, MAX_OUTPUT_BYTES, 0).decode(errors="replace")

        started = time.monotonic()
        login = None if over_ssh else 0.0
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True)
        try:
            while process.poll() is None and not stop.is_set():
                passed = time.monotonic() - started
                if login is None and LOGGED_IN in written(errors.fileno()):
                    login = passed
                if passed > LOGIN_SECONDS + (0 if login is None else PROBE_SECONDS):
                    break
                time.sleep(POLL_SECONDS)
            status = process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = written(errors.fileno())
        if login is None and LOGGED_IN in said:
            login = time.monotonic() - started
        return ProbeEnd(status=status, login_seconds=login, output=written(output.fileno()), errors=said)


def ssh_check(ended: ProbeEnd, address: str, port: int | None) -> Check:
    """Whether ssh logged in; else why not in a few words, and the remedy."""
    login = ended.login_seconds
    if login is not None and ended.status != SSH_STATUS:
        return Check("ssh", "ok", f"{login:.1f} s")
    place = address if port is None else f"{address}:{port}"
    hangs = f"{place} is cut off or hangs; see 'zeropods pods list'"
    if login is not None:
        return Check("ssh", "failed", "lost after login", hangs)
    if ended.status is None:
        return Check("ssh", "failed", f"no answer in {LOGIN_SECONDS:.1f} s", hangs)
    known = address if port in (None, 22) else f"'[{address}]:{port}'"
    for pattern, value, remedy in FAILURES:
        if re.search(pattern, ended.errors):
            return Check("ssh", "failed", value, remedy.format(address=address, place=place, known=known))
    return Check("ssh", "failed", _last_words(ended.errors) or "ssh failed", f"see what 'ssh -v {address}' says")


def _examine(
    name: str, expected: Expectation, *, ssh_config: Path | None, port: int | None, stop: threading.Event
) -> PodChecks:
    address = str(expected.address)
    command = ["sh", "-c", _probe_command(expected)]
    asked = time.time()
    ended = run_bounded(ssh_argv(ssh_config, address, command, port=port, log_level="VERBOSE"), stop)
    reached = ssh_check(ended, address, port)
    judged = _judged(ended, asked) if reached.verdict == "ok" else ()
    return PodChecks(pod=name, address=address, checks=(reached, *judged))


def _probe_command(expected: Expectation) -> str:
    """The command for a shell: in the project folder and with this interpreter, as DeepSpeed starts its ranks."""
    argv = [sys.executable, "-m", "zeropods.pods.checks", expected.to_json()]
    return f"cd {shlex.quote(str(expected.project))} 2>/dev/null; exec {shlex.join(argv)}"


def _judged(ended: ProbeEnd, asked: float) -> tuple[Check, ...]:
    """The checks that a pod has made of itself, and of its clock; or the one that says why there are none.

    Args:
        asked: seconds since 1970, when it was asked.
    """
    if ended.status is None:
        remedy = "is the pod overloaded, or the storage of its project folder gone?"
        return (Check("python", "failed", f"no answer in {PROBE_SECONDS} s", remedy),)
    if ended.status in (126, 127):
        return (Check("python", "failed", "missing", f"{sys.executable} is not on the pod; share the project folder"),)
    # A shell's start-up files may have written other lines before it.
    answer = next((line for line in reversed(ended.output.splitlines()) if line.startswith("{")), "")
    try:
        found = json.loads(answer)
        clock = check_clock(found["time_seconds"], asked=asked, answered=time.time())
        return (*(Check(**check) for check in found["checks"]), clock)
    except (ValueError, KeyError, TypeError):
        value = _last_words(ended.errors) or "not understood"
        return (Check("python", "failed", value, "install the same zeropods with its requirements on the pod"),)


def _last_words(errors: str) -> str:
    """The last line on stderr that says something, cut to what a cell can show."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith(CHATTER)]
    return "".join(filter(str.isprintable, lines[-1]))[:200] if lines else ""
