"""A launch on this machine alone: no pod, no ssh."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from zeropods.launch.command import Launch
from zeropods.launch.flags import find_script, run_folder_of
from zeropods.launch.run import PROJECT, check_arguments, free_port
from zeropods.pods.hostfile import Host
from zeropods.pods.this_pod import slots


def plan_alone(script: str | Path, arguments: Sequence[str]) -> Launch:
    """The launch as data, with its arguments checked; starts nothing."""
    here = Path.cwd()
    planned = Launch(
        script=find_script(script, here, PROJECT),
        arguments=tuple(arguments),
        folder=run_folder_of(arguments, here),
        hosts=(Host(socket.gethostname(), slots()),),
        master_port=free_port("127.0.0.1"),
        launcher="none",
    )
    check_arguments(planned)
    return planned
