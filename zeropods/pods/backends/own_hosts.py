"""Hosts of the user's own as pods: a hostfile instead of a number."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zeropods.errors import UserError
from zeropods.pods import this_pod
from zeropods.pods.hostfile import Host


class OwnHosts:
    """The network that these hosts have already; each worker is started through the user's own ssh."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {_numeric(host.address): host for host in hosts}

    def open(self) -> None: ...

    def close(self) -> None: ...

    def master_address(self) -> str:
        """This machine's address, which the hosts must reach."""
        only_here = all(address.startswith("127.") for address in self._hosts)
        return "127.0.0.1" if only_here else this_pod.address()

    def command(self, address: str, argv: list[str]) -> list[str]:
        """The command as it is run on the host of an address."""
        host = self._hosts[address]
        slots = f"ZEROPODS_SLOTS={host.slots}"
        return [sys.executable, "-m", "zeropods.pods.backends.far", host.address, "env", slots, *argv]

    @contextmanager
    def claiming(self, n: int) -> Iterator[list[str]]:
        """The hosts' addresses, in the order of the hostfile."""
        yield list(self._hosts)[:n]


def _numeric(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError as error:
        raise UserError(f"{address}: no such host ({error.strerror}); mend the hostfile") from None
