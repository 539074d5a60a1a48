"""What runs on a pod at one moment: processes of each run, ssh sessions, and what was left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zeropods.pods.agent.descendants import Tree, arguments, child_pids, variable
from zeropods.pods.processes import Process

RUN_VARIABLE = "ZEROPODS_RUN"
"""Marks the processes of a run: its launcher exports it on every pod."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh", "busybox"})
DEEPSPEED_LAUNCHERS = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py")


@dataclass(frozen=True, kw_only=True)
class Census:
    """Living descendants of an agent, sorted."""

    runs: dict[str, tuple[Process, ...]]
    """Those that carry a run's mark in their environment, and all that is below them."""
    leading: dict[str, tuple[Process, ...]]
    """Of each run: what is above its processes, up to sshd's session, and leads to nothing else."""
    sessions: int
    """Connections of the agent's sshd."""
    orphans: frozenset[Process]
    """Children of the agent without a mark, besides its sshd."""


def take_census(agent: int, sshd: int | None) -> Census:
    """Sort what is below `agent`, whose ssh daemon is `sshd`.

    /proc is read once, and hardly at all where nothing runs: an idle pod is asked often.
    """
    if _is_quiet(agent, sshd):
        return Census(runs={}, leading={}, sessions=0, orphans=frozenset())
    tree = Tree.read()
    run_of = dict(_marked(tree, agent))
    runs: dict[str, list[Process]] = {}
    for process in tree.below(agent):
        if process.pid in run_of and not process.zombie:
            runs.setdefault(run_of[process.pid], []).append(process)
    sessions = [] if sshd is None else [process for process in tree.children(sshd) if not process.zombie]
    strays = (child for child in tree.children(agent) if child.pid != sshd and child.pid not in run_of)
    return Census(
        runs={run: tuple(members) for run, members in runs.items()},
        leading={run: tuple(_leading(tree, members, {agent, sshd})) for run, members in runs.items()},
        sessions=len(sessions),
        orphans=frozenset(child for child in strays if not child.zombie),
    )


def takes_sigterm(process: Process) -> bool:
    """Whether a process of a run is asked to end before it is killed.

    Not asked: shells and sshd, which would cut the output of their children off, and DeepSpeed's
    launcher, which answers by ending its ranks over 30 s; they end by themselves after the ranks.
    """
    if process.name in SHELLS or process.name.startswith("sshd"):
        return False
    return not any(argument.endswith(DEEPSPEED_LAUNCHERS) for argument in arguments(process))


def _marked(tree: Tree, agent: int) -> Iterator[tuple[int, str]]:
    """(pid, run) of every descendant with a mark of its own or above it; the nearest counts."""
    inherited: dict[int, str] = {}
    for process in tree.below(agent):
        run = variable(process, RUN_VARIABLE) or inherited.get(process.parent)
        if run is not None:
            inherited[process.pid] = run
            yield process.pid, run


def _leading(tree: Tree, members: Iterable[Process], tops: set[int | None]) -> list[Process]:
    """Processes above `members`, below `tops`, whose descendants all are of the run or lead to it; lowest first."""
    known = {process.pid for process in members}
    found: list[Process] = []
    waiting = list(members)
    for process in waiting:
        above = tree.table.get(process.parent)
        if above is None or above.pid in known or above.pid in tops:
            continue
        if all(child.pid in known or child.zombie for child in tree.children(above.pid)):
            known.add(above.pid)
            found.append(above)
            waiting.append(above)
    return found


def _is_quiet(agent: int, sshd: int | None) -> bool:
    """Whether an agent of one thread has nothing below it but an sshd without sessions; False where unsure."""
    return sshd is not None and child_pids(agent) == [sshd] and child_pids(sshd) == []
