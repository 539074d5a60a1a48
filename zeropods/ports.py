"""Ports to listen on that nobody else gets by chance."""

from __future__ import annotations

import random
import socket

from zeropods.errors import UserError

LISTENED = range(20_000, 32_000)
"""Below those that a kernel gives to connections, and to whoever asks it for any (Linux: 32,768 and up). One of those
may be another's by the time at which a rank that has imported torch listens on it; the other ranks then wait for it."""
TRIES = 100


def free_port(address: str = "") -> int:
    """A port of LISTENED on which nothing listens, at an address of this machine or at any of them."""
    # Not the module's own generator: a seeded run would take the ports of another one with that seed.
    for port in random.SystemRandom().sample(LISTENED, TRIES):
        if is_free(address, port):
            return port
    raise UserError(f"{address or 'this machine'}: {TRIES} ports of {LISTENED[0]}-{LISTENED[-1]} tried, none is free")


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now; on every address of this machine where it is empty."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address, port))
            server.listen(1)
        except OSError:
            return False
    return True
