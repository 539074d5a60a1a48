"""What a worker is told through its environment by whoever started it."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from zeropods.errors import UserError
from zeropods.pods import this_pod

T = TypeVar("T")
SECRET_VARIABLE = "ZEROPODS_SECRET"
SECRET_BYTES = 32
WORKER_VARIABLES = ("CDSW_ENGINE_ID", "CML_ENGINE_ID")


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Where to report, as whom, and what to offer."""

    worker: str
    """Id of this worker with the backend that started it."""
    address: str
    master: tuple[str, int]
    secret: bytes
    ssh_ports: tuple[int, ...]
    """Ports for sshd, the one that is wanted most first."""
    slots: int | None
    """None: as many as there are GPUs."""
    register_seconds: float


def take_orders() -> Orders:
    """Read this process's environment, and take the secret out of it; `UserError` names a variable that is wrong."""
    return Orders(
        secret=_value(SECRET_VARIABLE, _secret, f"{2 * SECRET_BYTES} hexadecimal digits", take_variable),
        worker=next(filter(None, map(os.environ.get, WORKER_VARIABLES)), f"{socket.gethostname()}-{os.getpid()}"),
        address=this_pod.address(),
        master=_value("ZEROPODS_MASTER", _place, "ADDRESS:PORT"),
        ssh_ports=_value("ZEROPODS_SSH_PORTS", _ports, "ports, like 2222,40123"),
        slots=_value("ZEROPODS_SLOTS", _positive, "a number from 1") if os.environ.get("ZEROPODS_SLOTS") else None,
        register_seconds=_value("ZEROPODS_REGISTER_SECONDS", _seconds, "seconds"),
    )


def take_variable(name: str) -> str | None:
    """A variable's value, which is then gone: for children, and for readers of /proc/PID/environ."""
    value = os.environ.get(name)
    if value is None:
        return None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(os.fsencode(name))
    if place:
        # /proc shows the memory in which the process was handed its environment; unsetting leaves that as it is.
        ctypes.memset(place, ord("-"), len(os.fsencode(value)))
    del os.environ[name]
    return value


def _value(
    name: str, parse: Callable[[str], T], expected: str, read: Callable[[str], str | None] = os.environ.get
) -> T:
    text = read(name)
    if not text:
        raise UserError(f"{name}: not set; a worker is started by `zeropods pods up`, not by hand")
    try:
        return parse(text)
    except ValueError:
        shown = "a value that is not shown" if name == SECRET_VARIABLE else repr(text)
        raise UserError(f"{name}: {shown}; expected {expected}") from None


def _secret(text: str) -> bytes:
    secret = bytes.fromhex(text)
    if len(secret) != SECRET_BYTES:
        raise ValueError(text)
    return secret


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    if not address:
        raise ValueError(text)
    return address, _port(port)


def _ports(text: str) -> tuple[int, ...]:
    return tuple(map(_port, text.split(",")))


def _port(text: str) -> int:
    port = _positive(text)
    if port > 65_535:
        raise ValueError(text)
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError(text)
    return seconds
