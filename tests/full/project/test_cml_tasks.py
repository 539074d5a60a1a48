"""The scripts of `cml/`: tasks as CML runs them, statement by statement in a kernel; an application's begin and end."""

import ast
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.full.clusters import listens, processes_naming
from tests.full.launches import ROOT, until
from zeropods.programs import free_port

SECONDS = 600.0
TENSORBOARD = ROOT / "cml" / "run_tensorboard.py"
DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: madeup\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}
CONTROL = "Package: pdsh\nVersion: 9.9\nArchitecture: all\nMaintainer: a test <a@b.c>\nDescription: made up\n"


def executed(project: Path, script: str, **variables: object) -> tuple[str, str]:
    """What a script's top-level statements said in a kernel of the project's folder, and the error that ended them."""
    source = (project / script).read_text(encoding="utf-8")
    statements = [ast.get_source_segment(source, node) for node in ast.parse(source).body]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(statement) for statement in statements])
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    environment.pop("PYTHONPATH", None)
    place = {"metadata": {"path": str(project)}}
    client = NotebookClient(notebook, timeout=SECONDS, startup_timeout=SECONDS, resources=place, kernel_name="python3")
    error = ""
    try:
        client.execute(env=environment)
    except CellExecutionError as failed:
        error = f"{failed.ename}: {failed.evalue}"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs), error


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


def dependencies(folder: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    """The first job, in a folder and with further environment variables."""
    argv = [sys.executable, "cml/install_dependencies.py", "--no-operations"]
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_a_job_executes_the_notebook_of_its_arguments_with_this_project_s_code(project: Path) -> None:
    said, error = executed(project, "cml/run_notebook.py", JOB_ARGUMENTS="good.ipynb")
    assert "good: " in said and not error
    (cell,) = nbformat.read(project / "build" / "notebooks" / "good.ipynb", as_version=4).cells
    assert cell.outputs[0].text.strip() == str(project / "zeropods" / "__init__.py")


def test_an_error_cell_fails_the_job(project: Path) -> None:
    said, error = executed(project, "cml/run_notebook.py", JOB_ARGUMENTS="bad")
    assert error == "TaskError: tools/demo.py bad: ended with status 1; see its output above"
    assert "ZeroDivisionError: division by zero; see build/notebooks/bad.html" in said


def test_where_all_is_there_the_first_job_installs_nothing(project: Path) -> None:
    said, error = executed(project, "cml/install_dependencies.py", JOB_ARGUMENTS="--no-operations")
    assert said.endswith("packages of requirements.txt are there\nzeropods is there\npdsh is there\nsshd is there\n")
    assert "to install" not in said and not error


@pytest.mark.parametrize("is_there", [True, False])
def test_a_missing_package_is_installed_or_ends_the_job(project: Path, tmp_path: Path, is_there: bool) -> None:
    """Pip looks into a folder alone, and installs there."""
    if is_there:
        with zipfile.ZipFile(tmp_path / "madeup-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("madeup.py", "")
            for name, text in DIST_INFO.items():
                wheel.writestr(f"madeup-1.0.dist-info/{name}", text)
    asking = tmp_path / "project"
    asking.mkdir()
    for name in ("cml", "zeropods"):
        (asking / name).symlink_to(project / name)
    (asking / "requirements.txt").write_text("# pinned\nmadeup==1.0\n")
    index = {"PIP_NO_INDEX": 1, "PIP_FIND_LINKS": tmp_path, "PIP_CONFIG_FILE": os.devnull}
    done = dependencies(asking, PIP_TARGET=tmp_path / "target", **index)
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
    program, control = tmp_path / "content/usr/bin/pdsh.bin", tmp_path / "content/DEBIAN/control"
    for path, text in ((program, "#!/bin/sh\necho modules $PDSH_MODULE_DIR $*\n"), (control, CONTROL)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    program.chmod(0o755)
    (tmp_path / "archive").mkdir()
    package = tmp_path / "archive" / "pdsh_9.9_all.deb"
    subprocess.run(["dpkg-deb", "--build", tmp_path / "content", package], check=True, capture_output=True)
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
    done = dependencies(project, PATH=path, HOME=tmp_path / "home", APT_CONFIG=tmp_path / "apt.conf")
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
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and f"zeropods: {tmp_path}: not the project's folder" in done.stderr


def fetched(port: int, path: str = "") -> str:
    """What an application answers; nothing while it does not."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
            return str(answer.read(), "utf-8")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""


def test_an_application_is_served_until_its_kernel_is_interrupted(project: Path) -> None:
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(executed, project, "cml/start_tensorboard.py", CDSW_APP_PORT=port)
        until(lambda: fetched(port) or running.done(), SECONDS)
        assert fetched(port)
        alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        (kernel,) = [child for child in alive if "ipykernel_launcher" in child.cmdline()]
        kernel.send_signal(signal.SIGINT)
        _, error = running.result(SECONDS)
    assert error.startswith("KeyboardInterrupt") and not fetched(port)


def refused(application: Path, *arguments: object, **environment: str) -> str:
    """What an application of CML says where it cannot start."""
    command, whole = [sys.executable, application, *map(str, arguments)], {**os.environ, **environment}
    done = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_application_shows_runs_that_begin_meanwhile_and_leaves_nothing(
    trained: Path, tmp_path: Path, number: int, status: int
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "tensorboard").symlink_to(trained / "tensorboard")
    port = free_port("127.0.0.1")
    command = [sys.executable, str(TENSORBOARD), "--runs", str(tmp_path / "runs"), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as application:
        try:
            until(lambda: "first/tensorboard/train" in fetched(port, "data/runs"), SECONDS)
            shutil.copytree(trained / "tensorboard", tmp_path / "runs" / "second" / "tensorboard")
            until(lambda: "second/tensorboard/train" in fetched(port, "data/runs"), SECONDS)
            curve = json.loads(fetched(port, "data/plugin/scalars/scalars?run=second/tensorboard/train&tag=loss"))
            assert [step for _, step, _ in curve] == [1, 2, 3, 4, 5, 6]
        finally:
            application.send_signal(number)
            said, _ = application.communicate(timeout=240)
    assert application.returncode == status and "Traceback" not in said, said
    until(lambda: not listens("127.0.0.1", port) and not processes_naming(tmp_path))


def test_it_says_in_one_line_why_it_cannot_start_and_so_does_the_demo(tmp_path: Path) -> None:
    for application in (TENSORBOARD, TENSORBOARD.with_name("run_demo.py")):
        said = "no port: CDSW_APP_PORT is not set, as it is in a CML application; give --port"
        assert refused(application) == f"zeropods: {said}\n"
    assert "no such folder" in refused(TENSORBOARD, "--runs", tmp_path / "none", "--port", free_port("127.0.0.1"))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        number = busy.getsockname()[1]
        busy_line = f"zeropods: port {number}: Address already in use; give another with --port\n"
        assert refused(TENSORBOARD, CDSW_APP_PORT=str(number)) == busy_line
