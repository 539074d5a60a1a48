"""Start a rank on its pod as DeepSpeed's launcher does in use: forked by the pod's server if it may be, its end noted.

RANK=1 python -m tests.full.watched_rank SCRIPT ARGUMENT ...
"""

import os
import subprocess
import sys

from zeropods.launch import light


def main() -> int:
    light.watch_ranks()
    rank = subprocess.Popen([sys.executable, "-u", *sys.argv[1:]], env=dict(os.environ))
    status = rank.wait()
    # As a shell says it.
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
