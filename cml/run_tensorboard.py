"""TensorBoard over all runs, as a CML application or on any machine.

    python cml/run_tensorboard.py
    python cml/run_tensorboard.py --runs runs --port 6006

It listens on 127.0.0.1 at CDSW_APP_PORT, where CML's proxy looks for an application, and ends with this command.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

from zeropods.errors import UserError, guarded
from zeropods.pods.processes import ending_in_order
from zeropods.programs import bound_argv

HOST = "127.0.0.1"
GRACE_SECONDS = 5.0


def main() -> int:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder whose run folders are shown")
    parser.add_argument("--port", default=os.environ.get("CDSW_APP_PORT"), help="default: CDSW_APP_PORT")
    arguments = parser.parse_args()
    port = free_port(arguments.port)
    if not arguments.runs.is_dir():
        raise UserError(f"--runs {arguments.runs}: no such folder; expected one that holds run folders")
    print(f"http://{HOST}:{port}/ shows {arguments.runs}", flush=True)
    return serve(arguments.runs, port)


def free_port(said: str | None) -> int:
    """The port that was asked for, after checking that it can be listened on."""
    if not said:
        raise UserError("no port: CDSW_APP_PORT is not set, as it is in a CML application; give --port")
    if not said.isascii() or not said.isdigit() or not 0 < int(said[:6]) < 65_536:
        raise UserError(f"port {said}; expected a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, int(said)))
        except OSError as error:
            raise UserError(f"port {said}: {error.strerror}; give another with --port") from None
    return int(said)


def serve(runs: Path, port: int) -> int:
    """Run TensorBoard as a child process; whatever ends this process ends it too."""
    command = ["-m", "tensorboard.main", "--logdir", str(runs), "--host", HOST, "--port", str(port)]
    with ending_in_order(), subprocess.Popen(bound_argv([sys.executable, *command])) as server:
        try:
            status = server.wait()
        except (KeyboardInterrupt, SystemExit):
            server.terminate()
            try:
                server.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
            return 0
    raise UserError(f"tensorboard ended with status {status}; see its output above")


if __name__ == "__main__":
    sys.exit(guarded(main))
