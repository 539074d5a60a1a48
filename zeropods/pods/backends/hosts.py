"""Hosts of the user's own as pods: a hostfile instead of a number, the user's own ssh instead of a backend."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods import this_pod
from zeropods.pods.hostfile import Host

ASK_SECONDS = 10.0
MAX_AT_ONCE = 32


@dataclass(frozen=True)
class OwnHost:
    """A host as the hostfile has it, and where the user's ssh finds it."""

    host: Host
    address: str
    user: str


class OwnHosts:
    """The network that these hosts have already.

    Args:
        hosts: names may be those of the user's ssh configuration, as for DeepSpeed.
        ssh_config: None for the user's usual one.
    """

    def __init__(self, hosts: Sequence[Host], ssh_config: Path | None) -> None:
        self._hosts = tuple(hosts)
        self._ssh_config = ssh_config

    def open(self) -> None: ...

    def close(self) -> None: ...

    def settled(self) -> None: ...

    def master_address(self) -> str:
        """This machine's address on the way to the hosts."""
        return _towards([own.address for own in self._found.values()])

    def user(self, address: str) -> str:
        return self._found[address].user

    def claim(self, n: int) -> list[str]:
        """The hosts' addresses, in the order of the hostfile."""
        return list(self._found)[:n]

    def command(self, address: str, argv: list[str]) -> list[str]:
        """The command as it is run on the host of an address."""
        host = self._found[address].host
        config = [] if self._ssh_config is None else ["--ssh-config", str(self._ssh_config)]
        far = [sys.executable, "-m", "zeropods.pods.backends.far", *config, host.address]
        return [*far, "env", f"ZEROPODS_SLOTS={host.slots}", *argv]

    @cached_property
    def _found(self) -> dict[str, OwnHost]:
        """By address, looked up when it is first needed: for the end of a cluster it is not."""
        with ThreadPoolExecutor(min(len(self._hosts), MAX_AT_ONCE)) as threads:
            found = list(threads.map(partial(_look_up, self._ssh_config), self._hosts))
        return _by_address(_seen_from_others(found))


def _look_up(ssh_config: Path | None, host: Host) -> OwnHost:
    """Ask ssh, which contacts nobody for that, whom it would reach under a name."""
    argv = ["ssh", "-G", *([] if ssh_config is None else ["-F", str(ssh_config)]), "--", host.address]
    try:
        said = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
        facts = dict(line.partition(" ")[::2] for line in said.stdout.splitlines())
        return OwnHost(host, socket.gethostbyname(facts["hostname"]), facts["user"])
    except subprocess.TimeoutExpired:
        raise UserError(
            f"host {host.address}: no word of ssh -G in {ASK_SECONDS:g} s; mend its configuration"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"host {host.address}: {' '.join(error.stderr.split())}; mend ssh's configuration") from None
    except OSError as error:
        raise UserError(f"host {host.address}: no IPv4 address ({error.strerror}); mend the hostfile") from None


def _seen_from_others(found: list[OwnHost]) -> list[OwnHost]:
    """This machine may be among the hosts under a name of its own that others know as theirs."""
    others = [own.address for own in found if not this_pod.is_loopback(own.address)]
    if not others:
        return found
    here = _towards(others)
    return [replace(own, address=here) if this_pod.is_loopback(own.address) else own for own in found]


def _towards(addresses: list[str]) -> str:
    there = next((address for address in addresses if not this_pod.is_loopback(address)), addresses[0])
    try:
        return this_pod.address_towards(there)
    except OSError as error:
        raise UserError(f"{there}: no network to this host ({error.strerror}); mend the hostfile") from None


def _by_address(found: list[OwnHost]) -> dict[str, OwnHost]:
    by_address: dict[str, OwnHost] = {}
    for own in found:
        known = by_address.setdefault(own.address, own)
        if known is not own:
            names = f"{known.host.address} and {own.host.address}"
            raise UserError(f"hostfile: {names} are both {own.address}; remove one of them")
    return by_address
