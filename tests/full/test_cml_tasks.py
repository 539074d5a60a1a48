"""The scripts of `cml/`, run as CML runs them: statement by statement in a kernel, in the project's folder."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.full.launches import ROOT, until

SECONDS = 120.0
WHEEL = {
    "METADATA": "Metadata-Version: 2.1\nName: madeup\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}

CONTROL = (
    "Package: pdsh\nVersion: 9.9\nArchitecture: all\nMaintainer: nobody <nobody@localhost>\nDescription: made up\n"
)


class Kernel:
    """A kernel as CML gives one to a job: its arguments in JOB_ARGUMENTS, its folder the project's."""

    def __init__(self, project: Path, **variables: object) -> None:
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        environment.pop("PYTHONPATH", None)
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel(
            startup_timeout=SECONDS, kernel_name="python3", cwd=str(project), env=environment,
            extra_arguments=["--log-level=ERROR"],
        )  # fmt: skip
        self.project = project
        self.said = ""
        self.error = ""

    def run(self, script: str) -> bool:
        """Execute a script's top-level statements one by one, until one fails; returns whether none did."""
        source = (self.project / script).read_text(encoding="utf-8")
        for statement in ast.parse(source).body:
            code = ast.get_source_segment(source, statement)
            answer = self.client.execute_interactive(code, output_hook=self._hear, timeout=SECONDS)
            if answer["content"]["status"] != "ok":
                return False
        return True

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            self.said += message["content"]["text"]
        elif message["msg_type"] == "error":
            self.error = f"{message['content']['ename']}: {message['content']['evalue']}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, whose notebooks are one that works and one that does not."""
    folder = tmp_path_factory.mktemp("cdsw")
    for name in ("cml", "tools", "zeropods"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "notebooks").mkdir()
    for name, source in (("good", "import zeropods\nprint(zeropods.__file__)"), ("bad", "1 / 0")):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        nbformat.write(notebook, folder / "notebooks" / f"{name}.ipynb")
    return folder


@pytest.fixture
def kernels(project: Path) -> Iterator[Callable[..., Kernel]]:
    """Start kernels in the project's folder."""
    started: list[Kernel] = []

    def start(**variables: object) -> Kernel:
        started.append(Kernel(project, **variables))
        return started[-1]

    yield start
    for kernel in started:
        kernel.close()


Start = Callable[..., Kernel]


