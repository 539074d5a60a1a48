"""The socket on which a master listens, and the open files that it takes."""

from __future__ import annotations

import resource
import socket

from zeropods.errors import UserError

DEFAULT_PORT = 6_000
"""The port of the original's master."""


def listening_socket(address: str, port: int | None) -> socket.socket:
    """A TCP socket that listens on an IPv4 address of this machine.

    Args:
        port: None for 6000, which gives way to any free port; one that is asked for does not.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    reason: object = None
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # A master that ended a moment ago leaves connections in TIME_WAIT, which are nobody's.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, candidate))
            sock.listen()
            return sock
        except (OSError, OverflowError) as error:
            sock.close()
            reason = getattr(error, "strerror", None) or error
    place = f"{address}:{port or 'any port'}"
    raise UserError(f"{place}: cannot listen there ({reason}); name another port, or an address of this machine")


def allow_open_files(needed: int) -> None:
    """Raise this process's soft limit of open files to `needed`, or as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
