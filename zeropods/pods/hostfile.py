"""DeepSpeed's hostfile: a line `ADDRESS slots=GPUS` per pod, in the order of their ranks; and this
pod's own line.

DeepSpeed takes any word as an address. Here it is a host name or an IPv4 address, since it is also
written into configurations of ssh, sshd and pdsh, and since pods have an IPv4 address each.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.pods.gpus import own_gpus

ADDRESS = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
"""A host name or an IPv4 address, but nothing that ssh or pdsh could take for a flag, a pattern or
a range of hosts."""
HOST_LINE = re.compile(rf"({ADDRESS.pattern})[ \t]+slots=([1-9][0-9]{{0,3}})")
BLANK = " \t\r"
"""Signs that do not count at the ends of a line, the `\\r` of Windows among them."""


@dataclass(frozen=True)
class Host:
    """A pod as the launcher knows it."""

    address: str
    slots: int
    """Number of processes that it gets, one for each GPU."""

    def __post_init__(self) -> None:
        """Raise `UserError` where this is no valid host."""
        if HOST_LINE.fullmatch(self.line()) is None:
            expected = "expected a host name or IPv4 address, and 1 to 9999 slots"
            raise UserError(f"{self.line()!r}: {expected}")

    def line(self) -> str:
        """The host's line in a hostfile."""
        return f"{self.address} slots={self.slots}"


