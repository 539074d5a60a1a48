"""What a pod can say of itself: the address under which others reach it, and its slots."""

from __future__ import annotations

import ipaddress
import os
import socket

from zeropods.errors import UserError

ADDRESS_VARIABLES = ("CDSW_IP_ADDRESS", "CML_IP_ADDRESS")
SOMEWHERE_ELSE = "192.0.2.1"
"""A documentation address (RFC 5737): it stands for everything behind the default route."""


def address() -> str:
    """This pod's IPv4 address: as CML says, else that of the default route, else loopback."""
    for variable in ADDRESS_VARIABLES:
        stated = os.environ.get(variable, "")
        try:
            if stated:
                return str(ipaddress.IPv4Address(stated))
        except ValueError:
            raise UserError(f"{variable}: {stated!r}; expected an IPv4 address, or unset it") from None
    try:
        return address_towards(SOMEWHERE_ELSE)
    except OSError:
        return "127.0.0.1"


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
    import psutil

    if is_loopback(address):
        return "lo"
    addresses = {name: {each.address for each in found} for name, found in psutil.net_if_addrs().items()}
    return next((name for name, found in addresses.items() if address in found), None)


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
