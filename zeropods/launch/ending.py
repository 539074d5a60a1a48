"""The end of what a launcher started on this machine: itself, pdsh, and every ssh that pdsh has started."""

from __future__ import annotations

import signal

from zeropods.pods.agent.descendants import Tree
from zeropods.pods.processes import read_process, send


def end_tree(pid: int) -> None:
    """SIGKILL a process that is ours to reap, and everything below it.

    pdsh puts each ssh into a session of its own, so that a process group would not reach them.
    """
    top = read_process(pid)
    below = Tree.read().below(pid)
    for process in (*([] if top is None else [top]), *below):
        send(process, signal.SIGKILL)
