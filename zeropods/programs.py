"""What this environment offers to a process: its programs, threads, ports, and DeepSpeed's compiled
operations.

`python -m zeropods.programs PARENT SIGNAL PROGRAM ARGUMENT ...` runs a program that gets the signal
when its parent has ended, in whatever way (Linux).
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
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from zeropods.errors import UserError

SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Folders of daemons such as sshd, which an ordinary user's PATH often lacks."""
PROGRAMS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
}
"""The programs that a cluster needs, each with the Debian and Ubuntu package that provides it."""
LISTENED = range(20_000, 32_000)
"""Ports to listen on: below those that a kernel gives to connections, and to processes that ask for
any (Linux: 32,768 and up). One of those may be taken by the time a rank has imported torch and
listens on it."""
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
"""The environment variable that says where torch keeps the extensions that it compiles."""
CUDA = "/usr/local/cuda"
"""Folder of the CUDA toolkit where `CUDA_HOME` does not name one."""
TURN_LOCK = "turn"
"""The file that is locked while an extension is compiled or loaded. It stays: only the kernel's
lock counts."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2), from linux/prctl.h. The first survives `execve`, not `fork`; the second
makes a process the parent of its orphaned descendants (Linux 3.4)."""


# Programs and threads


def own_programs_first() -> str:
    """This process's PATH with its interpreter's folder in front, each folder once.

    DeepSpeed calls `ninja`, and compiles its operations anew (half a minute and more) whenever it
    finds another version of it than before.
    """
    path = os.environ.get("PATH") or os.defpath
    # An empty entry would mean the working folder.
    usual_folders = [folder for folder in path.split(os.pathsep) if folder]
    folders = [str(Path(sys.executable).parent), *usual_folders]
    return os.pathsep.join(dict.fromkeys(folders))


def child_environment() -> dict[str, str]:
    """This process's environment, with the programs of its Python first."""
    return {**os.environ, "PATH": own_programs_first()}


