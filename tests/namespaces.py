"""Pods that each have a network of their own, from which they can be cut off at will.

    BACKENDS["namespaces"] = Namespaces
    pods.up(2, backend="namespaces")

A pod is in a network namespace with its own loopback and an `eth0`, all on one bridge of this machine. Linux, root and
iproute2 are needed.
"""

import fcntl
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache, cached_property

from zeropods import files
from zeropods.pods.backends.local import LocalWorkers, Place

RECORD = "network.json"
COMMAND_SECONDS = 10.0
MASTER = 254
"""Last number of the bridge's own address, 10.77.X.254; pods count from 1."""


@cache
def are_possible() -> bool:
    """Whether this process may make network namespaces and work in them; a container's root often may not."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    space = f"zp{secrets.token_hex(3)}-try"
    try:
        ip("netns", "add", space)
        try:
            ip("-n", space, "link", "set", "lo", "up")
        finally:
            ip("netns", "del", space)
    except subprocess.SubprocessError:
        return False
    return True


class Namespaces(LocalWorkers):
    """Workers with a network each. Everything made for them carries a random name, kept in the cluster's folder."""

    network = None

    @classmethod
    def gpus_of_pods(cls, count: int, slots: int | None) -> tuple[str, ...]:
        """Each sees all GPUs."""
        return ()

    def master_address(self) -> str:
        """The bridge's address; the bridge is made when it is first asked for."""
        if not (self.folder / RECORD).is_file():
            self._open()
        return f"{self._subnet}.{MASTER}"

    def claim(self) -> Sequence[str]:
        """Make a namespace for each pod."""
        self.master_address()
        made = []
        for number in range(1, self.settings.count + 1):
            space, address = f"{self._name}-{number}", f"{self._subnet}.{number}"
            ip("netns", "add", space)
            ip("link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", space, "master", self._name, "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            made.append(address)
        return made

    @cached_property
    def places(self) -> Sequence[Place]:
        return [
            Place(address, self.settings.slots, before=tuple(self.command(address, []))) for address in self.claim()
        ]

    def command(self, address: str, argv: list[str]) -> list[str]:
        """The command as it is run in an address's namespace; `ip` becomes the program and is not its parent."""
        return ["ip", "netns", "exec", self._space(address), *argv]

    def stop(self, ids: Sequence[str]) -> None:
        super().stop(ids)
        self.close()

    def close(self) -> None:
        """Remove bridge, cables and namespaces, after the pods' processes have ended."""
        if (self.folder / RECORD).is_file():
            ours = tuple(
                link["ifname"] for link in json.loads(ip("-j", "link")) if link["ifname"].startswith(self._name)
            )
            # A namespace's interfaces vanish some time after it; deleted first, they are gone when this returns.
            for link in ours:
                ip("link", "del", link)
            for space in (space["name"] for space in json.loads(ip("-j", "netns", "list") or "[]")):
                if space.startswith(self._name):
                    ip("netns", "del", space)
            (self.folder / RECORD).unlink()

    def cut(self, address: str) -> None:
        """Take a pod off the network, as if its cable were pulled."""
        ip("link", "set", self._space(address), "down")

    def restore(self, address: str) -> None:
        """Undo `cut`."""
        ip("link", "set", self._space(address), "up")

    @property
    def _name(self) -> str:
        return str(json.loads((self.folder / RECORD).read_text(encoding="utf-8"))["name"])

    @property
    def _subnet(self) -> str:
        return str(json.loads((self.folder / RECORD).read_text(encoding="utf-8"))["subnet"])

    def _space(self, address: str) -> str:
        """The name of an address's namespace, and of the bridge's end of its cable."""
        return f"{self._name}-{address.rpartition('.')[2]}"

    def _open(self) -> None:
        # A lock on this machine's network, which leaves no file, keeps others from choosing the same addresses.
        with open("/proc/self/ns/net", "rb") as network:
            fcntl.flock(network, fcntl.LOCK_EX)
            taken = ip("-o", "route", "show", "table", "all") + ip("-o", "addr")
            subnet = next(net for net in (f"10.77.{number}" for number in range(1, 255)) if f"{net}." not in taken)
            name = f"zp{secrets.token_hex(3)}"
            files.write_json(self.folder / RECORD, {"name": name, "subnet": subnet})
            ip("link", "add", name, "type", "bridge")
            ip("addr", "add", f"{subnet}.{MASTER}/24", "dev", name)
            ip("link", "set", name, "up")


def ip(*arguments: str) -> str:
    """Run iproute2's `ip`, and return what it prints."""
    command = ["ip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True).stdout
