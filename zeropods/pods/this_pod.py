"""What a pod can say of itself: the address under which others reach it, and its slots."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from zeropods.errors import UserError

ADDRESS_VARIABLES = ("CDSW_IP_ADDRESS", "CML_IP_ADDRESS")
LOOPBACK = "127.0.0.1"
SIOCGIFADDR, NAME_BYTES = 0x8915, 16
"""From linux/sockios.h and linux/if.h: netdevice(7)."""
SOMEWHERE_ELSE = "192.0.2.1"
"""A documentation address (RFC 5737): it stands for everything behind the default route."""


def address() -> str:
    """This pod's IPv4 address: as CML says, else that of the default route, else loopback."""
    for variable in ADDRESS_VARIABLES:
        stated = os.environ.get(variable, "")
        if stated:
            return _checked(stated, variable)
    return _of_default_route()


def address_towards(there: str) -> str:
    """The source address that the kernel chooses on the way to another address; `OSError` where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # Connecting UDP sends nothing; the port is that of `discard`.
        sock.connect((there, 9))
        return str(sock.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address is reached from its own machine only."""
    return ipaddress.IPv4Address(address).is_loopback


def interface(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where none has."""
    if is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return next((name for _, name in socket.if_nameindex() if _address_of(sock, name) == address), None)


def slots() -> int:
    """GPUs of this pod as NVML counts them; 1 where there is none, for one process on the CPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 1
    try:
        return max(1, pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _checked(stated: str, variable: str) -> str:
    try:
        return str(ipaddress.IPv4Address(stated))
    except ValueError:
        raise UserError(f"{variable}: {stated!r}; expected an IPv4 address, or unset it") from None


def _address_of(sock: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[: NAME_BYTES - 1])
    try:
        answer = fcntl.ioctl(sock, SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _of_default_route() -> str:
    try:
        return address_towards(SOMEWHERE_ELSE)
    except OSError:
        return LOOPBACK
