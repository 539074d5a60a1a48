"""Notebooks by `make demo`: what ends it early, WikiSQL; 03 on a machine with one GPU; 07, whose run loses a pod; 11 to
15, of causal models.

The sequence 00 to 06 is run in tests/browser/test_notebooks.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.clusters import processes_naming, processes_of
from tests.full.executed_demo import LIMIT_SECONDS, begun, executed, outputs, prepared_workshop, train_states
from tests.full.forks import train_ranks
from tests.full.launches import ROOT, until
from tests.noise import noise
from tests.nvml import environment, folder_with_gpus
from zeropods.launch.script_call import train_arguments
from zeropods.measure.record import Record, read_json, read_record
from zeropods.report.run import largest_difference

pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS)


def test_a_demo_without_a_terminal_says_how_far_it_is_and_an_interrupted_one_leaves_no_process(
    sample: Path, tmp_path: Path
) -> None:
    prepared_workshop(tmp_path, sample, limit=400)
    process = begun(tmp_path, "02_train_single_pod", ZEROPODS_LIMIT="400", ZEROPODS_STEPS="100000")
    until(lambda: [lock for lock in (tmp_path / "runs").glob("*/run.lock") if lock.read_text()])
    (lock,) = (tmp_path / "runs").glob("*/run.lock")
    trainer = int(lock.read_text().split()[1])  # now: an interrupted run may remove its lock when it has saved
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert re.match(r"02_train_single_pod: \d+ s, cell \d+ of \d+", lines[1]), lines
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode == 130
    until(lambda: not Path(f"/proc/{trainer}").exists())


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


# 03 on a machine with one GPU, by a stand-in for NVML; tests/browser has it on one without.


def test_03_runs_where_pods_share_one_gpu_and_says_once_that_they_train_without_it(
    sample: Path, tmp_path: Path
) -> None:
    given = {"limit": 64, "steps": 2, "pods": 2, "repeats": 1, "questions": 4, "states_model": "t5-tiny"}
    workshop = prepared_workshop(tmp_path, sample, **given)
    train_states(tmp_path, "t5-tiny")
    trained = train_arguments(**workshop.training, outputdir=workshop.run_folder)
    train_ranks(trained, 1, tmp_path / "said")

    (tmp_path / "copies").mkdir()
    with_gpu = folder_with_gpus(tmp_path / "gpus", 1)
    places = {"ZEROPODS_RUNS": str(tmp_path / "runs"), "ZEROPODS_HOME": str(tmp_path / "home")}
    settings = {f"ZEROPODS_{name.upper()}": str(value) for name, value in given.items()}
    notebooks = [str(folder / "03_train_pods.ipynb") for folder in (ROOT / "notebooks", tmp_path / "copies")]
    papermill = [str(Path(sys.executable).with_name("papermill")), *notebooks, "--cwd", str(with_gpu)]
    variables = environment(with_gpu, **places, **settings)
    subprocess.run(papermill, env=variables, check=True, timeout=1.5 * LIMIT_SECONDS)

    said = "".join("".join(out.get("text", "")) for out in outputs(tmp_path, "03_train_pods"))
    assert said.count("2 pods with 2 processes for 1 visible GPU: they train without GPUs") == 1
    assert "runs of one process train without GPUs too" in said
    profiled = list(tmp_path.glob("runs-profiled/*"))
    compared = list(workshop.sweep_folder.glob("*/1"))
    records = [read_record(folder) for folder in (*profiled, *compared)]
    assert [record.device for record in records if record.status == "ok"] == ["cpu"] * 6
    logs = [folder / "launch.log" for folder in profiled]
    assert [log.read_text().count("Setting CUDA_VISIBLE_DEVICES=-1") for log in logs] == [2, 2]
    assert not processes_of(tmp_path / "home")


# 07: a pod is killed in mid-run, and the run goes on with the two that are left.


SAME = 1e-5
"""Relative: FP32, no dropout, sums in another order."""


@pytest.fixture(scope="module")
def ended(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the notebook's runs, copies and pods, once it has ended."""
    folder = tmp_path_factory.mktemp("faults")
    prepared_workshop(folder, sample, limit=64)
    executed(folder, "07_faults", ZEROPODS_LIMIT="64", ZEROPODS_HOME=str(folder / "home"))
    return folder


def run(folder: Path, kind: str) -> Path:
    (found,) = (folder / "runs").glob(f"*-{kind}")
    return found


def values(folder: Path) -> list[str]:
    """What each cell shows as its value."""
    shown = [out for out in outputs(folder, "07_faults") if out["output_type"] == "execute_result"]
    return ["".join(out["data"]["text/plain"]) for out in shown]


def test_the_run_that_lost_a_pod_is_resumed_and_ends_well_on_two(ended: Path) -> None:
    lost = run(ended, "lost-pod")
    record, killed = read_record(lost), read_json(lost / "fault.json")
    (entry,) = read_json(lost / "restarts.json")["restarts"]
    assert (record.status, record.pods, record.restarts, record.steps) == ("ok", 2, 1, 12)
    assert entry["pod"] == killed["pod"] == "pod2"
    found, first = entry["found_unix_seconds"], record.ranks[0]
    # How soon, on a machine that does nothing else, is what the trials of `make soak` measure.
    assert killed["killed_unix_seconds"] < found
    assert first.ended_unix_seconds and first.wall_seconds and first.start_seconds
    assert found < first.ended_unix_seconds - first.wall_seconds + first.start_seconds
    # At most one interval between checkpoints is done again.
    assert first.first_step >= 4 and entry["steps"] - first.first_step <= 4


