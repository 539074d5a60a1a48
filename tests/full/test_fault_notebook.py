"""Notebook 07: a pod is killed in mid-run, and the run goes on with the two that are left."""

from pathlib import Path

import pytest

from tests.full.clusters import processes_of
from tests.full.demo import executed, outputs, prepared_workshop
from zeropods.measure.record import read_json, read_record
from zeropods.report.run import largest_difference

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
