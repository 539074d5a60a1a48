"""Tries of plans: which are made, and what later plans know by them."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from zeropods.cli import main
from zeropods.measure.tries import TRIES, TriedWay, Try, keep, kept_tries
from zeropods.plan.estimate import plan, request_for
from zeropods.plan.machines import Machines
from zeropods.sweep import tune
from zeropods.tables import GIB

ASKED = {"batch_size": 48, "techniques": ("none",), "precision": "fp32"}
ONE = Machines(pods=1)
A100 = "NVIDIA A100-SXM4-40GB"


def tried(status: str, rows: int = 48, gpu: str | None = A100, tokens: int = 96) -> Try:
    """How t5-large without a technique ended on a GPU of 40 GiB."""
    (estimate,) = plan(request_for("t5-large", machines=ONE, **ASKED)).estimates
    return Try(
        way=TriedWay.of(estimate.work), rows=rows, passes=1, tokens=tokens, labels=96, gpu=gpu,
        gpu_memory_bytes=40 * GIB, status=status, reason=None, step_seconds=0.5,
        planned_step_seconds=estimate.time.seconds, planned_bytes=estimate.memory.device_bytes, folder="runs/a",
    )  # fmt: skip


def verdict(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, int]:
    """The verdict on t5-large without a technique, and the most rows of a pass that are planned to fit."""
    given = ["--pods", "1", "--technique", "none", "--precision", "fp32", "--gradient-checkpointing", "False"]
    assert main(["plan", "--model", "t5-large", *given, *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (estimate,) = document["techniques"]
    return estimate["verdict"], estimate["largest_batch_size"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path))
    return tmp_path


def test_a_way_that_ran_out_of_memory_fits_no_more_and_one_that_ran_does(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 48 rows are planned with some 35 of 40 GiB, and 58 with a little more than there is.
    before, most = verdict(capsys, "--batch-size", "48")
    assert before == "FITS" and most > 52
    keep(tried("oom", rows=48), here)
    assert verdict(capsys, "--batch-size", "48") == ("NO", 47)
    assert verdict(capsys, "--batch-size", "40") == ("FITS", 47)
    # Longer rows need more, shorter ones perhaps not; other GPUs and techniques are as they were.
    assert verdict(capsys, "--batch-size", "48", "--source-length", "120")[0] == "NO"
    assert verdict(capsys, "--batch-size", "48", "--source-length", "64")[0] == "FITS"
    assert verdict(capsys, "--batch-size", "48", "--gpu", "A800-40GB")[0] == "FITS"
    # The same batch that ran takes the place of the one that did not.
    keep(tried("ok", rows=48), here)
    assert [each.status for each in kept_tries(here)] == ["ok"]
    keep(tried("ok", rows=most + 4), here)
    assert verdict(capsys, "--batch-size", str(most + 4)) == ("FITS", most + 4)
    assert verdict(capsys, "--batch-size", str(most + 4), "--source-length", "97")[0] != "FITS"


def test_a_try_without_a_gpu_or_that_failed_changes_no_plan_and_a_plan_says_what_it_knows(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in (tried("oom", gpu=None), tried("failed"), tried("oom", gpu="Tesla T4")):
        keep(other, here)
    assert verdict(capsys, "--batch-size", "48")[0] == "FITS"
    main(["plan", "--model", "t5-large"])
    assert "What fits is as 1 of your tries showed" in " ".join(capsys.readouterr().out.split())


def test_a_file_of_tries_that_is_none_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / TRIES).write_text(json.dumps({"tries": [{**asdict(tried("ok")), "rows": "many"}]}))
    assert main(["plan", "--model", "t5-small"]) == 1
    assert re.search(r"tries\.json: .*rows.*; remove the file, and tune again", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("asked", "batches"),
    [
        ({"batch_size": 8}, [(8, 1), (4, 2), (2, 4), (1, 8)]),
        # Of 40 rows a step 2 is the largest share that is at most half of 5.
        ({"batch_size": 5, "gradient_accumulation": 8}, [(5, 8), (2, 20), (1, 40)]),
        ({"batch_size": 4, "global_batch": 12}, [(4, 3), (2, 6), (1, 12)]),
        ({"batch_size": 1}, [(1, 1)]),
    ],
)
def test_rows_step_down_and_the_rows_of_a_step_stay(asked: dict[str, Any], batches: list[tuple[int, int]]) -> None:
    request = request_for("t5-small", machines=ONE, techniques=("none",), **asked)
    (estimate,) = plan(request).estimates
    works = [way.estimate.work for way in tune.with_fewer_rows(tune.Way(request=request, estimate=estimate))]
    assert [(work.batch_size, work.gradient_accumulation) for work in works] == batches


def test_the_best_try_is_the_one_with_most_rows_a_second() -> None:
    slow, quick = tried("ok"), replace(tried("ok"), step_seconds=0.4)
    none = replace(tried("oom"), step_seconds=None)
    tuning = tune.Tuning(tries=(none, slow, quick), file=Path("tries.json"))
    assert tuning.to_json()["best"] == 2 and tuning.best is quick
    assert f"later plans for {A100} know what fitted" in tuning.to_text()
    assert tune.Tuning(tries=(none,), file=Path("tries.json")).best is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tune", "data", "--what-if"), "--what-if: is for a plan that is shown; leave out --tune or this"),
        (("--tune", "data", "--pods", "2"), "--pods 2: no pods are up; zeropods pods up starts some, or give --pods 1"),
        (("--tune", "data", "--attention", "eager"), "--tune data: --attention eager is planned only; leave it out"),
        (("--tune", "data", "--gpu-memory", "0.4"), "--tune data: nothing fits; zeropods plan without it says what"),
        (("--tune", "no-such-data", "--technique", "none"), "no-such-data"),
        (("--out", "runs"), "is the folder of --tune's runs; leave it out"),
        (("--tune", "data", "--device", "cpu"), "--tune: is for --device gpu; leave it out"),
    ],
)
def test_what_cannot_be_tried_is_refused_and_nothing_is_kept(
    here: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    assert main(["plan", "--model", "t5-tiny", "--batch-size", "2", *words]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (here / TRIES).exists()
