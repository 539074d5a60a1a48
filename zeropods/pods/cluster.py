"""A cluster that is up: its pods, and the files by which others reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.pods import this_pod
from zeropods.pods.agent.control import AgentError, ask_all
from zeropods.pods.hostfile import Host
from zeropods.pods.state import Pod, Settings, State, folder_of, names, read_state

if TYPE_CHECKING:
    from zeropods.report.table import Table

HOSTFILE, SSH_CONFIG, KNOWN_HOSTS, KEY, SECRET = "hostfile", "ssh_config", "known_hosts", "id_ed25519", "secret"
ENVIRONMENT = "deepspeed_env"
"""What ranks need exported, in the form of DeepSpeed's `DS_ENV_FILE`."""
SHELL_NAME = "pods"
"""The name of a cluster that the shell starts without naming it."""
STATUS_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Pods that are ready; `down` ends them. The files lie in `folder`."""

    name: str
    folder: Path
    settings: Settings
    ssh_port: int
    pods: tuple[Pod, ...]

    @classmethod
    def of(cls, folder: Path, state: State) -> Cluster:
        """A cluster from its state."""
        return cls(
            name=state.name, folder=folder, settings=state.settings, ssh_port=state.ssh_port, pods=state.pods
        )  # fmt: skip

    @property
    def backend(self) -> str:
        """`local`, `cml`, or `hosts` of the user's own."""
        return self.settings.backend

    @property
    def network(self) -> str:
        """`loopback`, `namespaces`, `cml` or `hosts`."""
        return self.settings.network

    @property
    def shared_machine(self) -> bool:
        """Whether all pods are processes of this machine, among which its cores have to be divided."""
        loopback = bool(self.pods) and all(this_pod.is_loopback(pod.address) for pod in self.pods)
        return self.backend == "local" or (self.backend == "hosts" and loopback)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Addresses and slots, in the hostfile's order."""
        return tuple(Host(pod.address, pod.slots) for pod in self.pods)

    @property
    def hostfile(self) -> Path:
        """In DeepSpeed's format."""
        return self.folder / HOSTFILE

    @property
    def ssh_config(self) -> Path:
        """For ssh and for pdsh's ssh: port, key and pinned host keys."""
        return self.folder / SSH_CONFIG

    @property
    def secret(self) -> bytes:
        """By which agents know their master."""
        return bytes.fromhex((self.folder / SECRET).read_text(encoding="ascii"))

    @property
    def environment(self) -> dict[str, str]:
        """What ranks on these pods need exported; nothing secret.

        Gloo would connect over the interface of the host's name, which is not always the pod's.
        """
        if self.network == "namespaces":
            return {"GLOO_SOCKET_IFNAME": "eth0"}
        return {"GLOO_SOCKET_IFNAME": "lo"} if self.shared_machine else {}

    @property
    def agents(self) -> tuple[tuple[str, int], ...]:
        """Addresses and control ports of the agents."""
        return tuple((pod.address, pod.control_port) for pod in self.pods)

    def statuses(self, seconds: float = STATUS_SECONDS) -> Sequence[dict[str, Any]]:
        """What each pod answers when asked, all at once; one that does not is `status` "no answer"."""
        answers = ask_all(self.agents, self.secret, {"do": "status"}, seconds)
        return [_status(pod, answer) for pod, answer in zip(self.pods, answers, strict=True)]

    def is_ready(self) -> bool:
        """Whether all pods answer now."""
        return all(pod["status"] == "ready" for pod in self.statuses())

    def list(self) -> Table:
        """The pods and their state now."""
        # Only here do pods know of reports: a notebook's cell shows what it is given.
        from zeropods.report.table import Table

        return Table.of(self.statuses(), f"Cluster {self.name}")

    def check(self) -> Table:
        """What is found on every pod now: pods x checks, and below them what mends those that are not ok."""
        from zeropods.pods.checked import check_table, checked

        return check_table(checked(self), f"Cluster {self.name}, checked")

    def _repr_html_(self) -> str:
        from zeropods.report.table import Table

        title = f"Cluster {self.name}: {len(self.pods)} pods, ssh port {self.ssh_port}"
        return Table.of([_facts(pod) for pod in self.pods], title).to_html()

    def down(self) -> None:
        """End all pods and remove all files; a second call does nothing."""
        from zeropods.pods.removal import take_down

        take_down(self.name, self.pods)


def find(name: str | None = None) -> Cluster:
    """A cluster that is up: of this name, else the shell's, else the only one; `UserError` where there is none."""
    name = name or chosen_name()
    state = read_state(folder_of(name)) if name else None
    if name is None or state is None or not state.pods:
        there = f"up are {', '.join(c.name for c in clusters())}" if clusters() else "none is up"
        raise UserError(f"cluster {name or SHELL_NAME}: is not up, {there}; zeropods pods up --count N")
    return Cluster.of(folder_of(name), state)


def clusters() -> list[Cluster]:
    """All clusters of this home."""
    found = ((folder_of(name), read_state(folder_of(name))) for name in names())
    return [Cluster.of(folder, state) for folder, state in found if state and state.pods]


def chosen_name() -> str | None:
    """The cluster that is meant where none is named; None where there is none."""
    there = names()
    if SHELL_NAME in there or not there:
        return SHELL_NAME if there else None
    if len(there) > 1:
        raise UserError(f"clusters {', '.join(there)}: several are up; say which with --name")
    return there[0]


def _facts(pod: Pod) -> dict[str, Any]:
    return {"pod": pod.name, "address": pod.address, "slots": pod.slots, "hostname": pod.hostname}


def _status(pod: Pod, answer: dict[str, Any] | AgentError) -> dict[str, Any]:
    if isinstance(answer, AgentError):
        return {**_facts(pod), "status": f"no answer: {answer}", "runs": {}, "lease_seconds_left": None}
    left = answer["lease_seconds_left"]
    return {**_facts(pod), "status": "ready", "runs": answer["runs"], "lease_seconds_left": left}
