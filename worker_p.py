"""A worker pod: it reports to its master, starts its own sshd where there is one, and sleeps.

`zeropods pods up` starts it on every pod and passes it what it needs in the variable
ZEROPODS_ORDERS, and the cluster's secret in a file that only its owner can read, or on stdin. It
does nothing when started by hand.
"""

from __future__ import annotations

import argparse
import sys

from zeropods.errors import guarded

FORK_SERVER = "zeropods.launch.forks"
"""Module that a pod runs to fork ranks. Modules are named, not imported, since they need what the
pod itself does not."""
LAUNCHER = ("zeropods.launch.light", "deepspeed.launcher.launch")
"""Module with which a pod starts DeepSpeed's launcher where its master asks for that, and the
launcher's own."""
CHECKS = ("zeropods.pods.preflight", "zeropods.launch.probe")
"""Modules that a pod runs to say what it has, where its master asks for that."""


def main() -> int:
    """Run as a pod until it ends."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "stdin",
        nargs="?",
        choices=["stdin"],
        help="read variables and secret from the first line of stdin",
    )
    parser.parse_args()
    from zeropods.pods.agent import main as warden
    from zeropods.pods.started import Modules

    return warden(Modules(fork_server=FORK_SERVER, launcher=LAUNCHER, checks=CHECKS))


if __name__ == "__main__":
    sys.exit(guarded(main))
