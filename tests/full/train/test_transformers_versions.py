"""The oldest and the newest transformers that training works with: what our trainer relies on is alike in both.

`make soak` runs this, since it downloads both, and a run needs the one that is not installed.
"""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.full.conftest import ROOT, TINY
from tests.full.train.test_train import losses
from zeropods.measure.record import read_record
from zeropods.train.engines.ddp import Ddp
from zeropods.train.engines.deepspeed import DeepSpeed
from zeropods.train.flags import TextToSQLArguments
from zeropods.train.job import UNCHANGED

OLDEST, NEWEST = "5.17.0", "5.23.0"
HUB = "huggingface_hub<2"
"""What the oldest requires; the newest goes with a later one."""
OURS = ROOT / "zeropods" / "train" / "trainer.py"
ASKING = ROOT / "zeropods" / "train" / "job.py"
RENAMED = {"activation_checkpointing", "gradient_checkpointing"}
"""An argument that each version has under one of these names at least."""

ASK = ("-m", "zeropods", "predict", "--split", "test", "--limit", "24")

pytestmark = pytest.mark.skipif(os.environ.get("ZEROPODS_SOAK") != "1", reason="downloads packages; see make soak")


def pip(*words: object) -> None:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each version."""
    folder = tmp_path_factory.mktemp("wheels")
    for number in (OLDEST, NEWEST):
        pip("download", "--no-deps", "--dest", folder, f"transformers=={number}")
    return {number: next(folder.glob(f"transformers-{number}-*.whl")) for number in (OLDEST, NEWEST)}


def source(wheel: Path, module: str) -> ast.Module:
    """The tree of a module of transformers, which is not imported."""
    with zipfile.ZipFile(wheel) as packed:
        return ast.parse(packed.read(f"transformers/{module}.py"))


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    """The class of that name."""
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """The methods of a class by name."""
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef)}


def attributes(of: ast.ClassDef) -> set[str]:
    """Names of what a class uses of itself: `self.name` and `super().name`."""
    used = set()
    for node in ast.walk(of):
        if not isinstance(node, ast.Attribute):
            continue
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        if of_self or of_super:
            used.add(node.attr)
    return used


def test_trainers_methods_that_ours_replaces_or_calls_have_one_signature(wheels: dict[str, Path]) -> None:
    ours = class_of(ast.parse(OURS.read_text(encoding="utf-8")), "MeasuredTrainer")
    theirs = {number: methods(class_of(source(wheel, "trainer"), "Trainer")) for number, wheel in wheels.items()}
    both = theirs[OLDEST].keys() | theirs[NEWEST].keys()
    names = sorted((methods(ours).keys() | attributes(ours)) & both)
    assert {"_save", "_run_epoch", "_prepare_inputs", "save_model"} <= set(names)
    signatures = {
        number: {name: ast.unparse(of[name].args) if name in of else None for name in names}
        for number, of in theirs.items()
    }
    assert signatures[OLDEST] == signatures[NEWEST]


def test_both_versions_know_every_argument_that_a_run_gives(wheels: dict[str, Path]) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(ASKING.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TrainingArguments"
    ]
    (call,) = calls
    given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    for engine in (Ddp, DeepSpeed):
        given |= engine(TextToSQLArguments()).settings("bf16").keys()
    assert {"logging_first_step", "deepspeed", "bf16"} <= given
    for number, wheel in wheels.items():
        arguments = class_of(source(wheel, "training_args"), "TrainingArguments")
        known = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}
        assert not (given | set(UNCHANGED)) - known, number
        assert RENAMED & known, number


def python(packages: list[Path], *words: object) -> None:
    """Run Python with words, and with what is in these folders before what is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*packages, ROOT]))}
    argv = [sys.executable, *map(str, words)]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("technique", ["none", "zero1", "zero3"])
def test_the_oldest_trains_resumes_and_answers_as_the_installed_one_does(
    technique: str, prepared: Path, sample: Path, tmp_path: Path
) -> None:
    old = tmp_path / "packages"
    pip("install", "--no-deps", "--target", old, f"transformers=={OLDEST}", HUB)
    flags = [*TINY, "--dataset_path", prepared, "--max_steps", "6", "--eval_steps", "3", "--threads", "1"]
    flags += ["--save_steps", "3", "--gradient_checkpointing", "True"]
    if technique != "none":
        flags += ["--deepspeed", f"dsconfig/{technique}.json"]
    numbers, answers = [], []
    for packages in ([old], []):
        run = tmp_path / ("installed" if not packages else "old")
        python(packages, "textsql_train.py", *flags, "--outputdir", run)
        whole = read_record(run)
        assert (whole.versions["transformers"] == OLDEST) == bool(packages)
        out = run / "predictions.test.jsonl"
        python(packages, *ASK, "--model", run, "--data", sample, "--out", out)
        answers.append(out.read_text(encoding="utf-8"))

        (run / "record.json").unlink()
        shutil.rmtree(run / "checkpoints" / "checkpoint-6")
        python(packages, "textsql_train.py", *flags, "--outputdir", run)
        resumed = read_record(run)
        assert losses(resumed) == losses(whole)[3:]
        numbers.append((losses(whole), losses(whole, "eval_losses")))
    assert numbers[0] == numbers[1]
    assert answers[0] == answers[1]
