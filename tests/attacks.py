"""What strangers say at a port where pods and masters meet: whole conversations, made by hypothesis.

The protocol is written down here a second time, from its description, so that a conversation with one fault is
known to fail by that fault: the same words without it are heard.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

LARGEST_LINE = 65_536
OWN = b"0123456789abcdef" * 2
"""The stranger's nonce."""
OLD = b"fedcba9876543210" * 2
"""The other side's nonce in a conversation of the past."""


@dataclass(frozen=True)
class Door:
    """What is attacked: the side that listens, or the one that connects."""

    secret: bytes
    purpose: str
    lure: dict[str, Any]
    """A message that would be heeded."""
    stranger_listens: bool = False

    def words(self, nonce: bytes) -> bytes:
        """What an honest peer says to the other side, whose nonce this is: all of it is right."""
        return greeting(OWN) + self.line(nonce) + b"\n"

    def line(
        self,
        nonce: bytes,
        *,
        secret: bytes | None = None,
        purpose: str | None = None,
        turned: bool = False,
        number: int = 0,
    ) -> bytes:
        """The first message, or one that is wrong in a single point."""
        listener, connector = (OWN, nonce) if self.stranger_listens else (nonce, OWN)
        said = b"|".join([(self.purpose if purpose is None else purpose).encode(), listener, connector])
        key = hmac.new(self.secret if secret is None else secret, said, hashlib.sha256).digest()
        direction = b"L" if self.stranger_listens is not turned else b"C"
        text = json.dumps(self.lure).encode()
        sealed = direction + struct.pack(">Q", number) + text
        return hmac.new(key, sealed, hashlib.sha256).hexdigest().encode() + b" " + text


def greeting(nonce: bytes) -> bytes:
    """How each side begins."""
    return b"zeropods 1 " + nonce + b"\n"


@dataclass(frozen=True)
class Bytes:
    """Anything at all."""

    said: bytes

    def words(self, door: Door, nonce: bytes) -> bytes:
        return self.said


@dataclass(frozen=True)
class Oversize:
    """A line that is too long."""

    beyond: int
    greets: bool
    ends: bool

    def words(self, door: Door, nonce: bytes) -> bytes:
        opening = greeting(OWN) if self.greets else b""
        return opening + b"x" * (LARGEST_LINE + self.beyond) + b"\n" * self.ends


@dataclass(frozen=True)
class Replayed:
    """Lines of an honest conversation of the past, in any order and number."""

    order: tuple[int, ...]

    def words(self, door: Door, nonce: bytes) -> bytes:
        lines = door.words(OLD).splitlines(keepends=True)
        return b"".join(lines[place] for place in self.order)


@dataclass(frozen=True)
class Reflected:
    """The other side's own greeting, and what a stranger can add to it."""

    times: int
    rest: bytes

    def words(self, door: Door, nonce: bytes) -> bytes:
        return greeting(nonce) * self.times + self.rest


@dataclass(frozen=True)
class Missealed:
    """A message for this very connection, proven with one thing wrong."""

    fault: dict[str, Any]

    def words(self, door: Door, nonce: bytes) -> bytes:
        return greeting(OWN) + door.line(nonce, **self.fault) + b"\n"


@dataclass(frozen=True)
class Mutated:
    """Right words, of which one stretch was replaced on the way."""

    place: float
    taken: int
    put: bytes

    def words(self, door: Door, nonce: bytes) -> bytes:
        right = door.words(nonce)
        begin = int(self.place * len(right))
        wrong = right[:begin] + self.put + right[begin + self.taken :]
        return wrong if not wrong.startswith(right) else right[:-1]


@dataclass(frozen=True)
class Flipped:
    """Right words, of which one byte was changed on the way."""

    place: int
    bits: int

    def words(self, door: Door, nonce: bytes) -> bytes:
        words = bytearray(door.words(nonce))
        words[self.place % len(words)] ^= self.bits
        return bytes(words)


@dataclass(frozen=True)
class Truncated:
    """Right words that end too early."""

    place: float

    def words(self, door: Door, nonce: bytes) -> bytes:
        right = door.words(nonce)
        return right[: int(self.place * len(right))]


@dataclass(frozen=True)
class Turned:
    """The message before the greeting, or a second message first."""

    second: bool

    def words(self, door: Door, nonce: bytes) -> bytes:
        first, second = door.line(nonce) + b"\n", door.line(nonce, number=1) + b"\n"
        return greeting(OWN) + second + first if self.second else first + greeting(OWN)


Attack = Bytes | Oversize | Replayed | Reflected | Missealed | Mutated | Flipped | Truncated | Turned
FRACTIONS = st.floats(0, 1, exclude_max=True)
NO_GREETINGS = [
    b"\n", b"\r\n", b"zeropods 2 " + OWN + b"\n", b"zeropods 1 " + OWN + b"\r\n", b"zeropods 1 " + OWN[1:] + b"\n",
    b"zeropods 1 " + OWN.upper() + b"\n", b"ZEROPODS 1 " + OWN + b"\n", b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n",
    b"zeropods 1 " + OWN + b" " + OWN + b"\n", b"\x16\x03\x01\x02\x00\x01", bytes(range(256)),
]  # fmt: skip
FAULTS = (
    st.binary(max_size=40).map(lambda secret: {"secret": b"another" + secret})
    | st.text(max_size=20).map(lambda purpose: {"purpose": f"not {purpose}"})
    | st.just({"turned": True})
    | st.integers(1, 2**64 - 1).map(lambda number: {"number": number})
)
ATTACKS = st.one_of(
    st.builds(Bytes, st.binary(max_size=300)),
    st.builds(Bytes, st.binary(max_size=300).map(lambda rest: greeting(OWN) + rest)),
    st.builds(Bytes, st.sampled_from(NO_GREETINGS)),
    st.builds(Oversize, st.integers(0, 4) | st.integers(0, 100_000), st.booleans(), st.booleans()),
    st.builds(Replayed, st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)),
    st.builds(Reflected, st.integers(1, 3), st.binary(max_size=100)),
    st.builds(Missealed, FAULTS),
    st.builds(Mutated, FRACTIONS, st.integers(0, 5), st.binary(max_size=5)),
    st.builds(Flipped, st.integers(0, 999), st.integers(1, 255)),
    st.builds(Truncated, FRACTIONS),
    st.builds(Turned, st.booleans()),
)
"""Whole conversations, none of which may be heeded."""
ENDINGS = st.sampled_from(["ends", "ends", "resets", "waits", "drips"])
"""Says all and ends; breaks off; says all and stays; says it byte by byte and stays."""
SIEGE = 20
SIEGES = st.lists(st.tuples(ATTACKS, ENDINGS), min_size=SIEGE, max_size=SIEGE)
