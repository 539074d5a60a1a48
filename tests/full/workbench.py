"""A workbench like a stock one of CML, made of what is here: for one user without rights, and without ssh and pdsh.

Cloudera's gateway starts its kernels, in which the double (`cml_double.py`) gives workers. They share the home folder,
which is the project's. Linux, root, util-linux and iproute2 are needed, and a network for Cloudera's packages.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from tests.full import ordinary_user
from tests.full.cloudera_gateway import FALLBACK_SECONDS, Kernel, gateway_argv, made_runtime
from tests.full.clusters import listens
from tests.full.launches import ROOT, until
from tests.full.sessions import Session, session
from tests.full.without_ssh import LACKING
from zeropods.programs import SYSTEM_FOLDERS, free_port

USER, NUMBER, HOME = "cdsw", "8536", "/home/cdsw"
"""The account under which CML runs everything, and its home, where CML keeps the project."""
RUNTIME = "runtime"
PYTHON = f"/mnt/{RUNTIME}/bin/python"
"""The interpreter of the gateway, of its kernels and of workers."""
ADDRESS = "127.0.2.254"
"""Of the session; the double's workers are at 127.0.2.1 and up."""
USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"
PROJECT = (
    "zeropods", "notebooks", "dsconfig", "matrices", "tools", "cml", "textsql_train.py", "causal_train.py",
    "worker_p.py", "master_p.py", "requirements.txt",
)  # fmt: skip
"""Folders and files of the project that are copied."""
MODULE = """
from cml.cml_double import CmlDouble

double = CmlDouble()
launch_workers, list_workers, stop_workers = double.launch_workers, double.list_workers, double.stop_workers
"""
"""The runtime's `cml.workers_v1`."""


@dataclass(frozen=True)
class Workbench:
    """A session of the workbench; `project` is what it has as home, as this machine sees it."""

    project: Path
    machine: Session
    port: int

    def outputs(self, notebook: str, seconds: float) -> list[dict[str, Any]]:
        """What the cells of one of the project's notebooks show, on a kernel of its own; the test fails if one fails.

        Args:
            seconds: of all cells together.
        """
        cells = nbformat.read(self.project / "notebooks" / f"{notebook}.ipynb", as_version=4).cells
        kernel = Kernel(self.port)
        try:
            shown = kernel.outputs([cell.source for cell in cells if cell.cell_type == "code"], seconds)
        finally:
            kernel.end()
        for output in shown:
            if output["output_type"] == "error":
                pytest.fail(f"{notebook}: {output['ename']}: {output['evalue']}")
        return shown

    def processes(self) -> list[list[str]]:
        """The command lines of the user's processes in this session, but for the gateway's."""
        lines = []
        space = _space(self.machine.pid)
        for process in psutil.process_iter(["uids", "cmdline"]):
            # It is empty where a process has ended and waits to be reaped, None where it is gone.
            line = process.info["cmdline"]
            is_user_s = bool(line) and process.info["uids"].real == int(NUMBER)
            if is_user_s and "kernel_gateway" not in line and _space(process.pid) == space:
                lines.append(line)
        return lines


@contextmanager
def workbench(folder: Path, **variables: str) -> Iterator[Workbench]:
    """A session with these environment variables, until the block ends.

    Args:
        folder: gets the runtime and the project's copy.
    """
    runtime, project = folder / RUNTIME, folder / "project"
    made_runtime(runtime)
    _add_to_runtime(runtime)
    _copy_project(project)
    with session("workbench", has_network=False) as machine:
        view = ordinary_user.view(folder, USER, NUMBER, HOME, {RUNTIME: runtime, USER: project})
        subprocess.run(machine.inside(["sh", "-c", view + _rest_of_view()]), check=True)
        subprocess.run(machine.inside(_as_user(["tools/compile_ops.py"], variables)), check=True)
        port = free_port("127.0.0.1")
        argv = machine.inside(_as_user(gateway_argv("", port)[1:], variables))
        with open(folder / "gateway.log", "w") as log, subprocess.Popen(argv, stdout=log, stderr=log) as entering:
            until(lambda: listens("127.0.0.1", port) or entering.poll() is not None, FALLBACK_SECONDS)
            assert entering.poll() is None, (folder / "gateway.log").read_text()
            (gateway,) = psutil.Process(entering.pid).children()
            try:
                yield Workbench(project, machine, port)
            finally:
                gateway.terminate()


def _add_to_runtime(runtime: Path) -> None:
    """Let the runtime find this environment's packages after its own, and CML's module."""
    (packages,) = runtime.glob("lib/python*/site-packages")
    (packages / "environment.pth").write_text(f"{ordinary_user.PACKAGES}\n")
    module = packages / "cml"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "workers_v1.py").write_text(MODULE)
    shutil.copy(ROOT / "tests" / "full" / "cml_double.py", module)


def _copy_project(project: Path) -> None:
    """Copy what the notebooks need of the project, for that user."""
    project.mkdir()
    for name in PROJECT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, project)
    subprocess.run(["chown", "-R", f"{NUMBER}:{NUMBER}", str(project)], check=True)


def _rest_of_view() -> str:
    """Lines for a shell: the home at its usual place, an empty /tmp, and no program of ssh or pdsh that can be run."""
    programs = set()
    for place in (*USUAL_PATH.split(os.pathsep), *SYSTEM_FOLDERS):
        for program in Path(place).glob("*"):
            if program.name.startswith(LACKING):
                programs.add(program.resolve())
    hidden = [f"mount --bind /dev/null {shlex.quote(str(program))}" for program in sorted(programs)]
    home = ["mount -t tmpfs tmpfs /home", f"mkdir {HOME}", f"mount --rbind /mnt/{USER} {HOME}"]
    return "\n".join([*hidden, *home, "mount -t tmpfs tmpfs /tmp"])


def _as_user(words: Sequence[str], variables: dict[str, str]) -> list[str]:
    """The command by which that user runs Python with these words in the project's folder.

    Nothing of this process's environment is there.
    """
    of_session = {
        "HOME": HOME, "USER": USER, "PATH": f"{Path(PYTHON).parent}:{USUAL_PATH}", "PYTHONPATH": HOME,
        "CDSW_ENGINE_ID": "session0000000", "CDSW_IP_ADDRESS": ADDRESS, **variables,
    }  # fmt: skip
    settings = [f"{name}={value}" for name, value in of_session.items()]
    command = f"cd {HOME} && exec {shlex.join([PYTHON, *words])}"
    return ordinary_user.as_user(NUMBER, "env", "--ignore-environment", *settings, "sh", "-c", command)


def _space(pid: int) -> str | None:
    """The namespace of a process's id; None where the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
