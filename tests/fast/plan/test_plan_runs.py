"""Plans by a probe of a machine, by what finished runs tell, and beside what a run measured; states without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_batch, a_rank, a_record, as_record, statistics, write_run
from zeropods.cli import main
from zeropods.measure.calibration import plan_figures
from zeropods.plan.known_models import known_config
from zeropods.tables import GIB, MIB

ON_GPU = ("--model", "t5-small")
ON_CPU = ("--model", "t5-small", "--device", "cpu")
PARAMETERS = 60_506_624
"""Parameters of t5-small."""
H100 = "NVIDIA H100 80GB HBM3"
PROBE = {
    "measured_at": "2026-01-02T03:04:05+00:00",
    "hardware": {"cpu": "a CPU", "cores": 2, "memory_bytes": 24 * GIB, "gpus": None},
    "versions": {"python": "3.11.4"},
    "matmul_flops_per_second": {"fp32": {"512": 5e10, "1024": 1e11}},
    "processes": 2,
    "machines": 1,
    "bandwidth": 1e9,
    "latency_seconds": 1e-4,
    "pcie_bandwidth": None,
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZEROPODS_HOME", str(tmp_path / "home"))
    return a_probe(tmp_path / "machine.json")


def a_probe(path: Path, **values: Any) -> Path:
    path.write_text(json.dumps({**PROBE, **values}))
    return path


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON document of a plan of t5-small."""
    assert main(["plan", "--model", "t5-small", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# Without a GPU.


def test_a_plan_without_a_gpu_says_the_states_alone_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    planned = document(capsys, "--device", "cpu", "--pods", "2", "--batch-size", "7")
    by_name = {states["technique"]: states["bytes"] for states in planned["techniques"]}
    assert len(by_name) == 8
    assert by_name["none"] == {
        "parameters": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        "total": 16 * PARAMETERS,
    }
    # What is offloaded is counted too, wherever it lies.
    assert by_name["zero3"]["optimizer"] == 12 * PARAMETERS // 2 == by_name["zero3_offload"]["optimizer"]
    assert "step_seconds" not in json.dumps(planned) and "for GPUs only" in planned["remark"]
    assert main(["plan", *ON_CPU, "--formulas"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert planned["remark"] in text and "4 B x 60.51 M" in text and "step" not in text


def test_states_without_a_gpu_are_those_of_a_plan_for_gpus(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--pods", "3", "--slots", "2", "--precision", "bf16")
    on_gpus = document(capsys, *flags)["techniques"]
    without = document(capsys, "--device", "cpu", *flags)["techniques"]
    for planned, states in zip(on_gpus, without, strict=True):
        assert [planned[key] for key in ("technique", "pods", "slots")] == list(states.values())[:3]
        if "offload" not in planned["technique"]:
            parts = {part: planned["bytes"][part] for part in ("parameters", "gradients", "optimizer")}
            assert states["bytes"] == {**parts, "total": sum(parts.values())}


def test_gradients_of_several_passes_accumulate_without_a_gpu_too(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--device", "cpu", "--technique", "zero1", "--gradient-accumulation")
    (once,), (often,) = (document(capsys, *flags, number)["techniques"] for number in "18")
    assert often["bytes"]["gradients"] == 4 * PARAMETERS > once["bytes"]["gradients"]


# By finished runs.


def runs(folder: Path, capsys: pytest.CaptureFixture[str], factor: float, steps: float, count: int = 9) -> None:
    """Runs on an H100 that needed that many times what was planned of them."""
    lengths = ("--source-length", "64", "--target-length", "32")
    for rows in range(2, 2 * count + 2, 2):
        flags = ("--gpu", H100, "--technique", "none", "--batch-size", str(rows), *lengths)
        (planned,) = document(capsys, *flags)["techniques"]
        used = factor * planned["bytes"]["total"]
        rank = a_rank(
            shape=known_config("t5-small"), step_seconds=[steps * planned["step_seconds"]] * 5, gpu=H100,
            sampled={"device_used_bytes": statistics(used)}, padded_tokens=5 * rows * 96,
            largest_batch=a_batch(rows, 64, 32),
        )  # fmt: skip
        record = a_record(ranks=[rank], effective_batch_size=rows, model_id="t5-small", run_id=f"{rows}")
        write_run(folder / str(rows), record)


def test_a_plan_learns_its_error_from_finished_runs_and_a_summary_marks_what_fell_outside(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--gpu", "H100", "--technique", "none", "--batch-size", "7")
    (before,) = document(capsys, *flags)["techniques"]
    assert before["intervals"] == {"memory": None, "time": None}
    runs(tmp_path / "runs", capsys, factor=1.3, steps=0.5)
    fit = ["plan", "--fit", str(tmp_path / "runs")]
    assert main([*fit, "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert fitted["runs"] == 9 and max(fitted["error"].values()) < 0.05
    planned = document(capsys, *flags)
    assert f"9 runs of {tmp_path / 'runs'}" in planned["source"]
    (after,) = planned["techniques"]
    # The plan itself is arithmetic as before; what must fit is what such runs needed.
    assert (after["bytes"], after["step_seconds"]) == (before["bytes"], before["step_seconds"])
    total = before["bytes"]["total"]
    assert after["intervals"]["memory"] == pytest.approx([1.3 * total] * 2, rel=0.02)
    assert after["needed_bytes"] == pytest.approx(1.3 * total, rel=0.02) and before["needed_bytes"] == total
    assert after["intervals"]["time"] == pytest.approx([0.5 * before["step_seconds"]] * 2, rel=0.05)
    assert "none of your runs shows yet" in document(capsys, "--gpu", "T4")["source"]

    runs(tmp_path / "later" / "alike", capsys, factor=1.3, steps=0.5, count=2)
    runs(tmp_path / "later" / "larger", capsys, factor=1.6, steps=0.5, count=2)
    summary = ["summary", str(tmp_path / "later"), "--out", str(tmp_path / "summary")]
    assert main(summary) == 0 and "(outside)" in (tmp_path / "summary" / "summary.md").read_text()
    # What another version has fitted is named by a plan; a summary needs none.
    path = Path(fitted["file"])
    kept = json.loads(path.read_text())
    kept["factors"][H100]["time"] = [1.0, 1.0]
    path.write_text(json.dumps(kept))
    plan = ["plan", "--model", "t5-small"]
    capsys.readouterr()
    assert main(plan) == 1
    assert "run zeropods plan --fit again" in capsys.readouterr().err
    assert (main(summary), main(fit), main(plan)) == (0, 0, 0)


def test_a_run_without_a_gpu_has_no_planned_peak_and_step() -> None:
    rank = a_rank(shape=known_config("t5-tiny"), largest_batch=a_batch(32, 40, 30), peak_resident_bytes=10**9)
    assert set(plan_figures(as_record(a_record(ranks=[rank]))).values()) == {None}


def test_a_run_on_a_gpu_that_is_not_known_has_a_plan_of_its_memory_alone() -> None:
    rank = a_rank(
        shape=known_config("t5-tiny"), largest_batch=a_batch(32, 40, 30), gpu="a card of the future",
        sampled={"device_used_bytes": statistics(3e9)},
    )  # fmt: skip
    found = plan_figures(as_record(a_record(ranks=[rank])))
    assert found["plan_peak_measured_bytes"] == 3e9 and found["plan_peak_planned_bytes"] is not None
    assert found["plan_step_planned_seconds"] is None and found["plan_step_measured_seconds"] is None


# By a probe.


@pytest.mark.parametrize(
    ("measured", "flags", "expected"),
    [
        # NVML's bytes of the probed GPU win over its name, and what is asked for over both.
        ({"gpu_memory_bytes": 79 * GIB}, (), 79 * GIB),
        ({"gpu_memory_bytes": 79 * GIB}, ("--gpu-memory", "64"), 64 * GIB),
        # NVML may not know them; nor has a GPU of another name anything to do with it.
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


def test_small_steps_take_as_long_as_the_probed_host_launches_them(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = {**PROBE["hardware"], "gpus": [H100]}
    steps = {}
    for launch_seconds in (20e-6, 40e-6):
        a_probe(machine, hardware=hardware, launch_seconds=launch_seconds)
        asked = ("--machine", str(machine), "--technique", "none", "--batch-size", "1", "--flops", "20", "--all")
        (estimate,) = document(capsys, *asked)["techniques"]
        steps[launch_seconds] = estimate["step_seconds"]
    # 177 operations, and 188 in each of the 12 layers.
    assert steps[40e-6] - steps[20e-6] == pytest.approx(2433 * 20e-6)


def test_a_gpu_of_any_name_is_planned_by_its_probe(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = {**PROBE["hardware"], "gpus": ["a card of the future"]}
    a_probe(machine, hardware=hardware, pcie_bandwidth=1e10, gpu_memory_bytes=20 * GIB)
    assert main(["plan", "--model", "t5-small", "--machine", str(machine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["gpu_memory_bytes"] == 20 * GIB


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "zeropods: --model is missing; give a name such as t5-large, or --fit RUNS"),
        (["--device", "cpu"], "zeropods: --model is missing; give a name such as t5-large, or --fit RUNS"),
        ([*ON_GPU, "--machine", "none.json"], "none.json: no such file; create it with zeropods probe"),
        ([*ON_GPU, "--machine", "cut.json"], "zeropods probe again"),
        ([*ON_GPU, "--machine", "zero.json"], "bandwidth 0.0; expected more than 0"),
        ([*ON_GPU, "--machine", "other.json"], "memory_bandwidth is 20000000000.0: "),
        ([*ON_GPU, "--machine", "machine.json"], "was measured on 2 cores of a CPU without a GPU; leave it out"),
        ([*ON_GPU, "--precision", "fp8", "--machine", "gpu.json"], "fp8; expected fp32 or bf16"),
        ([*ON_CPU, "--gpu", "A100"], "--gpu: is for --device gpu; leave it out"),
        ([*ON_CPU, "--machine", "gpu.json"], "--machine: is for --device gpu; leave it out"),
        ([*ON_CPU, "--latency", "0"], "--latency: is for --device gpu; leave it out"),
        ([*ON_CPU, "--steps", "9"], "--steps: is for --device gpu; leave it out"),
        ([*ON_CPU, "--what-if"], "--what-if: is for --device gpu; leave it out"),
        ([*ON_CPU, "--precision", "fp8"], "fp8; expected fp32 or bf16"),
        (["--fit", "few"], "too few runs to fit; expected at least 9 runs with sampled memory on one kind of GPU"),
        (["--fit", "few", "--machine", "gpu.json"], "--machine: is for a plan, not for --fit; leave it out"),
        (["--fit", "few", "--check"], "--check: is for a plan, not for --fit; leave it out"),
        (["--fit", "few", "--within", "2", "--samples", "9"], "--samples: is for a plan, not for --fit; leave it out"),
        (["--fit", "few", "--technique", "zero1"], "--technique: is for a plan, not for --fit; leave it out"),
        (["--fit", "few", "--latency", "0"], "--latency: is for a plan, not for --fit; leave it out"),
        (["--fit", "few", "--device", "cpu"], "--device cpu: --fit is for runs on GPUs; leave it out"),
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
    a_probe(here / "other.json", memory_bandwidth=2e10)
    a_probe(here / "gpu.json", hardware={**PROBE["hardware"], "gpus": ["H100"]}, pcie_bandwidth=1e10)
    write_run(here / "few" / "one", a_record())
    assert main(["plan", *argv]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_plan_by_a_probe_of_its_own_is_printed_with_it(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_probe(machine, hardware={**PROBE["hardware"], "gpus": [H100]}, pcie_bandwidth=1e10)
    answers = document(capsys, "--machine", str(machine), "--what-if")["what_if"]
    possible = [answer for answer in answers if "technique" in answer]
    assert possible and all(answer["command"].endswith(f"--machine {machine}") for answer in possible)
