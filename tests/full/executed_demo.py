"""Notebooks executed by `tools/demo.py`, as `make demo` does it, and what their copies show."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.full.forks import train_ranks
from tests.full.launches import ROOT
from zeropods.data.prepare import prepare
from zeropods.sweep.run import SWEEP_LOCK, trials
from zeropods.workshop import STATES_EXAMPLES, Workshop

LIMIT_SECONDS = 3_600


def prepared_workshop(folder: Path, sample: Path, **settings: Any) -> Workshop:
    """Settings of notebooks whose runs are in a folder, with the sample fetched and prepared already."""
    workshop = Workshop(runs=folder / "runs", **settings)
    shutil.copytree(sample, workshop.data)
    for each in workshop.each:
        prepare(each.preparation, each.prepared)
    return workshop


def train_states(folder: Path, states_model: str) -> None:
    """Train what 03 shows of ZeRO's stages, by forks: over pods it takes minutes, and the matrix has shown those."""
    workshop = Workshop(runs=folder / "runs", limit=STATES_EXAMPLES, pods=2, states_model=states_model)
    prepare(workshop.preparation, workshop.prepared)
    workshop.states_folder.mkdir(parents=True)
    # As a sweep that was killed leaves it.
    (workshop.states_folder / SWEEP_LOCK).touch()
    for trial in trials(workshop.states_matrix, workshop.states_folder):
        train_ranks(trial.launch.arguments, trial.cell.pods, folder / f".{trial.cell.name}")


def begun(folder: Path, *notebooks: str, **variables: str) -> subprocess.Popen[str]:
    """The demo, with its runs and executed copies below a folder, and no settings but these."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZEROPODS_")}
    environment |= {"ZEROPODS_RUNS": str(folder / "runs"), **variables}
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), "--out", str(folder / "copies"), *notebooks]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def executed(folder: Path, *notebooks: str, **variables: str) -> str:
    """What it printed, once it has ended well."""
    process = begun(folder, *notebooks, **variables)
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, errors[-4000:]
    return out


def outputs(folder: Path, notebook: str) -> list[dict[str, Any]]:
    """What the cells of an executed copy show."""
    cells = json.loads((folder / "copies" / f"{notebook}.ipynb").read_text())["cells"]
    return [out for cell in cells for out in cell.get("outputs", [])]
