"""A library that does, in a rank of a real run, what a test asks for: it ends the process, fails, or hangs.

With this folder on PYTHONPATH, a rank that loads a T5 imports this module in place of the real one, to which it gives
way at once. After each step the rank then looks for a file `fault.RANK` in its run folder, which names a fault of
`FAULTS`; `tests/full/faults.py` writes it.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from zeropods.train.meter import Meter

LAST_WORDS = "the library says goodbye"
LONG_SECONDS = 600.0


def exit_with(status: int) -> None:
    """End the process without any clean-up, and without a word of Python's."""
    print(LAST_WORDS, flush=True)
    os._exit(status)


def exit_in_a_thread() -> None:
    threading.Thread(target=os._exit, args=(0,)).start()
    time.sleep(LONG_SECONDS)


def exit_in_a_signal_handler() -> None:
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(LONG_SECONDS)


def fail() -> None:
    raise ValueError("row 7 is damaged")


def ask_torch_for_too_much_memory() -> None:
    import torch

    torch.empty(2**50)


def fill_the_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def hang() -> None:
    time.sleep(LONG_SECONDS)


FAULTS: dict[str, Callable[[], object]] = {
    "exit": sys.exit,
    "exit in a thread": exit_in_a_thread,
    "exit in a signal handler": exit_in_a_signal_handler,
    "os._exit(0)": lambda: exit_with(0),
    "os._exit(3)": lambda: exit_with(3),
    "segmentation fault": lambda: ctypes.string_at(0),
    "exception": fail,
    "MemoryError": lambda: bytearray(2**60),
    "torch out of memory": ask_torch_for_too_much_memory,
    "disk full": fill_the_disk,
    "hang": hang,
}


def look_after_each_step() -> None:
    on_step_end = Meter.on_step_end

    def on_faulty_step_end(self: Meter, args: Any, state: Any, control: Any, **about: Any) -> None:
        on_step_end(self, args, state, control, **about)
        order = self.folder / f"fault.{self.measured.rank}"
        if order.is_file():
            fault = FAULTS[order.read_text()]
            order.unlink()
            fault()

    Meter.on_step_end = on_faulty_step_end  # type: ignore[method-assign]


def give_way() -> None:
    """Put the real library into the place of this one."""
    here = str(Path(__file__).parent)
    del sys.modules[__name__]
    sys.path.remove(here)
    import_module(__name__)
    sys.path.insert(0, here)


look_after_each_step()
give_way()
