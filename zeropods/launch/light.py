"""DeepSpeed's launcher without DeepSpeed's engine and without torch: it needs four of their names.

    python -m zeropods.launch.light deepspeed.launcher.runner ARGUMENT ...

It is DeepSpeed's own code that runs, here and on each pod. Importing the rest of it takes seconds, one after the other
here and on a pod, before a rank so much as starts.
"""

from __future__ import annotations

import logging
import os
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from zeropods.launch.forks import fork
from zeropods.pods.processes import FORKS_VARIABLE
from zeropods.train.arguments import arguments_of

LAUNCH = "deepspeed.launcher.launch"
"""What DeepSpeed's runner lets each pod run."""
POLL_SECONDS = 0.1
FORM = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
"""Of the lines of DeepSpeed's logger."""


class Devices:
    """What launchers ask DeepSpeed's accelerators for; those of CPUs and of CUDA say the same.

    Source: deepspeed/accelerator/cpu_accelerator.py and cuda_accelerator.py (0.19.8).
    """

    def visible_devices_envs(self) -> list[str]:
        """Names of the variables that choose a process's devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, environment: MutableMapping[str, str], chosen: Sequence[int]) -> None:
        """Let a process see these devices."""
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen))

    def export_envs(self) -> list[str]:
        """Beginnings of the names of variables that ranks need."""
        return ["NCCL"]


def stand_in(name: str, **names: object) -> ModuleType:
    """Put a package in the place of one of DeepSpeed's: with these names, and with the modules that its folder has."""
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    package = ModuleType(name)
    package.__spec__, package.__path__ = spec, spec.submodule_search_locations
    vars(package).update(names)
    sys.modules[name] = package
    return package


def lighten() -> None:
    """Let DeepSpeed's launcher be imported without the rest of DeepSpeed, and each pod's as well."""
    logging.basicConfig(format=FORM, stream=sys.stdout)
    logger = logging.getLogger("DeepSpeed")
    stand_in("deepspeed")
    stand_in("deepspeed.accelerator", get_accelerator=Devices)
    stand_in("deepspeed.autotuning", Autotuner=None)
    utils = stand_in(
        "deepspeed.utils", logger=logger, set_log_level_from_string=lambda name: logger.setLevel(name.upper())
    )
    vars(utils)["get_numactl_cmd"] = import_module("deepspeed.utils.numa").get_numactl_cmd
    pdsh = import_module("deepspeed.launcher.multinode_runner").PDSHRunner
    command = pdsh.get_cmd

    def light_command(self: Any, *given: Any) -> Any:
        words, *rest = command(self, *given)
        at = words.index(LAUNCH)
        # A path may hold blanks, and a shell on the pod reads the words.
        words[at - 4 : at - 2] = f"cd {shlex.quote(os.getcwd())};", shlex.quote(sys.executable)
        script = words.index(self.user_script, at)
        words[script] = shlex.quote(words[script])
        return [*words[:at], __spec__.name, *words[at:]], *rest

    pdsh.get_cmd = light_command


def fork_ranks() -> None:
    """Let the launcher of a pod have ranks of this project's scripts forked by the pod's server, if it has one."""
    server, popen = os.environ.get(FORKS_VARIABLE), subprocess.Popen

    def start(command: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any) -> Any:
        forked = None
        is_ours = list(command[:2]) == [sys.executable, "-u"] and arguments_of(command[2]) is not None
        if server and env is not None and is_ours and not more:
            forked = fork(server, command[2:], env)
        return forked or popen(command, env=env, **more)

    vars(subprocess)["Popen"] = start


def look_often() -> None:
    """Let the launcher of a pod see at once that its ranks have ended: it sleeps a second each time that it looks."""
    sleep = time.sleep
    vars(time)["sleep"] = lambda seconds: sleep(min(seconds, POLL_SECONDS))


if __name__ == "__main__":
    lighten()
    if sys.argv[1] == LAUNCH:
        fork_ranks()
        look_often()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
