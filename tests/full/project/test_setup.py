"""`tools/setup` without a network, in a project of its own: a few files, and wheels of torch made by hand."""

import os
import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.full.launches import ROOT, until
from zeropods.pods.processes import find_process, is_alive

PINNED = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch=="))
VERSION = PINNED.removeprefix("torch==")
BACKEND = """\
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "project-1-py3-none-any.whl"
    files = {"METADATA": "Metadata-Version: 2.1\\nName: project\\nVersion: 1\\n",
             "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n", "RECORD": ""}
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"project-1.dist-info/{file}", text)
    return name
"""
"""What builds the project without a package from anywhere."""
FILES = {
    "requirements.txt": f"{PINNED}\n",
    "requirements-dev.txt": "",
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "backend.py": BACKEND,
    "zeropods/__init__.py": "",
    "tools/debian-packages.txt": "bash command:bash runs set-up\n",
    "tools/compile_ops.py": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("setup", "torch_build.py"):
        shutil.copy(ROOT / "tools" / name, folder / "tools")
    return folder


def a_wheel(folder: Path, name: str, version: str) -> Path:
    """A folder with a package that says its version and does nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{information}/METADATA", metadata)
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return folder


def set_up(project: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    """Set-up to its end."""
    with begun_set_up(project, **variables) as begun:
        output, errors = begun.communicate(timeout=600)
    return subprocess.CompletedProcess(begun.args, begun.returncode, output, errors)


def begun_set_up(project: Path, **variables: object) -> subprocess.Popen[str]:
    """Set-up where pip reaches no index but those that are named."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    environment |= {name: str(value) for name, value in variables.items()}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [project / "tools" / "setup"], cwd=project.parent, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def torch_of(project: Path) -> str:
    call = [project / ".venv" / "bin" / "python", "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(call, capture_output=True, text=True, check=True, timeout=240).stdout.strip()


def test_torch_is_taken_from_the_folder_that_is_named_and_stays(project: Path, tmp_path: Path) -> None:
    a_wheel(tmp_path / "first", "torch", f"{VERSION}+first")
    a_wheel(tmp_path / "second", "torch", f"{VERSION}+second")
    made = set_up(project, TORCH_WHEELS="first")
    assert made.returncode == 0, made.stdout + made.stderr
    assert f"setup: torch from {tmp_path}/first: " in made.stdout and "setup: complete after" in made.stdout
    assert torch_of(project) == f"{VERSION}+first"
    # Without a word of torch, or with the same one, there is nothing to do.
    for same in ({}, {"TORCH_WHEELS": tmp_path / "first"}):
        again = set_up(project, **same)
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    other = set_up(project, TORCH_WHEELS=tmp_path / "second")
    assert other.returncode == 0 and torch_of(project) == f"{VERSION}+second", other.stdout + other.stderr


def test_a_place_without_the_pinned_torch_is_refused_in_a_line(project: Path, tmp_path: Path) -> None:
    nowhere = set_up(project, TORCH_WHEELS=tmp_path / "nowhere")
    assert nowhere.returncode == 1 and not (project / ".venv").exists()
    assert nowhere.stderr.startswith(f"setup: TORCH_WHEELS={tmp_path}/nowhere: no such folder; give a folder of ")
    old = a_wheel(tmp_path / "old", "torch", "1.0")
    refused = set_up(project, TORCH_WHEELS=old)
    *_, last = refused.stderr.splitlines()
    assert refused.returncode == 1 and last.startswith(f"setup: TORCH_WHEELS={old}: pip found no {PINNED} for this ")
    assert not (project / ".venv" / ".setup-torch").exists()


# DeepSpeed's operations are compiled beside the other packages.

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="nothing is compiled without g++")
FAILS_ONCE = """\
from pathlib import Path
import sys

tries = Path("tries")
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
sys.exit(len(tries.read_text()) < 2)
"""
LASTS = """\
from pathlib import Path
import os, time

Path("pid.new").write_text(str(os.getpid()))
Path("pid.new").rename("pid")
time.sleep(600)
"""
WAITS = """\
from pathlib import Path
import time

while not Path("pid").exists():
    time.sleep(0.05)
raise SystemExit("cannot be built")
"""


@needs_compiler
def test_operations_that_fail_beside_pip_are_compiled_once_more(project: Path, tmp_path: Path) -> None:
    (project / "tools" / "compile_ops.py").write_text(FAILS_ONCE)
    made = set_up(project, TORCH_WHEELS=a_wheel(tmp_path / "wheels", "torch", VERSION))
    assert (made.returncode, made.stderr) == (0, ""), made.stdout + made.stderr
    assert (project / "tries").read_text() == "xx" and "setup: complete after" in made.stdout


@needs_compiler
def test_what_compiles_ends_where_the_packages_fail(project: Path, tmp_path: Path) -> None:
    (project / "tools" / "compile_ops.py").write_text(LASTS)
    (project / "backend.py").write_text(WAITS)
    made = set_up(project, TORCH_WHEELS=a_wheel(tmp_path / "wheels", "torch", VERSION))
    assert made.returncode == 1 and "setup: pip failed; mend what it says above" in made.stderr
    process = find_process(int((project / "pid").read_text()))
    assert process is None or not is_alive(process)


@needs_compiler
def test_what_compiles_ends_with_set_up_that_waits_for_it(project: Path, tmp_path: Path) -> None:
    (project / "tools" / "compile_ops.py").write_text(LASTS)
    wheels = a_wheel(tmp_path / "wheels", "torch", VERSION)
    with begun_set_up(project, TORCH_WHEELS=wheels) as begun:
        until((project / "pid").exists)
        assert begun.stdout is not None
        assert any("operations, begun before" in line for line in begun.stdout)
        process = find_process(int((project / "pid").read_text()))
        begun.terminate()
        assert begun.wait(timeout=60) != 0
    assert process is None or not is_alive(process)


HAS_GPU = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
IS_USUAL = platform.machine() == "x86_64" and not HAS_GPU


@pytest.mark.skipif(not IS_USUAL, reason="libraries for GPUs are welcome here, or do not come")
@pytest.mark.parametrize(("build", "is_announced"), [("", True), ("+cpu", False)])
def test_libraries_for_gpus_are_announced_where_there_is_no_gpu(
    build: str, is_announced: bool, project: Path, tmp_path: Path
) -> None:
    wheels = a_wheel(tmp_path / "wheels", "torch", VERSION)
    a_wheel(wheels, "torch", f"{VERSION}{build}")
    made = set_up(project, PIP_FIND_LINKS=wheels, PIP_NO_INDEX=1)
    assert made.returncode == 0 and torch_of(project) == f"{VERSION}{build}", made.stdout + made.stderr
    before, _, _ = made.stdout.partition("setup: torch and DeepSpeed")
    announced = (f"there is no GPU here, but torch {VERSION} brings ", "make setup TORCH_WHEELS=")
    assert [words in before for words in announced] == [is_announced] * 2
