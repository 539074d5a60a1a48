"""Tries of plans: which are made, and what later plans know by them."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.made import SETTINGS, a_pod, a_rank, a_record, as_record
from zeropods.cli import main
from zeropods.launch.script_call import ScriptCall, find_script
from zeropods.measure.tries import TRIES, TriedWay, Try, keep, kept_tries, span_with_tries
from zeropods.plan.estimate import plan, request_for
from zeropods.plan.machines import Machines
from zeropods.plan.workload import ZeroSettings
from zeropods.pods import cluster
from zeropods.pods.cluster import Cluster
from zeropods.pods.machine import this_machine
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
    ("part", "key", "value"),
    [
        ("try", "rows", 0),
        ("try", "gpu_memory_bytes", -1),
        ("try", "step_seconds", float("nan")),
        ("try", "version", 2),
        ("way", "ranks", 0),
        ("way", "secondary_ranks", "2"),
    ],
)
def test_a_file_of_tries_with_a_value_that_no_try_has_is_named(
    here: Path, part: str, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    document = asdict(tried("ok"))
    {"try": document, "way": document["way"]}[part][key] = value
    (here / TRIES).write_text(json.dumps({"tries": [document]}))
    assert main(["plan", "--model", "t5-small"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zeropods: {here / TRIES}: ") and line.endswith("; remove the file, and tune again")


@pytest.mark.parametrize(
    "other",
    [
        {"adapter": "lora", "precision": "bf16"},
        {"masters": "none", "precision": "bf16"},
        {"optimizer": "adamw_8bit", "precision": "bf16"},
        {"techniques": ("zero2",), "zero": ZeroSettings(reduce_elements=1_000)},
        {"techniques": ("zero3_offload",), "machines": Machines(pods=2, nvme_bandwidth=3e9)},
        {"techniques": ("zero3++",), "quantized": "weights", "machines": Machines(pods=2)},
        {"techniques": ("zero3++",), "machines": Machines(pods=1, slots=2)},
    ],
)
def test_a_try_says_nothing_of_training_with_other_settings(here: Path, other: dict[str, Any]) -> None:
    """A try of the usual settings that ran out of memory, and a plan of others."""
    settings = {"machines": Machines(pods=2), "techniques": ("none",), "batch_size": 1, **other}
    usual = {**settings, "machines": replace(settings["machines"], pods=2, slots=1, nvme_bandwidth=None)}
    if settings["techniques"] == ("none",):
        usual["machines"] = settings["machines"] = ONE
    for name in ("adapter", "masters", "optimizer", "zero", "quantized"):
        usual.pop(name, None)
    (estimate,) = plan(request_for("qwen2.5-0.5b", **usual)).estimates
    work = estimate.work
    failed = replace(tried("oom", rows=1), way=TriedWay.of(work), tokens=work.tokens, labels=work.labels)
    span = span_with_tries([failed], None)
    assert [each.verdict for each in plan(request_for("qwen2.5-0.5b", **usual), span).estimates] == ["NO"]
    assert [each.verdict for each in plan(request_for("qwen2.5-0.5b", **settings), span).estimates] == ["FITS"]


def a_way(model: str, **asked: Any) -> tune.Way:
    request = request_for(model, machines=ONE, techniques=("none",), batch_size=2, **asked)
    (estimate,) = plan(request).estimates
    return tune.Way(request=request, estimate=estimate)


def test_a_try_has_the_memory_of_the_gpu_that_ran_it(tmp_path: Path) -> None:
    way = a_way("t5-small", gpu_memory_bytes=39 * GIB)
    call = ScriptCall(find_script("textsql_train.py"), ("--outputdir", str(tmp_path)))
    shown = {}
    for gpu in (A100, "Tesla T4", "a GPU of tomorrow"):
        record = as_record(a_record(ranks=[a_rank(gpu=gpu)]))
        shown[gpu] = tune.outcome_of(way, call, "ok", None, record).gpu_memory_bytes / GIB
    # That of the GPU of the plan is as the plan was told.
    assert shown == {A100: 39, "Tesla T4": pytest.approx(15, abs=0.1), "a GPU of tomorrow": 39}


def test_any_token_of_a_row_that_was_too_much_may_have_had_a_label() -> None:
    way = a_way("llama-tiny", seq_length=64, label_length=3)
    ended = tune.outcome_of(way, ScriptCall(find_script("causal_train.py")), "oom", "out of memory", None)
    assert (ended.tokens, ended.labels) == (64, 63)


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
        (("--tune", "data", "--bucket-size", "1000"), "--bucket-size: is for a plan that is shown; leave out --tune"),
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pods", "3"), "zeropods: --pods 3: cluster one has 2 pods; give at most 2"),
        (("--slots", "3"), "zeropods: --slots 3: pods of one have 2"),
        # One process runs on one pod of several, in one of its slots.
        (("--technique", "none"), "zeropods: data: no prepared data set there; make one with"),
        (("--technique", "none", "--pods", "2"), "zeropods: --technique none: runs one process only; leave out --pods"),
        (("--technique", "none", "--technique", "ddp"), "zeropods: data: no prepared data set there; make one with"),
    ],
)
def test_flags_are_held_against_the_pods_that_are_up(
    here: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    folder = cluster.folder_of("one")
    folder.mkdir(parents=True)
    up = tuple(a_pod(number, slots=2) for number in (1, 2))
    made = Cluster(folder=folder, settings=SETTINGS, workers=("w1", "w2"), pods=up, machine=this_machine())
    cluster.write_cluster(made)
    assert main(["plan", "--model", "t5-tiny", "--tune", "data", *words]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(message)


def test_data_without_a_name_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "t5-tiny", "--tune", ""])
    assert ended.value.code == 2 and "argument --tune: expected a name" in capsys.readouterr().err
