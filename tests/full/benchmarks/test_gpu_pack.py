"""The calls of a session on a GPU, at tiny shapes on a CPU: within this environment, and as a pack in another one."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.gpu.commands import Command, Desk, ended_as_expected, ended_in_words, typed, zeropods
from benchmarks.gpu.pack import CARRIED, tiny_data
from tests.full.conftest import ROOT

OLDEST = ("transformers==5.17.0", "huggingface_hub==1.33.0")
"""The oldest transformers that is tried, which refuses a later hub; the newest takes this one too."""
LACKING = {"deepspeed", "hjson", "datasets", "evaluate", "sqlglot", "zeropods", "torch", "huggingface-hub"}
"""Packages of this environment that the other one does not have, or in another version."""
ENDING_SECONDS = 20.0
"""What a call may take beyond its seconds: the interpreter's start, and its end."""
soak = pytest.mark.skipif(os.environ.get("ZEROPODS_SOAK") != "1", reason="makes an environment of a GiB; see make soak")


def archived(path: Path) -> set[str]:
    with tarfile.open(path) as packed:
        return set(packed.getnames())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a pack, as far as `--device cpu` needs them."""
    folder = tmp_path_factory.mktemp("pack-data")
    tiny_data(folder / "cpu")
    return folder


def test_a_call_measures_while_its_seconds_last_and_says_what_it_skipped(tiny: Path, tmp_path: Path) -> None:
    # The facts come first, and may take their own limit; after them a few seconds are left at most.
    argv = [sys.executable, "-m", "benchmarks.gpu.session", "a", "--seconds", "40", "--device", "cpu"]
    argv += ["--data", str(tiny), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    steps = json.loads((tmp_path / "work" / "a" / "steps.json").read_text())
    outcomes = {step["step"]: step["outcome"] for step in steps}
    assert list(outcomes) == [
        "facts", "recipe", "prediction", "attention", "profiler", "prediction with cuDNN", "offload",
    ]  # fmt: skip
    assert outcomes["recipe"].startswith("skipped, it needs 45 s")
    assert "part-a/steps.json" in archived(tmp_path / "out" / "part-a.tar.gz")
    planned = json.loads((tmp_path / "work" / "a" / "planned.json").read_text())
    assert planned["t5-small-uncompiled-32"]["planned_peak_allocated_bytes"] > 0


def test_a_command_is_kept_with_its_end_and_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    desk = Desk(out=tmp_path, places={"data": "the data", "runs": str(tmp_path / "runs"), "model": "t5-tiny"})
    says = "import os, sys; print(sys.argv[1], os.environ['PLACE']); sys.exit(3)"
    said = Command(name="says so", words=("-c", says, "{data}"), status=3, variables={"PLACE": "{model}"})
    late = Command(name="late", words=("-c", "import time; print('begun', flush=True); time.sleep(3600)"))
    assert ended_in_words(desk.type(said, 60.0)) == "says so ended with 3"
    assert ended_in_words(desk.type(late, 30.0)) == f"late ended with {-signal.SIGTERM}, not 0"
    first, second = typed(tmp_path)
    assert (first["output"], second["output"]) == ("the data t5-tiny", "begun")
    assert (tmp_path / "commands" / "says-so.log").read_text() == "the data t5-tiny\n"


def test_a_rank_is_killed_at_its_step_and_its_run_goes_on(tiny: Path, tmp_path: Path) -> None:
    places = {"data": str(tiny / "cpu"), "runs": str(tmp_path / "runs"), "model": "t5-tiny"}
    flags = ("--init", "random", "--model_id", "{model}", "--dataset_path", "{data}/question", "--threads", "1")
    steps = ("--max_steps", "40", "--save_steps", "5", "--eval_steps", "0", "--outputdir", "{runs}/killed")
    launch = ("launch", "--launcher", "none", "--restarts", "1", "--", "textsql_train.py", *flags, *steps)
    ended = Desk(out=tmp_path, places=places).type(zeropods("killed", *launch, kills_rank_at=10), 600.0)
    assert ended_as_expected(ended), ended["output"]
    assert ended["killed_at_step"] >= 10 and "killed by SIGKILL" in ended["output"]


# The pack in an environment of another place and other versions.


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with transformers 5.17, and without what a pack carries."""
    folder = tmp_path_factory.mktemp("other") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    carried = {name.replace("_", "-") for name in CARRIED}
    kept = []
    for each in distributions():
        name = each.metadata["Name"].lower().replace("_", "-")
        if name not in LACKING and name not in carried:
            kept.append(f"{name}=={each.version}")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "--no-deps", *kept, *OLDEST], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def pack(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack for this Python."""
    out = tmp_path_factory.mktemp("packed") / "pack"
    argv = [sys.executable, "-m", "benchmarks.gpu.pack", "--out", str(out), "--data", str(shared_data)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "taken for granted there: torch," in done.stdout
    assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) < 40 << 20
    return out


@soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("without", [(), ("--without", "transformers")], ids=["as-packed", "transformers-5.17"])
def test_both_calls_end_well_in_another_environment_and_are_collected(
    without: tuple[str, ...], pack: Path, other: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHON": str(other), "OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work")}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    for part, seconds in (("a", 240), ("b", 420)):
        argv = ["bash", str(pack / "run.sh"), part, str(seconds), "--device", "cpu", *without]
        began = time.monotonic()
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert time.monotonic() - began < seconds + ENDING_SECONDS
    collect = [sys.executable, "-m", "benchmarks.gpu", "--collect", str(tmp_path / "out"), "--out", str(tmp_path / "r")]
    subprocess.run(collect, cwd=ROOT, check=True)
    figures = json.loads((tmp_path / "r" / "summary.json").read_text())
    versions = figures["a"]["facts"]["versions"]
    assert versions["transformers"] == ("5.17.0" if without else "5.23.0")
    for part in ("a", "b"):
        assert {cell["status"] for cell in figures[part]["cells"]} == {"ok"}
        assert figures[part]["missing"] == []
