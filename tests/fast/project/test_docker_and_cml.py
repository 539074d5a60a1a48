"""The project's file for Cloudera Machine Learning, and the image's recipe, as far as they can be
judged unbuilt."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dockerfile import Instruction, read_dockerfile
from zeropods.launch.command import SECRET_NAME
from zeropods.pods.preflight import TEMPORARY_BYTES
from zeropods.pods.start import POD_SECONDS
from zeropods.workshop import Workshop

ROOT = Path(__file__).resolve().parents[3]
MIRROR = "ZEROPODS_MIRROR"
OTHERS = (MIRROR, POD_SECONDS)
TOP = {
    "name",
    "description",
    "author",
    "date",
    "specification_version",
    "prototype_version",
    "shared_memory_limit",
    "environment_variables",
}
RESOURCES = {
    "name",
    "script",
    "kernel",
    "cpu",
    "memory",
    "gpu",
    "short_summary",
    "long_summary",
}
KEYS = {
    "run_job": {"type", "entity_label", "short_summary"},
    "create_job": {"type", "entity_label", *RESOURCES},
    "start_application": {"type", "subdomain", "bypass_authentication", *RESOURCES},
}
"""What the specification 1.0, or an AMP of Cloudera's own, has of each kind of task."""


@pytest.fixture(scope="module")
def project() -> Any:
    return yaml.safe_load((ROOT / ".project-metadata.yaml").read_text(encoding="utf-8"))


def of_kind(project: Any, kind: str) -> list[Any]:
    return [task for task in project["tasks"] if task["type"] == kind]


def settings() -> set[str]:
    """The variables that the notebooks' workshop reads."""
    names = re.findall(r'setting\("(\w+)"', inspect.getsource(Workshop))
    return {f"ZEROPODS_{name.upper()}" for name in names}


def files_in_git() -> set[str]:
    argv = ["git", "ls-files"]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return set(done.stdout.splitlines())


def test_it_has_the_keys_of_its_specification_and_values_of_their_kinds(project: Any) -> None:
    assert project.keys() == TOP | {"runtimes", "tasks"}
    assert project["specification_version"] == 1.0
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", project["date"])
    for task in project["tasks"]:
        assert task.keys() - {"arguments"} == KEYS[task["type"]], task
        for key in task.keys() & {"name", "short_summary", "long_summary"}:
            assert isinstance(task[key], str)
            assert 0 < len(task[key]) <= 1_024
        assert task.get("kernel", "python3") == "python3"
        assert not task.get("bypass_authentication")
        assert task.get("cpu", 1) > 0
        assert task.get("memory", 1) > 0
        assert task.get("gpu", 0) >= 0
        assert re.fullmatch(r"[a-z0-9_]+", task.get("entity_label", "a"))
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,62}", task.get("subdomain", "a"))


def test_every_script_is_in_the_repository(project: Any) -> None:
    scripts = {task["script"] for task in project["tasks"] if "script" in task}
    assert scripts
    assert scripts <= files_in_git()


def test_dependencies_come_first_applications_last_and_each_job_is_run_as_soon_as_it_is_made(
    project: Any,
) -> None:
    jobs = of_kind(project, "create_job")
    assert jobs[0]["script"] == "cml/install_dependencies.py"
    labels = [job["entity_label"] for job in jobs]
    assert len(set(labels)) == len(labels)
    expected = []
    for label in labels:
        expected += [("create_job", label), ("run_job", label)]
    expected += [("start_application", None)] * 2
    assert [(task["type"], task.get("entity_label")) for task in project["tasks"]] == expected


def test_the_notebooks_are_jobs_in_the_demo_s_order(project: Any) -> None:
    _, *jobs = of_kind(project, "create_job")
    demo = ast.parse((ROOT / "tools" / "demo.py").read_text())
    assigned = {}
    for node in demo.body:
        if isinstance(node, ast.Assign):
            assigned[ast.unparse(node.targets[0])] = node.value
    notebooks = list(ast.literal_eval(assigned["NOTEBOOKS"]))
    assert {job["script"] for job in jobs} == {"cml/run_notebook.py"}
    assert [job["arguments"] for job in jobs] == notebooks
    assert [job["entity_label"] for job in jobs] == notebooks


