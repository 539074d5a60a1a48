"""How a run hears that it shall end.

Python's own handlers run in the main thread between two instructions, which a rank that waits in a collective for
a lost pod never reaches. The operating system's byte on a wake-up socket reaches another thread all the same.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

UNHEARD_SECONDS = 2.0
"""How long the main thread may take to act on a signal before it counts as waiting."""
ENDINGS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def terminable(*, saving: signal.Signals | None = None) -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, so that its record is written.

    Args:
        saving: the signal that asks for a save instead; where it is SIGTERM, that stays as it is.
    """
    if saving == signal.SIGTERM:
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def heard_while_waiting(act: Callable[[str], None], *, saving: signal.Signals | None = None) -> Iterator[None]:
    """Call `act` with a signal's name, in a thread, where the main thread does not leave this block on it.

    To be entered in the main thread.

    Args:
        saving: a signal on which the main thread goes on, until it has saved.
    """
    hearing, waking = socket.socketpair()
    waking.setblocking(False)
    before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    endings = [number for number in ENDINGS if number != saving]
    thread = threading.Thread(target=_listen, args=(hearing, endings, act), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        waking.close()
        thread.join()
        hearing.close()


def _listen(hearing: socket.socket, endings: Sequence[int], act: Callable[[str], None]) -> None:
    """Read signal numbers until the other end is closed."""
    while number := hearing.recv(1):
        if number[0] not in endings:
            continue
        hearing.settimeout(UNHEARD_SECONDS)
        try:
            while hearing.recv(1):
                pass
            return
        except TimeoutError:
            act(signal.Signals(number[0]).name)
        hearing.settimeout(None)
