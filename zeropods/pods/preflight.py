"""Preflight: every pod is looked at over ssh, all at once, before anything is started on it."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess

from zeropods.errors import UserError
from zeropods.pods.checks import SECONDS as PROBE_SECONDS
from zeropods.pods.checks import Check, Expectation, check_clock
from zeropods.pods.hostfile import Host
from zeropods.pods.ssh import ssh_argv
from zeropods.programs import find_program
from zeropods.tables import Table

MAX_AT_ONCE = 64
ANSWER_SECONDS = PROBE_SECONDS + 5.0
"""A pod that has not answered by then is given up; one that cannot be reached is named after `CONNECT_SECONDS`."""
MAX_OUTPUT_BYTES = 1_048_576
"""Bytes that are read of each stream; what comes after them is not."""
SSH_STATUS, TIMED_OUT = 255, -signal.SIGKILL
"""ssh's own exit status where the connection failed, and that of a command which `run_all` has killed."""
ANEW = "'zeropods pods down' and 'zeropods pods up'"
FAILURES = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host key changed",
        "another machine answers at {address}, or the pod was recreated: "
        + ANEW
        + "; a host of your own that you trust: ssh-keygen -R {address}",
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
    ("Connection refused", "nothing listens", "no sshd at {address}; see 'zeropods pods list', then " + ANEW),
    ("Could not resolve hostname", "unknown name", "correct '{address}' in the hostfile, or add it to /etc/hosts"),
    ("No route to host|Network is unreachable", "unreachable", "no network to {address}; is the pod running?"),
    ("timed out|imeout", "no answer", "{address} is cut off or its sshd hangs; see 'zeropods pods list'"),
    (
        "closed by|reset by|Broken pipe|kex_exchange|banner",
        "connection closed",
        "what answers at {address} is no sshd, or it refuses this machine; see the pod's log",
    ),
)
"""What ssh says, as a regular expression; the value in a few words; the remedy."""


@dataclass(frozen=True, kw_only=True)
class PodChecks:
    """What was found on one pod."""

    pod: str
    address: str
    checks: tuple[Check, ...]

    def lines(self) -> Iterator[tuple[str, Check]]:
        """Each check that is not ok, failures first, as a line: pod, check, value, remedy."""
        place = self.pod if self.address in ("", self.pod) else f"{self.pod} ({self.address})"
        for check in sorted(self.checks, key=lambda check: check.verdict != "failed"):
            if check.verdict != "ok":
                yield f"{place}: {check.check} {check.verdict}: {check.value}; {check.remedy}", check