def test_its_variables_and_defaults_are_those_of_the_code(
    project: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = project["environment_variables"]
    assert settings()
    assert set(variables) == {*settings(), *OTHERS}
    assert all(variable.keys() == {"default", "description"} for variable in variables.values())
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    of_code = asdict(Workshop())
    for name, variable in variables.items():
        monkeypatch.setenv(name, variable["default"])
    assert asdict(Workshop()) == of_code
    expected = {}
    for key, value in of_code.items():
        expected[f"ZEROPODS_{key.upper()}"] = "" if value is None else str(value)
    defaults = {name: variable["default"] for name, variable in variables.items()}
    for name in OTHERS:
        del defaults[name]
    assert defaults == expected


def test_its_runtimes_are_the_editions_of_the_image_and_those_of_cloudera_that_the_page_names(project: Any) -> None:
    text = "\n".join(line.text for line in read_dockerfile(ROOT / "docker" / "Dockerfile"))
    [edition] = set(re.findall(r'ML_RUNTIME_EDITION="?(\w+)', text))
    [version] = set(re.findall(r"python(3\.\d+)-cuda", text))
    page = (ROOT / "docs" / "cml.md").read_text(encoding="utf-8")
    of_cloudera = re.findall(r"^\| (Standard|Nvidia GPU|Hardened) \|", page, re.MULTILINE)
    assert len(of_cloudera) == 3
    expected = []
    for name in (edition, *of_cloudera):
        for editor in ("JupyterLab", "PBJ Workbench"):
            expected.append({"editor": editor, "kernel": f"Python {version}", "edition": name})
    assert project["runtimes"] == expected


def test_sessions_have_shared_memory_enough_for_nccl_and_the_preflight(project: Any) -> None:
    assert project["shared_memory_limit"] * 1e9 > TEMPORARY_BYTES


# The scripts of the tasks.

SCRIPTS = ("install_dependencies", "run_notebook", "start_demo", "start_tensorboard")
WITHOUT_MAIN = """
import sys
source = open(sys.argv[1]).read()
exec(compile(source, "kernel", "exec"), {"__name__": "kernel"})
import os, zeropods
print(os.getcwd(), zeropods.__file__)
"""
"""Runs a script as a kernel does, without its path, and says where it is then."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_composable_amp_finds_its_folder_below_the_working_one(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "text2sql"
    folder.mkdir()
    (tmp_path / "another").mkdir()
    for part in ("cml", "zeropods"):
        (folder / part).symlink_to(ROOT / part)
    for working, composable in ((tmp_path, "true"), (folder, "true"), (folder, "")):
        environment = {**os.environ, "IS_COMPOSABLE": composable}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_MAIN, str(folder / "cml" / f"{name}.py")],
            cwd=working,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        assert done.stdout == f"{folder} {folder / 'zeropods' / '__init__.py'}\n"


def python_3_10() -> str | None:
    """A Python that is too old for this project; None where there is none."""
    candidates = [shutil.which("python3.10"), *Path.home().glob(".pyenv/versions/3.10.*/bin/python")]
    for candidate in candidates:
        if candidate is None:
            continue
        argv = [str(candidate), "-c", "pass"]
        if subprocess.run(argv, capture_output=True, check=False, timeout=240).returncode == 0:
            return str(candidate)
    return None


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_python_that_is_too_old_is_one_line(name: str) -> None:
    python = python_3_10()
    if python is None:
        pytest.skip("there is no Python 3.10")
    argv = [python, f"cml/{name}.py"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    line = "zeropods: Python 3.10: zeropods needs 3.11 or newer; choose a runtime with Python 3.11 or newer\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


# The image's recipe.

CUDA_OF_TORCH = {"2.13.0": "13.0"}
"""From PyPI's metadata of torch: 2.13.0 requires cuda-toolkit==13.0.3."""


@pytest.fixture(scope="module")
def image() -> list[Instruction]:
    return read_dockerfile(ROOT / "docker" / "Dockerfile")


def named(image: list[Instruction], *names: str, words: str = "") -> list[str]:
    """The texts of the instructions of some names that hold some words."""
    texts = []
    for instruction in image:
        if instruction.name in names and words in instruction.text:
            texts.append(instruction.text)
    assert texts, f"no {names} with {words!r}"
    return texts


def let_in(path: str) -> bool:
    """Whether .dockerignore lets a path into the build; its last line that matches decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch(path, pattern):
            allowed = line.startswith("!")
    return allowed


def test_what_the_build_copies_is_in_the_repository_and_nothing_else_gets_in(
    image: list[Instruction],
) -> None:
    copied = set[str]()
    for text in named(image, "COPY"):
        *words, _ = text.split()
        copied.update(word for word in words if not word.startswith("--"))
    assert copied <= files_in_git()
    assert all(map(let_in, copied))
    others = ["runs/a/record.json", ".zeropods/c/key", ".git/config", "README.md", ".netrc"]
    assert not any(map(let_in, others))


def test_the_last_user_is_the_one_of_cml_and_not_root(image: list[Instruction]) -> None:
    [added] = named(image, "RUN", words="useradd")
    assert "--uid 8536 --gid 8536" in added
    assert named(image, "USER")[-1] == "8536"


def test_packages_leave_neither_lists_nor_host_keys_nor_downloads(image: list[Instruction]) -> None:
    for text in named(image, "RUN", words="apt-get install"):
        assert text.count("apt-get install") == text.count("--no-install-recommends")
        assert "/var/lib/apt/lists/*" in text
    [text] = named(image, "RUN", words="openssh-server")
    assert text.index("rm -rf /etc/ssh/ssh_host_*") > text.rindex("apt-get install")
    installed = named(image, "RUN", words="pip install")
    assert all("--mount=type=cache,target=/root/.cache/pip" in text for text in installed)


def test_no_download_is_piped_into_a_shell(image: list[Instruction]) -> None:
    scripts = [path.read_text() for path in (ROOT / "docker").glob("*.sh")]
    for text in [*named(image, "RUN"), *scripts]:
        assert not re.search(r"(curl|wget)[^\n|]*\|\s*(sudo |ba)?sh", text), text


def test_the_cuda_of_the_image_and_of_slurm_s_is_torch_s(image: list[Instruction]) -> None:
    requirements = (ROOT / "requirements.txt").read_text()
    [torch] = re.findall(r"^torch==(\S+)$", requirements, re.MULTILINE)
    [argument] = named(image, "ARG", words="CUDA_VERSION=")
    assert re.findall(r'CUDA_VERSION:?="?([\d.]+)', argument) == [CUDA_OF_TORCH[torch]]
    pyxis = (ROOT / "slurm" / "setup-pyxis.sh").read_text()
    assert re.findall(r'"\$\{CUDA_VERSION:=([\d.]+)\}"', pyxis) == [CUDA_OF_TORCH[torch]]


def test_an_argument_is_known_in_every_stage_that_uses_it(image: list[Instruction]) -> None:
    known: dict[int, set[str]] = {}
    for line in image:
        names = known.setdefault(line.stage, {"PATH"})
        if line.name in ("ARG", "ENV", "LABEL"):
            names |= set(re.findall(r"(?:^|\s)(\w+)(?==|$)", line.text))
        usable = set(names)
        if line.name == "FROM":
            usable |= known[0]
        if line.name != "RUN":
            used = set(re.findall(r"\$\{?(\w+)", line.text))
            assert used <= usable, line


def test_no_variable_of_the_build_sounds_like_a_secret_and_no_key_is_in_it(
    image: list[Instruction],
) -> None:
    names = set[str]()
    for text in named(image, "ENV", "ARG", "LABEL"):
        names.update(re.findall(r"([\w.-]+)=", text))
    assert names
    assert not [name for name in names if SECRET_NAME.search(name)]
    for path in (ROOT / "docker").iterdir():
        assert "-----BEGIN" not in path.read_text(), path