def parse_hostfile(text: str, place: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's text; `#` begins a comment.

    Args:
        place: name of the file in error messages.

    Raises:
        UserError: a line is not `ADDRESS slots=GPUS`, with what is wrong about it; an address
            occurs twice; or there is no host.
    """
    hosts: list[Host] = []
    lines_of_addresses: dict[str, int] = {}
    """Number of the line of each address, which is the same in upper and lower case."""
    for number, line in enumerate(text.split("\n"), start=1):
        without_comment = line.partition("#")[0].strip(BLANK)
        if not without_comment:
            continue
        match = HOST_LINE.fullmatch(without_comment)
        if match is None:
            raise UserError(f"{place}:{number}: {line.strip(BLANK)!r}; {_fault(without_comment)}")
        host = Host(match[1], int(match[2]))
        earlier = lines_of_addresses.get(host.address.lower())
        if earlier is not None:
            reason = f"{host.address!r} is on line {earlier} already"
            raise UserError(f"{place}:{number}: {reason}; remove one of them")
        lines_of_addresses[host.address.lower()] = number
        hosts.append(host)
    if not hosts:
        raise UserError(f"{place}: no host; expected a line '<address> slots=<gpus>' for each pod")
    return tuple(hosts)


EXPECTED = "expected '<address> slots=<gpus>'"
PATTERN_SIGNS = frozenset("[]*?,")
"""Signs with which pdsh and others name several hosts at once."""


def _fault(line: str) -> str:
    """What is wrong with a line that does not match `HOST_LINE`, and what to write instead.

    Args:
        line: the line without its comment, and without blanks at its ends.
    """
    words = re.split(r"[ \t]+", line)
    if words[0].startswith("slots"):
        return f"no address before the slots; {EXPECTED}"
    fault = _address_fault(words[0])
    if fault is not None:
        return fault
    if len(words) == 1:
        return (
            f"no slots; write '{words[0]} slots=N', where N is the number of its GPUs, or 1 "
            "without GPUs"
        )
    if words[1].partition("=")[0] != "slots":
        return f"{words[1]!r} is not the number of slots; {EXPECTED}"
    if "=" not in words[1] or words[1] == "slots=":
        return "no number right after 'slots='; write it without blanks, as in slots=2"
    if re.fullmatch(r"slots=[1-9][0-9]{0,3}", words[1]) is None:
        return f"{words[1]!r}; expected a number from 1 to 9999, as in slots=2"
    # Its first two words are good, so it would be a host's line if there were no third.
    return f"{words[2]!r}: nothing may follow the slots but a comment after '#'; remove it"


def _address_fault(address: str) -> str | None:
    """What is wrong with an address, and what to write instead; None where nothing is."""
    if ADDRESS.fullmatch(address) is not None:
        return None
    user, at_sign, host = address.partition("@")
    if at_sign and ADDRESS.fullmatch(host) is not None:
        return (
            f"a user is not part of an address; write '{host}', and 'User {user}' for it in "
            "~/.ssh/config or in the file of --ssh-config"
        )
    if _is_ipv6(address.strip("[]")):
        return "IPv6 is not supported; write the host's name or its IPv4 address"
    if PATTERN_SIGNS & set(address):
        return "several hosts on one line; write a line '<address> slots=<gpus>' for each"
    scheme, url_sign, rest = address.partition("://")
    if url_sign:
        host = rest.partition("/")[0]
        return f"{scheme}:// is not part of an address; write '{host}'"
    host, colon, port = address.partition(":")
    if colon and ADDRESS.fullmatch(host) is not None:
        return (
            f"a port is not part of an address; write '{host}', and 'Port {port}' for it in "
            "~/.ssh/config or in the file of --ssh-config"
        )
    return (
        f"{address!r:.60} is not an address; expected a host name of ASCII letters, digits, '.', "
        "'-' and '_', or an IPv4 address"
    )


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a hostfile; `UserError` where there is no such file, or a line is wrong as in
    `parse_hostfile`."""
    try:
        # Editors of Windows begin a file with a mark. Bytes that are no UTF-8 are shown in the
        # error about their line.
        text = path.read_text(encoding="utf-8-sig", errors="backslashreplace")
    except (FileNotFoundError, IsADirectoryError):
        reason = "a folder" if path.is_dir() else "no such hostfile"
        remedy = "give your own, or one that 'zeropods pods up' wrote"
        raise UserError(f"{path}: {reason}; {remedy}") from None
    return parse_hostfile(text, str(path))


def write_hostfile(path: Path, hosts: Iterable[Host]) -> None:
    """Write a hostfile that `read_hostfile` can read back; a reader sees the old or the new one,
    never part of one."""
    files.write_text(path, "".join(f"{host.line()}\n" for host in hosts))


def world_info(slots: Mapping[str, Sequence[int]]) -> str:
    """The slots of each pod by its address, in the order of ranks, as DeepSpeed's launcher on a pod
    takes them: JSON in base64."""
    return base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()


# What a pod can say about itself: the address at which others reach it, and its slots.

ADDRESS_VARIABLES = ("CDSW_IP_ADDRESS", "CML_IP_ADDRESS")
UNKNOWN_ADDRESS = "unknown"
"""What CML states as long as it does not know an address itself."""
SOMEWHERE_ELSE = "192.0.2.1"
"""A documentation address (RFC 5737): it stands for everything behind the default route."""


def own_address() -> str:
    """This pod's IPv4 address: the one that CML states, else that of the default route, else
    loopback; `UserError` where CML's variable holds anything else than an IPv4 address."""
    for variable in ADDRESS_VARIABLES:
        address = os.environ.get(variable, "")
        if address in ("", UNKNOWN_ADDRESS):
            continue
        try:
            return str(ipaddress.IPv4Address(address))
        except ValueError:
            remedy = "expected an IPv4 address, or unset it"
            raise UserError(f"{variable}: {address!r}; {remedy}") from None
    try:
        return address_towards(SOMEWHERE_ELSE)
    except OSError:
        return "127.0.0.1"


def address_towards(destination: str) -> str:
    """The source address that the kernel chooses on the route to another address; `OSError` where
    there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # Connecting a UDP socket sends nothing; the port is that of `discard`.
        sock.connect((destination, 9))
        return str(sock.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address can be reached from its own machine only."""
    return ipaddress.IPv4Address(address).is_loopback


def interface(address: str) -> str | None:
    """Name of the network interface that has this IPv4 address, `lo` for any loopback address; None
    where no interface has it."""
    import psutil

    if is_loopback(address):
        return "lo"
    for name, interface_addresses in psutil.net_if_addrs().items():
        if address in {entry.address for entry in interface_addresses}:
            return name
    return None


def own_slots() -> int:
    """Number of GPUs of this pod that are visible; 1 where there is none, for one process on the
    CPU."""
    return max(1, own_gpus())
