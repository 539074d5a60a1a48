"""The project's file for Cloudera Machine Learning, against what it names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tests.dockerfile import read_dockerfile
from zeropods.workshop import Workshop

ROOT = Path(__file__).resolve().parents[2]
MIRROR = "ZEROPODS_MIRROR"


Text = Annotated[str, StringConstraints(min_length=1, max_length=1024, strict=True)]
Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")]


class Strict(BaseModel):
    """What the specification, or an AMP of Cloudera's own, does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Variable(Strict):
    default: Annotated[str, Field(strict=True)]
    description: Text


class Runtime(Strict):
    editor: Literal["JupyterLab", "PBJ Workbench"]
    kernel: Annotated[str, StringConstraints(pattern=r"^Python 3\.\d+$")]
    edition: str


class RunJob(Strict):
    type: Literal["run_job"]
    entity_label: str
    short_summary: Text


class Resources(Strict):
    name: Text
    script: str
    kernel: Literal["python3"]
    cpu: Annotated[float, Field(gt=0)]
    memory: Annotated[float, Field(gt=0)]
    gpu: Annotated[int, Field(ge=0)]
    short_summary: Text
    long_summary: Text


class CreateJob(Resources):
    type: Literal["create_job"]
    entity_label: Label
    arguments: str = ""


class StartApplication(Resources):
    type: Literal["start_application"]
    subdomain: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
    bypass_authentication: Literal[False]


class Project(Strict):
    name: Text
    description: Text
    author: Text
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}$", strict=True)]
    specification_version: Literal[1.0]
    prototype_version: float
    environment_variables: dict[str, Variable]
    runtimes: list[Runtime]
    tasks: list[Annotated[CreateJob | RunJob | StartApplication, Field(discriminator="type")]]

    @property
    def jobs(self) -> list[CreateJob]:
        return [task for task in self.tasks if isinstance(task, CreateJob)]

    @property
    def applications(self) -> list[StartApplication]:
        return [task for task in self.tasks if isinstance(task, StartApplication)]


@pytest.fixture(scope="module")
def project() -> Project:
    return Project.model_validate(yaml.safe_load((ROOT / ".project-metadata.yaml").read_text(encoding="utf-8")))


def notebooks_of_the_demo() -> list[str]:
    demo = ast.parse((ROOT / "tools" / "demo.py").read_text())
    assigned = {node.targets[0].id: node.value for node in demo.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    return list(ast.literal_eval(assigned["NOTEBOOKS"]))


def settings() -> set[str]:
    """The variables that the notebooks' workshop reads."""
    source = (ROOT / "zeropods" / "workshop" / "text2sql.py").read_text()
    return {f"ZEROPODS_{name.upper()}" for name in re.findall(r'setting\("(\w+)"', source)}


def test_every_script_is_in_the_repository(project: Project) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    scripts = {task.script for task in [*project.jobs, *project.applications]}
    assert scripts and scripts <= set(listed.stdout.splitlines())


def test_each_job_is_run_as_soon_as_it_is_made(project: Project) -> None:
    labels = [(task.type, task.entity_label) for task in project.tasks if not isinstance(task, StartApplication)]
    made = [label for kind, label in labels if kind == "create_job"]
    assert labels == [(kind, label) for label in made for kind in ("create_job", "run_job")]
    assert len(set(made)) == len(made)


def test_dependencies_come_first_and_applications_last(project: Project) -> None:
    assert project.jobs[0].script == "cml/install_dependencies.py"
    kinds = [task.type for task in project.tasks]
    assert kinds[-2:] == ["start_application"] * 2 and "start_application" not in kinds[:-2]


def test_the_notebooks_are_jobs_in_the_demo_s_order(project: Project) -> None:
    jobs = project.jobs[1:]
    assert {job.script for job in jobs} == {"cml/run_notebook.py"}
    assert [job.arguments for job in jobs] == [job.entity_label for job in jobs] == notebooks_of_the_demo()


def test_its_variables_are_those_that_the_notebooks_read(project: Project) -> None:
    assert settings() and set(project.environment_variables) == settings() | {MIRROR}


def test_its_defaults_are_those_of_the_code(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in project.environment_variables:
        monkeypatch.delenv(name, raising=False)
    own = asdict(Workshop())
    for name, variable in project.environment_variables.items():
        monkeypatch.setenv(name, variable.default)
    assert asdict(Workshop()) == own
    said = {name: variable.default for name, variable in project.environment_variables.items() if name != MIRROR}
    assert said == {f"ZEROPODS_{key.upper()}": "" if value is None else str(value) for key, value in own.items()}


def test_its_runtimes_are_the_editions_of_the_image(project: Project) -> None:
    image = read_dockerfile(ROOT / "docker" / "Dockerfile")
    [edition] = {line.assignments()["ML_RUNTIME_EDITION"] for line in image if "ML_RUNTIME_EDITION=" in line.text}
    kernels = {f"Python {found}" for line in image[:6] for found in re.findall(r"python(3\.\d+)-cuda", line.text)}
    assert {runtime.edition for runtime in project.runtimes} == {edition}
    assert {runtime.kernel for runtime in project.runtimes} == kernels
    assert [runtime.editor for runtime in project.runtimes] == ["JupyterLab", "PBJ Workbench"]


def test_every_variable_of_its_page_is_read_somewhere(project: Project) -> None:
    page = (ROOT / "docs" / "cml.md").read_text()
    read = "\n".join(
        path.read_text() for folder in ("zeropods", "cml", "tools") for path in (ROOT / folder).rglob("*.py")
    )
    told = set(re.findall(r"\bZEROPODS_[A-Z_]+\b", page))
    assert set(project.environment_variables) <= told
    assert not [name for name in told - settings() if name not in read]


@pytest.mark.parametrize("script", ["install_dependencies.py", "run_notebook.py"])
def test_a_script_says_what_it_does(script: str) -> None:
    argv = [sys.executable, f"cml/{script}", "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and f"python cml/{script}" in done.stdout
