"""A project in a folder whose path has a blank and a letter outside ASCII: pods, a launch over pdsh, compiled code."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full import ordinary_user
from tests.full.conftest import ROOT, TINY
from zeropods.measure.record import read_record

NAME = "my pods é"
SCRIPT = f"""
    "$PYTHON" -m zeropods pods up --count 2 && "$PYTHON" -m zeropods pods check &&
    "$PYTHON" -m zeropods launch --num-pods 2 -- textsql_train.py {" ".join(TINY)} --max_steps 2 --eval_steps 2 \\
        --deepspeed dsconfig/zero1.json --dataset_path "my data" --outputdir "runs/é 1"
    status=$?
    "$PYTHON" -m zeropods pods down
    exit $status
"""
COMPILED = """
from torch.utils.cpp_extension import load
from zeropods.programs import compile_in_turns
compile_in_turns()
print(load("tiny", ["tiny.cpp"], with_cuda=False).__name__)
"""
SOURCE = """
#include <Python.h>
static struct PyModuleDef tiny = {PyModuleDef_HEAD_INIT, "tiny"};
extern "C" PyObject *PyInit_tiny(void) { return PyModule_Create(&tiny); }
"""
ORDINARY, NUMBER = "ordinary-pod", "64321"
"""Not `nobody`: where systemd names accounts, sshd takes that one for locked."""


def as_ordinary_user(folder: Path, project: Path, name: str, script: str) -> list[str]:
    """The command that runs a shell's script as this user, for whom /mnt/NAME is the project."""
    view = ordinary_user.view(folder, ORDINARY, NUMBER, "/tmp", {name: project})
    variables = f"PYTHONPATH={ordinary_user.PACKAGES} HOME=/tmp"
    script_call = shlex.join(ordinary_user.as_user(NUMBER, "sh", "-c", script))
    return ["unshare", "--mount", "sh", "-c", f"{view}\nexport {variables}\nexec {script_call}"]


@pytest.fixture
def project(tmp_path: Path, prepared: Path) -> Iterator[Path]:
    """A copy of the project with a link to its environment, and with data; what it keeps elsewhere goes with it."""
    before = set(Path("/tmp").glob("zeropods-[0-9]*-*"))
    folder = tmp_path / NAME
    shutil.copytree(ROOT / "zeropods", folder / "zeropods", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "dsconfig", folder / "dsconfig")
    shutil.copytree(prepared, folder / "my data")
    for script in ("textsql_train.py", "worker_p.py"):
        shutil.copy(ROOT / script, folder)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    yield folder
    for kept in set(Path("/tmp").glob("zeropods-[0-9]*-*")) - before:
        assert kept.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(kept)


def run(argv: list[str], project: Path, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("ZEROPODS_HOME", "PYTHONPATH")}
    done = subprocess.run(
        argv, cwd=project, env={**kept, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def make_venv(folder: Path) -> None:
    """An environment of what lies where this user can read it."""
    folder.unlink()
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    links = {folder / "bin" / "python": f"{ordinary_user.PYTHON}/bin/python3", packages: ordinary_user.PACKAGES}
    for link, target in links.items():
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
    (folder / "pyvenv.cfg").write_text(f"home = {ordinary_user.PYTHON}/bin\n")


def test_pods_are_checked_and_train(project: Path, tmp_path: Path) -> None:
    """As an ordinary user, where root runs the tests and may become one."""
    if not ordinary_user.are_possible(NUMBER):
        said = run(["sh", "-c", SCRIPT], project, PYTHON=str(project / ".venv" / "bin" / "python"))
    else:
        make_venv(project / ".venv")
        subprocess.run(["chown", "-R", f"{NUMBER}:{NUMBER}", str(project)], check=True)
        inside = f"unset PYTHONPATH; cd '/mnt/{NAME}'; PYTHON=$PWD/.venv/bin/python; {SCRIPT}"
        said = run(as_ordinary_user(tmp_path, project, NAME, inside), project)
    record = read_record(project / "runs" / "é 1")
    assert (record.status, record.pods, record.steps) == ("ok", 2, 2)
    assert "deepspeed --hostfile" not in said


def test_code_is_compiled_against_a_torch_in_such_a_folder(project: Path) -> None:
    (project / "tiny.cpp").write_text(SOURCE)
    (project / "compiled.py").write_text(COMPILED)
    extensions = project / "torch extensions"
    extensions.mkdir()
    python = str(project / ".venv" / "bin" / "python")
    assert run([python, "compiled.py"], project, TORCH_EXTENSIONS_DIR=str(extensions)).endswith("tiny\n")
