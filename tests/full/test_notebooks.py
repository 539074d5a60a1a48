"""`make demo`: what ends it early, and WikiSQL. One notebook by papermill.

The whole sequence is run in tests/browser/test_notebooks.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.demo import LIMIT_SECONDS, begun, executed, prepared_workshop
from tests.full.launches import ROOT, until

pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS)


def test_a_demo_without_a_terminal_says_how_far_it_is_and_an_interrupted_one_leaves_no_process(
    sample: Path, tmp_path: Path
) -> None:
    prepared_workshop(tmp_path, sample, limit=400)
    process = begun(tmp_path, "02_train_single_pod", ZEROPODS_LIMIT="400", ZEROPODS_STEPS="100000")
    until(lambda: [lock for lock in (tmp_path / "runs").glob("*/run.lock") if lock.read_text()], 90)
    (lock,) = (tmp_path / "runs").glob("*/run.lock")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert re.match(r"02_train_single_pod: \d+ s, cell \d+ of \d+", lines[1]), lines
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    trainer = int(lock.read_text().split()[1])
    assert process.returncode == 130
    until(lambda: not Path(f"/proc/{trainer}").exists(), 30)


def test_papermill_sets_the_parameters_of_a_notebook(tmp_path: Path) -> None:
    papermill = [str(Path(sys.executable).with_name("papermill")), "00_plan.ipynb", str(tmp_path / "out.ipynb")]
    settings = {"ZEROPODS_RUNS": str(tmp_path / "runs"), "ZEROPODS_MODEL": "t5-small"}
    words = [*papermill, "-p", "model", "t5-large", "-p", "steps", "2"]
    subprocess.run(words, cwd=ROOT / "notebooks", env=os.environ | settings, check=True, timeout=LIMIT_SECONDS)
    shown = (tmp_path / "out.ipynb").read_text()
    assert "model='t5-large'" in shown and "steps=2" in shown and "model='t5-small'" not in shown


def test_the_notebooks_run_on_wikisql(tmp_path: Path, shared_data: Path) -> None:
    settings = {
        "ZEROPODS_DATASET": str(shared_data / "wikisql"),
        "ZEROPODS_MODEL": "t5-small",
        "ZEROPODS_INIT": "random",
        "ZEROPODS_TOKENIZER": str(shared_data / "t5" / "spiece.model"),
        "ZEROPODS_STEPS": "2",
        "ZEROPODS_BATCH_SIZE": "2",
        "ZEROPODS_LIMIT": "24",
        "ZEROPODS_QUESTIONS": "2",
    }
    executed(tmp_path, "01_prepare_dataset", "02_train_single_pod", "05_inference", **settings)
    (score,) = (tmp_path / "runs").glob("*/score.dev.json")
    assert json.loads(score.read_text())["unparseable"] == 0
