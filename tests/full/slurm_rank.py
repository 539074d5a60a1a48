"""A rank for tests of SLURM jobs: it opens a run and leaves what a run leaves, but trains nothing.

It needs no torch, so that many such jobs take seconds. What it was asked to save it finds again when it is resumed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import rank as of_pdsh

from zeropods import files
from zeropods.measure.record import RankMeasurement, compose_record, write_record
from zeropods.measure.run_folder import CONFIG, locked, open_run

ALONE = argparse.Namespace(said="", per_device_train_batch_size=1, gradient_accumulation_steps=1)
"""What the other stand-in is asked for."""


class SavedError(Exception):
    """As a real run ends that was asked to save."""


def main() -> int:
    arguments = parse()
    number, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(arguments.outputdir)
    measured = RankMeasurement(rank=number, host=os.environ["ZEROPODS_POD"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if arguments.ignore_term else interrupt)
    if os.environ.get("ZEROPODS_SAVE_SIGNAL") == "USR1" and not arguments.deaf:
        signal.signal(signal.SIGUSR1, save)
    with locked(folder) if number == 0 else nullcontext():
        if number == 0:
            start(folder, world_size)
        while not (folder / CONFIG).exists():
            time.sleep(0.05)
        try:
            train(arguments, number, folder)
            measured.status = "ok"
        except SavedError:
            (folder / "saved").touch()
            measured.status, measured.reason = "interrupted", "SIGUSR1: saved at step 1"
        except KeyboardInterrupt:
            measured.status, measured.reason = "interrupted", "SIGTERM"
        except MemoryError:
            measured.status, measured.reason = "oom", "no memory left"
        measured.ended_unix_seconds = time.time()
        measured.write(folder)
        if number == 0:
            await_others(folder, world_size if measured.status == "ok" else 1)
            write_record(folder, compose_record(folder))
    return {"ok": 0, "interrupted": os.EX_TEMPFAIL}.get(measured.status, 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--outputdir", required=True)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--fail_rank", type=int, default=-1)
    parser.add_argument("--ignore_term", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--said", default="")
    return parser.parse_args()


def start(folder: Path, world_size: int) -> None:
    identity = {"max_train_seconds": 0, "max_steps": 1}
    opening = open_run(folder, identity, again=False)
    of_run = {"identity": identity, "run_id": opening.run_id, "attempt": opening.attempt}
    files.write_json(folder / CONFIG, {**of_pdsh.config(world_size, ALONE), **of_run})


def train(arguments: argparse.Namespace, number: int, folder: Path) -> None:
    print(f"rank {number} on {os.environ['ZEROPODS_POD']} trains {arguments.said!r}", flush=True)
    (folder / f"train.{number}").touch()
    if number == arguments.fail_rank:
        raise MemoryError
    if (folder / "saved").exists() or (arguments.deaf and os.environ.get("SLURM_RESTART_COUNT")):
        return
    deadline = time.monotonic() + arguments.seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)


def await_others(folder: Path, ranks: int) -> None:
    """A real run has a barrier at its end."""
    deadline = time.monotonic() + 10.0
    while len(list((folder / "ranks").glob("*.json"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def save(number: int, frame: object) -> None:
    raise SavedError


if __name__ == "__main__":
    sys.exit(main())
