"""A worker on a host of the user's own: `python -m zeropods.pods.backends.far [--ssh-config F] HOST PROGRAM ...`.

It stands here for the program over there, which ends with it. ssh reaches the host as the user's configuration
says. What the worker is told, the cluster's secret included, goes by ssh's stdin, never on a command line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from zeropods.errors import UserError, guarded
from zeropods.pods.agent import SECRET_VARIABLE
from zeropods.pods.processes import end_with_parent
from zeropods.pods.ssh import ssh_argv

TOLD = ("ZEROPODS_", "CDSW_IP_ADDRESS", "CDSW_ENGINE_ID", "CDSW_MASTER_IP")
"""How the names of the variables begin that a worker is told."""
KEEP_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A host that is cut off is given up after a minute; the worker there ends with its lease."""
END_SECONDS = 13.5
"""For the other side to end its worker; less than this process itself is given."""
SSH_FAILED = 255
THERE = "; ".join(
    [
        'cd "$1" 2>/dev/null || { echo "zeropods: host $0: $1: no such folder there; share the project folder with it"'
        " >&2; exit 1; }",
        "shift",
        'command -v "$1" >/dev/null || { echo "zeropods: host $0: $1: no such Python there; install it with the '
        'requirements at this path" >&2; exit 1; }',
        'exec "$@"',
    ]
)
"""For sh, told host, folder, program and arguments. One line: not every login shell takes more in quotes."""


def main() -> int:
    """Run the program on the host until it ends, or until this process is asked to end."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ssh-config", type=Path)
    parser.add_argument("host")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    told = _told()
    with _started(arguments.ssh_config, arguments.host, arguments.program) as ssh:
        try:
            last = _converse(ssh, told)
            status = ssh.wait()
        except SystemExit:
            return _finish(ssh)
    if status == SSH_FAILED:
        remedy = f"'ssh {arguments.host} true' has to work without a question"
        raise UserError(f"host {arguments.host}: {last or 'ssh failed'}; {remedy}")
    return status


def _told() -> dict[str, str]:
    named = {name: value for name, value in os.environ.items() if name.startswith(TOLD)}
    # Not for ssh, whose configuration may start other programs.
    os.environ.pop(SECRET_VARIABLE, None)
    return named


def _started(ssh_config: Path | None, host: str, program: list[str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    near = [sys.executable, "-m", "zeropods.pods.backends.near", *program]
    ssh, *rest = ssh_argv(ssh_config, host, ["sh", "-c", THERE, host, str(Path.cwd()), *near])
    return subprocess.Popen(
        [ssh, *KEEP_ALIVE, *rest],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
    )


def _converse(ssh: subprocess.Popen[bytes], told: dict[str, str]) -> str:
    """Say what the worker is told, and pass on what comes until the end; returns the last line of stderr."""
    assert ssh.stdin is not None and ssh.stderr is not None
    # An ssh that has ended already says on stderr why.
    with suppress(BrokenPipeError):
        ssh.stdin.write(json.dumps(told).encode() + b"\n")
        ssh.stdin.flush()
    last = b""
    for line in ssh.stderr:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        last = line.strip() or last
    return last.decode(errors="replace")


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def _finish(ssh: subprocess.Popen[bytes]) -> int:
    """The end of stdin tells the other side to end; a connection that is dead is cut."""
    try:
        ssh.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        ssh.kill()
    return ssh.wait()


if __name__ == "__main__":
    sys.exit(guarded(main))
