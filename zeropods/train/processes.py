"""What the processes of a run tell one another outside of training, and how they react to signals.

A signal ends a run, or asks it to save at its next step and end, so that it can go on elsewhere. Schedulers announce
an end this way: SLURM with `--signal=USR1@120`, clouds before they take a machine back. `ZEROPODS_SAVE_SIGNAL` names
the signal to save; where it names none, nothing here costs a step anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from zeropods.errors import UserError

UNHEARD_SECONDS = 2.0
"""Seconds that the main thread may take to act on a signal before it counts as waiting."""
ENDINGS = (signal.SIGINT, signal.SIGTERM)
VARIABLE = "ZEROPODS_SAVE_SIGNAL"
NAMES = ("USR1", "USR2", "TERM", "HUP", "CONT", "URG")

log = logging.getLogger(__name__)


class SharedError(UserError):
    """An error that every rank knows of; only one of them reports it."""


def rank() -> int:
    """This process's rank; 0 where there is only one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank; return all results on each, or raise the first `UserError` as a `SharedError`."""
    result, failure = None, None
    try:
        result = action()
    except UserError as error:
        # Every rank is told, or the others would wait for ever.
        failure = str(error)
    told = gathered((result, failure))
    for _, failed in told:
        if failed is not None:
            raise SharedError(failed)
    return [each for each, _ in told]


def on_rank_zero(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0; return its result on every rank, or raise its `UserError` as a `SharedError`."""
    return on_every_rank(action if rank() == 0 else lambda: None)[0]


def leave() -> None:
    """End the process group after every rank is done.

    Without this, one CPU run in three that succeeded aborts at exit with status 250, and DeepSpeed's
    launcher then ends the ranks beside it.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# Signals that end a run, or ask it to save first


@contextlib.contextmanager
def heard_while_waiting(act: Callable[[str], None], *, saving: signal.Signals | None = None) -> Iterator[None]:
    """Call `act` with a signal's name, in a thread, where the main thread does not leave this block because of it.

    Python's own handlers run in the main thread between two instructions, which a rank that waits in a collective for
    a lost pod never reaches. The byte that a signal puts on a wake-up socket still reaches another thread.
    Enter this in the main thread.

    Args:
        saving: a signal after which the main thread goes on until it has saved; `act` is not called for it.
    """
    hearing, waking = socket.socketpair()
    waking.setblocking(False)

    def listen() -> None:
        """Read signal numbers until the other end is closed, which also ends the wait for the main thread."""
        while number := hearing.recv(1):
            if number[0] in ENDINGS and number[0] != saving:
                hearing.settimeout(UNHEARD_SECONDS)
                try:
                    while hearing.recv(1):
                        pass
                    return
                except TimeoutError:
                    act(signal.Signals(number[0]).name)
                hearing.settimeout(None)

    before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        waking.close()
        thread.join()
        hearing.close()


class SavedOnSignalError(SharedError):
    """The run was asked to end, and has saved all that it needs to go on."""

    exit_status = os.EX_TEMPFAIL


class SaveOnSignal(TrainerCallback):
    """Saves at the end of the step in which any rank received the signal, then ends the run.

    All ranks have one: they tell one another which signal it is as training begins, and after each step whether it
    came. Where no rank listens for a signal, steps exchange nothing.
    """

    def __init__(self) -> None:
        """Take the signal that the environment names, with or without `SIG`; it may name none."""
        said = os.environ.get(VARIABLE, "")
        name = said.removeprefix("SIG")
        if name and name not in NAMES:
            raise UserError(f"{VARIABLE} {said!r}; expected {', '.join(NAMES)}")
        self.number = signal.Signals[f"SIG{name}"] if name else None
        self.name: str | None = None
        """Name of the signal that some rank listens for; None where no rank does."""
        self.heard = self.saving = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the signal; SIGTERM, if not that signal, ends a run as Ctrl-C does. For use in the main thread."""

        def hear(number: int, frame: Any) -> None:
            # A flag and nothing else, so that a second signal disturbs no save.
            self.heard = True

        def interrupt(number: int, frame: Any) -> None:
            raise KeyboardInterrupt(signal.Signals(number).name)

        handlers = {signal.SIGTERM: interrupt} | ({self.number: hear} if self.number else {})
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, former in before.items():
                # A process that ends because of the signal must not be killed by a second one in its last moments.
                signal.signal(number, signal.SIG_IGN if self.heard and number == self.number else former)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.name = next(filter(None, gathered(self.number and self.number.name)), None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        heard = self.heard
        if self.name is not None and world_size() > 1:
            flag = torch.tensor(int(heard), device=args.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            heard = bool(flag.item())
        if heard:
            log.info("step %d: %s, saving", state.global_step, self.name)
            self.saving = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.saving:
            raise SavedOnSignalError(f"{self.name}: saved at step {state.global_step}")
