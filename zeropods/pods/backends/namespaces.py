"""A network for each pod: a namespace with its own loopback and an `eth0`, all on one bridge of this machine.

Linux, root and iproute2 are needed. Other rooms see no difference: pods have an address, the master has one.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.pods.sshd import account

RECORD = "network.json"
COMMAND_SECONDS = 10.0
MASTER = 254
"""The bridge's own address is 10.77.X.254; pods count from 1."""


class Namespaces:
    """The networks of one cluster. All that is made carries a random name, kept in the cluster's folder."""

    def __init__(self, folder: Path) -> None:
        self._record = folder / RECORD

    def open(self) -> None:
        """Make the bridge; `UserError` where namespaces cannot be had."""
        if os.geteuid() != 0:
            raise UserError("network namespaces: need root; use --network loopback")
        if shutil.which("ip") is None:
            raise UserError("network namespaces: no 'ip' on PATH; apt-get install iproute2, or use --network loopback")
        with _locked():
            subnet = _free_subnet()
            # Written first: what is then made is found again, however this process ends.
            name = f"zp{secrets.token_hex(3)}"
            files.write_json(self._record, {"name": name, "subnet": subnet})
            _ip("link", "add", name, "type", "bridge")
            _ip("addr", "add", f"{_address(subnet, MASTER)}/24", "dev", name)
            _ip("link", "set", name, "up")

    def master_address(self) -> str:
        """The bridge's address."""
        return _address(self._subnet(), MASTER)

    def user(self, address: str) -> str:
        return account()

    def claim(self, n: int) -> list[str]:
        """Make n namespaces; their addresses are the cluster's own, so that nobody has to be kept out."""
        if n >= MASTER:
            raise UserError(f"{n} pods in namespaces: at most {MASTER - 1}")
        here = [name for name in _namespaces() if name.startswith(f"{self._name()}-")]
        first = 1 + max((int(name.rpartition("-")[2]) for name in here), default=0)
        return [self._make(number) for number in range(first, first + n)]

    def settled(self) -> None: ...

    def command(self, address: str, argv: list[str]) -> list[str]:
        """The command as it is run in an address's namespace; `ip` becomes the program, it is no parent of it."""
        return ["ip", "netns", "exec", f"{self._name()}-{_number(address)}", *argv]

    def cut(self, address: str) -> None:
        """Take a pod off the network, as if its cable were pulled."""
        _ip("link", "set", self._outside(_number(address)), "down")

    def restore(self, address: str) -> None:
        """Undo `cut`."""
        _ip("link", "set", self._outside(_number(address)), "up")

    def close(self) -> None:
        """Remove bridge, cables and namespaces; the pods' processes have ended."""
        if not self._record.is_file():
            return
        name = self._name()
        # A namespace's interfaces go some time after it; taken first, they are gone when this returns.
        for link in (link for link in _links() if link.startswith(f"{name}-") or link == name):
            _ip("link", "del", link)
        for namespace in (space for space in _namespaces() if space.startswith(f"{name}-")):
            _ip("netns", "del", namespace)
        self._record.unlink(missing_ok=True)

    def _make(self, number: int) -> str:
        space, outside, address = f"{self._name()}-{number}", self._outside(number), _address(self._subnet(), number)
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._name(), "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        return address

    def _name(self) -> str:
        return json.loads(self._record.read_text(encoding="utf-8"))["name"]

    def _subnet(self) -> int:
        return json.loads(self._record.read_text(encoding="utf-8"))["subnet"]

    def _outside(self, number: int) -> str:
        return f"{self._name()}-{number}"


def _address(subnet: int, number: int) -> str:
    return f"10.77.{subnet}.{number}"


def _number(address: str) -> int:
    return int(address.rpartition(".")[2])


def _free_subnet() -> int:
    routes = _ip("-o", "route", "show", "table", "all") + _ip("-o", "addr")
    free = [subnet for subnet in range(1, 255) if f"10.77.{subnet}." not in routes]
    if not free:
        raise UserError("network namespaces: 10.77.1.0/24 ... 10.77.254.0/24 are all in use; take clusters down")
    return free[0]


def _links() -> list[str]:
    return [link["ifname"] for link in json.loads(_ip("-j", "link"))]


def _namespaces() -> list[str]:
    return [space["name"] for space in json.loads(_ip("-j", "netns", "list") or "[]")]


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise UserError(f"ip {' '.join(arguments)}: {said}; use --network loopback where namespaces are not allowed")
    return done.stdout


@contextmanager
def _locked() -> Iterator[None]:
    """Keep other clusters of this machine from choosing the same addresses: lock its network, which leaves no file."""
    with open("/proc/self/ns/net", "rb") as network:
        fcntl.flock(network, fcntl.LOCK_EX)
        yield
