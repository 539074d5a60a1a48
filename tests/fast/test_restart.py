"""What a run goes on with by itself: the batch that it keeps, when it does, and when it does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made import a_rank, a_record, as_record
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.launch import planning
from zeropods.launch.command import Batch, Launch, batch_of, with_flags
from zeropods.launch.local import run_here
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.planning import plan_launch
from zeropods.launch.restart import End, Restarts, changed_flags, next_attempt
from zeropods.measure.record import Record
from zeropods.pods.cluster import Cluster
from zeropods.pods.state import Pod, Settings, State

TRAIN = Path(__file__).resolve().parents[2] / "textsql_train.py"
NUMBERS = st.integers(1, 48)


@given(NUMBERS, NUMBERS, st.integers(1, 16), st.integers(1, 16))
def test_the_effective_batch_stays_and_no_pass_grows(rows: int, passes: int, ranks: int, fewer: int) -> None:
    same = Batch(rows, passes).on(ranks, fewer)
    if same is None:
        assert rows * passes * ranks % fewer
    else:
        assert same.rows * same.passes * fewer == rows * passes * ranks and same.rows <= rows


@pytest.mark.parametrize(
    ("before", "ranks", "fewer", "after"),
    [
        (Batch(4, 2), 3, 2, Batch(4, 3)),
        (Batch(16, 1), 3, 1, Batch(16, 3)),
        (Batch(6, 1), 3, 2, Batch(3, 3)),
        (Batch(8, 3), 3, 3, Batch(8, 3)),
        (Batch(5, 1), 3, 2, None),
    ],
)
def test_passes_make_up_for_ranks_where_they_divide(before: Batch, ranks: int, fewer: int, after: Batch | None) -> None:
    assert before.on(ranks, fewer) == after


@pytest.mark.parametrize(
    ("arguments", "batch"),
    [
        ((), Batch(32, 1)),
        (("--per_device_train_batch_size", "8"), Batch(8, 1)),
        (("--per-device-train-batch-size=8", "--gradient-accumulation-steps", "3"), Batch(8, 3)),
    ],
)
def test_a_batch_is_read_with_the_scripts_own_defaults(arguments: tuple[str, ...], batch: Batch) -> None:
    assert batch_of(TRAIN, arguments) == batch


def test_a_script_of_another_has_to_be_told_its_batch() -> None:
    assert batch_of(Path("/theirs.py"), ("--per_device_train_batch_size", "8")) is None


def test_flags_take_the_place_of_those_of_their_name() -> None:
    before = ("--outputdir", "r", "--gradient-accumulation-steps", "2", "--resume=never", "--seed", "1")
    changed = with_flags(before, {"gradient_accumulation_steps": "3", "resume": "auto"})
    assert changed == ("--outputdir", "r", "--seed", "1", "--gradient_accumulation_steps", "3", "--resume", "auto")


@pytest.fixture
def three(tmp_path: Path) -> Cluster:
    """Pods that nobody has started; that they are planned for is enough here."""
    settings = Settings(
        count=3, slots=None, backend="local", lease="idle", lease_seconds=9.0, cpu=1, memory=1,
        nvidia_gpu=0,
    )  # fmt: skip
    pods = tuple(
        Pod(name=f"pod{n}", worker=f"w{n}", address=f"127.0.1.{n}", hostname="h", slots=1, host_key="k", control_port=1)
        for n in (1, 2, 3)
    )
    return Cluster.of(tmp_path / "three", State(name="three", settings=settings, ssh_port=2222, pods=pods))


def asked(cluster: Cluster, folder: Path, *arguments: str) -> Launch:
    return plan_launch(cluster, TRAIN, ["--outputdir", str(folder), *arguments])


def without(cluster: Cluster, *numbers: int) -> Cluster:
    return replace(cluster, pods=tuple(pod for at, pod in enumerate(cluster.pods) if at not in numbers))


def test_the_next_attempt_is_on_the_pods_that_are_left(three: Cluster, tmp_path: Path) -> None:
    again = next_attempt(asked(three, tmp_path), without(three, 0), Restarts(most=1), opened=True)
    assert isinstance(again, Launch)
    assert [host.address for host in again.hosts] == [pod.address for pod in three.pods[1:]]


def test_a_spare_pod_takes_the_place_of_a_lost_one(three: Cluster, tmp_path: Path) -> None:
    first = plan_launch(three, TRAIN, ["--outputdir", str(tmp_path)], pods=2)
    again = next_attempt(first, without(three, 0), Restarts(most=1), opened=True)
    assert isinstance(again, Launch) and len(again.hosts) == 2 and not changed_flags(again)


def test_a_pod_stays_unused_where_only_fewer_keep_the_batch(three: Cluster, tmp_path: Path) -> None:
    first = asked(three, tmp_path, "--per_device_train_batch_size", "5")
    again = next_attempt(first, without(three, 2), Restarts(most=1), opened=True)
    assert isinstance(again, Launch) and len(again.hosts) == 1
    assert changed_flags(again) == {"gradient_accumulation_steps": "3"}


def test_a_batch_that_does_not_divide_ends_it(three: Cluster, tmp_path: Path) -> None:
    first = asked(three, tmp_path, "--per_device_train_batch_size", "5")
    why = next_attempt(first, without(three, 2), Restarts(most=1, min_pods=2), opened=True)
    assert why == "an effective batch of 15 rows does not divide among 2 pods"


def test_fewer_pods_than_allowed_end_it(three: Cluster, tmp_path: Path) -> None:
    why = next_attempt(asked(three, tmp_path), without(three, 1, 2), Restarts(most=1, min_pods=2), opened=True)
    assert why == "1 pods are left, --min-pods 2"


def test_a_run_that_was_to_begin_anew_does_so_once(three: Cluster, tmp_path: Path) -> None:
    first = asked(three, tmp_path, "--resume", "never")
    opened, unopened = (next_attempt(first, three, Restarts(most=1), opened=opened) for opened in (True, False))
    assert isinstance(opened, Launch) and changed_flags(opened) == {"resume": "auto"}
    assert isinstance(unopened, Launch) and not changed_flags(unopened)


def test_a_run_that_went_on_is_still_the_one_that_was_asked_for(three: Cluster, tmp_path: Path) -> None:
    first = asked(three, tmp_path)
    again = next_attempt(first, without(three, 0), Restarts(most=1), opened=True)
    assert isinstance(again, Launch) and planning.identity(again) == planning.identity(first)


def record(status: str, *ranks: str, pod: str | None = None) -> Record:
    measured = [a_rank(number, status=one) for number, one in enumerate(ranks)]
    return as_record(a_record(ranks=measured, pods=3, status=status, pod=pod))


@pytest.mark.parametrize(
    ("found", "calls"),
    [
        (record("pod_lost", "interrupted", "interrupted", pod="pod2"), True),
        (record("failed", "failed", "interrupted"), True),
        (record("failed", "interrupted", "interrupted", "interrupted"), True),
        (record("failed", "failed", "interrupted", "interrupted"), False),
        (record("oom", "oom", "interrupted"), False),
        (record("timeout", "interrupted", "interrupted"), False),
        (record("interrupted", "interrupted", "interrupted"), False),
        (record("ok", "ok", "ok", "ok"), False),
    ],
    ids=["pod lost", "a rank killed", "launcher killed", "own error", "oom", "timeout", "Ctrl-C", "ok"],
)
def test_only_what_is_no_error_of_the_script_calls_for_another_attempt(found: Record, calls: bool) -> None:
    assert End(record=found).calls_for_another is calls


@pytest.mark.parametrize(("status", "calls"), [("pod_lost", True), ("failed", False)])
def test_so_it_is_before_the_ranks_have_opened_the_run(status: str, calls: bool) -> None:
    assert End(unopened=UnopenedError(Path("r"), status, "why", [], "log")).calls_for_another is calls


@pytest.mark.parametrize(("most", "least"), [(-1, 1), (1, 0)])
def test_numbers_that_make_no_sense_are_refused(most: int, least: int) -> None:
    with pytest.raises(UserError, match=f"--restarts {most} --min-pods {least}; expected"):
        Restarts(most=most, min_pods=least)


def test_more_pods_than_it_begins_on_are_refused(three: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--min-pods 4: the run begins on 3"):
        Restarts(most=1, min_pods=4).check(asked(three, tmp_path))


KILLED_ONCE = """
import os, pathlib, signal, sys
marks = pathlib.Path(sys.argv[1])
marks.write_text(marks.read_text() + "x" if marks.exists() else "x")
if len(marks.read_text()) < int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def here(folder: Path, good: int, restarts: int) -> int:
    """Run what is killed until its attempt number `good`; returns how many there were."""
    marks = folder / "marks"
    argv = [sys.executable, "-c", KILLED_ONCE, str(marks), str(good)]
    try:
        run_here(argv, folder / "run", restarts=restarts)
    except UserError as error:
        assert "killed by SIGKILL" in str(error) or "status -9" in str(error)
    return len(marks.read_text())


@pytest.mark.parametrize(("good", "restarts", "attempts"), [(2, 3, 2), (9, 2, 3), (9, 0, 1)])
def test_a_run_of_this_machine_is_started_again_after_sigkill(
    tmp_path: Path, good: int, restarts: int, attempts: int
) -> None:
    (tmp_path / "run").mkdir()
    assert here(tmp_path, good, restarts) == attempts


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--launcher", "slurm", "--restarts", "2"), "--restarts 2: SLURM requeues a job by itself"),
        (("--launcher", "none", "--restarts", "2", "--min-pods", "1"), "--min-pods 1: is for --launcher pdsh"),
        (("--min-pods", "2"), "--min-pods 2: says how a run goes on; give --restarts too"),
        (("--restarts", "-1"), "--restarts -1; expected at least 0"),
    ],
)
def test_flags_without_a_meaning_are_refused_in_one_line(
    arguments: tuple[str, ...], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments, "--", "textsql_train.py"]) == 1
    assert fault in capsys.readouterr().err.strip().splitlines()[-1]
