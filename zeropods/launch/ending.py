"""The end of what a launcher started on this machine: itself, pdsh, every ssh of pdsh, and ranks that nobody minds."""

from __future__ import annotations

import signal

from zeropods.launch.exported import RUN
from zeropods.pods.agent.descendants import Tree, variable
from zeropods.pods.processes import read_process, send


def end_tree(pid: int) -> None:
    """SIGKILL a process that is ours to reap, and everything below it.

    pdsh puts each ssh into a session of its own, so that a process group would not reach them.
    """
    top = read_process(pid)
    below = Tree.read().below(pid)
    for process in (*([] if top is None else [top]), *below):
        send(process, signal.SIGKILL)


def end_marked(run: str) -> None:
    """SIGKILL every process of this machine that carries a run's mark.

    For pods of this machine only. Their agents have ended the run; this is for a pod whose agent and
    warden were both killed, whose ranks nobody else would end.
    """
    for process in Tree.read().table.values():
        if variable(process, RUN) == run:
            send(process, signal.SIGKILL)
