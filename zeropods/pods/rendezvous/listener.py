"""The sockets on which masters and pods listen, and the open files that they take."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable

from zeropods.errors import UserError
from zeropods.pods.wire.channel import MAX_MESSAGE_BYTES

DEFAULT_PORT = 6_000
"""The port of the original's master."""
QUEUE = 4_096
"""Connections that the kernel keeps until they are accepted, as far as it is allowed to (`net.core.somaxconn`).

One more gets no answer, and is tried again a second, three and seven seconds later: too late for a pod among a crowd.
"""
AT_ONCE = 16
"""Connections that are accepted before those that came earlier have their turn to prove themselves."""


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


async def serve(
    listener: socket.socket, attend: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server:
    """Serve the connections of a listening socket, which is the server's from now on."""
    server = await asyncio.start_server(attend, sock=listener, limit=MAX_MESSAGE_BYTES, backlog=AT_ONCE)
    # asyncio takes one number for both of them.
    listener.listen(QUEUE)
    return server


def allow_open_files(needed: int) -> None:
    """Raise this process's soft limit of open files to `needed`, or as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
