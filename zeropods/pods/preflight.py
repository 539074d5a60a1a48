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
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods.checks import SECONDS as PROBE_SECONDS
from zeropods.pods.checks import Check, Expectation, check_clock
from zeropods.pods.hostfile import Host
from zeropods.pods.ssh import ssh_argv
from zeropods.tables import Table

MAX_AT_ONCE = 64
ANSWER_SECONDS = PROBE_SECONDS + 5.0
"""A pod that has not answered by then is given up; one that cannot be reached is named after `CONNECT_SECONDS`."""
MAX_OUTPUT_BYTES = 1_048_576
"""Bytes that are read of each stream; what comes after them is not."""
SSH_STATUS = 255
"""ssh's own exit status where the connection failed; any other is the command's."""
ANEW = "'zeropods pods down' and 'zeropods pods up'"
FAILURES = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host key changed",
        "another machine answers at {place}, or the pod was recreated: "
        + ANEW
        + "; a host of your own that you trust: ssh-keygen -R {known}",
    ),
    (
        "host key is known|Host key verification failed",
        "host key unknown",
        "restart the cluster: " + ANEW + "; a host of your own: log in once by hand, and compare its key",
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

    def to_json(self) -> dict[str, object]:
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

    def __repr__(self) -> str:
        """The table, then what is to be done."""
        return "\n".join([super().__repr__(), *self.remedies])


def preflight(
    hosts: Sequence[Host],
    expected: Expectation,
    *,
    names: Sequence[str] | None = None,
    ssh_config: Path | None = None,
    port: int | None = None,
) -> Preflight:
    """Check all hosts in parallel; a dead one is given up before 3 s, one that hangs after `ANSWER_SECONDS`.

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
    # The run's port is wanted on the first pod only: there its first rank listens.
    wanted = [
        replace(expected, slots=host.slots, address=host.address, master_port=None if number else expected.master_port)
        for number, host in enumerate(hosts)
    ]
    shell = [ssh_argv(ssh_config, each.address or "", ["sh", "-c", probe_command(each)], port=port) for each in wanted]
    ends = [end for first in range(0, len(shell), MAX_AT_ONCE) for end in run_all(shell[first : first + MAX_AT_ONCE])]
    pods = []
    for host, name, end in zip(hosts, names or [host.address for host in hosts], ends, strict=True):
        reached = ssh_check(end, host.address, port)
        judged = _judged(end) if reached.verdict == "ok" else ()
        pods.append(PodChecks(pod=name, address=host.address, checks=(reached, *judged)))
    return Preflight(pods=tuple(pods))


def preflight_self(expected: Expectation) -> Preflight:
    """Check this machine alone, without ssh; also for the programs with which it serves and starts others."""
    (end,) = run_all([["sh", "-c", probe_command(expected)]])
    return Preflight(pods=(PodChecks(pod="self", address="", checks=_judged(end)),))


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


# The probe is run on each pod, and what it says is judged


@dataclass(frozen=True, kw_only=True)
class ProbeEnd:
    """How a command ended."""

    status: int | None
    """Its exit status, negative for a signal; None where it was killed by us."""
    output: str
    errors: str
    asked: float
    """Seconds since 1970, before it was started."""
    answered: float
    """The same, when it had ended."""


def run_all(commands: Sequence[list[str]], seconds: float | None = None) -> list[ProbeEnd]:
    """Run commands at once; those that take too long, or run when this is interrupted, are killed with their group."""
    with ExitStack() as stack:
        # Files, not pipes: nothing has to be read while they run.
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in commands]
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill, processes)
        asked = time.time()
        for argv, (output, errors) in zip(commands, files, strict=True):
            processes.append(
                subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True)
            )
        deadline = time.monotonic() + (seconds or ANSWER_SECONDS)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        answered = time.time()
        said = [[os.pread(file.fileno(), MAX_OUTPUT_BYTES, 0).decode(errors="replace") for file in of] for of in files]
        return [
            ProbeEnd(status=process.returncode, output=output, errors=errors, asked=asked, answered=answered)
            for process, (output, errors) in zip(processes, said, strict=True)
        ]


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def probe_command(expected: Expectation) -> str:
    """The command for a shell: in the project folder and with this interpreter, as DeepSpeed starts its ranks."""
    argv = [sys.executable, "-m", "zeropods.pods.checks", expected.to_json()]
    return f"cd {shlex.quote(str(expected.project))} 2>/dev/null; exec {shlex.join(argv)}"


def ssh_check(end: ProbeEnd, address: str, port: int | None) -> Check:
    """Whether ssh reached the pod; else why not in a few words, and the remedy."""
    place = address if port is None else f"{address}:{port}"
    if end.status is None:
        remedy = f"{place} hangs, or the storage of its project folder is gone; see 'zeropods pods list'"
        return Check("ssh", "failed", f"no answer in {ANSWER_SECONDS:.0f} s", remedy)
    if end.status != SSH_STATUS:
        return Check("ssh", "ok", "reached")
    known = address if port in (None, 22) else f"'[{address}]:{port}'"
    for pattern, value, remedy in FAILURES:
        if re.search(pattern, end.errors):
            return Check("ssh", "failed", value, remedy.format(address=address, place=place, known=known))
    return Check("ssh", "failed", _last_words(end.errors) or "ssh failed", f"see what 'ssh -v {address}' says")


def _judged(end: ProbeEnd) -> tuple[Check, ...]:
    """The checks that a pod has made of itself, and of its clock; or the one that says why there are none."""
    if end.status in (126, 127):
        return (Check("python", "failed", "missing", f"{sys.executable} is not on the pod; share the project folder"),)
    # A shell's start-up files may have written other lines before it.
    answer = next((line for line in reversed(end.output.splitlines()) if line.startswith("{")), "")
    try:
        found = json.loads(answer)
        clock = check_clock(found["time_seconds"], asked=end.asked, answered=end.answered)
        return (*(Check(**check) for check in found["checks"]), clock)
    except (ValueError, KeyError, TypeError):
        value = _last_words(end.errors) or f"ended with status {end.status}"
        return (Check("python", "failed", value, "install the same zeropods with its requirements on the pod"),)


def _last_words(errors: str) -> str:
    """The last line on stderr that says something, cut to what a cell can show."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return "".join(filter(str.isprintable, lines[-1]))[:200] if lines else ""
