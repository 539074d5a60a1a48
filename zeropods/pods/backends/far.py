"""A worker on a host of the user's own: `python -m zeropods.pods.backends.far HOST PROGRAM ARGUMENT ...`.

It stands here for the program over there, reached as the user's ssh reaches the host. The cluster's
secret goes by ssh's stdin, never on a command line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from zeropods.errors import guarded
from zeropods.pods.ssh import ssh_argv

PREFIXES = ("ZEROPODS_", "CDSW_IP_ADDRESS", "CDSW_ENGINE_ID", "CDSW_MASTER_IP")
"""What a worker is told, by name."""
SSH_CONFIG = "ZEROPODS_SSH_CONFIG"
"""The ssh configuration for the user's own hosts, where it is not the usual one."""
END_SECONDS = 15.0


def main() -> int:
    """Run the program on the host until it ends, or until this process is asked to end."""
    host, *argv = sys.argv[1:]
    config = os.environ.get(SSH_CONFIG)
    told = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES) and name != SSH_CONFIG}
    near = [sys.executable, "-m", "zeropods.pods.backends.near", *argv]
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *near]
    argv = ssh_argv(Path(config) if config else None, host, command)
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as ssh:
        assert ssh.stdin is not None
        signal.signal(signal.SIGTERM, _end)
        try:
            ssh.stdin.write(json.dumps(told).encode() + b"\n")
            ssh.stdin.flush()
            return ssh.wait()
        except (SystemExit, BrokenPipeError):
            return _finish(ssh)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit


def _finish(ssh: subprocess.Popen[bytes]) -> int:
    """The end of stdin tells the other side to end; a connection that is dead is cut."""
    assert ssh.stdin is not None
    try:
        ssh.stdin.close()
        return ssh.wait(END_SECONDS)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        ssh.kill()
        return ssh.wait()


if __name__ == "__main__":
    sys.exit(guarded(main))
