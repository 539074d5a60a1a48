"""A program that says how it was started, and ends in a way that its last arguments name.

python -m tests.said [WORD ...] [write BYTES | complain BYTES | leave | hang]
"""

import json
import os
import signal
import subprocess
import sys
import time


def main() -> int:
    match sys.argv[1:]:
        case [*_, "write", number]:
            print("an error", file=sys.stderr, flush=True)
            sys.stdout.write("x" * int(number))
            return 3
        case [*_, "complain", number]:
            print("y" * int(number), file=sys.stderr)
        case [*_, "leave"]:
            left = subprocess.Popen(["sleep", "600"])
            print(left.pid, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        case [*_, "hang"]:
            time.sleep(600)
        case words:
            print(json.dumps({"argv": words, "folder": os.getcwd(), "environment": dict(os.environ)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
