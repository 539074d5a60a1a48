"""How a run hears that it shall end, or save at its next step and end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from zeropods.errors import UserError
from zeropods.train import processes

# How a run hears that it shall end.
#
# Python's own handlers run in the main thread between two instructions, which a rank that waits in a collective for
# a lost pod never reaches. The operating system's byte on a wake-up socket reaches another thread all the same.

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


# A signal that asks a run to save at its next step and end, so that it can go on elsewhere.
#
# Schedulers announce an end so: SLURM with `--signal=USR1@120`, clouds before they take a machine back.
# `ZEROPODS_SAVE_SIGNAL` names the signal; where it names none, nothing here costs a step anything.

log = logging.getLogger(__name__)
VARIABLE = "ZEROPODS_SAVE_SIGNAL"
NAMES = ("USR1", "USR2", "TERM", "HUP", "CONT", "URG")


class SavedOnSignalError(processes.SharedError):
    """The run was asked to end, and has saved all that it needs to go on."""

    exit_status = os.EX_TEMPFAIL


def named_signal() -> signal.Signals | None:
    """The signal that `ZEROPODS_SAVE_SIGNAL` names, with or without `SIG`; None where it names none."""
    said = os.environ.get(VARIABLE, "")
    name = said.removeprefix("SIG")
    if not name:
        return None
    if name not in NAMES:
        raise UserError(f"{VARIABLE} {said!r}; expected {', '.join(NAMES)}")
    return signal.Signals[f"SIG{name}"]


class SaveSignal:
    """Whether this process was told to save and end."""

    def __init__(self, number: signal.Signals | None) -> None:
        self.number = number
        self.heard = False

    def hear(self, number: int, frame: Any) -> None:
        """The handler: a flag and nothing else, so that a second signal disturbs no save."""
        self.heard = True


@contextlib.contextmanager
def save_signal_heard() -> Iterator[SaveSignal]:
    """Take notice of the signal that the environment names. To be entered in the main thread."""
    found = SaveSignal(named_signal())
    if found.number is None:
        yield found
        return
    before = signal.signal(found.number, found.hear)
    try:
        yield found
    finally:
        # A process that ends because of it shall not be killed by the next one on its last steps.
        signal.signal(found.number, signal.SIG_IGN if found.heard else before)


class SaveOnSignal(TrainerCallback):
    """Saves at the end of the step in which any rank heard the signal, then ends the run.

    All ranks must have one or none: they ask one another after each step.
    """

    def __init__(self, asked: SaveSignal, name: str) -> None:
        """`name`: of the signal, for a rank that listens to none itself."""
        self.asked = asked
        self.name = name
        self.saving = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if any_rank(self.asked.heard, args.device):
            log.info("step %d: %s, saving", state.global_step, self.name)
            self.saving = True
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.saving:
            raise SavedOnSignalError(f"{self.name}: saved at step {state.global_step}")


def save_on_signal(asked: SaveSignal) -> SaveOnSignal | None:
    """The callback, for every rank where any of them listens; every rank must call this."""
    names = [name for name in processes.gathered(asked.number and asked.number.name) if name]
    return SaveOnSignal(asked, names[0]) if names else None


def any_rank(heard: bool, device: torch.device) -> bool:
    """Whether it is so on any rank."""
    if processes.world_size() == 1:
        return heard
    flag = torch.tensor(int(heard), device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
