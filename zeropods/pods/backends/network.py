"""Addresses for pods of this machine: on the loopback interface, or this machine's own."""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import Callable
from typing import Protocol

from zeropods.errors import UserError
from zeropods.pods.agent.sshd_config import account
from zeropods.ports import is_free

SSH_PORT = 2222
"""Where CML's own sshd listens, and ours where it can."""


class Network(Protocol):
    """Gives pods addresses."""

    def open(self) -> None:
        """Make what all pods share."""
        ...

    def master_address(self) -> str:
        """Where pods reach the process that starts them; the network is open."""
        ...

    def user(self, address: str) -> str:
        """The account under which the pod at an address runs."""
        ...

    def claim(self, n: int) -> list[str]:
        """Addresses for n pods; nobody else is given them before `settled`."""
        ...

    def settled(self) -> None:
        """The pods serve at their addresses, or never will."""
        ...

    def command(self, address: str, argv: list[str]) -> list[str]:
        """The command as it is run at an address."""
        ...

    def close(self) -> None:
        """Remove all that was made; what is gone already is no error."""
        ...


class Loopback:
    """127.0.1.1, 127.0.1.2 and so on: a pod differs from another by its address alone."""

    def __init__(self, taken: Callable[[], set[str]]) -> None:
        self._taken = taken
        self._claims: list[socket.socket] = []

    def open(self) -> None: ...

    def close(self) -> None: ...

    def settled(self) -> None:
        while self._claims:
            self._claims.pop().close()

    def master_address(self) -> str:
        return "127.0.0.1"

    def user(self, address: str) -> str:
        return account()

    def command(self, address: str, argv: list[str]) -> list[str]:
        return argv

    def claim(self, n: int) -> list[str]:
        """Addresses that no other cluster has or is about to have, with nothing on sshd's usual port."""
        candidates = map(str, ipaddress.ip_network("127.0.0.0/16").hosts())
        usable = (a for a in candidates if not a.startswith("127.0.0.") and not a.endswith((".0", ".255")))
        found = list(itertools.islice(filter(self._is_claimed, usable), n))
        if len(found) < n:
            raise UserError(f"127.0.1.1 ... 127.0.255.254: {len(found)} free addresses; {n} are needed")
        return found

    def _is_claimed(self, address: str) -> bool:
        claim = _claim(address)
        if claim is None:
            return False
        # Asked after the claim: whoever gave it up just now has pods there.
        if address in self._taken() or not is_free(address, SSH_PORT):
            claim.close()
            return False
        self._claims.append(claim)
        return True


class OwnAddress:
    """This machine's one address, for a session that is itself a pod."""

    def __init__(self, address: str) -> None:
        self._address = address

    def open(self) -> None: ...

    def close(self) -> None: ...

    def master_address(self) -> str:
        return self._address

    def user(self, address: str) -> str:
        return account()

    def command(self, address: str, argv: list[str]) -> list[str]:
        return argv

    def settled(self) -> None: ...

    def claim(self, n: int) -> list[str]:
        if n > 1:
            raise UserError(f"{n} pods at {self._address}; a machine with one address is one pod")
        return [self._address] * n


def _claim(address: str) -> socket.socket | None:
    """Keep other processes of this machine from an address until the socket is closed, or this process ends.

    A name in the abstract namespace (unix(7)) leaves no file.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0zeropods-{address}")
    except OSError:
        claim.close()
        return None
    return claim
