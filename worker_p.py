"""A worker pod: it reports to its master, starts its own sshd, and sleeps.

`zeropods pods up` starts it on every pod and passes it what it needs in the variable ZEROPODS_ORDERS.
"""

from __future__ import annotations

import argparse
import sys

from zeropods.errors import guarded


def main() -> int:
    """Run as a pod until it ends."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("stdin", nargs="?", choices=["stdin"], help="read its variables from the first line of stdin")
    parser.parse_args()
    from zeropods.pods.agent import main as warden

    return warden()


if __name__ == "__main__":
    sys.exit(guarded(main))
