"""The notebooks of causal models, executed on fresh kernels at a small scale."""

import json
from pathlib import Path

import pytest

from tests.full.clusters import processes_naming
from tests.full.demo import executed, outputs
from zeropods.measure.record import Record, read_record

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
