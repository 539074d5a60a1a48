"""What a run goes on with by itself: the batch that it keeps, when it does, and when it does not."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.made import SETTINGS, a_pod, a_rank, a_record, as_record
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.launch.command import AGENTS, PDSH, Launch, plan_launch
from zeropods.launch.lost_pods_and_hangs import Ending
from zeropods.launch.outcome import UnopenedError
from zeropods.launch.restart import calls_for_another, check_restarts, next_attempt, saved_checkpoints
from zeropods.launch.script_call import ScriptCall, flag_values
from zeropods.measure.record import Record
from zeropods.pods.cluster import Cluster
from zeropods.pods.machine import this_machine
from zeropods.train.checkpoints import MANIFEST
from zeropods.train.flags import PASSES, PROJECT, ROWS, Batch, batch_on

TRAIN = PROJECT / "textsql_train.py"


@pytest.mark.parametrize(
    ("ranks", "effective", "most_rows", "share"),
    [
        (2, 24, 4, Batch(4, 3)),
        (1, 48, 16, Batch(16, 3)),
        (2, 18, 6, Batch(3, 3)),
        (2, 15, 5, None),
        (4, 2, 1, None),
        (0, 8, 8, None),
    ],
)
def test_passes_make_up_for_ranks_where_they_divide(
    ranks: int, effective: int, most_rows: int, share: Batch | None
) -> None:
    assert batch_on(ranks, effective, most_rows) == share


@pytest.fixture
def three(tmp_path: Path) -> Cluster:
    """Pods that nobody has started; that they are planned for is enough here."""
    pods = tuple(map(a_pod, (1, 2, 3)))
    return Cluster(folder=tmp_path / "three", settings=SETTINGS, pods=pods, machine=this_machine())


def restarted(
    cluster: Cluster,
    folder: Path,
    *arguments: str,
    pods: int = 3,
    lost: int = 0,
    min_pods: int = 1,
    opened: bool = True,
    has_saved: bool = False,
) -> tuple[Launch, Launch | str]:
    """A launch on the first pods of a cluster, and what follows when these are lost."""
    call = ScriptCall.of(TRAIN, ["--outputdir", str(folder), *arguments])
    asked = plan_launch(cluster, call, pods=pods)
    left = replace(cluster, pods=cluster.pods[lost:])
    return asked, next_attempt(asked, left, min_pods, opened=opened, has_saved=has_saved)


@pytest.mark.parametrize(
    ("arguments", "asked", "addresses", "flags"),
    [
        ((), {"lost": 1}, ("127.0.1.2", "127.0.1.3"), {ROWS: "24", PASSES: "2"}),
        ((), {"lost": 1, "pods": 2}, ("127.0.1.2", "127.0.1.3"), {}),
        (("--per_device_train_batch_size", "5"), {"lost": 1}, ("127.0.1.2",), {PASSES: "3"}),
        (("--resume", "never"), {}, ("127.0.1.1", "127.0.1.2", "127.0.1.3"), {"resume": "auto"}),
        (("--resume", "never"), {"opened": False}, ("127.0.1.1", "127.0.1.2", "127.0.1.3"), {}),
        (("--resume", "old"), {}, ("127.0.1.1", "127.0.1.2", "127.0.1.3"), {}),
        (("--resume", "old"), {"has_saved": True}, ("127.0.1.1", "127.0.1.2", "127.0.1.3"), {"resume": "auto"}),
    ],
    ids=[
        "fewer pods",
        "a spare pod",
        "an unused pod",
        "began anew",
        "had not begun",
        "had not saved",
        "had saved",
    ],
)
def test_a_run_goes_on_with_its_batch_on_the_pods_that_are_left(
    arguments: tuple[str, ...], asked: dict[str, Any], addresses: tuple[str, ...], flags: dict[str, str],
    three: Cluster, tmp_path: Path,
) -> None:  # fmt: skip
    first, following = restarted(three, tmp_path, *arguments, **asked)
    assert isinstance(following, Launch)
    assert tuple(host.address for host in following.hosts) == addresses
    assert following.changed_flags == flags
    assert flag_values(following.arguments[len(first.arguments) :]) == flags
    assert command.identity(following) == command.identity(first)


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (1, "an effective batch of 15 rows cannot be divided evenly among 2 pods"),
        (2, "too few pods are left (1, --min-pods 2)"),
    ],
)
def test_where_a_run_cannot_go_on_it_is_said_why(lost: int, why: str, three: Cluster, tmp_path: Path) -> None:
    _, following = restarted(three, tmp_path, "--per_device_train_batch_size", "5", lost=lost, min_pods=2)
    assert following == why


def test_a_launcher_that_was_not_asked_for_is_chosen_anew_for_a_restart(
    three: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("pdsh", "ssh"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    call = ScriptCall.of(TRAIN, ["--outputdir", str(tmp_path / "run")])
    without_sshd = replace(three, pods=(*three.pods[:2], a_pod(3, ssh_port=None, host_key=None)))
    for before, launcher, left, again in (
        (three, None, without_sshd, AGENTS),
        (three, None, three, PDSH),
        (three, AGENTS, three, AGENTS),
        # An argument or a variable may be one that pdsh could not pass on.
        (without_sshd, None, three, AGENTS),
    ):
        first = plan_launch(before, call, launcher=launcher)
        following = next_attempt(first, left, 1, opened=True, has_saved=False)
        assert isinstance(following, Launch) and following.launcher == again
    demanded = plan_launch(three, call, launcher=PDSH)
    refusal = next_attempt(demanded, without_sshd, 1, opened=True, has_saved=False)
    assert isinstance(refusal, str) and refusal.startswith("--launcher pdsh: there is no sshd on pod3; leave it out")


def test_more_pods_than_there_are_come_by_the_commands_that_are_named(three: Cluster, tmp_path: Path) -> None:
    remedy = "zeropods pods down --name three, then zeropods pods up --name three --count 4"
    with pytest.raises(UserError, match=f"--num-pods 4: three has 3 pods; {remedy}"):
        restarted(three, tmp_path, pods=4)


def record(status: str, *ranks: str, pod: str | None = None) -> Record:
    measured = [a_rank(number, status=one) for number, one in enumerate(ranks)]
    return as_record(a_record(ranks=measured, pods=3, status=status, pod=pod))


def unopened(status: str) -> UnopenedError:
    return UnopenedError(Path("/run"), Ending(status, "it is gone"), [])


@pytest.mark.parametrize(
    ("end", "calls"),
    [
        (record("pod_lost", "interrupted", "interrupted", pod="pod2"), True),
        (record("failed", "failed", "interrupted"), True),
        (record("failed", "interrupted", "interrupted", "interrupted"), True),
        (record("failed", "failed", "interrupted", "interrupted"), False),
        (record("oom", "oom", "interrupted"), False),
        (record("timeout", "interrupted", "interrupted"), False),
        (record("interrupted", "interrupted", "interrupted", "interrupted"), False),
        (record("ok", "ok", "ok", "ok"), False),
        (unopened("pod_lost"), True),
        (unopened("failed"), False),
    ],
)
def test_only_what_is_no_error_of_the_script_calls_for_another_attempt(
    end: Record | UnopenedError, calls: bool
) -> None:
    assert calls_for_another(end) is calls


def test_what_could_not_go_on_is_refused_before_it_starts(three: Cluster, tmp_path: Path) -> None:
    asked, _ = restarted(three, tmp_path)
    with pytest.raises(UserError, match="--min-pods 4: the run starts on only 3"):
        check_restarts(asked, 1, 4)
    with pytest.raises(UserError, match=r"theirs.py is not one of our scripts; give --per_device_train_batch_size"):
        check_restarts(replace(asked, call=ScriptCall(Path("/theirs.py"))), 1, 1)


def test_a_checkpoint_that_was_there_before_is_told_from_one_that_was_saved_since(tmp_path: Path) -> None:
    manifests = [tmp_path / "checkpoints" / f"checkpoint-{step}" / MANIFEST for step in (50, 100)]
    for path in manifests:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (1.0, 1.0))
    before = saved_checkpoints(tmp_path)
    assert len(before) == 2 and not saved_checkpoints(tmp_path) - before
    # The same step again is another checkpoint.
    manifests[1].write_text("{}")
    assert {path for path, _ in saved_checkpoints(tmp_path) - before} == {str(manifests[1])}
