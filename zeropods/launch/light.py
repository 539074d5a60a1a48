"""Run DeepSpeed's launcher without DeepSpeed's engine and without torch, since it needs only four
of their names.

    python -m zeropods.launch.light deepspeed.launcher.runner ARGUMENT ...

DeepSpeed's own code runs, here and on each pod. Importing the rest of it takes seconds, first here
and then again on each pod, before a rank even starts.
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
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from zeropods.launch.forks import Forked, fork
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.watched_rank import start_watched
from zeropods.pods.gpus import POD_GPUS, VISIBLE, gpus_of_slots
from zeropods.pods.processes import FORKS_VARIABLE

POD_LAUNCHER = "deepspeed.launcher.launch"
"""Name of the module that DeepSpeed's runner runs on each pod."""
RANK = "RANK"
"""Environment variable that tells a process its number in the run."""
LONGEST_SLEEP_SECONDS = 0.1
"""Most seconds that a pod's launcher sleeps at a time."""
FORM = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
"""Format of the lines of DeepSpeed's logger."""


def stand_in(name: str, **names: object) -> ModuleType:
    """Replace one of DeepSpeed's packages by one that has only these names, but the same modules,
    in `sys.modules`; returns the new package."""
    spec = find_spec(name)
    # DeepSpeed is installed, or nobody would run its launcher.
    assert spec is not None and spec.submodule_search_locations is not None
    package = ModuleType(name)
    package.__spec__ = spec
    package.__path__ = spec.submodule_search_locations
    vars(package).update(names)
    sys.modules[name] = package
    return package


def lighten() -> None:
    """Let DeepSpeed's launcher be imported without the rest of DeepSpeed, in this process and on
    each pod on which it starts one."""
    logging.basicConfig(format=FORM, stream=sys.stdout)
    logger = logging.getLogger("DeepSpeed")
    stand_in("deepspeed")
    # What launchers ask an accelerator for; the CPU and CUDA ones answer the same
    # (deepspeed/accelerator/, 0.19.8).
    devices = SimpleNamespace(
        visible_devices_envs=lambda: [VISIBLE],
        set_visible_devices_envs=show_gpus_of_slots,
        export_envs=lambda: ["NCCL"],
    )
    stand_in("deepspeed.accelerator", get_accelerator=lambda: devices)
    stand_in("deepspeed.autotuning", Autotuner=None)
    utils = stand_in(
        "deepspeed.utils",
        logger=logger,
        set_log_level_from_string=lambda name: logger.setLevel(name.upper()),
    )
    vars(utils)["get_numactl_cmd"] = import_module("deepspeed.utils.numa").get_numactl_cmd
    lighten_pods()


def lighten_pods() -> None:
    """Let DeepSpeed's runner call this module on each pod, so that the launcher there is light
    too."""
    pdsh = import_module("deepspeed.launcher.multinode_runner").PDSHRunner
    get_command = pdsh.get_cmd

    def light_command(self: Any, *arguments: Any) -> Any:
        words, *rest = get_command(self, *arguments)
        launcher = words.index(POD_LAUNCHER)
        # Before the launcher's name stand `cd FOLDER;`, the interpreter, `-u` and `-m`. A path may
        # contain blanks, and a shell on the pod parses the words.
        words[launcher - 4 : launcher - 2] = [
            f"cd {shlex.quote(os.getcwd())};",
            shlex.quote(sys.executable),
        ]
        script = words.index(self.user_script, launcher)
        words[script] = shlex.quote(words[script])
        light_words = [*words[:launcher], __spec__.name, *words[launcher:]]
        return light_words, *rest

    pdsh.get_cmd = light_command


def show_gpus_of_slots(environment: MutableMapping[str, str], slots: Sequence[int]) -> None:
    """Set in the environment of ranks which GPUs they see: of those that the launcher sees, the
    ones of these slots.

    DeepSpeed itself would take the slots for numbers of GPUs, so every pod of one machine would get
    the machine's first GPU.
    """
    environment[VISIBLE] = gpus_of_slots(environment.get(VISIBLE), slots)
    environment.pop(POD_GPUS, None)


def watch_ranks() -> None:
    """Let a pod's launcher, which runs in this process, watch its ranks, and have those of this
    project's scripts forked by the pod's server: `subprocess.Popen` is replaced.

    The launcher also notices sooner that its ranks have ended: on its own, it sleeps a second
    between two checks, so `time.sleep` is replaced too.
    """
    server = os.environ.get(FORKS_VARIABLE)
    popen = subprocess.Popen
    sleep = time.sleep

    def start(command: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any) -> Any:
        # What else the launcher starts is none of the ranks, and stays as it is.
        is_python = list(command[:2]) == [sys.executable, "-u"]
        if env is None or RANK not in env or not is_python or more:
            return popen(command, env=env, **more)
        script, *arguments = command[2:]
        call = ScriptCall(Path(script), tuple(arguments))

        def begin(output: int) -> subprocess.Popen[bytes] | Forked:
            if server and call.kind is not None:
                forked = fork(server, command[2:], env, (0, output, output))
                if forked is not None:
                    return forked
            return popen(command, env=env, stdout=output, stderr=output)

        return start_watched(int(env[RANK]), call.folder, begin, sys.stdout.fileno())

    vars(subprocess)["Popen"] = start
    vars(time)["sleep"] = lambda seconds: sleep(min(seconds, LONGEST_SLEEP_SECONDS))


if __name__ == "__main__":
    lighten()
    if sys.argv[1] == POD_LAUNCHER:
        watch_ranks()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
