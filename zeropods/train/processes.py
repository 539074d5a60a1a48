"""What the processes of a run tell one another outside of training, and how they react to signals.

A signal ends a run, or asks it to save at its next step and end, so that it can go on elsewhere.
Schedulers announce an end this way: SLURM with `--signal=USR1@120`, clouds before they take a
machine back. `ZEROPODS_SAVE_SIGNAL` names the signal to save; where it names none, nothing here
costs a step anything.
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
"""Signals that end a run."""
VARIABLE = "ZEROPODS_SAVE_SIGNAL"
"""Environment variable that names the signal to save, one of `NAMES`."""
NAMES = ("USR1", "USR2", "TERM", "HUP", "CONT", "URG")

log = logging.getLogger(__name__)


class SharedError(UserError):
    """An error that every rank knows of; only one of them reports it."""


def rank() -> int:
    """This process's rank; 0 where there is only one process."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank()


def world_size() -> int:
    """Number of processes of the run."""
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in the order of ranks; every rank must call this."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank; return all results, in the order of ranks, on each.

    Every rank must call this. An error that is no `UserError` stays on its rank, and the others
    wait for that rank in vain.

    Raises:
        SharedError: on every rank, the `UserError` of the first rank whose `action` has raised one.
    """
    result = None
    failure = None
    try:
        result = action()
    except UserError as error:
        # Every rank learns of it, or the others would wait for ever.
        failure = str(error)
    outcomes = gathered((result, failure))
    for _, failure_there in outcomes:
        if failure_there is not None:
            raise SharedError(failure_there)
    return [result_there for result_there, _ in outcomes]


def on_rank_zero(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0, and return its result on every rank; every rank must call this.

    Raises:
        SharedError: on every rank, a `UserError` that `action` has raised.
    """
    is_first = rank() == 0

    def act_if_first() -> Any:
        if is_first:
            return action()
        return None

    return on_every_rank(act_if_first)[0]


def leave() -> None:
    """End the process group after every rank is done.

    Without this, one CPU run in three that succeeded aborts at exit with status 250, and
    DeepSpeed's launcher then ends the ranks beside it.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# Signals that end a run, or ask it to save first


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore the signals that end a run, while what it leaves is written.

    A launcher sends one to every rank when one of them fails, and it comes to a rank that is ending
    already. For use in the main thread, around what is sure to end.
    """
    before = {}
    for number in ENDINGS:
        before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def heard_while_waiting(
    act: Callable[[str], None], *, saving: signal.Signals | None = None
) -> Iterator[None]:
    """Let a thread act on a signal that ends a run, where the main thread is stuck.

    Python's own handlers run in the main thread between two instructions, which a rank that waits
    in a collective for a lost pod never reaches. The byte that a signal puts on a wake-up socket
    still reaches another thread. Enter this in the main thread.

    Args:
        act: called in the thread, with the signal's name, where the main thread is still in this
            block `UNHEARD_SECONDS` after the signal.
        saving: a signal after which the main thread goes on until it has saved; `act` is not called
            for it.
    """
    hearing, waking = socket.socketpair()
    waking.setblocking(False)

    def listen() -> None:
        """Act on signals that end a run, until the other end is closed."""
        while True:
            byte = hearing.recv(1)
            if not byte:
                return
            number = byte[0]
            if number not in ENDINGS or number == saving:
                continue
            # If Python's handler reaches the main thread, that thread leaves the block within this
            # time and closes the other end.
            if _wait_until_closed(hearing, UNHEARD_SECONDS):
                return
            act(signal.Signals(number).name)

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


def _wait_until_closed(hearing: socket.socket, seconds: float) -> bool:
    """Read and drop bytes until the other end of a socket is closed, or none come any more.

    Args:
        seconds: how long to wait for each byte.

    Returns:
        True where the other end was closed, False where nothing has come for `seconds`.
    """
    hearing.settimeout(seconds)
    try:
        while hearing.recv(1):
            pass
        return True
    except TimeoutError:
        return False
    finally:
        hearing.settimeout(None)


class SavedOnSignalError(SharedError):
    """The run was asked to end, and has saved all that it needs to go on."""

    exit_status = os.EX_TEMPFAIL


class SaveOnSignal(TrainerCallback):
    """Saves at the end of the step in which any rank received the signal, then ends the run.

    All ranks have one: they tell one another which signal it is as training begins, and after each
    step whether it came. Where no rank listens for a signal, steps exchange nothing.
    """

    def __init__(self) -> None:
        """Take the signal that the environment names, with or without `SIG`; it may name none.

        Raises:
            UserError: `ZEROPODS_SAVE_SIGNAL` is none of `NAMES`.
        """
        value = os.environ.get(VARIABLE, "")
        name = value.removeprefix("SIG")
        if name and name not in NAMES:
            raise UserError(f"{VARIABLE} {value!r}; expected {', '.join(NAMES)}")
        self.number: signal.Signals | None = None
        """The signal that this rank listens for; None where it does not listen."""
        if name:
            self.number = signal.Signals[f"SIG{name}"]
        self.name: str | None = None
        """Name of the signal that some rank listens for; None where no rank does."""
        self.heard = False
        """Whether this rank has received the signal."""
        self.saving = False
        """Whether a checkpoint is asked for because of the signal, after which the run ends."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the signal within the block; any other SIGTERM ends the run as Ctrl-C does.

        For use in the main thread.
        """

        def hear(number: int, frame: Any) -> None:
            # A flag and nothing else, so that a second signal disturbs no save.
            self.heard = True

        def interrupt(number: int, frame: Any) -> None:
            raise KeyboardInterrupt(signal.Signals(number).name)

        handlers = {signal.SIGTERM: interrupt}
        if self.number is not None:
            # It may be SIGTERM itself.
            handlers[self.number] = hear
        before = {}
        for number, handler in handlers.items():
            before[number] = signal.signal(number, handler)
        try:
            yield
        finally:
            for number, former in before.items():
                if self.heard and number == self.number:
                    # A process that ends because of the signal must not be killed by a second one
                    # in its last moments.
                    signal.signal(number, signal.SIG_IGN)
                else:
                    signal.signal(number, former)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        name = None
        if self.number is not None:
            name = self.number.name
        self.name = None
        for name_there in gathered(name):
            if name_there is not None:
                self.name = name_there
                break

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The signal may come at any moment: it is looked at once.
        is_heard = self.heard
        if self.name is not None and world_size() > 1:
            # All ranks save at the same step, whichever of them has heard it.
            flag = torch.tensor(int(is_heard), device=args.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            is_heard = bool(flag.item())
        if is_heard:
            log.info("step %d: %s, saving", state.global_step, self.name)
            self.saving = True
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.saving:
            raise SavedOnSignalError(f"{self.name}: saved at step {state.global_step}")
