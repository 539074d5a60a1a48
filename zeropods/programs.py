"""What this environment offers to a process: its programs, threads, ports, and DeepSpeed's compiled operations.

`python -m zeropods.programs PARENT SIGNAL PROGRAM ARGUMENT ...` runs a program that gets the signal when its parent is
gone, however that went (Linux).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from zeropods.errors import UserError

SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Where daemons such as sshd are, and where an ordinary user's PATH often does not look."""
PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}
"""The programs that a cluster cannot do without, and Debian's and Ubuntu's packages that bring them."""
LISTENED = range(20_000, 32_000)
"""Ports to listen on: below those that a kernel gives to connections, and to whoever asks for any (Linux: 32,768 and
up). One of those may be another's by the time at which a rank that has imported torch listens on it."""
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
"""The variable that says where torch keeps the extensions that it compiles."""
LOCK = "turn"
"""The file that is locked while an extension is compiled or loaded. It stays: what counts is the kernel's lock."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From linux/prctl.h. The first survives `execve`, not `fork`; by the second a process becomes the parent of what is
orphaned below it (Linux 3.4)."""


# Programs and threads


def own_programs_first() -> str:
    """This process's PATH with its interpreter's folder in front.

    DeepSpeed calls `ninja`, and compiles its operations anew (half a minute and more) whenever it meets another
    version than the one before.
    """
    folders = [str(Path(sys.executable).parent), *(os.environ.get("PATH") or os.defpath).split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, folders)))


def child_environment() -> dict[str, str]:
    """This process's environment, with the programs of its Python first."""
    return {**os.environ, "PATH": own_programs_first()}


def bound_argv(argv: Sequence[str], at_end: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command that runs `argv` bound to this process: it gets `at_end` when this process is gone."""
    return [sys.executable, "-m", "zeropods.programs", str(os.getpid()), str(int(at_end)), *argv]


def end_with_parent(parent: int, signum: int) -> None:
    """Get `signum` when the parent ends, at once if it has ended already; survives `execve`, not `fork`."""
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """An environment variable that has this value inside, and after that the one that it had before, or none."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def prctl(option: int, value: int) -> None:
    """Set an option of this process (prctl(2), Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def find_program(name: str) -> str | None:
    """The path of a program on PATH, or among the daemons; None where there is none."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(SYSTEM_FOLDERS))


def required_programs(*names: str) -> list[str]:
    """Paths of programs; `UserError` names all that are missing, and the packages that bring them."""
    found = [find_program(name) for name in names]
    if missing := [name for name, path in zip(names, found, strict=True) if path is None]:
        packages = " ".join(sorted({PROGRAMS[name] for name in missing}))
        raise UserError(f"{', '.join(missing)}: not found on PATH; apt-get install {packages}")
    return [str(path) for path in found]


def in_kernel() -> bool:
    """Whether this process is a Jupyter kernel. That `ipykernel` has been imported does not say so: others load it."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait; call it before torch is loaded.

    By default they spin, and where another process wants the core (several pods on one machine, a browser, a second
    run) each parallel region then waits out a time slice. Training t5-tiny on two threads beside one busy process:
    84 samples/s spinning, 178 sleeping; on a quiet machine about 240 against 170. A value that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Ports


def free_port(address: str = "") -> int:
    """A port of LISTENED on which nothing listens, at an address of this machine or at any of them."""
    # Not the module's own generator: a seeded run would take the ports of another one with that seed.
    return next(port for port in random.SystemRandom().sample(LISTENED, len(LISTENED)) if is_free(address, port))


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now; on every address of this machine where it is empty."""
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True


# Compiled extensions of torch


def prepare_compiling() -> None:
    """Let torch compile with this environment's programs, into `extension_cache` unless the user has said where.

    Its usual cache is the user's: two environments that share it compile everything anew whenever they take turns.
    """
    os.environ["PATH"] = own_programs_first()
    os.environ.setdefault(EXTENSIONS, str(extension_cache()))


def extension_cache() -> Path:
    """The folder of compiled extensions: as chosen, else in the virtual environment, else in the user's cache."""
    is_own = sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeropods"
    own = Path(sys.prefix) if is_own else cache / f"py{sys.version_info.major}{sys.version_info.minor}"
    return Path(os.environ.get(EXTENSIONS) or own / "torch_extensions")


def compile_in_turns() -> None:
    """Let processes that compile or load the same extension take turns by a lock that ends with its holder.

    torch (2.13, utils/file_baton.py) takes turns by a file that exists: where its holder is killed, by a supervisor
    or for want of memory, everyone after it waits for ever.
    """
    from torch.utils import file_baton

    if re.search(r"\s", file_baton.__file__):
        # torch (2.13) writes this path into the linker's command without quotes.
        from torch.utils import cpp_extension

        if not cpp_extension.TORCH_LIB_PATH.startswith("'"):
            cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    # Its user is not imported for this: that takes a third of a second, and most runs compile nothing.
    for module in (file_baton, sys.modules.get("torch.utils.cpp_extension")):
        if module is not None:
            setattr(module, "FileBaton", Turn)  # noqa: B010 (a type that mypy does not let us replace)


class Turn:
    """Takes the place of torch's `FileBaton`, with its methods."""

    def __init__(self, lock_file_path: str, **_: object) -> None:
        self._path = Path(lock_file_path).with_name(LOCK)
        self._descriptor = -1

    def try_acquire(self) -> bool:
        """Wait for the turn. What another process has compiled is found up to date, what it has begun is ended."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        if not (folder := self._path.parent).joinpath(f"{folder.name}.so").exists():
            print(f"zeropods: compiling DeepSpeed's {folder.name}, once: it takes minutes", file=sys.stderr)
        return True

    def wait(self) -> None:
        """Do nothing: whoever asked has had its turn."""

    def release(self) -> None:
        """Give the turn to the next process."""
        os.close(self._descriptor)


def is_held(lock: Path) -> bool:
    """Whether somebody holds a lock at this moment."""
    with suppress(FileNotFoundError), open(lock, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
