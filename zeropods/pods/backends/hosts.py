"""The user's own hosts as pods: a hostfile instead of a number, the user's own ssh instead of a
backend.

`python -m zeropods.pods.backends.hosts CONFIG HOST PROGRAM ...` stands in here for a worker on a
host, and the worker ends with it. What a worker is told, the cluster's secret included, goes
through ssh's stdin, and the stand-in reads the secret from the cluster's file: it is in no command
line and in no environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from zeropods.errors import UserError, guarded
from zeropods.pods.agent import BY_STDIN, ORDERS, read_secret, stdin_message
from zeropods.pods.backends.local import Place, ProcessWorkers
from zeropods.pods.hostfile import Host, address_towards, is_loopback, parse_hostfile
from zeropods.pods.ssh import SSH_FAILED, output_of, ssh_argv
from zeropods.programs import end_with_parent

MOST_LOOK_UPS = 32
"""Number of hosts that are looked up at a time."""
PASSED_VARIABLES = ("ZEROPODS_", "CDSW_IP_ADDRESS", "CDSW_ENGINE_ID", "CDSW_MASTER_IP")
"""Prefixes of the names of the environment variables that are passed to a worker."""
KEEP_ALIVE = {"ServerAliveInterval": 15, "ServerAliveCountMax": 4}
"""ssh options by which a host that is cut off is given up after a minute; the worker there ends
with its lease."""
SCRIPT_ON_HOST = "; ".join(
    [
        'cd "$1" 2>/dev/null || { echo "zeropods: host $0: $1: no such folder there; share the '
        'project folder with it" >&2; exit 1; }',
        "shift",
        'command -v "$1" >/dev/null || { echo "zeropods: host $0: $1: no such Python there; '
        'install it with the requirements at this path" >&2; exit 1; }',
        'exec "$@"',
    ]
)
"""Script for sh, with arguments host, folder and command. It is one line, as not every login shell
can quote more."""


class OwnHosts(ProcessWorkers):
    """One process of this machine for each host, which runs the agent there over ssh.

    Host names may be names from the user's ssh configuration, as for DeepSpeed.
    """

    has_processes_here = True
    # A host may have a file system of its own.
    shares_folder = False

    def master_address(self) -> str:
        """This machine's address on the route to the hosts."""
        return _source_address([place.address for place in self.places])

    @cached_property
    def places(self) -> Sequence[Place]:
        """The hosts in the order of the hostfile. They are looked up on first use, since ending a
        cluster needs no look-up; `UserError` where one has no address, or two have the same."""
        hosts = parse_hostfile("\n".join(self.settings.hosts), "hostfile")
        ssh_config = self.settings.ssh_config or ""
        with ThreadPoolExecutor(min(len(hosts), MOST_LOOK_UPS)) as threads:
            looked_up = list(threads.map(partial(_look_up, ssh_config), hosts))
        beyond_loopback = [address for address, _ in looked_up if not is_loopback(address)]
        names: dict[str, str] = {}
        """What the hostfile calls the hosts, by their addresses."""
        places = []
        for number, host in enumerate(hosts):
            address, user = looked_up[number]
            if beyond_loopback and is_loopback(address):
                # The host is this machine under a name of its own; take the address that the other
                # hosts know.
                address = _source_address(beyond_loopback)
            if address in names:
                raise UserError(
                    f"hostfile: {names[address]} and {host.address} are both {address}; remove one "
                    "of them"
                )
            names[address] = host.address
            place = Place(
                address,
                host.slots,
                user,
                gpus=self.gpus_of(number),
                before=(sys.executable, "-m", __name__, ssh_config, host.address),
                after=(BY_STDIN,),
            )
            places.append(place)
        return places


def _look_up(ssh_config: str, host: Host) -> tuple[str, str]:
    """Ask ssh where it would connect to, without contacting the host.

    Args:
        ssh_config: path of the ssh configuration; empty for the user's own.

    Returns:
        The host's IPv4 address, and the account there.

    Raises:
        UserError: ssh's configuration is wrong, or the host has no IPv4 address.
    """
    argv = ["ssh", "-G"]
    if ssh_config:
        argv += ["-F", ssh_config]
    argv += ["--", host.address]
    options = {}
    for line in output_of(argv, f"host {host.address}", "fix ssh's configuration").splitlines():
        option, _, value = line.partition(" ")
        options[option] = value
    try:
        return socket.gethostbyname(options["hostname"]), options["user"]
    except OSError as error:
        reason = f"no IPv4 address ({error.strerror})"
        raise UserError(f"host {host.address}: {reason}; fix the hostfile") from None


def _source_address(addresses: Sequence[str]) -> str:
    """This machine's address on the route to the first of these addresses that is not loopback, or
    to the first one where all are; `UserError` where there is no route."""
    beyond_loopback = [address for address in addresses if not is_loopback(address)]
    destination = beyond_loopback[0] if beyond_loopback else addresses[0]
    try:
        return address_towards(destination)
    except OSError as error:
        reason = f"no route to this host ({error.strerror})"
        raise UserError(f"{destination}: {reason}; fix the hostfile") from None


def main() -> int:
    """Stand in for a worker: run its program on the host, and return its exit status. On SIGTERM
    the program is told to end. `UserError` where ssh fails."""
    ssh_config, host, *program = sys.argv[1:]
    variables = {}
    for name, value in os.environ.items():
        if name.startswith(PASSED_VARIABLES):
            variables[name] = value
    secret = read_secret(json.loads(os.environ[ORDERS])["secret_file"])
    command = ["sh", "-c", SCRIPT_ON_HOST, host, str(Path.cwd()), *program]
    config = Path(ssh_config) if ssh_config else None
    this_process = os.getpid()
    with subprocess.Popen(
        ssh_argv(config, host, command, **KEEP_ALIVE),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=lambda: end_with_parent(this_process, signal.SIGTERM),
    ) as ssh:
        # Both are pipes, as asked for above.
        assert ssh.stdin is not None and ssh.stderr is not None
        stdin = ssh.stdin
        # If ssh has already ended, it says on stderr why.
        with suppress(BrokenPipeError):
            stdin.write(stdin_message(variables, secret))
        # The end of stdin tells the other side to end.
        signal.signal(signal.SIGTERM, lambda *_: stdin.close())
        last_words = _pass_on(ssh.stderr)
        status = ssh.wait()
        is_asked_to_end = stdin.closed
    if status == SSH_FAILED and not is_asked_to_end:
        reason = last_words.decode(errors="replace") or "ssh failed"
        remedy = f"'ssh {host} true' must work without a prompt"
        raise UserError(f"host {host}: {reason}; {remedy}")
    return status


def _pass_on(lines: Iterable[bytes]) -> bytes:
    """Write lines to stderr as they come; return the last one that is not blank, or none."""
    last_words = b""
    for line in lines:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        last_words = line.strip() or last_words
    return last_words


if __name__ == "__main__":
    sys.exit(guarded(main))