def test_its_losses_are_those_of_the_undisturbed_run(ended: Path) -> None:
    ours, theirs = (read_record(run(ended, kind)) for kind in ("lost-pod", "undisturbed"))
    assert len(ours.losses) >= 4 and largest_difference(ours, theirs) < SAME
    assert ours.eval_losses[-1].loss == pytest.approx(theirs.eval_losses[-1].loss, rel=SAME)


def test_the_notebook_shows_both_side_by_side(ended: Path) -> None:
    (table,) = [out for out in values(ended) if "ended by" in out]
    rows = {
        cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in table.split("\n")[2:])
    }
    assert rows["ended by"] == ["pod_lost: pod2", "nothing"]
    assert rows["pods"] == ["3, then 2: pod1, pod3", "1"] and rows["effective batch"] == ["48", "48"]


def test_nothing_of_the_run_or_the_pods_is_left(ended: Path) -> None:
    assert values(ended)[-1] == "0" and not processes_of(ended / "home")


def test_its_cells_show_no_words_of_other_libraries(ended: Path) -> None:
    assert noise(outputs(ended, "07_faults")) == []


# 11 to 15, of causal models.


NOTEBOOKS = (
    "11_baseline_bloom_squad",
    "12_zero_stages_one_gpu",
    "13_many_gpus_many_nodes",
    "14_causal_lm",
    "15_plan_8b",
)
STEPS = 2
SMALL = {"STEPS": str(STEPS), "SUBSET": "16", "QUESTIONS": "4", "SLOTS": "2", "PODS": "2"}
TECHNIQUES = ["none", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and copies of the five notebooks, as `make demo` executes notebooks."""
    folder = tmp_path_factory.mktemp("causal")
    own = {f"ZEROPODS_CAUSAL_{name}": value for name, value in {**SMALL, "RUNS": str(folder / "causal")}.items()}
    # The baseline is trained with the techniques: what forks the ranks has imported torch already.
    executed(folder, NOTEBOOKS[1], NOTEBOOKS[0], *NOTEBOOKS[2:], **own)
    return folder


@pytest.fixture(scope="module")
def squad(folder: Path) -> Path:
    """The runs of 11, 12 and 13."""
    (runs,) = (folder / "causal").glob("*-squad-*")
    return runs


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    """The runs of 14."""
    (runs,) = (folder / "causal").glob("*-lm-*")
    return runs


def record(runs: Path, name: str) -> Record:
    return read_record(runs / f"{name}-{STEPS}-steps")


def shown(folder: Path, notebook: str) -> str:
    """All that the cells of an executed copy show as text."""
    return "".join("".join(out.get("data", {}).get("text/plain", [])) for out in outputs(folder, notebook))


def test_every_notebook_is_kept_as_a_page_and_shows_its_tables(folder: Path) -> None:
    assert {page.stem for page in (folder / "copies").glob("*.html")} == set(NOTEBOOKS)
    baseline = ("final train loss", "steps per epoch", "peak (MiB)", "minimum (MiB)")
    for notebook, headings in {0: baseline, 2: ("sbatch --parsable",), 3: ("perplexity before", "| test ")}.items():
        assert [heading for heading in headings if heading not in shown(folder, NOTEBOOKS[notebook])] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_no_cell_shows_words_of_other_libraries(folder: Path, notebook: str) -> None:
    assert noise(outputs(folder, notebook)) == []


def test_the_baseline_answers_questions_and_is_scored(squad: Path) -> None:
    score = json.loads((squad / f"none-{STEPS}-steps" / "score.dev.json").read_text())
    assert (score["task"], score["examples"]) == ("squad", int(SMALL["QUESTIONS"]))


def test_techniques_and_several_processes_have_the_losses_of_the_baseline(squad: Path) -> None:
    records = [record(squad, technique) for technique in TECHNIQUES]
    assert len(list(squad.glob("*/record.json"))) == len(TECHNIQUES) + 2
    assert [(one.technique, one.status) for one in records] == [(technique, "ok") for technique in TECHNIQUES]
    several = [record(squad, name) for name in ("zero1", "zero1-2-slots", "zero1-2-pods")]
    assert [(one.pods, one.slots) for one in several] == [(1, 1), (1, 2), (2, 1)]
    for found, tolerance in ((records, 1e-5), (several, 1e-4)):
        curves = [[point.loss for point in one.losses] for one in found]
        assert len(curves[0]) == STEPS and all(curve == pytest.approx(curves[0], rel=tolerance) for curve in curves)


def test_text_is_scored_on_both_unseen_splits_and_generated_before_and_after(folder: Path, text: Path) -> None:
    run = text / f"none-{STEPS}-steps"
    losses = [json.loads((run / f"score.{split}.json").read_text())["loss"] for split in ("dev", "test")]
    assert losses[0] == pytest.approx(record(text, "none").eval_losses[-1].loss)
    prompt = json.loads((run / "generated.json").read_text())["prompt"]
    assert shown(folder, NOTEBOOKS[3]).count(f"| {prompt} |") == 2


def test_no_pod_outlives_its_notebook(folder: Path) -> None:
    assert not processes_naming(folder)
