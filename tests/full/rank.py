"""A rank that trains nothing: it leaves what a run leaves, and misbehaves where it is told to.

It stands for a training script where a test is about what runs it; it needs no torch, so that many such
tests take seconds. What it was asked to save it finds again when it is resumed.
"""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from zeropods import files
from zeropods.measure.heartbeat import HeartbeatWriter
from zeropods.measure.record import RankMeasurement, compose_record, read_json, write_record
from zeropods.measure.run_folder import open_run

ENDS = {"well": {"seconds": 0.2}, "oom": {"fail_rank": 0}, "slow": {"seconds": 600.0}, "broken": {}, "killed": {}}
"""How a run of a matrix ends, by the name of its model."""


class SavedError(Exception):
    """As a real run ends that was asked to save."""


def main() -> int:
    arguments = parse()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(arguments.outputdir)
    folder.mkdir(parents=True, exist_ok=True)
    measured = RankMeasurement(rank=rank, host=os.environ.get("ZEROPODS_POD", "?"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if arguments.deaf else interrupt)
    if os.environ.get("ZEROPODS_SAVE_SIGNAL") == "USR1" and not arguments.no_save:
        signal.signal(signal.SIGUSR1, save)
    with open(folder / "run.lock", "a") as lock:
        if rank == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
            attempt = put_aside(folder)
            files.write_json(folder / "config.json", config(world_size, arguments) | {"attempt": attempt})
        while not (folder / "config.json").exists():
            time.sleep(0.05)
        files.write_text(folder / f"pid.{rank}", str(os.getpid()))
        try:
            with HeartbeatWriter(folder, rank, lambda: "steady") as beating:
                train(arguments, rank, folder, beating)
            measured.status = "ok"
        except SavedError:
            (folder / "saved").touch()
            measured.status, measured.reason = "interrupted", "SIGUSR1: saved at step 1"
        except KeyboardInterrupt:
            measured.status, measured.reason = "interrupted", "SIGTERM"
        except MemoryError:
            measured.status, measured.reason = "oom", "no memory left"
        # As a real run's, its record is written whatever signal comes again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        measured.ended_unix_seconds = time.time()
        measured.write(folder)
        if rank == 0 and "ZEROPODS_RUN" not in os.environ:
            await_others(folder, world_size if measured.status == "ok" else 1)
            write_record(folder, compose_record(folder))
    return {"ok": 0, "interrupted": os.EX_TEMPFAIL}.get(measured.status, 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--outputdir", required=True)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--fail_rank", type=int, default=-1)
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--no_save", action="store_true")
    parser.add_argument("--leave_behind", action="store_true")
    parser.add_argument("--hog_mib", type=int, default=0)
    parser.add_argument("--said", nargs="*", default=[])
    parser.add_argument("--seconds_again", type=float, default=0.5)
    parser.add_argument("--per_device_train_batch_size", type=int, default=1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--model_id", choices=ENDS)
    arguments = parser.parse_args()
    vars(arguments).update(ENDS.get(arguments.model_id, {}))
    return arguments


def put_aside(folder: Path) -> int:
    """Open the run as a training script does; returns the number of earlier attempts."""
    if not (folder / "config.json").is_file():
        return 0
    return open_run(folder, read_json(folder / "config.json")["identity"], again=False).attempt


def config(world_size: int, arguments: argparse.Namespace) -> dict[str, object]:
    rows, passes = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    seen = {name: value for name, value in os.environ.items() if name.startswith(("ZEROPODS", "OMP", "SEEN"))}
    return {
        "schema_version": 3,
        "run_id": "0123456789ab",
        "attempt": 0,
        "started_at": "2026-01-02T03:04:05+00:00",
        "task": "none",
        "model_id": "none",
        "init": "random",
        "technique": "ddp",
        "pods": world_size,
        "slots": 1,
        "world_size": world_size,
        "precision": "fp32",
        "prompt": None,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": passes,
        "effective_batch_size": rows * passes * world_size,
        "gradient_checkpointing": False,
        "train_rows": 1,
        "dev_rows": None,
        "dataset": {},
        "deepspeed": None,
        "hosts": [],
        "versions": {},
        "git_revision": None,
        "hardware": {},
        "device": "cpu",
        "argv": ["rank.py", *arguments.said],
        "identity": {"max_train_seconds": 0, "max_steps": 1, "seen": seen},
    }


def train(arguments: argparse.Namespace, rank: int, folder: Path, beating: HeartbeatWriter) -> None:
    print(" ".join([f"rank {rank} trains", *map(repr, arguments.said)]), flush=True)
    if rank == arguments.fail_rank:
        raise MemoryError
    if arguments.model_id == "broken":
        raise RuntimeError("the script is broken")
    if arguments.model_id == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if (folder / "saved").exists() or (arguments.no_save and os.environ.get("SLURM_RESTART_COUNT")):
        return
    if arguments.leave_behind:
        # No mark of the run, another session, and its hands on the ssh session's pipe.
        subprocess.Popen(["env", "-i", "setsid", "sleep", "600"])
    seconds = arguments.seconds_again if (folder / "restarts.json").is_file() else arguments.seconds
    deadline = time.monotonic() + seconds
    beating.training = True
    hogged = []
    while time.monotonic() < deadline and not (folder / "enough").exists():
        time.sleep(0.05)
        beating.mark(beating.step + 1)
        if arguments.hog_mib:
            hogged.append(b"x" * (arguments.hog_mib << 20))


def await_others(folder: Path, ranks: int) -> None:
    """A real run has a barrier at its end."""
    deadline = time.monotonic() + 10.0
    while len(list((folder / "ranks").glob("*.json"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def save(number: int, frame: object) -> None:
    # On a busy machine another one may come while the record is written.
    signal.signal(number, signal.SIG_IGN)
    raise SavedError


if __name__ == "__main__":
    sys.exit(main())