@dataclass(frozen=True, kw_only=True, repr=False)
class Preflight:
    """What was found on all pods, in the order of the hostfile; shown as pods x checks, and what is to be done."""

    pods: tuple[PodChecks, ...]
    title: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings are let pass."""
        return all(check.verdict != "failed" for pod in self.pods for check in pod.checks)

    def require(self) -> None:
        """Raise `UserError` with the first pod and check that failed, and its remedy."""
        for pod in self.pods:
            for line, check in pod.lines():
                if check.verdict == "failed":
                    raise UserError(line)

    def remedies(self) -> list[str]:
        """A line for each check that is not ok."""
        return [line for pod in self.pods for line, _ in pod.lines()]

    def table(self) -> Table:
        """A row for each pod, a column for each check that was made of any pod."""
        headings = list(dict.fromkeys(check.check for pod in self.pods for check in pod.checks))
        rows = []
        for pod in self.pods:
            shown = {c.check: c.value if c.verdict == "ok" else f"{c.verdict.upper()}: {c.value}" for c in pod.checks}
            rows.append((pod.pod, *(shown.get(heading, "-") for heading in headings)))
        return Table(("pod", *headings), tuple(rows), self.title)

    def to_json(self) -> dict[str, object]:
        """As `zeropods pods check --json` prints it."""
        return {"ok": self.ok, "pods": [asdict(pod) for pod in self.pods]}

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.remedies())
        return self.table().to_html() + (f"<ul>{lines}</ul>" if lines else "")

    def __repr__(self) -> str:
        """The table, then what is to be done."""
        return "\n".join([str(self.table()), *self.remedies()])


def preflight(
    hosts: Sequence[Host],
    expected: Expectation,
    *,
    names: Sequence[str] | None = None,
    ssh_config: Path | None = None,
    title: str = "",
) -> Preflight:
    """Check all hosts in parallel; a dead one is given up before 3 s, one that hangs after `ANSWER_SECONDS`.

    Args:
        names: the pods', for people; their addresses where there are none.
        ssh_config: the cluster's; None for the user's own configuration.
        title: of the table.

    Raises:
        UserError: there is no ssh here.
    """
    if find_program("ssh") is None:
        raise UserError("ssh: not found; install it (Debian: apt-get install openssh-client)")
    # The run's port is wanted on the first pod only: there its first rank listens.
    wanted = [
        replace(expected, slots=host.slots, master_port=None if number else expected.master_port)
        for number, host in enumerate(hosts)
    ]
    shells = [
        ssh_argv(ssh_config, host.address, ["sh", "-c", probe_command(each)])
        for host, each in zip(hosts, wanted, strict=True)
    ]
    pods: list[PodChecks] = []
    for first in range(0, len(hosts), MAX_AT_ONCE):
        asked = time.time()
        ends = run_all(shells[first : first + MAX_AT_ONCE])
        clock = (asked, time.time())
        for host, end in zip(hosts[first:], ends, strict=False):
            reached = ssh_check(end, host.address)
            judged = _judged(end, clock) if reached.verdict == "ok" else ()
            name = names[len(pods)] if names else host.address
            pods.append(PodChecks(pod=name, address=host.address, checks=(reached, *judged)))
    return Preflight(pods=tuple(pods), title=title)


def preflight_self(expected: Expectation) -> Preflight:
    """Check this machine alone, without ssh; also for the programs with which it serves and starts others."""
    asked = time.time()
    (end,) = run_all([["sh", "-c", probe_command(replace(expected, programs=True))]])
    return Preflight(pods=(PodChecks(pod="self", address="", checks=_judged(end, (asked, time.time()))),))


# The probe is run on each pod, and what it says is judged


def run_all(commands: Sequence[list[str]], seconds: float = ANSWER_SECONDS) -> list[CompletedProcess[str]]:
    """Run commands at once; those that take too long, or run when this is interrupted, are killed with their group."""
    with ExitStack() as stack:
        # Files, not pipes: nothing has to be read while they run.
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in commands]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for argv, (output, errors) in zip(commands, files, strict=True):
                how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors, "start_new_session": True}
                processes.append(subprocess.Popen(argv, **how))  # type: ignore[call-overload]
            deadline = time.monotonic() + seconds
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said = [[os.pread(file.fileno(), MAX_OUTPUT_BYTES, 0).decode(errors="replace") for file in of] for of in files]
        return [CompletedProcess(p.args, p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def probe_command(expected: Expectation) -> str:
    """The command for a shell: in the project folder and with this interpreter, as DeepSpeed starts its ranks."""
    argv = [sys.executable, "-m", "zeropods.pods.checks", expected.to_json()]
    return f"cd {shlex.quote(str(expected.project))} 2>/dev/null; exec {shlex.join(argv)}"


def ssh_check(end: CompletedProcess[str], address: str) -> Check:
    """Whether ssh reached the pod; else why not in a few words, and the remedy."""
    if end.returncode == TIMED_OUT:
        remedy = f"{address} hangs, or the storage of its project folder is gone; see 'zeropods pods list'"
        return Check("ssh", "failed", f"no answer in {ANSWER_SECONDS:.0f} s", remedy)
    if end.returncode != SSH_STATUS:
        return Check("ssh", "ok", "reached")
    for pattern, value, remedy in FAILURES:
        if re.search(pattern, end.stderr):
            return Check("ssh", "failed", value, remedy.format(address=address))
    return Check("ssh", "failed", _last_words(end.stderr) or "ssh failed", f"see what 'ssh -v {address}' says")


def _judged(end: CompletedProcess[str], clock: tuple[float, float]) -> tuple[Check, ...]:
    """The checks that a pod has made of itself, and of its clock; or the one that says why there are none.

    Args:
        clock: when the pod was asked and when it had answered, in seconds since 1970.
    """
    if end.returncode in (126, 127):
        return (Check("python", "failed", "missing", f"{sys.executable} is not on the pod; share the project folder"),)
    # A shell's start-up files may have written other lines before it.
    answer = next((line for line in reversed(end.stdout.splitlines()) if line.startswith("{")), "")
    try:
        found = json.loads(answer)
        return (*(Check(**check) for check in found["checks"]), check_clock(found["time_seconds"], *clock))
    except (ValueError, KeyError, TypeError):
        value = _last_words(end.stderr) or f"ended with status {end.returncode}"
        return (Check("python", "failed", value, "install the same zeropods with its requirements on the pod"),)


def _last_words(errors: str) -> str:
    """The last line on stderr that says something, cut to what a cell can show."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return "".join(filter(str.isprintable, lines[-1]))[:200] if lines else ""
