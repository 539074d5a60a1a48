r"""`zeropods launch` with pdsh itself in the place of DeepSpeed's launcher, which takes many seconds to start.

    python -m tests.full.over_pdsh CLUSTER [--pods N] [--step-timeout SECONDS] [--restarts N] [--min-pods M] \
        [--watched] SCRIPT ARGUMENT ...

Everything else is as in use: pods, sshd, agents, lease, supervisor, record. With `--watched` each pod's ranks are also
watched as DeepSpeed's launcher watches them, so that how they end is noted; without it only ssh tells.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from tests.namespaces import Namespaces
from zeropods import pods
from zeropods.errors import UserError, guarded
from zeropods.launch.command import Launch, plan_launch
from zeropods.launch.outcome import failure
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.supervisor import Supervision, run_launch
from zeropods.pods.cluster import BACKENDS


def pdsh_argv(planned: Launch, hostfile: Path) -> list[str]:
    """A rank on each pod, which nobody watches there."""
    return _pdsh(planned, ["-u"])


def watched_argv(planned: Launch, hostfile: Path) -> list[str]:
    """A rank on each pod, watched by its parent there."""
    return _pdsh(planned, ["-m", "tests.full.watched_rank"])


def _pdsh(planned: Launch, of_python: list[str]) -> list[str]:
    """The command for all pods; `%n` is pdsh's number of the host."""
    hosts = ",".join(host.address for host in planned.hosts)
    # As DeepSpeed's launcher does.
    python = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in {**python, **planned.exported}.items())
    master = f"MASTER_ADDR={planned.hosts[0].address} MASTER_PORT={planned.master_port} LOCAL_RANK=0 LOCAL_SIZE=1"
    rank = f"export RANK=%n WORLD_SIZE={len(planned.hosts)} {master}; cd {Path.cwd()};"
    return [
        "pdsh",
        "-S",
        "-w",
        hosts,
        exports,
        rank,
        sys.executable,
        *of_python,
        str(planned.script),
        *planned.arguments,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("--pods", type=int)
    parser.add_argument("--step-timeout", type=float)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--min-pods", type=int)
    parser.add_argument("--watched", action="store_true")
    asked, (script, *arguments) = parser.parse_known_args()
    # A test may have started the cluster on this backend, which is not one of the package's.
    BACKENDS["namespaces"] = Namespaces
    cluster = pods.find(asked.name)
    planned = plan_launch(cluster, ScriptCall.of(script, arguments), pods=asked.pods)
    supervision = Supervision(
        show=lambda line: print(line, file=sys.stderr),
        argv=watched_argv if asked.watched else pdsh_argv,
        step_timeout=asked.step_timeout,
        restarts=asked.restarts,
        min_pods=asked.min_pods,
    )
    record = run_launch(planned, cluster, supervision)
    if record.status != "ok":
        raise UserError(failure(planned.folder, record))


if __name__ == "__main__":
    sys.exit(guarded(main))
