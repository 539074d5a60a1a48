"""`zeropods launch` with pdsh itself in the place of DeepSpeed's launcher, which takes many seconds to start.

    python -m tests.full.over_pdsh CLUSTER RESTARTS MIN_PODS SCRIPT ARGUMENT ...

Everything else is as in use: pods, sshd, agents, lease, supervisor, record.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from zeropods import pods
from zeropods.errors import UserError, guarded
from zeropods.launch.again import Restarts
from zeropods.launch.command import Launch
from zeropods.launch.planning import plan_launch
from zeropods.launch.restart import run_restarting
from zeropods.launch.run import failure


def pdsh_argv(planned: Launch, hostfile: Path) -> list[str]:
    """A rank on each pod; `%n` is pdsh's number of the host."""
    hosts = ",".join(host.address for host in planned.hosts)
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in planned.exported.items())
    rank = f"export RANK=%n WORLD_SIZE={len(planned.hosts)}; cd {Path.cwd()};"
    return ["pdsh", "-S", "-w", hosts, exports, rank, sys.executable, "-u", str(planned.script), *planned.arguments]


def main() -> None:
    name, restarts, min_pods, script, *arguments = sys.argv[1:]
    cluster = pods.find(name)
    planned = plan_launch(cluster, script, arguments)
    wanted = Restarts(most=int(restarts), min_pods=int(min_pods))
    record = run_restarting(planned, cluster, wanted, show=lambda line: print(line, file=sys.stderr), argv=pdsh_argv)
    if record["status"] != "ok":
        raise UserError(failure(planned.folder, record))


if __name__ == "__main__":
    sys.exit(guarded(main))
