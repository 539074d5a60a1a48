"""The project's file for Cloudera Machine Learning, and the image's recipe, as far as they can be judged unbuilt."""

import ast
import inspect
import re
import subprocess
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dockerfile import Instruction, read_dockerfile
from zeropods.launch.command import SECRET_NAME
from zeropods.workshop import Workshop

ROOT = Path(__file__).resolve().parents[2]
MIRROR = "ZEROPODS_MIRROR"
TOP = {"name", "description", "author", "date", "specification_version", "prototype_version", "environment_variables"}
RESOURCES = {"name", "script", "kernel", "cpu", "memory", "gpu", "short_summary", "long_summary"}
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
    return {f"ZEROPODS_{name.upper()}" for name in re.findall(r'setting\("(\w+)"', inspect.getsource(Workshop))}


def test_it_has_the_keys_of_its_specification_and_values_of_their_kinds(project: Any) -> None:
    assert project.keys() == TOP | {"runtimes", "tasks"} and project["specification_version"] == 1.0
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", project["date"])
    for task in project["tasks"]:
        assert task.keys() - {"arguments"} == KEYS[task["type"]], task
        texts = [task[key] for key in task.keys() & {"name", "short_summary", "long_summary"}]
        assert all(isinstance(text, str) and 0 < len(text) <= 1_024 for text in texts)
        assert task.get("kernel", "python3") == "python3" and not task.get("bypass_authentication")
        assert all(task.get(key, 1) > 0 for key in ("cpu", "memory")) and task.get("gpu", 0) >= 0
        assert re.fullmatch(r"[a-z0-9_]+", task.get("entity_label", "a"))
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,62}", task.get("subdomain", "a"))


def test_every_script_is_in_the_repository(project: Any) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240)
    scripts = {task["script"] for task in project["tasks"] if "script" in task}
    assert scripts and scripts <= set(listed.stdout.splitlines())


def test_dependencies_come_first_applications_last_and_each_job_is_run_as_soon_as_it_is_made(project: Any) -> None:
    jobs = of_kind(project, "create_job")
    labels = [(task["type"], task.get("entity_label")) for task in project["tasks"]]
    made = [(kind, job["entity_label"]) for job in jobs for kind in ("create_job", "run_job")]
    assert labels == [*made, *[("start_application", None)] * 2] and len(set(made)) == len(made)
    assert jobs[0]["script"] == "cml/install_dependencies.py"