def bound_argv(argv: Sequence[str], at_end: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command that runs `argv` bound to this process: it gets `at_end` when this process has
    ended."""
    return [sys.executable, "-m", "zeropods.programs", str(os.getpid()), str(int(at_end)), *argv]


def end_with_parent(parent: int, signum: int) -> None:
    """Let this process get `signum` when its parent ends, at once if it has ended.

    This lasts through `execve`, but not through `fork`.

    Args:
        parent: the parent's process id.
    """
    prctl(PR_SET_PDEATHSIG, signum)
    # A parent that ended before the line above gave no signal; the process has another one by now.
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Give an environment variable this value in the block, and afterwards the one from before."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def prctl(option: int, value: int) -> None:
    """Set an option of this process (prctl(2), Linux); `OSError` if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if libc.prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def find_program(name: str) -> str | None:
    """The path of a program on PATH, or in `SYSTEM_FOLDERS`; None where there is none."""
    system_path = os.pathsep.join(SYSTEM_FOLDERS)
    return shutil.which(name) or shutil.which(name, path=system_path)


def required_programs(*names: str) -> list[str]:
    """Paths of programs, in the order of their names, which must be keys of `PROGRAMS`.

    Raises:
        UserError: names all programs that are missing, and the packages that provide them.
    """
    paths = []
    missing = []
    for name in names:
        path = find_program(name)
        if path is None:
            missing.append(name)
        else:
            paths.append(path)
    if missing:
        packages = " ".join(sorted({PROGRAMS[name] for name in missing}))
        raise UserError(f"{', '.join(missing)}: not found on PATH; apt-get install {packages}")
    return paths


def in_kernel() -> bool:
    """Whether this process is a Jupyter kernel.

    An imported `ipykernel` does not prove it: others load it too.
    """
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait; call it before torch is loaded.

    By default they spin, and where another process wants the core (several pods on one machine, a
    browser, a second run) each parallel region then waits out a time slice. Training t5-tiny on two
    threads beside one busy process: 84 samples/s spinning, 178 sleeping; on a quiet machine about
    240 against 170. A value that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Ports


def free_port(address: str = "") -> int:
    """A port of `LISTENED` on which nothing listens, at an address of this machine or, if it is
    empty, at all of them. Another process may take the port at any moment."""
    # Not the module's own generator: a seeded run would pick the same ports as another with that
    # seed.
    ports = random.SystemRandom().sample(LISTENED, len(LISTENED))
    return next(port for port in ports if is_free(address, port))


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen on the port now.

    Args:
        address: an empty one means all addresses of this machine.
    """
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True


# Compiled extensions of torch


def prepare_compiling() -> None:
    """Let torch compile with this environment's programs, into `extension_cache` unless the user
    has said where.

    torch's usual cache is the user's: two environments that share it recompile everything whenever
    they alternate.
    """
    os.environ["PATH"] = own_programs_first()
    os.environ.setdefault(EXTENSIONS, str(extension_cache()))


def extension_cache() -> Path:
    """The folder of compiled extensions, which need not exist.

    It is the one that `EXTENSIONS` names, else one in the virtual environment, else one in the
    user's cache.
    """
    chosen = os.environ.get(EXTENSIONS)
    if chosen:
        return Path(chosen)
    is_environment = sys.prefix != sys.base_prefix
    if is_environment and os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "torch_extensions"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache / "zeropods" / python / "torch_extensions"


def compile_in_turns() -> None:
    """Let processes that compile or load the same extension take turns by a lock that ends with its
    holder.

    torch (2.13, utils/file_baton.py) takes turns by the existence of a file: where its holder is
    killed, by a supervisor or for lack of memory, every process after it waits forever.

    Replaces a class in torch's modules, and where torch lies in a path with a space, also quotes
    that path for the linker.
    """
    from torch.utils import file_baton

    if re.search(r"\s", file_baton.__file__):
        # torch (2.13) writes this path into the linker's command without quotes.
        from torch.utils import cpp_extension

        if not cpp_extension.TORCH_LIB_PATH.startswith("'"):
            cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    # `cpp_extension` is not imported just for this: that takes a third of a second, and most runs
    # compile nothing.
    for module in (file_baton, sys.modules.get("torch.utils.cpp_extension")):
        if module is not None:
            # It is a type, which mypy does not let us replace.
            setattr(module, "FileBaton", Turn)  # noqa: B010


def lacking_for_operation(operation: str, *, cuda: bool = False) -> dict[str, str] | None:
    """What is missing on this machine to compile an operation of DeepSpeed.

    Args:
        operation: DeepSpeed's name for it, such as `cpu_adam`.
        cuda: whether it is one for GPUs, which CUDA's own compiler compiles.

    Returns:
        What is missing, each with what installs it, and nothing if it can be compiled; None where
        the operation is compiled already.
    """
    if _is_prebuilt(operation):
        return None
    compiled = extension_cache() / operation / f"{operation}.so"
    if compiled.is_file():
        return None
    lacks = {}
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        lacks["C++ compiler"] = "apt-get install g++"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lacks["Python.h"] = "apt-get install python3-dev"
    if shutil.which("ninja", path=own_programs_first()) is None:
        lacks["ninja"] = "pip install ninja"
    if cuda and not _has_nvcc():
        lacks["nvcc"] = "install the CUDA toolkit"
    return lacks


def _is_prebuilt(operation: str) -> bool:
    """Whether DeepSpeed was installed with the operation compiled (DS_BUILD_OPS)."""
    spec = find_spec("deepspeed")
    if spec is None or not spec.origin:
        return False
    folder = Path(spec.origin).parent
    return any(folder.glob(f"ops/*/{operation}_op*.so"))


def _has_nvcc() -> bool:
    """Whether CUDA's compiler is on PATH or in the toolkit's folder."""
    toolkit = os.environ.get("CUDA_HOME", CUDA)
    return shutil.which("nvcc") is not None or Path(toolkit, "bin", "nvcc").is_file()


class Turn:
    """A replacement for torch's `FileBaton`, with the same methods."""

    def __init__(self, lock_file_path: str, **_: object) -> None:
        self._path = Path(lock_file_path).with_name(TURN_LOCK)
        self._descriptor = -1

    def try_acquire(self) -> bool:
        """Wait for the turn, however long it takes, and return True.

        torch then finds up to date what another process has compiled in its turn, and compiles what
        another process only began. A line on stderr says why nothing seems to happen for minutes.
        """
        folder = self._path.parent
        operation = folder / f"{folder.name}.so"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not operation.exists():
                print(
                    "zeropods: waits for another process, which compiles DeepSpeed's "
                    f"{folder.name}: it takes minutes",
                    file=sys.stderr,
                )
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        if not operation.exists():
            print(
                f"zeropods: compiling DeepSpeed's {folder.name}, once: it takes minutes",
                file=sys.stderr,
            )
        return True

    def wait(self) -> None:
        """Do nothing: `try_acquire` has waited already."""

    def release(self) -> None:
        """Give the turn to the next process."""
        os.close(self._descriptor)


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock of a file at this moment; False where there is no file."""
    with suppress(FileNotFoundError), open(lock, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
