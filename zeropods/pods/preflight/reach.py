"""Why ssh did not reach a pod, in a few words, and what mends it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zeropods.pods.preflight.bounded import Ended
from zeropods.pods.preflight.check import Check

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
