"""DeepSpeed's own command over the pods of a cluster, for those who call it themselves."""

from __future__ import annotations

import sys
from pathlib import Path

from zeropods.pods.cluster import ENVIRONMENT, Cluster
from zeropods.pods.ssh import pdsh_ssh_arguments


def deepspeed_environment(cluster: Cluster) -> dict[str, str]:
    """What DeepSpeed's runner needs in order to reach the pods as pinned, and to hand on what ranks need."""
    return {
        "PDSH_RCMD_TYPE": "ssh",
        "PDSH_SSH_ARGS_APPEND": pdsh_ssh_arguments(cluster.ssh_config),
        "DS_ENV_FILE": str(cluster.folder / ENVIRONMENT),
    }


def deepspeed_argv(cluster: Cluster) -> list[str]:
    """DeepSpeed's own command, up to the script.

    Its ssh check is left out because it uses neither port nor key of ours, and knows no time limit; one
    host is reached by ssh only if that is forced.
    """
    hosts = cluster.hosts
    return [
        str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(cluster.hostfile), "--launcher", "pdsh",
        "--no_ssh_check", *(["--force_multi"] if len(hosts) == 1 else []), "--num_nodes", str(len(hosts)),
        "--num_gpus", str(min(host.slots for host in hosts)), "--master_addr", hosts[0].address,
        "--ssh_port", str(cluster.ssh_port),
    ]  # fmt: skip
