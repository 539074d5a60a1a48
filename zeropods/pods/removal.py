"""The end of clusters: their pods, their networks, their keys, and what is left where `up` was killed."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods import keeper
from zeropods.pods.agent.control import AgentError, ask_all
from zeropods.pods.backends.fleet import fleet_of
from zeropods.pods.cluster import SECRET, Cluster
from zeropods.pods.signals import deferred
from zeropods.pods.state import STATE, Pod, folder_of, locked, names, read_state

END_SECONDS, LOCK_SECONDS = 5.0, 20.0


def take_down(name: str, pods: tuple[Pod, ...] | None = None, *, ask: bool = True) -> bool:
    """End a cluster, or what is left of one, and remove its files; returns whether there was anything.

    Args:
        pods: only if it still has these pods: the name may be another cluster's by now.
        ask: see `clear`.
    """
    folder = folder_of(name)
    keeper.release(name, pods)
    if not folder.is_dir():
        return False
    with locked(folder, LOCK_SECONDS):
        state = read_state(folder)
        if state is None or (pods is not None and state.pods != pods):
            return False
        with deferred():
            clear(folder, ask=ask)
    return True


def clear(folder: Path, *, ask: bool = True) -> None:
    """End what a cluster's folder speaks of and empty the folder, whose lock is held; an empty one stays as it is.

    Args:
        ask: ask agents on other machines to end first, which a Python that is about to exit cannot: it starts
            no thread. Workers are stopped in any case, and local ones end in order then.
    """
    state = read_state(folder)
    if state is None:
        if any(folder.iterdir()):
            raise UserError(f"{folder}: holds something that is no cluster; choose another name")
        return
    if ask:
        _end_agents(Cluster.of(folder, state))
    fleet = fleet_of(folder, state.settings)
    fleet.stop(state.workers)
    fleet.network.close()
    for path in sorted(folder.iterdir(), key=lambda path: path.name == STATE):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def sweep() -> None:
    """Remove the remains of clusters whose workers were processes of this machine, and have all ended.

    Their keys open nothing any more.
    """
    for name in names():
        # What another process holds, or what is no cluster of ours, is left alone.
        with suppress(UserError), locked(folder_of(name)):
            state = read_state(folder_of(name))
            ours = state is not None and state.settings.backend != "cml"
            if state and ours and not fleet_of(folder_of(name), state.settings).is_running_here():
                clear(folder_of(name), ask=False)


def _end_agents(cluster: Cluster) -> None:
    if cluster.backend == "local" or not cluster.pods or not (cluster.folder / SECRET).is_file():
        return
    # A worker on a host of the user's own is stopped over ssh, which does not reach it now either.
    own = "if it lives, it ends when its host is reached again, or with its lease"
    fate = own if cluster.backend == "hosts" else "its worker is stopped all the same"
    answers = ask_all(cluster.agents, cluster.secret, {"do": "end"}, END_SECONDS)
    for pod, answer in zip(cluster.pods, answers, strict=True):
        if isinstance(answer, AgentError):
            print(f"{pod.name} ({pod.address}): {answer}; {fate}", file=sys.stderr)
