"""The demo page over all trained runs, as a CML application or on any machine.

    python cml/run_demo.py
    python cml/run_demo.py --runs runs --port 7860

It listens on 127.0.0.1 at CDSW_APP_PORT, where CML's proxy looks for an application, and ends with this command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from zeropods.chatter import without_chatter
from zeropods.demo.page import ANY_NAME, OWN_NAMES, serve
from zeropods.errors import UserError, guarded
from zeropods.pods.processes import ending_in_order
from zeropods.programs import wait_passively


def main() -> int:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder whose trained runs are asked")
    parser.add_argument("--data", type=Path, help="tables and questions, in WikiSQL's layout; as trained if not given")
    parser.add_argument("--port", default=os.environ.get("CDSW_APP_PORT"), help="default: CDSW_APP_PORT")
    arguments = parser.parse_args()
    if not arguments.port:
        raise UserError("no port: CDSW_APP_PORT is not set, as it is in a CML application; give --port")
    wait_passively()
    without_chatter()
    names = ANY_NAME if "CDSW_APP_PORT" in os.environ else OWN_NAMES
    with contextlib.suppress(KeyboardInterrupt, SystemExit), ending_in_order():
        serve([arguments.runs], arguments.data, arguments.port, lambda line: print(line, flush=True), names)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
