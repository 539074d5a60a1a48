"""Install what zeropods needs into this Python, and compile DeepSpeed's operations; what is there already stays.

    python cml/install_dependencies.py
    python cml/install_dependencies.py --no-operations

In CML packages go to ~/.local, which the project's sessions, jobs, applications and workers share. The image of
docker/ has them all. Elsewhere `make setup` is the way: it makes an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, os.getcwd())

from zeropods.cml_task import TaskError, conclude, project, run_task, task_arguments
from zeropods.errors import UserError

PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")


def main() -> None:
    """Packages, then the project itself, then DeepSpeed's operations."""
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
    if not arguments.no_operations:
        compile_operations()


def read_pins(requirements: Path) -> dict[str, str]:
    """Names and versions of a requirements file whose lines all are `NAME==VERSION` or `NAME[EXTRA]==VERSION`."""
    pins = {}
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)", line.strip())
            if match is None:
                raise UserError(f"{requirements}:{number}: {line!r}; expected NAME==VERSION")
            pins[match[1]] = match[2]
    return pins


def installed(name: str) -> str | None:
    """The version that is there, without what a builder adds (`2.13.0+cpu`); None if there is none."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def install_project() -> None:
    """Make `import zeropods` work from any folder: a notebook's is not the project's."""
    if installed("zeropods") is not None:
        print("zeropods is there", flush=True)
        return
    run_task(*PIP, "--no-deps", "--no-build-isolation", "--editable", ".")


def compile_operations() -> None:
    """Compile once what the first training run would compile in the midst of what it measures."""
    try:
        run_task("tools/compile_ops.py")
    except TaskError as error:
        print(f"{error}: DeepSpeed's operations are not compiled; offload to the CPU will not run", flush=True)
        return
    print("DeepSpeed's operations are compiled", flush=True)


if __name__ == "__main__":
    conclude(main)
