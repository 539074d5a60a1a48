"""Plans without a GPU: by a probe of the machine, by what finished runs tell, and beside what a run measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_rank, a_record, as_record, write_run
from zeropods.cli import main
from zeropods.measure.calibration import MachineProbe, plan_figures, probe_for
from zeropods.plan.known_models import known_config
from zeropods.tables import GIB, MIB
from zeropods.train.probe import step_parameters

BARE = 300_000_000
ON_CPU = ("--model", "t5-small", "--device", "cpu")
PROBE = {
    "measured_at": "2026-01-02T03:04:05+00:00",
    "hardware": {"cpu": "a CPU", "cores": 2, "memory_bytes": 24 * GIB, "gpus": None},
    "versions": {"python": "3.11.4"},
    "matmul_flops_per_second": {"fp32": {"512": 5e10, "1024": 1e11}},
    "one_core_flops_per_second": {"fp32": 6e10},
    "memory_bandwidth": 2e10,
    "one_core_bandwidth": 1.2e10,
    "processes": 2,
    "machines": 1,
    "bandwidth": 1e9,
    "latency_seconds": 1e-4,
    "python_seconds": 1e-5,
    "process_bytes": BARE,
    "pcie_bandwidth": None,
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "home"))
    return a_probe(tmp_path / "machine.json")


def a_probe(path: Path, **values: Any) -> Path:
    path.write_text(json.dumps({**PROBE, **values}))
    return path


def plan(capsys: pytest.CaptureFixture[str], machine: Path, *argv: str) -> dict[str, Any]:
    only = [] if "--technique" in argv else ["--technique", "none"]
    flags = ["--model", "t5-small", "--device", "cpu", "--machine", str(machine), *only, *argv]
    assert main(["plan", *flags, "--json"]) == 0
    (found,) = (document := json.loads(capsys.readouterr().out))["techniques"]
    return {**found, "source": document["source"]}


def runs(
    folder: Path, capsys: pytest.CaptureFixture[str], machine: Path, factor: float, steps: float, count: int = 9
) -> None:
    """Runs that needed that many times what was planned of them."""
    for rows in range(2, 2 * count + 2, 2):
        planned = plan(capsys, machine, "--batch-size", str(rows), "--source-length", "64", "--target-length", "32")
        above = factor * (planned["bytes"]["total"] - BARE)
        seconds = steps * planned["step_seconds"]
        statistics = {"samples": 9, "peak": 1.0, "mean": 1.0, "minimum": float(BARE), "p95": None}
        rank = a_rank(
            shape=known_config("t5-small"), step_seconds=[seconds] * 5, sampled={"resident_bytes": statistics},
            largest_batch={"rows": rows, "source_tokens": 64, "target_tokens": 32}, padded_tokens=5 * rows * 96,
            peak_resident_bytes=BARE + round(above),
        )  # fmt: skip
        record = a_record(ranks=[rank], effective_batch_size=rows, model_id="t5-small", run_id=f"{rows}")
        write_run(folder / str(rows), record)


def test_a_plan_without_a_gpu_is_of_resident_memory_and_of_the_cores(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, shared = plan(capsys, machine), plan(capsys, machine, "--threads", "1")
    assert whole["bytes"]["context"] == BARE and whole["bytes"]["total"] == sum(
        size for part, size in whole["bytes"].items() if part != "total"
    )
    assert whole["bytes"]["total"] == shared["bytes"]["total"]
    assert whole["step_seconds"] < shared["step_seconds"] <= 2.01 * whole["step_seconds"]
    assert "the probe of 2 cores of a CPU" in whole["source"]
    # What 95 % of runs of the kind do not exceed has to fit into the machine, of which one process has all.
    rows = whole["largest_batch_size"]
    most = plan(capsys, machine, "--batch-size", str(rows))
    assert most["fits"] and most["intervals"]["memory"][1] < most["needed_bytes"] <= 24 * GIB
    assert not plan(capsys, machine, "--batch-size", str(rows + 1))["fits"]


def test_a_plan_learns_its_error_from_finished_runs_and_a_summary_marks_what_fell_outside(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = plan(capsys, machine, "--batch-size", "7", "--source-length", "64", "--target-length", "32")
    runs(tmp_path / "runs", capsys, machine, factor=1.3, steps=0.5)
    fit = ["plan", "--fit", str(tmp_path / "runs"), "--machine", str(machine)]
    assert main([*fit, "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert fitted["runs"] == 9 and max(fitted["error"].values()) < 0.05
    after = plan(capsys, machine, "--batch-size", "7", "--source-length", "64", "--target-length", "32")
    assert f"9 runs of {tmp_path / 'runs'}" in after["source"]
    above = after["bytes"]["total"] - BARE
    assert above == pytest.approx(1.3 * (before["bytes"]["total"] - BARE), rel=0.05)
    assert after["step_seconds"] == pytest.approx(0.5 * before["step_seconds"], rel=0.1)
    low, high = after["intervals"]["memory"]
    assert low <= after["bytes"]["total"] * 1.05 and high >= after["bytes"]["total"] * 0.95
    runs(tmp_path / "later" / "alike", capsys, machine, factor=1.0, steps=1.0, count=2)
    runs(tmp_path / "later" / "larger", capsys, machine, factor=1.4, steps=1.0, count=2)
    summary = ["summary", str(tmp_path / "later"), "--out", str(tmp_path / "summary")]
    assert main(summary) == 0 and "(outside)" in (tmp_path / "summary" / "summary.md").read_text()
    # What another version has fitted is said to be that; a summary needs none.
    path = Path(fitted["file"])
    kept = json.loads(path.read_text())
    kept["factors"]["cpu"]["time"].pop()
    path.write_text(json.dumps(kept))
    asked = ["plan", *ON_CPU, "--machine", str(machine)]
    assert main(asked) == 1
    assert "was fitted by another version of zeropods; run zeropods plan --fit again" in capsys.readouterr().err
    assert (main(summary), main(fit), main(asked)) == (0, 0, 0)


def test_a_run_on_another_machine_is_planned_by_the_rates_that_it_measured() -> None:
    probe = MachineProbe(**PROBE)
    first = a_rank(matmul_flops_per_second=2e11, one_core_flops_per_second=1.5e11, python_seconds=5e-6)
    other = {**PROBE["hardware"], "instructions": "avx512f"}
    assert probe_for(as_record(a_record(ranks=[first])), probe) is probe
    found = probe_for(as_record(a_record(ranks=[first], hardware=other)), probe)
    assert (found.flops("fp32"), found.flops("fp32", 1), found.python_seconds) == (2e11, 1.5e11, 5e-6)


def test_a_run_on_a_gpu_that_is_not_known_has_a_plan_of_its_memory_alone() -> None:
    sampled = {"device_used_bytes": {"samples": 9, "peak": 3e9, "mean": 1.0, "minimum": 1.0, "p95": None}}
    batch = {"rows": 32, "source_tokens": 40, "target_tokens": 30}
    rank = a_rank(shape=known_config("t5-tiny"), largest_batch=batch, gpu="a card of the future", sampled=sampled)
    found = plan_figures(as_record(a_record(ranks=[rank])))
    assert found["plan_peak_measured_bytes"] == 3e9 and found["plan_peak_planned_bytes"] is not None
    assert found["plan_step_planned_seconds"] is None and found["plan_step_measured_seconds"] is None


@pytest.mark.parametrize(
    ("measured", "flags", "expected"),
    [
        # NVML's bytes of the probed GPU win over its name, and what is asked for over both.
        ({"gpu_memory_bytes": 79 * GIB}, (), 79 * GIB),
        ({"gpu_memory_bytes": 79 * GIB}, ("--gpu-memory", "64"), 64 * GIB),
        # An older probe has none; nor has a GPU of another name anything to do with it.
        ({}, (), 81_559 * MIB),
        ({"gpu_memory_bytes": 79 * GIB}, ("--gpu", "A100-40GB"), 40 * GIB),
    ],
)
def test_a_gpu_at_hand_has_the_memory_that_it_shows(
    measured: dict[str, Any], flags: tuple[str, ...], expected: int, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = {**PROBE["hardware"], "gpus": ["NVIDIA H100 80GB HBM3"]}
    a_probe(machine, hardware=hardware, pcie_bandwidth=1e10, **measured)
    assert main(["plan", "--model", "t5-small", "--machine", str(machine), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["gpu_memory_bytes"] == expected


def test_a_gpu_of_any_name_is_planned_by_its_probe(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = {**PROBE["hardware"], "gpus": ["a card of the future"]}
    a_probe(machine, hardware=hardware, pcie_bandwidth=1e10, gpu_memory_bytes=20 * GIB)
    assert main(["plan", "--model", "t5-small", "--machine", str(machine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["gpu_memory_bytes"] == 20 * GIB


@pytest.mark.parametrize(
    ("cache_mb", "bytes_of_the_step"),
    [
        # Without a GPU as before: plans were fitted to rates of this step.
        (None, 64_000_000),
        # An H100's L2, and that of a B200.
        (50, 512 << 20),
        (126, 512 << 20),
        (256, 4 * 256_000_000),
    ],
)
def test_the_probed_step_of_a_gpu_is_larger_than_its_caches(cache_mb: int | None, bytes_of_the_step: int) -> None:
    # Weight, gradient and both moments, in FP32.
    cache = None if cache_mb is None else cache_mb * 1_000_000
    assert 16 * step_parameters(cache) == bytes_of_the_step


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "zeropods: --model is missing; give a name such as t5-large, or --fit RUNS"),
        ([*ON_CPU, "--machine", "none.json"], "none.json: no such file; create it with zeropods probe"),
        ([*ON_CPU, "--machine", "cut.json"], "zeropods probe again"),
        ([*ON_CPU, "--machine", "zero.json"], "bandwidth 0.0; expected more than 0"),
        (["--model", "t5-small", "--machine", "machine.json"], "without a GPU; give --device cpu"),
        ([*ON_CPU, "--gpu", "A100"], "--gpu: is for --device gpu; leave it out"),
        ([*ON_CPU, "--machine", "machine.json", "--precision", "bf16"], "with fp32; give"),
        (["--fit", "few"], "too few runs to fit; expected at least 9 runs with sampled memory on one device"),
        (["--model", "t5-small", "--hosts", "2"], "--hosts: is for --device cpu; leave it out"),
        ([*ON_CPU, "--machine", "gpu.json"], "on H100; leave out --device cpu"),
        (["--model", "t5-small", "--precision", "fp8", "--machine", "gpu.json"], "fp8; expected fp32 or bf16"),
        (["--fit", "few", "--machine", "gpu.json"], "on H100; give that of the runs without a GPU"),
        (["--fit", "nowhere"], "nowhere: no such folder"),
    ],
)  # fmt: skip
def test_what_no_plan_can_be_made_of_is_one_line(
    argv: list[str], said: str, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = machine.parent
    monkeypatch.chdir(here)
    (here / "cut.json").write_text(machine.read_text()[:200])
    a_probe(here / "zero.json", bandwidth=0.0)
    a_probe(here / "gpu.json", hardware={**PROBE["hardware"], "gpus": ["H100"]}, pcie_bandwidth=1e10)
    write_run(here / "few" / "one", a_record())
    assert main(["plan", *argv]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_pods_of_one_machine_share_its_cores_and_memory_and_accumulated_gradients_take_some(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ddp(*argv: str) -> dict[str, Any]:
        return plan(capsys, machine, "--technique", "ddp", *argv)

    shared = [ddp("--pods", "4", "--hosts", hosts) for hosts in "124"]
    steps, batches = ([each[key] for each in shared] for key in ("step_seconds", "largest_batch_size"))
    assert steps == sorted(steps, reverse=True) and steps[0] > 1.5 * steps[-1]
    assert ddp("--pods", "2")["largest_batch_size"] == batches[1] > batches[0]
    once, often = (plan(capsys, machine, "--technique", "zero1", "--gradient-accumulation", number) for number in "18")
    assert often["bytes"]["gradients"] > once["bytes"]["gradients"]
    more = {part: often["bytes"][part] - once["bytes"][part] for part in ("total", "gradients")}
    # Each term is rounded to a byte.
    assert more["total"] == pytest.approx(more["gradients"], abs=100)
    assert often["communication_seconds"] >= once["communication_seconds"]


def test_a_plan_by_a_probe_of_its_own_is_printed_with_it(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "t5-small", "--device", "cpu", "--machine", str(machine), "--what-if", "--json"]
    assert main(["plan", *flags]) == 0
    commands = [each["command"] for each in json.loads(capsys.readouterr().out)["what_if"]]
    assert all(command.endswith(f"--machine {machine}") for command in commands)
