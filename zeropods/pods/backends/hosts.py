"""Hosts of the user's own as pods: a hostfile instead of a number, the user's own ssh instead of a backend.

`python -m zeropods.pods.backends.hosts CONFIG HOST PROGRAM ...` stands here for a worker over there, which ends
with it. What a worker is told, the cluster's secret included, goes by ssh's stdin, never on a command line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from zeropods.errors import UserError, guarded
from zeropods.pods.agent import BY_STDIN, ORDERS
from zeropods.pods.backends.local import LocalWorkers
from zeropods.pods.hostfile import Host, address_towards, is_loopback, parse_hostfile
from zeropods.pods.ssh import ssh_argv
from zeropods.programs import end_with_parent

ASK_SECONDS, MAX_AT_ONCE = 10.0, 32
TOLD = ("ZEROPODS_", "CDSW_IP_ADDRESS", "CDSW_ENGINE_ID", "CDSW_MASTER_IP")
"""How the names of the variables begin that a worker is told."""
KEEP_ALIVE = {"ServerAliveInterval": 15, "ServerAliveCountMax": 4}
"""A host that is cut off is given up after a minute; the worker there ends with its lease."""
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
"""A script for sh, whose arguments are host, folder and command. One line: not every login shell quotes more."""


@dataclass(frozen=True)
class OwnHost:
    """A host as the hostfile has it, and where the user's ssh finds it."""

    host: Host
    address: str
    user: str


class OwnHosts(LocalWorkers):
    """A process of this machine for each host, which runs the agent there over ssh.

    Names of hosts may be those of the user's ssh configuration, as for DeepSpeed.
    """

    def master_address(self) -> str:
        """This machine's address on the way to the hosts."""
        return _towards(list(self._found))

    def user(self, address: str) -> str:
        return self._found[address].user

    def claim(self) -> Sequence[str]:
        """The hosts' addresses, in the order of the hostfile."""
        return list(self._found)

    def command(self, address: str, argv: list[str]) -> list[str]:
        host = self._found[address].host
        here = [sys.executable, "-m", __name__, self.settings.ssh_config or "", host.address]
        return [*here, *argv, BY_STDIN]

    def slots(self, address: str) -> int | None:
        return self._found[address].host.slots

    @cached_property
    def _found(self) -> dict[str, OwnHost]:
        """The hosts by address, looked up when they are first needed, which they are not for the end of a cluster."""
        hosts = parse_hostfile("\n".join(self.settings.hosts), "hostfile")
        with ThreadPoolExecutor(min(len(hosts), MAX_AT_ONCE)) as threads:
            found = list(threads.map(partial(_look_up, self.settings.ssh_config), hosts))
        by_address: dict[str, OwnHost] = {}
        for own in _seen_from_others(found):
            known = by_address.setdefault(own.address, own)
            if known is not own:
                names = f"{known.host.address} and {own.host.address}"
                raise UserError(f"hostfile: {names} are both {own.address}; remove one of them")
        return by_address


def _look_up(ssh_config: str | None, host: Host) -> OwnHost:
    """Ask ssh, which contacts nobody for that, whom it would reach under a name."""
    argv = ["ssh", "-G", *([] if ssh_config is None else ["-F", ssh_config]), "--", host.address]
    try:
        said = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
        facts = dict(line.partition(" ")[::2] for line in said.stdout.splitlines())
        return OwnHost(host, socket.gethostbyname(facts["hostname"]), facts["user"])
    except subprocess.TimeoutExpired:
        raise UserError(f"host {host.address}: ssh -G hangs; fix ssh's configuration") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"host {host.address}: {' '.join(error.stderr.split())}; fix ssh's configuration") from None
    except OSError as error:
        raise UserError(f"host {host.address}: no IPv4 address ({error.strerror}); fix the hostfile") from None


def _seen_from_others(found: list[OwnHost]) -> list[OwnHost]:
    """This machine may be among the hosts under a name of its own that others know as theirs."""
    others = [own.address for own in found if not is_loopback(own.address)]
    if not others:
        return found
    here = _towards(others)
    return [replace(own, address=here) if is_loopback(own.address) else own for own in found]


def _towards(addresses: list[str]) -> str:
    there = next((address for address in addresses if not is_loopback(address)), addresses[0])
    try:
        return address_towards(there)
    except OSError as error:
        raise UserError(f"{there}: no network to this host ({error.strerror}); fix the hostfile") from None


# What stands here for a worker on another host


def run_here(ssh_config: Path | None, host: str, program: list[str]) -> int:
    """Run the program on the host until it ends, or until this process is asked to end."""
    told = {name: value for name, value in os.environ.items() if name.startswith(TOLD)}
    # Not for ssh, whose configuration may start other programs.
    os.environ.pop(ORDERS, None)
    argv = ssh_argv(ssh_config, host, ["sh", "-c", THERE, host, str(Path.cwd()), *program], **KEEP_ALIVE)
    parent, last = os.getpid(), b""
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
    ) as ssh:
        assert ssh.stdin is not None and ssh.stderr is not None
        stdin = ssh.stdin
        # An ssh that has ended already says on stderr why.
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(told).encode() + b"\n")
        # The end of stdin tells the other side to end.
        signal.signal(signal.SIGTERM, lambda *_: stdin.close())
        for line in ssh.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            last = line.strip() or last
        status = ssh.wait()
        is_asked = stdin.closed
    if status == SSH_FAILED and not is_asked:
        said = last.decode(errors="replace") or "ssh failed"
        raise UserError(f"host {host}: {said}; 'ssh {host} true' has to work without a question")
    return status


def main() -> int:
    """Stand for a worker."""
    ssh_config, host, *program = sys.argv[1:]
    return run_here(Path(ssh_config) if ssh_config else None, host, program)


if __name__ == "__main__":
    sys.exit(guarded(main))
