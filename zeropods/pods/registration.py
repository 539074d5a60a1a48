"""The pod's side of the rendezvous: what it reports, and what it is told in answer."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import reprlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeGuard

from zeropods.errors import UserError
from zeropods.pods.wire import Channel, ChannelError, connect

# What a pod tells its master about itself, what every pod is told in answer, and which values are believed.

MAX_SLOTS = 9_999
MAX_FREE_PORTS = 1_024
SHOWN_CHARACTERS = 400

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_HOST_KEY = re.compile(r"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/]{43}")
"""The type and 32 bytes (RFC 8709, section 4): nothing that could end a line of `known_hosts` or begin another."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One pod; `UserError` where a value is not what it should be, since all of them end up in files for ssh."""

    worker: str
    """Its id with the backend that started it."""
    address: str
    """IPv4, under which master and pods reach it."""
    hostname: str
    slots: int
    """Processes that it takes, one for each GPU, at least 1."""
    host_key: str
    """Public key of its sshd, `ssh-ed25519 AAAA...`, without a comment."""
    control_port: int
    free_ports: tuple[int, ...]
    """Those of the ports that were proposed for sshd which it can listen on."""

    def __post_init__(self) -> None:
        for name, (is_right, expected) in _RULES.items():
            value = getattr(self, name)
            if not is_right(value):
                raise UserError(f"{name}: {reprlib.repr(value)}; expected {expected}")

    def __str__(self) -> str:
        return f"{self.worker} ({self.address})"

    @property
    def number(self) -> int:
        """The address as a number, to sort by."""
        return int(ipaddress.IPv4Address(self.address))

    def to_json(self) -> dict[str, Any]:
        """The registration as plain JSON values."""
        return {**asdict(self), "free_ports": list(self.free_ports)}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Registration:
        """The inverse of `to_json`; `UserError` where a field is missing, unknown or wrong."""
        _check_fields(body, {field.name for field in fields(cls)}, "a registration")
        ports = body["free_ports"]
        return cls(**{**body, "free_ports": tuple(ports) if isinstance(ports, list) else ports})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What every pod is told, beside the port of its sshd."""

    cluster: str
    authorized_key: str
    """Public key of those who may log in."""
    lease: str
    """`kernel`: renewed by the master; `idle`: renewed by use."""
    lease_seconds: float

    def to_json(self, ssh_port: int) -> dict[str, Any]:
        """The answer as plain JSON values."""
        return {"ssh_port": ssh_port, **asdict(self)}


def check_answer(body: dict[str, Any]) -> dict[str, Any]:
    """The answer as it came; `UserError` where it lacks a field or has a wrong one."""
    _check_fields(body, {"ssh_port", *(field.name for field in fields(Answer))}, "the master's answer")
    if not _is_port(body["ssh_port"]):
        raise UserError(f"the master's answer: ssh_port {reprlib.repr(body['ssh_port'])}; expected a port")
    return body


def plain_line(text: object) -> str:
    """What another machine said, as one line of printable characters of bounded length."""
    line = " ".join(str(text).split())[:SHOWN_CHARACTERS]
    return "".join(character if character.isprintable() else "?" for character in line)


def _check_fields(body: dict[str, Any], expected: set[str], what: str) -> None:
    wrong = sorted(expected.symmetric_difference(body))
    if wrong:
        shown = plain_line(", ".join(wrong))
        raise UserError(f"{what}: {shown}: missing or unknown; is one version of zeropods on master and pods?")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_address(value: object) -> bool:
    try:
        address = ipaddress.IPv4Address(value) if isinstance(value, str) else None
    except ValueError:
        return False
    return address is not None and not (address.is_unspecified or address.is_multicast)


def _is_slots(value: object) -> bool:
    return _is_integer(value) and 1 <= value <= MAX_SLOTS


def _is_host_key(value: object) -> bool:
    return isinstance(value, str) and _HOST_KEY.fullmatch(value) is not None


def _is_port(value: object) -> bool:
    return _is_integer(value) and 1 <= value <= 65_535


def _is_integer(value: object) -> TypeGuard[int]:
    """JSON's `true` is no number, though Python's is."""
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ports(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_FREE_PORTS and all(map(_is_port, value))


_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "worker": (_is_name, "letters, digits, '.', '_' and '-'"),
    "address": (_is_address, "an IPv4 address"),
    "hostname": (_is_name, "letters, digits, '.', '_' and '-'"),
    "slots": (_is_slots, f"a number from 1 to {MAX_SLOTS}"),
    "host_key": (_is_host_key, "'ssh-ed25519 AAAA...'"),
    "control_port": (_is_port, "a port"),
    "free_ports": (_are_ports, f"at most {MAX_FREE_PORTS} ports"),
}


# The pod's side of the rendezvous: report in, wait to be told, serve, say so.

PURPOSE = "register"
CONNECT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0


async def register(
    master: tuple[str, int],
    secret: bytes,
    registration: Registration,
    seconds: float,
    serve: Callable[[dict[str, Any]], Awaitable[None]],
) -> dict[str, Any]:
    """Register with the master and return its answer, once `serve(answer)` is done and the master was told so.

    Args:
        master: address and port. It may come up later than this pod, or drop a connection: both are tried again.
        secret: of the cluster; proves both sides to each other and is never sent.
        seconds: until the master's answer has to be there.
        serve: starts the pod's sshd; a `UserError` of it is told to the master and raised again.

    Raises:
        UserError: no answer in time, refused, or the master gave up while the pod began to serve.
    """
    channel, answer = await _answered(master, secret, registration, seconds)
    try:
        await _serve(channel, answer, serve)
    except ChannelError as error:
        raise UserError(f"{_shown(master)}: the master gave up: {error}; start the cluster again") from None
    finally:
        await channel.close()
    return answer


async def _answered(
    master: tuple[str, int], secret: bytes, registration: Registration, seconds: float
) -> tuple[Channel, dict[str, Any]]:
    """A connection on which the master has answered; tried again until `seconds` are over."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await _ask_once(master, secret, registration, deadline)
        except ChannelError as error:
            if clock() + pause >= deadline:
                raise UserError(
                    f"{_shown(master)}: no answer of the master in {seconds:g} s ({error}); is it up and reachable, "
                    "and has this pod its cluster's secret?"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _ask_once(
    master: tuple[str, int], secret: bytes, registration: Registration, deadline: float
) -> tuple[Channel, dict[str, Any]]:
    clock = asyncio.get_running_loop().time
    channel = await connect(*master, secret, PURPOSE, min(CONNECT_SECONDS, deadline - clock()))
    try:
        answer = await channel.ask(registration.to_json(), deadline - clock())
        if "refused" in answer:
            raise UserError(f"{_shown(master)}: refused by the master: {plain_line(answer['refused'])}")
        return channel, check_answer(answer)
    except BaseException:
        await channel.close()
        raise


async def _serve(channel: Channel, answer: dict[str, Any], serve: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    try:
        await serve(answer)
    except UserError as error:
        await channel.send({"failed": plain_line(error)})
        raise
    await channel.send({"ready": True})


def _shown(master: tuple[str, int]) -> str:
    return f"{master[0]}:{master[1]}"
