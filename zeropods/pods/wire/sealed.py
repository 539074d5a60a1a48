"""A message as a line that proves who wrote it, in which direction and as which one in the sequence: `MAC JSON`."""

from __future__ import annotations

import hmac
import json
import math
import struct
from typing import Any, NoReturn


class SealError(ValueError):
    """A line that is not the next message of the other side, or no JSON object."""


class Seal:
    """Proofs of the messages of one direction, in their order.

    MAC = HMAC-SHA256(session key, direction | 64-bit sequence number | JSON), as hexadecimal.
    """

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = key
        self._direction = direction
        self._sequence = 0

    def line(self, body: dict[str, Any]) -> bytes:
        """The next message, without its newline; `ValueError` for a number that JSON does not have."""
        text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        return self._proof(text) + b" " + text

    def open(self, line: bytes) -> dict[str, Any]:
        """The body of the next message; `SealError` where the line is anything else."""
        proof, _, text = line.partition(b" ")
        if not hmac.compare_digest(self._proof(text), proof):
            raise SealError("bad proof: a message that was not made with this cluster's secret, here and now")
        return _parsed(text)

    def _proof(self, text: bytes) -> bytes:
        sealed = self._direction + struct.pack(">Q", self._sequence) + text
        self._sequence += 1
        return hmac.digest(self._key, sealed, "sha256").hex().encode()


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        body = _DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise SealError("malformed: a message that is no JSON object")
    return body


def _finite(text: str) -> float:
    """`1e999` is JSON, and infinite."""
    number = float(text)
    return number if math.isfinite(number) else _not_json(text)


def _not_json(text: str) -> NoReturn:
    raise ValueError(text)


_DECODER = json.JSONDecoder(parse_constant=_not_json, parse_float=_finite)
