"""`rank.py` as the script of a matrix: the model's name says how its run ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import rank

from zeropods.measure.heartbeat import HeartbeatWriter

ENDINGS = {
    "well": ["--seconds", "0.2"],
    "oom": ["--fail_rank", "0"],
    "slow": ["--seconds", "600"],
    "broken": ["--seconds", "-1"],
    "killed": ["--seconds", "-2"],
}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model_id", choices=ENDINGS, required=True)
    parser.add_argument("--outputdir", required=True)
    parser.add_argument("--per_device_train_batch_size")
    arguments = parser.parse_args()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    rank.train = train
    sys.argv[1:] = ["--outputdir", arguments.outputdir, *ENDINGS[arguments.model_id]]
    return rank.main()


def train(arguments: argparse.Namespace, number: int, folder: Path, beating: HeartbeatWriter, usual=rank.train) -> None:
    if arguments.seconds == -1:
        raise RuntimeError("the script is broken")
    if arguments.seconds == -2:
        os.kill(os.getpid(), signal.SIGKILL)
    usual(arguments, number, folder, beating)


if __name__ == "__main__":
    sys.exit(main())
