"""The user's own hosts as pods: a hostfile instead of a number, the user's own ssh instead of a backend.

`python -m zeropods.pods.backends.hosts CONFIG HOST PROGRAM ...` stands in here for a worker on a host, and the worker
ends with it. What a worker is told, the cluster's secret included, goes through ssh's stdin, and the stand-in reads the
secret from the cluster's file: it is in no command line and in no environment.
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
from functools import cached_property, partial
from pathlib import Path

from zeropods.errors import UserError, guarded
from zeropods.pods.agent import BY_STDIN, ORDERS, read_secret, stdin_message
from zeropods.pods.backends.local import LocalWorkers, Place
from zeropods.pods.hostfile import Host, address_towards, is_loopback, parse_hostfile
from zeropods.pods.ssh import said_by, ssh_argv
from zeropods.programs import end_with_parent

MAX_AT_ONCE = 32
TOLD = ("ZEROPODS_", "CDSW_IP_ADDRESS", "CDSW_ENGINE_ID", "CDSW_MASTER_IP")
"""Prefixes of the names of the environment variables that are passed to a worker."""
KEEP_ALIVE = {"ServerAliveInterval": 15, "ServerAliveCountMax": 4}
"""ssh options by which a host that is cut off is given up after a minute; the worker there ends with its lease."""
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
"""Script for sh, with arguments host, folder and command. It is one line, as not every login shell can quote more."""


class OwnHosts(LocalWorkers):
    """One process of this machine for each host, which runs the agent there over ssh.

    Host names may be names from the user's ssh configuration, as for DeepSpeed.
    """

    def master_address(self) -> str:
        """This machine's address on the route to the hosts."""
        return _towards([place.address for place in self.places])

    @cached_property
    def places(self) -> Sequence[Place]:
        """The hosts in the order of the hostfile, looked up on first use: ending a cluster needs no look-up."""
        hosts = parse_hostfile("\n".join(self.settings.hosts), "hostfile")
        ssh_config = self.settings.ssh_config or ""
        with ThreadPoolExecutor(min(len(hosts), MAX_AT_ONCE)) as threads:
            found = list(threads.map(partial(_look_up, ssh_config), hosts))
        others = [address for address, _ in found if not is_loopback(address)]
        names: dict[str, str] = {}
        places = []
        for number, (host, (address, user)) in enumerate(zip(hosts, found, strict=True)):
            if others and is_loopback(address):
                # The host is this machine under a name of its own; take the address that the other hosts know.
                address = _towards(others)
            if (known := names.setdefault(address, host.address)) != host.address:
                raise UserError(f"hostfile: {known} and {host.address} are both {address}; remove one of them")
            here = (sys.executable, "-m", __name__, ssh_config, host.address)
            places.append(Place(address, host.slots, user, self.gpus_of(number), here, (BY_STDIN,)))
        return places


def _look_up(ssh_config: str, host: Host) -> tuple[str, str]:
    """Ask ssh, which contacts no host for that, where it would connect to: the address, and the account there."""
    argv = ["ssh", "-G", *(["-F", ssh_config] if ssh_config else []), "--", host.address]
    said = said_by(argv, f"host {host.address}", "fix ssh's configuration")
    facts = dict(line.partition(" ")[::2] for line in said.splitlines())
    try:
        return socket.gethostbyname(facts["hostname"]), facts["user"]
    except OSError as error:
        raise UserError(f"host {host.address}: no IPv4 address ({error.strerror}); fix the hostfile") from None


def _towards(addresses: list[str]) -> str:
    there = next((address for address in addresses if not is_loopback(address)), addresses[0])
    try:
        return address_towards(there)
    except OSError as error:
        raise UserError(f"{there}: no route to this host ({error.strerror}); fix the hostfile") from None


def main() -> int:
    """Stand in for a worker: run its program on the host until it ends, or until this process is asked to end."""
    ssh_config, host, *program = sys.argv[1:]
    told = {name: value for name, value in os.environ.items() if name.startswith(TOLD)}
    secret = read_secret(json.loads(os.environ[ORDERS])["secret_file"])
    there = ["sh", "-c", THERE, host, str(Path.cwd()), *program]
    argv = ssh_argv(Path(ssh_config) if ssh_config else None, host, there, **KEEP_ALIVE)
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
        # If ssh has already ended, it says on stderr why.
        with suppress(BrokenPipeError):
            stdin.write(stdin_message(told, secret))
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
        raise UserError(f"host {host}: {said}; 'ssh {host} true' must work without a prompt")
    return status


if __name__ == "__main__":
    sys.exit(guarded(main))
