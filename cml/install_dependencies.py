"""Install what zeropods needs, without root; what is already installed stays as it is.

Packages of requirements.txt, DeepSpeed's compiled operations, and the programs for several pods (pdsh, sshd).

    python cml/install_dependencies.py
    python cml/install_dependencies.py --no-operations

In CML, packages go to ~/.local, which the project's sessions, jobs, applications and workers share. The image of
docker/ has them all; Cloudera's own editions lack pdsh, which is unpacked there from Debian's or Ubuntu's archive.
Elsewhere use `make setup`, which makes an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if os.environ.get("IS_COMPOSABLE"):
    # A composable AMP lies in a folder of its own below the working one.
    for module in Path.cwd().glob("*/zeropods/cml_task.py"):
        os.chdir(module.parents[1])
sys.path.insert(0, os.getcwd())

from zeropods.cml_task import TaskError, conclude, project, run_task, task_arguments
from zeropods.errors import UserError
from zeropods.programs import find_program

PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
PROGRAMS = {"pdsh": ("pdsh", "usr/bin/pdsh.bin"), "sshd": ("openssh-server", "usr/sbin/sshd")}
"""Programs that several pods need besides Python packages: the Debian package of each, and the program in it."""
WRAPPER = """#!/bin/sh
export LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}} PDSH_MODULE_DIR={libraries}/pdsh
exec {program} "$@"
"""


def main() -> None:
    """Install the packages, then the project itself and the programs, then compile DeepSpeed's operations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--no-operations", action="store_true", help="compile nothing: training does so where it must")
    arguments = parser.parse_args(task_arguments())
    pinned = read_pins(project() / "requirements.txt")
    missing = {name: wanted for name, wanted in pinned.items() if installed(name) != wanted}
    if missing:
        print(f"{len(missing)} of {len(pinned)} packages to install: {', '.join(missing)}", flush=True)
        run_task(*PIP, "-r", "requirements.txt")
    print(f"{len(pinned)} packages of requirements.txt are there", flush=True)
    install_project()
    for program in PROGRAMS:
        install_program(program, Path.home() / ".local")
    if not arguments.no_operations:
        compile_operations()


def read_pins(requirements: Path) -> dict[str, str]:
    """Names and versions in a requirements file whose lines are all `NAME==VERSION` or `NAME[EXTRA]==VERSION`."""
    pins = {}
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)", line.strip())
            if match is None:
                raise UserError(f"{requirements}:{number}: {line!r}; expected NAME==VERSION")
            pins[match[1]] = match[2]
    return pins


def installed(name: str) -> str | None:
    """The installed version, without what a builder adds (`2.13.0+cpu`); None if the package is not installed."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def install_project() -> None:
    """Make `import zeropods` work from any folder: a notebook's folder is not the project's."""
    if installed("zeropods") is not None:
        print("zeropods is there", flush=True)
        return
    run_task(*PIP, "--no-deps", "--no-build-isolation", "--editable", ".")


def install_program(name: str, prefix: Path) -> None:
    """Unpack a program of the distribution's archive below `prefix`, without root, and make `prefix/bin/NAME` start it.

    apt-get verifies what it fetches against the archive's signed index, as it does for root.
    """
    if find_program(name) is not None:
        print(f"{name} is there", flush=True)
        return
    package, program = PROGRAMS[name]
    folder = prefix / "share" / "zeropods" / package
    try:
        unpack_package(package, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        print(f"{name}: cannot be installed without root ({told}); training on several pods will not run", flush=True)
        return
    libraries = next(folder.glob("usr/lib/*-linux-gnu*"), folder / "usr/lib")
    script = prefix / "bin" / name
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(WRAPPER.format(libraries=libraries, program=folder / program), encoding="utf-8")
    script.chmod(0o755)
    print(f"{name} is installed as {script}", flush=True)


def unpack_package(package: str, folder: Path) -> None:
    """Fetch a Debian package and the packages it needs that are not installed, and unpack them into a folder."""
    lists, cache = folder / "apt/lists", folder / "apt/cache"
    for each in (lists / "partial", cache / "archives/partial"):
        each.mkdir(parents=True, exist_ok=True)
    own = ("-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}", "-o", "Debug::NoLocking=1")

    def call(*words: str) -> str:
        told = subprocess.run(words, cwd=cache, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return told.stdout

    call("apt-get", *own, "-qq", "update")
    simulated = call("apt-get", *own, "--simulate", "--no-install-recommends", "install", package)
    needed = {package, *re.findall(r"^Inst (\S+)", simulated, re.MULTILINE)}
    call("apt-get", *own, "-qq", "download", *sorted(needed))
    for archive in sorted(cache.glob("*.deb")):
        call("dpkg", "--extract", str(archive), str(folder))


def compile_operations() -> None:
    """Compile what the first training run would otherwise compile in the middle of what it measures."""
    try:
        run_task("tools/compile_ops.py")
    except TaskError as error:
        print(f"{error}: DeepSpeed's operations are not compiled; offload to the CPU will not run", flush=True)
        return
    print("DeepSpeed's operations are compiled", flush=True)


if __name__ == "__main__":
    conclude(main)
