"""Every command of the pages and of the Makefile, as people type it, in real processes (`tests/typed.py`)."""

import ast
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests import typed
from tests.full.demo_page import ADDRESS
from tests.full.launches import ROOT, until
from tests.full.slurm_cluster import SlurmCluster
from tests.pages import blocks, pages, spans
from tests.typed import Command
from zeropods import pods
from zeropods.cli import parser
from zeropods.data.squad import read_squad
from zeropods.data.wikisql import read_split
from zeropods.launch.notebook import launch
from zeropods.programs import free_port
from zeropods.report.run import Run
from zeropods.train.flags import SCRIPTS, parse_flags
from zeropods.workshop import CausalWorkshop

SECONDS = 900.0
IS_LONG_RUN = os.environ.get("ZEROPODS_SOAK") == "1"
NOISE = re.compile(r"^.*(?:\[INFO\]|\[WARNING\]|Warning: |accumulation steps mismatch|missing keys).*$", re.MULTILINE)
"""Matches what other libraries say, and nobody needs to know: no command of a page may show a line of it."""
NEXT = re.compile(r"; next: (.*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMANDS = typed.commands()
TO_RUN = [each for each in COMMANDS if not typed.is_fragment(each) and not typed.is_only_parsed(each)]
TO_PARSE = [each for each in COMMANDS if not typed.is_fragment(each) and typed.is_only_parsed(each)]
RUN = "sample-t5-tiny-schema-one-pod"
"""Name of the run folder of notebook 02, which pages refer to."""
ON_SHARED_PODS = ("CONTRIBUTING.md", "docs/causal.md", "docs/restarts.md")
"""Pages that launch on pods, and do not say how to start them."""
OWN_DATA = "docs/own_data.md"
MATRIX = """\
model: t5-tiny
technique: none
pods: 1
data: sample
limit: 48
flags: {init: random, max_steps: 2, per_device_train_batch_size: 4, threads: 1}
"""
LENGTHS = """\
def short(prediction, answers):
    return float(len(prediction) < 20)
"""


@dataclass
class Project:
    """A folder that looks like the project, in which the commands of a page are typed one after the other."""

    folder: Path
    environment: dict[str, str]
    variables: list[str] = field(default_factory=list)
    """Lines of the page that set variables for those after them."""

    def type(self, line: str) -> str:
        """Run a command to its end, which must be a good one; returns what it wrote."""
        if not typed.program_of(line):
            self.variables.append(line)
            return ""
        with self._started(line, subprocess.PIPE) as process:
            said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"{line}\n{said[-4000:]}"
        if typed.program_of(line) in ("zeropods", "python"):
            assert NOISE.findall(said) == [], line
        return said

    def serve(self, line: str) -> None:
        """Run a command that serves a page, until the page has an address; then press Ctrl-C."""
        log = self.folder / "served.log"
        with open(log, "w", encoding="utf-8") as output, self._started(line, output) as process:
            until(lambda: process.poll() is not None or ADDRESS.search(log.read_text()))
            os.killpg(process.pid, signal.SIGINT)
            process.wait(SECONDS)
        said = log.read_text()
        assert ADDRESS.search(said) and process.returncode in (0, 130), f"{line}\n{said[-4000:]}"

    def _started(self, line: str, output: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", "\n".join([*self.variables, line])], cwd=self.folder, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def world(
    sample: Path, squad_sample: Path, prepared: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What pages take for granted: data, a prepared set, runs of notebooks, files of predictions."""
    folder = tmp_path_factory.mktemp("world")
    runs = folder / "runs"
    shutil.copytree(trained, runs / "demo" / RUN)
    shutil.copytree(trained / "model", runs / "exported")
    (runs / "profiled").mkdir()
    shutil.copy(ROOT / "tests" / "fast" / "data" / "profile-zero1.txt", runs / "profiled" / "profile.txt")
    shutil.copytree(prepared, folder / "prepared")
    for place, data in (("wikisql", sample), ("squad", squad_sample), ("data/wikisql", sample)):
        shutil.copytree(data, folder / place)
    (folder / "one.yaml").write_text(MATRIX)
    (folder / "lengths.py").write_text(LENGTHS)
    unanswered = json.dumps({"query": None, "error": "no answer"}) + "\n"
    number = sum(1 for _ in read_split(sample, "dev"))
    (folder / "predictions.official.jsonl").write_text(unanswered * number)
    asked = next(iter(read_squad(squad_sample, "dev")))
    answer = {"index": 0, "id": asked.id, "question": asked.question, "prediction": "nobody"}
    (folder / "predictions.dev.jsonl").write_text(json.dumps(answer) + "\n")
    return folder


MADE_BY_THE_PAGE = {"README.md": ("data", "runs"), "docs/causal.md": ("data",)}
"""Folders that a page makes itself."""


@pytest.fixture
def project(world: Path, tmp_path: Path, shared_home: Path, request: pytest.FixtureRequest) -> Project:
    """The project's files as links, and copies of what the page takes for granted."""
    folder = tmp_path / "project"
    folder.mkdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in sorted({line.split("/")[0] for line in tracked.splitlines()}):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    callspec = getattr(request.node, "callspec", None)
    page = "" if callspec is None else callspec.params.get("page", "")
    for path in world.iterdir():
        if path.name in MADE_BY_THE_PAGE.get(page, ()):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy(path, folder)
    home = shared_home
    if page in ON_SHARED_PODS:
        request.getfixturevalue("cluster")
    else:
        home = request.getfixturevalue("home")
    programs = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": programs, "PYTHONPATH": str(ROOT), "ZEROPODS_HOME": str(home)}
    # As in an application of Cloudera Machine Learning, which docs/demo.md speaks of.
    own["CDSW_APP_PORT"] = str(free_port("127.0.0.1"))
    return Project(folder, {**os.environ, **own})


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", sorted({command.page for command in TO_RUN} - {"docs/slurm.md"}))
def test_the_commands_of_a_page_end_well_in_their_order(page: str, project: Project) -> None:
    if page == OWN_DATA:
        table, questions = blocks(pages()[page])[1:3]
        (project.folder / "tables").mkdir()
        (project.folder / "tables" / "people.csv").write_text(table)
        (project.folder / "questions.csv").write_text(questions)
    run_all(page, project)


def run_all(page: str, project: Project) -> None:
    """Run a page's commands, each as printed but for the substitutions; where it names a next one, that one too."""
    named: list[str] = []
    for command in TO_RUN:
        if command.page != page:
            continue
        line = typed.substituted(command.text)
        if not IS_LONG_RUN and any(re.fullmatch(pattern, command.text) for pattern in typed.ELSEWHERE):
            read(typed.words_of(line))
            continue
        kinds = [pattern for pattern in typed.SERVERS if re.fullmatch(pattern, line)]
        if kinds:
            if IS_LONG_RUN or kinds[0] != typed.SERVERS[-1]:
                project.serve(line)
            else:
                read_by_our_parser(typed.words_of(line)[1:])
            continue
        said = project.type(line + shortened(command.text))
        named += NEXT.findall(said)
    # One of each kind is enough: `predict` after training, `summary` after a score.
    for line in {line.split()[1]: line for line in named}.values():
        project.type(typed.substituted(line))


def shortened(text: str) -> str:
    """Flags that make a command short which takes minutes."""
    if IS_LONG_RUN:
        return ""
    return "".join(f" {flags}" for pattern, flags in typed.LONG.items() if re.fullmatch(pattern, text))


def test_the_commands_of_the_page_on_slurm_are_taken_by_slurm(project: Project, slurm: SlurmCluster) -> None:
    project.environment |= {**slurm.environment, "PATH": f"{project.environment['PATH']}:{slurm.environment['PATH']}"}
    run_all("docs/slurm.md", project)


# What cannot be run.


@pytest.mark.parametrize("command", TO_PARSE, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_a_command_that_cannot_be_run_is_read_by_its_own_parser(command: Command) -> None:
    text = command.text.removeprefix("!")
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, check=False, timeout=240)
    assert checked.returncode == 0, checked.stderr
    for part in text.split(" && "):
        words = typed.words_of(part)
        if "-m zeropods " in part:
            # `python3 -m zeropods ...`, in a container or not.
            place = words.index("-m")
            read_by_our_parser(words[place + 2 :])
            words = words[: place - 1]
        if not words:
            continue
        if words[0] == "make":
            dry = ["make", "--dry-run", *words[1:]]
            subprocess.run(dry, cwd=ROOT, capture_output=True, check=True, timeout=240)
        elif words[0] == "zeropods":
            read_by_our_parser(words[1:])
        else:
            read_by_help(words)


def read(words: list[str]) -> None:
    """Parse a command of `zeropods`, or of one of the training scripts."""
    if words[1] in SCRIPTS:
        parse_flags(SCRIPTS[words[1]], words[2:])
    else:
        read_by_our_parser(words[words.index("zeropods") + 1 :])


def read_by_our_parser(words: list[str]) -> None:
    """Parse the words of `zeropods`, and the flags of the script that is launched."""
    arguments = parser().parse_args(words)
    script, *flags = getattr(arguments, "command", None) or [""]
    if script in SCRIPTS and "..." not in flags:
        parse_flags(SCRIPTS[script], flags)


def read_by_help(words: list[str]) -> None:
    """Look for each flag in what the program says about itself, where it is installed."""
    program, *given = words
    flags = {flag for word in given for flag in FLAG.findall(word)}
    if program.endswith(("/python", "python3", "python")):
        program = sys.executable
        if "pytest" in given:
            # It imports all settings of the tests before it helps: once is enough for all of its lines.
            given = ["-m", "pytest"]
    else:
        # What follows a command's own name may be for another program.
        given = [word for word in given[:1] if not word.startswith("-")]
    has_no_help = program in ("bash", "find", "ssh")
    if not flags or has_no_help or shutil.which(program) is None:
        return
    known = flags_in_help(program, *given)
    assert flags <= known, f"{flags - known}: {program} {' '.join(given)} --help"


@cache
def flags_in_help(*call: str) -> set[str]:
    """Every flag that a program names in its help."""
    said = subprocess.run([*call, "--help"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    return set(FLAG.findall(said.stdout + said.stderr))


# Calls of Python in sentences.

CALLED = {"pods.up": pods.up, "launch": launch, "CausalWorkshop": CausalWorkshop, "Run": Run}
"""What pages call, by the name that they give it."""
CALL = re.compile(rf"^(?:\w+ = )?({'|'.join(map(re.escape, CALLED))})\(")


def test_calls_of_python_in_pages_fit_what_they_call() -> None:
    wrong, seen = [], set()
    for page, text in pages().items():
        for span in spans(text):
            match = CALL.match(span)
            if match is None:
                continue
            seen.add(match[1])
            if not fits(span, CALLED[match[1]]):
                wrong.append((page, span))
    assert wrong == [] and seen == set(CALLED)


def fits(code: str, called: Callable[..., object]) -> bool:
    """Whether code is Python, and its outermost call of `called` has arguments that it takes."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    call = calls[0]
    is_left_out = [isinstance(each, ast.Constant) and each.value is ... for each in call.args]
    given = is_left_out.count(False)
    names = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    try:
        inspect.signature(called).bind_partial(*range(given), **dict.fromkeys(names))
    except TypeError:
        return False
    return True
