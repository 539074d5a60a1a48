"""ZeRO's shards made universal by a process of its own: with a line of progress, and an end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zeropods.errors import UserError
from zeropods.launch.bound import bound_argv

log = logging.getLogger(__name__)
LIMIT_SECONDS = 1_500.0
"""The other ranks wait 1,800 s for rank 0 before they give up."""
PROGRESS_SECONDS = 5.0
PACKAGES = Path(__file__).resolve().parents[2]
"""Where this package is: the process finds it wherever it starts."""


def convert(shards: Path, out: Path, *, limit: float = LIMIT_SECONDS) -> None:
    """Make the universal form of a folder of shards.

    Args:
        shards: a checkpoint's folder of what ZeRO has divided; it has been verified.
        out: the folder to make; its own folder gets `latest_universal`, which names it.
        limit: seconds after which it is given up.

    Raises:
        UserError: it took too long, ran out of room, or the shards hold what is no plain value.
    """
    command = bound_argv([sys.executable, "-m", "zeropods.train.convert", str(shards), str(out)])
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            _await(process, shards, out, limit)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            said.seek(0)
            raise UserError(_why(said.read().decode(errors="replace"), shards, process.returncode))


def _environment() -> dict[str, str]:
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(PACKAGES), *([found] if found else [])])
    # It needs no GPU, and would take room on one.
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def _await(process: subprocess.Popen[bytes], shards: Path, out: Path, limit: float) -> None:
    began = time.monotonic()
    while True:
        try:
            process.wait(min(PROGRESS_SECONDS, limit))
            return
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - began
        if elapsed >= limit:
            raise UserError(f"{shards}: not converted within {limit:.0f} s; resume on as many ranks as saved it")
        line = f"{out.parent}: {_bytes_in(out) / 1e9:.1f} GB converted in {elapsed:.0f} s"
        print(line, file=sys.stderr, flush=True)
        log.info(line)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _why(said: str, shards: Path, status: int) -> str:
    """The process's line for people, without the name that begins it; else the last one."""
    lines = [line for line in said.splitlines() if line.strip()]
    ours = [line.removeprefix("zeropods: ") for line in lines if line.startswith("zeropods: ")]
    if ours:
        return ours[-1]
    last = f": {lines[-1][:200]}" if lines else ""
    return f"{shards}: the process that converts it ended with status {status}{last}; resume on as many ranks"
