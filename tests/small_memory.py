"""Memory cgroups of a few MiB, for tests in which the kernel kills a process."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

EMPTY_SECONDS = 20.0


@contextmanager
def small_memory(mebibytes: int) -> Iterator[Path]:
    """A memory cgroup below our own (v1), removed when it is empty; the test is skipped where none can be made."""
    own = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
    group = Path("/sys/fs/cgroup/memory", (own or ["/"])[0].lstrip("/"), f"zeropods-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mebibytes << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here ({error.strerror})")
    yield group
    deadline = time.monotonic() + EMPTY_SECONDS
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


def within(group: Path, command: list[object]) -> list[str]:
    """Command that runs `command` in a group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *map(str, command)]
