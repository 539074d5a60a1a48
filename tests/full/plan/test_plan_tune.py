"""`zeropods plan --tune`: plans tried on real pods, and what becomes of one for which memory is not enough."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full.clusters import zeropods
from tests.full.launches import ROOT, left
from zeropods.data.manifest import read_manifest
from zeropods.data.prepare import Preparation, prepare
from zeropods.launch.script_call import ScriptCall, find_script
from zeropods.measure.record import read_record
from zeropods.measure.tries import TRIES
from zeropods.plan.advice import Way
from zeropods.plan.estimate import plan, request_for
from zeropods.plan.machines import Machines
from zeropods.pods.cluster import Cluster
from zeropods.sweep.tune import outcome_of

ASKED = (
    "plan", "--model", "t5-tiny", "--pods", "2", "--batch-size", "4", "--gradient-accumulation", "1",
    "--precision", "fp32", "--gradient-checkpointing", "False", "--technique", "ddp", "--technique", "zero2",
)  # fmt: skip


@pytest.fixture
def tries_file(shared_home: Path) -> Iterator[Path]:
    """The file of the tries in the home of the tests' clusters, which has none before and after."""
    yield shared_home / TRIES
    (shared_home / TRIES).unlink(missing_ok=True)


def tuned(*words: object) -> dict[str, Any]:
    done = zeropods(*ASKED, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_best_plans_are_tried_on_the_pods_at_hand_and_kept(
    cluster: Cluster, prepared: Path, tries_file: Path, tmp_path: Path
) -> None:
    found = tuned("--tune", prepared, "--out", tmp_path / "runs")
    assert {each["way"]["technique"] for each in found["tries"]} == {"ddp", "zero2"}
    for each in found["tries"]:
        record = read_record(Path(each["folder"]))
        assert (each["status"], record.status, record.steps, record.pods) == ("ok", "ok", 8, 2)
        assert (record.technique, each["rows"], each["gpu"]) == (each["way"]["technique"], 4, None)
        # What ran may have shorter rows than what was planned.
        assert 0 < each["tokens"] <= 96 and 0 < each["labels"] <= 96
    rates = [each["samples_per_second"] for each in found["tries"]]
    assert rates[found["best"]] == max(rates) > 0
    assert json.loads(tries_file.read_text())["tries"][0]["folder"] == found["tries"][0]["folder"]
    assert not left(tmp_path / "runs")

    again = zeropods(*ASKED, "--tune", prepared, "--out", tmp_path / "runs")
    assert again.returncode == 0 and again.stderr.count("this run is finished; nothing to do") == 2
    assert "tried without a GPU, so no plan uses it" in again.stdout
    assert len(json.loads(tries_file.read_text())["tries"]) == 2


SIZE = """
import zeropods.train.text2sql
print(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
"""
"""Prints the KiB of address space that a process has once it could train."""
TUNE = """
import resource, sys
from dataclasses import asdict
from pathlib import Path
from zeropods.files import write_json
from zeropods.plan.advice import Choice, advise
from zeropods.plan.estimate import request_for
from zeropods.plan.machines import Machines
from zeropods.sweep.tune import tune
data, out, address_space = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(address_space), int(address_space)))
machines = Machines(pods=1)
request = request_for("t5-tiny", machines=machines, batch_size=512, techniques=("none",))
choice = Choice(batch=False, checkpointing=False, precision=False)
tuning = tune(advise(request, choice).ways, data, Path(out), None, steps=2)
write_json(Path(out) / "tuning.json", tuning.to_json())
"""
"""Tunes 512 rows a pass in FP32, which need 3.4 GiB beside the process, within an address space."""


def test_a_way_that_runs_out_of_memory_is_tried_with_fewer_rows(sample: Path, tmp_path: Path) -> None:
    prepare(Preparation(data=sample, tokenizer="t5-tiny", limit=512), tmp_path / "data")
    environment = {
        **os.environ,
        "ZEROPODS_HOME": str(tmp_path / "home"),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    size = subprocess.run([sys.executable, "-c", SIZE], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    # Threads and their heaps take about 2 GiB of it.
    address_space = 1024 * int(size.stdout) + (4 << 30)
    argv = [sys.executable, "-c", TUNE, str(tmp_path / "data"), str(tmp_path / "runs"), str(address_space)]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    tries = json.loads((tmp_path / "runs" / "tuning.json").read_text())["tries"]
    first, last = tries[0], tries[-1]
    assert (first["rows"], first["passes"], first["status"]) == (512, 1, "oom")
    assert "can't allocate memory" in first["reason"] and first["step_seconds"] is None
    # Each is half of the one before, in twice as many passes, and the first that runs is the last.
    assert [each["status"] for each in tries[:-1]] == ["oom"] * (len(tries) - 1) and last["status"] == "ok"
    assert [(each["rows"], each["passes"]) for each in tries] == [(512 >> n, 1 << n) for n in range(len(tries))]
    assert read_record(Path(last["folder"])).steps == 2


def test_rows_that_were_too_much_may_have_been_longer_than_planned(prepared: Path, tmp_path: Path) -> None:
    arguments = ("--dataset_path", str(prepared), "--outputdir", str(tmp_path))
    call = ScriptCall(find_script("textsql_train.py"), arguments)
    manifest = read_manifest(prepared)
    longest = (manifest.max_source_tokens, manifest.max_target_tokens)
    for planned, tried in ((4, longest), (10_000, (10_000, 10_000))):
        lengths = {"source_length": planned, "target_length": planned}
        request = request_for("t5-tiny", machines=Machines(pods=1), techniques=("none",), **lengths)
        (estimate,) = plan(request).estimates
        way = Way(request=request, estimate=estimate)
        ended = outcome_of(way, call, "oom", "out of memory", None)
        assert (ended.tokens, ended.labels) == tried