def outputs(notebook: Path) -> str:
    cells = nbformat.read(notebook, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def test_a_job_executes_the_notebook_of_its_arguments_with_this_project_s_code(kernels: Start, project: Path) -> None:
    kernel = kernels(JOB_ARGUMENTS="good.ipynb")
    assert kernel.run("cml/run_notebook.py"), kernel.error
    assert "good: " in kernel.said
    assert outputs(project / "build" / "notebooks" / "good.ipynb").strip() == str(project / "zeropods" / "__init__.py")


def test_an_error_cell_fails_the_job(kernels: Start) -> None:
    kernel = kernels(JOB_ARGUMENTS="bad")
    assert not kernel.run("cml/run_notebook.py")
    assert kernel.error == "TaskError: tools/demo.py bad: ended with status 1; what it said is above"
    assert "ZeroDivisionError: division by zero; see build/notebooks/bad.html" in kernel.said


def test_where_all_is_there_the_first_job_installs_nothing(kernels: Start, project: Path) -> None:
    kernel = kernels(JOB_ARGUMENTS="--no-operations")
    assert kernel.run("cml/install_dependencies.py"), kernel.error
    assert kernel.said.endswith(
        "packages of requirements.txt are there\nzeropods is there\npdsh is there\nsshd is there\n"
    )
    assert "to install" not in kernel.said


@pytest.mark.parametrize("is_there", [True, False])
def test_a_missing_package_is_installed_or_ends_the_job(project: Path, tmp_path: Path, is_there: bool) -> None:
    """Pip looks into a folder alone, and installs there."""
    if is_there:
        with zipfile.ZipFile(tmp_path / "madeup-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("madeup.py", "")
            for name, text in WHEEL.items():
                wheel.writestr(f"madeup-1.0.dist-info/{name}", text)
    asking = tmp_path / "project"
    asking.mkdir()
    for name in ("cml", "zeropods"):
        (asking / name).symlink_to(project / name)
    (asking / "requirements.txt").write_text("# pinned\nmadeup==1.0\n")
    pip = {"NO_INDEX": "1", "FIND_LINKS": tmp_path, "TARGET": tmp_path / "target", "CONFIG_FILE": os.devnull}
    environment = {**os.environ, **{f"PIP_{name}": str(value) for name, value in pip.items()}}
    argv = [sys.executable, "cml/install_dependencies.py", "--no-operations"]
    done = subprocess.run(
        argv, cwd=asking, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.stdout.startswith("1 of 1 packages to install: madeup\n")
    assert (tmp_path / "target" / "madeup.py").is_file() == is_there
    if is_there:
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode == 1 and "No matching distribution found for madeup==1.0" in done.stdout
        assert done.stderr.startswith("zeropods: -m pip install") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_without_root_pdsh_is_unpacked_from_the_archive_of_packages(
    project: Path, tmp_path: Path, is_there: bool
) -> None:
    """An archive of one package, and a PATH on which there is no pdsh."""
    content = tmp_path / "content"
    for name, text in {
        "usr/bin/pdsh.bin": "#!/bin/sh\necho modules $PDSH_MODULE_DIR $*\n",
        "DEBIAN/control": CONTROL,
    }.items():
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        (content / name).write_text(text)
    (content / "usr/bin/pdsh.bin").chmod(0o755)
    (tmp_path / "archive").mkdir()
    package = tmp_path / "archive" / "pdsh_9.9_all.deb"
    subprocess.run(["dpkg-deb", "--build", content, package], check=True, capture_output=True)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    index = f"{CONTROL}Filename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {digest}\n"
    (package.parent / "Packages").write_text(index if is_there else "")
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{package.parent} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{tmp_path}/sources.list"; Dir::Etc::SourceParts "-"; APT::Sandbox::User "root";'
        f'Dir::State::status "{tmp_path}/status";'
    )
    (tmp_path / "status").touch()
    path = tmp_path / "bin"
    path.mkdir()
    for program in ("apt-get", "dpkg", "dpkg-deb", "tar", "sh"):
        (path / program).symlink_to(str(shutil.which(program)))
    environment = {
        **os.environ, "PATH": str(path), "HOME": str(tmp_path / "home"), "APT_CONFIG": str(tmp_path / "apt.conf"),
    }  # fmt: skip
    argv = [sys.executable, "cml/install_dependencies.py", "--no-operations"]
    done = subprocess.run(
        argv, cwd=project, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    script = tmp_path / "home/.local/bin/pdsh"
    if is_there:
        assert f"pdsh is installed as {script}\n" in done.stdout
        said = subprocess.run([script, "-w", "a b"], capture_output=True, text=True, check=True).stdout
        assert said == f"modules {tmp_path}/home/.local/share/zeropods/pdsh/usr/lib/pdsh -w a b\n"
    else:
        assert "pdsh: cannot be installed without root (E: " in done.stdout and not script.exists()


def test_a_task_outside_the_project_s_folder_is_one_line(project: Path, tmp_path: Path) -> None:
    argv = [sys.executable, project / "cml" / "start_demo.py"]
    environment = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and f"zeropods: {tmp_path}: not the project's folder" in done.stderr


def is_served(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError):
        return False


def test_an_application_is_served_until_its_kernel_is_interrupted(kernels: Start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kernel = kernels(CDSW_APP_PORT=port)
    running = threading.Thread(target=kernel.run, args=("cml/start_tensorboard.py",), daemon=True)
    running.start()
    until(lambda: is_served(port) or not running.is_alive(), SECONDS)
    assert is_served(port), kernel.said
    kernel.manager.interrupt_kernel()
    running.join(SECONDS)
    assert kernel.error.startswith("KeyboardInterrupt") and not is_served(port)
