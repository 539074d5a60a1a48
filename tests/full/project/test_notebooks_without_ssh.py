"""Notebooks 00 to 06 where there is no ssh and no pdsh: on three pods of this machine, and on three workers of CML's
double from a session like a stock one of 2026.

`make soak` runs this: each sequence launches eleven runs over several pods. Over pdsh, the sequence is run in
tests/browser/test_notebooks.py.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.full.clusters import processes_of
from tests.full.executed_demo import LIMIT_SECONDS, executed, outputs
from tests.full.launches import until
from tests.full.sessions import are_possible
from tests.full.without_ssh import path_without_ssh
from tests.full.workbench import NUMBER, workbench
from tests.noise import noise
from zeropods.measure.record import Record, read_record

SMALL = {
    "ZEROPODS_STEPS": "4", "ZEROPODS_LIMIT": "96", "ZEROPODS_QUESTIONS": "12", "ZEROPODS_REPEATS": "1",
    "ZEROPODS_STATES_MODEL": "t5-tiny",
}  # fmt: skip
NOTEBOOKS = {
    "00_plan": "largest batch (rows)",
    "01_prepare_dataset": "truncated rows",
    "02_train_single_pod": "value",
    "03_train_pods": "states (MiB)",
    "04_read_profiler": "value",
    "05_inference": "execution",
    "06_summary": "throughput (samples/s)",
}
"""Each with a heading of one of its tables."""
PODS = 3
WORKERS = 3
ADDRESSES = {"127.0.2.1", "127.0.2.2", "127.0.2.3", "127.0.2.254"}
"""Of the double's workers, and of the session."""

pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROPODS_SOAK") != "1", reason="takes many minutes; see make soak"),
    pytest.mark.timeout(2 * LIMIT_SECONDS),
]


@dataclass(frozen=True)
class Sequence:
    """The sequence, executed: the area of its runs, its pods, and what its notebooks show."""

    runs: Path
    pods: int
    shown: dict[str, list[dict[str, Any]]]

    def text(self, notebook: str) -> str:
        """All that a notebook shows as text."""
        parts = []
        for output in self.shown[notebook]:
            parts.append("".join(output.get("text", "")))
            parts.append("".join(output.get("data", {}).get("text/plain", "")))
        return "\n".join(parts)

    def records(self, pattern: str) -> list[Record]:
        """The records of the runs in these folders beside the area."""
        return [read_record(folder) for folder in sorted(self.runs.parent.glob(pattern))]


@pytest.fixture(scope="module")
def on_local_pods(tmp_path_factory: pytest.TempPathFactory) -> Sequence:
    """The sequence as `make demo` executes it, with a PATH without ssh and pdsh."""
    folder = tmp_path_factory.mktemp("local")
    places = {"PATH": path_without_ssh(folder / "programs"), "ZEROPODS_HOME": str(folder / "home")}
    executed(folder, *NOTEBOOKS, **SMALL, **places, ZEROPODS_PODS=str(PODS))
    until(lambda: not processes_of(folder / "home"))
    return Sequence(folder / "runs", PODS, {name: outputs(folder, name) for name in NOTEBOOKS})


@pytest.fixture(scope="module")
def on_workers(tmp_path_factory: pytest.TempPathFactory) -> Sequence:
    """The sequence in a session of CML's, which is a pod beside its workers."""
    if not are_possible():
        pytest.skip("a session of another user needs root, util-linux and iproute2")
    folder = tmp_path_factory.mktemp("workbench")
    settings = {**SMALL, "ZEROPODS_PODS": str(WORKERS + 1), "ZEROPODS_RUNS": "runs/notebooks"}
    with workbench(folder, **settings) as bench:
        shown = {name: bench.outputs(name, LIMIT_SECONDS) for name in NOTEBOOKS}
        until(lambda: not bench.processes())
        clusters = bench.project / ".zeropods"
        assert not clusters.exists() or not list(clusters.iterdir())
    return Sequence(bench.project / "runs" / "notebooks", WORKERS + 1, shown)


@pytest.fixture(params=["on_local_pods", "on_workers"])
def sequence(request: pytest.FixtureRequest) -> Sequence:
    executed_sequence = request.getfixturevalue(request.param)
    assert isinstance(executed_sequence, Sequence)
    return executed_sequence


def test_every_notebook_runs_and_shows_its_tables_and_no_words_of_other_libraries(sequence: Sequence) -> None:
    for name, heading in NOTEBOOKS.items():
        assert heading in sequence.text(name), name
        assert noise(sequence.shown[name]) == [], name


def test_the_pods_agents_start_the_ranks_and_a_line_says_so(sequence: Sequence) -> None:
    said = sequence.text("03_train_pods")
    assert said.count("there is no pdsh and no ssh here, so agents start the ranks (--launcher agents)") == 1
    assert "--launcher agents" in said and "--launcher pdsh" not in said


def test_the_profiled_runs_and_the_matrix_end_well_on_all_pods_with_equal_losses(sequence: Sequence) -> None:
    profiled = sequence.records(f"{sequence.runs.name}-profiled/*-pods")
    assert [(run.technique, run.pods, run.status) for run in profiled] == [
        ("zero1", sequence.pods, "ok"),
        ("zero3_offload", sequence.pods, "ok"),
    ]
    compared = sequence.records(f"{sequence.runs.name}/*-sweep-*/*/1")
    expected = {("none", 1), ("ddp", sequence.pods), ("zero1", sequence.pods), ("zero1", sequence.pods - 1)}
    expected.add(("zero3_offload", sequence.pods))
    assert {(run.technique, run.pods) for run in compared} == expected
    assert [run.status for run in compared] == ["ok"] * len(expected)
    curves = [[entry.loss for entry in run.losses] for run in compared]
    assert len(curves[0]) == int(SMALL["ZEROPODS_STEPS"])
    assert all(curve == pytest.approx(curves[0], rel=1e-3) for curve in curves)


def test_runs_of_a_session_are_on_its_workers_and_itself_and_belong_to_its_user(on_workers: Sequence) -> None:
    owners = {path.stat().st_uid for path in on_workers.runs.parent.rglob("record.json")}
    assert owners == {int(NUMBER)}
    for run in on_workers.records(f"{on_workers.runs.name}-profiled/*-pods"):
        assert {rank.host for rank in run.ranks} == ADDRESSES