def test_the_notebooks_are_jobs_in_the_demo_s_order(project: Any) -> None:
    _, *jobs = of_kind(project, "create_job")
    demo = ast.parse((ROOT / "tools" / "demo.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in demo.body if isinstance(node, ast.Assign)}
    notebooks = [*ast.literal_eval(assigned["NOTEBOOKS"])]
    assert {job["script"] for job in jobs} == {"cml/run_notebook.py"}
    assert [job["arguments"] for job in jobs] == [job["entity_label"] for job in jobs] == notebooks


def test_its_variables_and_defaults_are_those_of_the_code(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = project["environment_variables"]
    assert settings() and set(variables) == settings() | {MIRROR}
    assert all(variable.keys() == {"default", "description"} for variable in variables.values())
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    own = asdict(Workshop())
    for name, variable in variables.items():
        monkeypatch.setenv(name, variable["default"])
    assert asdict(Workshop()) == own
    said = {name: variable["default"] for name, variable in variables.items() if name != MIRROR}
    assert said == {f"ZEROPODS_{key.upper()}": "" if value is None else str(value) for key, value in own.items()}


def test_its_runtimes_are_the_editions_of_the_image(project: Any) -> None:
    text = "\n".join(line.text for line in read_dockerfile(ROOT / "docker" / "Dockerfile"))
    [edition] = set(re.findall(r'ML_RUNTIME_EDITION="?(\w+)', text))
    [kernel] = {f"Python {found}" for found in re.findall(r"python(3\.\d+)-cuda", text)}
    expected = [{"editor": each, "kernel": kernel, "edition": edition} for each in ("JupyterLab", "PBJ Workbench")]
    assert project["runtimes"] == expected


# The image's recipe.

CUDA_OF_TORCH = {"2.13.0": "13.0"}
"""From PyPI's metadata of torch: 2.13.0 requires cuda-toolkit==13.0.3."""


@pytest.fixture(scope="module")
def image() -> list[Instruction]:
    return read_dockerfile(ROOT / "docker" / "Dockerfile")


def named(image: list[Instruction], *names: str, words: str = "") -> list[str]:
    """The texts of the instructions of some names that hold some words."""
    found = [instruction.text for instruction in image if instruction.name in names and words in instruction.text]
    assert found, f"no {names} with {words!r}"
    return found


def let_in(path: str) -> bool:
    """Whether .dockerignore lets a path into the build; its last line that matches decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch(path, pattern):
            allowed = line.startswith("!")
    return allowed


def test_what_the_build_copies_is_in_the_repository_and_nothing_else_gets_in(image: list[Instruction]) -> None:
    words = [text.split()[:-1] for text in named(image, "COPY")]
    copied = {word for line in words for word in line if not word.startswith("--")}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240)
    assert copied <= set(listed.stdout.splitlines()) and all(map(let_in, copied))
    assert not any(map(let_in, ["runs/a/record.json", ".zeropods/c/key", ".git/config", "README.md", ".netrc"]))


def test_the_last_user_is_the_one_of_cml_and_not_root(image: list[Instruction]) -> None:
    [made] = named(image, "RUN", words="useradd")
    assert named(image, "USER")[-1] == "8536" and "--uid 8536 --gid 8536" in made


def test_packages_leave_neither_lists_nor_host_keys_nor_downloads(image: list[Instruction]) -> None:
    for text in named(image, "RUN", words="apt-get install"):
        assert text.count("apt-get install") == text.count("--no-install-recommends")
        assert "/var/lib/apt/lists/*" in text
    [text] = named(image, "RUN", words="openssh-server")
    assert text.index("rm -rf /etc/ssh/ssh_host_*") > text.rindex("apt-get install")
    installed = named(image, "RUN", words="pip install")
    assert all("--mount=type=cache,target=/root/.cache/pip" in text for text in installed)


def test_no_download_is_piped_into_a_shell(image: list[Instruction]) -> None:
    texts = [*named(image, "RUN"), *(path.read_text() for path in (ROOT / "docker").glob("*.sh"))]
    assert not [text for text in texts if re.search(r"(curl|wget)[^\n|]*\|\s*(sudo |ba)?sh", text)]


def test_the_cuda_of_the_image_and_of_slurm_s_is_torch_s(image: list[Instruction]) -> None:
    found = [re.findall(r'CUDA_VERSION:?="?([\d.]+)', text) for text in named(image, "ARG", words="CUDA_VERSION=")]
    found.append(re.findall(r'"\$\{CUDA_VERSION:=([\d.]+)\}"', (ROOT / "slurm" / "setup-pyxis.sh").read_text()))
    [torch] = re.findall(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert found == [[CUDA_OF_TORCH[torch]]] * 2


def test_an_argument_is_known_in_every_stage_that_uses_it(image: list[Instruction]) -> None:
    known: dict[int, set[str]] = {}
    for line in image:
        names = known.setdefault(line.stage, {"PATH"})
        if line.name in ("ARG", "ENV", "LABEL"):
            names |= set(re.findall(r"(?:^|\s)(\w+)(?==|$)", line.text))
        used = set(re.findall(r"\$\{?(\w+)", line.text)) if line.name != "RUN" else set()
        assert used <= names | (known[0] if line.name == "FROM" else set()), line


def test_no_variable_of_the_build_sounds_like_a_secret_and_no_key_is_in_it(image: list[Instruction]) -> None:
    names = {name for text in named(image, "ENV", "ARG", "LABEL") for name in re.findall(r"([\w.-]+)=", text)}
    assert names and not [name for name in names if SECRET_NAME.search(name)]
    assert not [path for path in (ROOT / "docker").iterdir() if "-----BEGIN" in path.read_text()]
