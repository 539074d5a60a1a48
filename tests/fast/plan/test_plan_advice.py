"""Advice: the best of the plan's own space, by trying all of it; what is said at first sight; and how often to save."""

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.made import a_rank, a_record, write_run
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.plan.advice import MOST_STEP_ROWS, Choice, advise
from zeropods.plan.estimate import (
    FITS,
    NO,
    Request,
    request_for,
    requested_techniques,
    total_seconds,
    verdict_of,
    workload_of,
)
from zeropods.plan.gpus import is_before_ampere
from zeropods.plan.known_models import known_config
from zeropods.plan.machines import Machines, step_time
from zeropods.plan.workload import Workload
from zeropods.report.advice import model_to_train
from zeropods.tables import GIB

# Ten situations, tried out.

NVLINK = {"peer_bandwidth": 2e11}
SITUATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "8B on 4 x A10G": ("llama-8b", {"pods": 1, "slots": 4, "gpu": "A10G"}, {"seq_length": 4096}),
    "7B on a 4090": ("mistral-7b", {"pods": 1, "gpu": "RTX 4090"}, {"seq_length": 2048}),
    "t5-large on 3 x A100-40": ("t5-large", {"pods": 3}, {"source_length": 1024, "target_length": 512}),
    "8B on 8 x H100": ("llama-8b", {"pods": 1, "slots": 8, "gpu": "H100", **NVLINK}, {"seq_length": 8192}),
    "1.5B on 2 x T4": ("qwen2.5-1.5b", {"pods": 1, "slots": 2, "gpu": "T4"}, {"seq_length": 1024}),
    "a small one on pods of 2 x V100": (
        "qwen3-0.6b",
        {"pods": 2, "slots": 2, "gpu": "V100-16GB"},
        {"seq_length": 1024},
    ),
    "steps of 48 rows on a 3090": (
        "bloom-560m",
        {"pods": 1, "gpu": "3090"},
        {"global_batch": 48, "seq_length": 1024},
    ),
    "steps of 256 rows on 2 x 8 x A100-80": (
        "llama-8b",
        {"pods": 2, "slots": 8, "gpu": "A100-80GB", "bandwidth": 2e10, **NVLINK},
        {"global_batch": 256, "seq_length": 4096},
    ),
    "3B on hosts of 96 GiB": (
        "t5-3b",
        {"pods": 4},
        {"host_memory_bytes": 96 * GIB, "source_length": 512, "target_length": 512},
    ),
    "FP32 on 2 x L4": ("qwen3-0.6b", {"pods": 2, "gpu": "L4"}, {"precision": "fp32", "seq_length": 2048}),
}


def situation(name: str, **more: Any) -> tuple[Request, Choice]:
    """The request of a situation, and what may be chosen in it."""
    model, machines, values = SITUATIONS[name]
    request = request_for(model, machines=Machines(**machines), **values, **more)
    return request, Choice(precision="precision" not in values)


def tried(request: Request, choice: Choice) -> Iterator[tuple[Request, Workload]]:
    """Every batch of every way that fits, without any search."""
    precisions = [request.precision]
    if choice.precision:
        half = "fp16" if is_before_ampere(request.machines.gpu) else "bf16"
        precisions = [each for each in (half, "fp32") if each in request.shape.precisions]
    for precision in precisions:
        of_precision = replace(request, precision=precision)
        for checkpointing in (False, True):
            for technique in requested_techniques(request):
                (attention,) = of_precision.attentions
                work = workload_of(of_precision, technique, attention, checkpointing=checkpointing)
                yield from batches(of_precision, work)


def batches(request: Request, work: Workload) -> Iterator[tuple[Request, Workload]]:
    for rows in range(1, 10_000):
        one = replace(work, batch_size=rows, gradient_accumulation=1)
        if verdict_of(request, one) != FITS:
            return
        if request.global_batch is None:
            passes_to_try = [2**power for power in range(12)]
        else:
            whole = request.global_batch % (rows * work.ranks) == 0
            passes_to_try = [request.global_batch // (rows * work.ranks)] if whole else []
        for passes in passes_to_try:
            batch = replace(one, gradient_accumulation=passes)
            is_chosen = request.global_batch is not None or passes == 1
            is_small = rows * passes * work.ranks <= MOST_STEP_ROWS
            if (is_chosen or is_small) and verdict_of(request, batch) == FITS:
                yield request, batch


def rate(request: Request, work: Workload) -> float:
    rows = work.batch_size * work.gradient_accumulation * work.ranks
    return rows / step_time(work, request.machines).seconds


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_best_way_is_the_fastest_of_all_that_there_are(name: str) -> None:
    request, choice = situation(name)
    rates = {}
    for tried_request, work in tried(request, choice):
        rates[work.technique.name, work.checkpointing, work.precision, work.batch_size, work.gradient_accumulation] = (
            rate(tried_request, work)
        )
    advice = advise(request, choice)
    assert len(rates) > 5 and advice.best is not None and advice.best.estimate.verdict == FITS
    assert advice.best.estimate.samples_per_second == pytest.approx(max(rates.values()), rel=1e-9)
    # So is the line of each technique, with checkpointing and without.
    best_of_kind: dict[tuple[str, bool], float] = {}
    for (technique, checkpointing, *_), found in rates.items():
        kind = (technique, checkpointing)
        best_of_kind[kind] = max(found, best_of_kind.get(kind, 0.0))
    sure = [way.estimate for way in advice.ways if way.estimate.verdict == FITS]
    assert {(each.technique.name, each.work.checkpointing): each.samples_per_second for each in sure} == pytest.approx(
        best_of_kind, rel=1e-9
    )


@pytest.mark.parametrize("name", ["t5-large on 3 x A100-40", "a small one on pods of 2 x V100"])
def test_the_cheapest_way_is_that_of_all_numbers_of_pods(name: str) -> None:
    request, choice = situation(name, samples=100_000)
    prices = []
    for pods in range(1, request.machines.pods + 1):
        on_pods = replace(request, machines=replace(request.machines, pods=pods))
        for tried_request, work in tried(on_pods, choice):
            used = 1 if work.technique.is_alone else pods
            found = rate(tried_request, work)
            seconds = total_seconds(tried_request, work, step_time(work, request.machines).seconds) or 0.0
            prices.append((used / found, seconds))
    cheapest = advise(request, choice).cheapest
    assert cheapest is not None
    price = cheapest.estimate.pods / cheapest.estimate.samples_per_second
    assert price == pytest.approx(min(price for price, _ in prices), rel=1e-9)
    # In less time than that takes, another is the cheapest; in less than any takes, none is.
    hurried = 0.9 * (cheapest.estimate.total_seconds or 0.0)
    in_time = [price for price, seconds in prices if seconds <= hurried]
    quicker = advise(request, choice, within_seconds=hurried).cheapest
    assert in_time and quicker is not None and quicker.estimate.total_seconds is not None
    assert quicker.estimate.total_seconds <= hurried
    assert quicker.estimate.pods / quicker.estimate.samples_per_second == pytest.approx(min(in_time), rel=1e-9)
    assert advise(request, choice, within_seconds=1.0).cheapest is None


def test_the_cheapest_is_named_with_its_hours_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("t5-small", "--gpu", "T4", "--samples", "56355", "--epochs", "3", "--price-per-hour", "2")
    cheapest = document(capsys, *argv)["advice"]["cheapest"]
    text = shown(capsys, *argv)
    assert f"Cheapest: {cheapest['technique']} " in text and f" h, cost {cheapest['cost']:.2f}.\n" in text
    assert "No way that fits ends within 0.001 h.\n" in shown(capsys, *argv, "--within", "0.001")


# What would make possible what is not.


def shown(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    """What people see of a plan."""
    assert main(["plan", "--model", *argv]) == status
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    return json.loads(shown(capsys, *argv, "--json"))


@pytest.mark.parametrize(
    ("argv", "change"),
    [
        (("t5-3b", "--pods", "1", "--technique", "zero1", "--gpu", "A100-80GB", "--precision", "fp32",
          "--batch-size", "160", "--gradient-checkpointing", "False"), "fewer rows a pass"),
        (("t5-large", "--pods", "1", "--batch-size", "96", "--gradient-checkpointing", "False", "--precision", "fp32"),
         "checkpointing"),
        (("t5-3b", "--technique", "ddp", "--precision", "fp32"), "another technique"),
        (("t5-large", "--pods", "1", "--technique", "none", "--precision", "fp32", "--batch-size", "72",
          "--gradient-checkpointing", "False"), "BF16"),
        (("t5-3b", "--technique", "zero3", "--pods", "2", "--gpu-memory", "14"), "5 pods"),
        (("t5-3b", "--technique", "zero3", "--gpu-memory", "14"), "GPUs of 22.49 GiB (A10)"),
        (("t5-3b", "--technique", "zero3_offload", "--host-memory", "8"), "21 GiB of host memory a pod"),
        (("mistral-7b", "--gpu", "4090", "--pods", "1", "--host-memory", "64"), "LoRA"),
        (("mistral-7b", "--gpu", "4090", "--pods", "1", "--technique", "zero1_offload", "--precision", "fp32"),
         "QLoRA"),
    ],
)  # fmt: skip
def test_what_is_not_possible_has_a_change_that_makes_it_so(
    argv: tuple[str, ...], change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = document(capsys, *argv)
    assert (planned["verdict"], planned["advice"]["ways"]) == (NO, [])
    found = {each["what"]: each for each in planned["advice"]["changes"]}
    assert change in found and all(each["verdict"] != NO for each in found.values())
    text = shown(capsys, *argv)
    assert ": NO\n" in text and f"With {change} it fits: {found[change]['technique']}" in text


@pytest.mark.parametrize(
    ("batch", "pods"),
    [
        ((), 7),
        # Only 1, 2, 3, 4, 6, 8, ... pods share 48 rows evenly; 4 rows a pass allow 1, 2, 3, 4, 6 and 12.
        (("--global-batch", "1024"), 8),
        (("--global-batch", "48"), 8),
        (("--global-batch", "48", "--batch-size", "4"), 12),
        (("--global-batch", "48", "--batch-size", "12"), None),
    ],
)
def test_as_many_more_pods_are_named_as_are_enough_and_share_the_rows_of_a_step(
    batch: tuple[str, ...], pods: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("mistral-7b", "--precision", "bf16", "--technique", "zero3", "--gpu-memory", "24",
            "--seq-length", "2048", *batch)  # fmt: skip
    changes = document(capsys, *argv, "--pods", "2")["advice"]["changes"]
    found = [change for change in changes if change["what"].endswith(" pods")]
    assert [change["what"] for change in found] == ([] if pods is None else [f"{pods} pods"])
    for change in found:
        if "--batch-size" in batch:
            assert change["batch_size"] == 4
        asked = ("--batch-size", str(change["batch_size"]), "--gradient-checkpointing", "True")
        enough = document(capsys, *argv, *asked, "--pods", str(pods))
        assert enough["verdict"] == FITS


def test_what_fits_otherwise_comes_after_what_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("t5-small", "--gpu", "T4", "--batch-size", "4096", "--samples", "10000",
            "--gradient-checkpointing", "False")  # fmt: skip
    first, second, third = shown(capsys, *argv).split("\n\n")[1].splitlines()[:3]
    assert first == "Nothing that was asked for fits."
    assert second.startswith("Best otherwise: ddp ") and third.startswith("Cheapest otherwise: ")
    text = shown(capsys, *argv[:3])
    assert "Best: ddp" in text and "otherwise" not in text


def test_what_no_change_makes_possible_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "llama-8b", "--technique", "none", "--seq-length", "1e9", "--batch-size", "1")
    assert "Nothing that was asked for fits.\nNo other technique, batch, precision, GPU or number of pods" in text


# Fits, tight, or not.


@pytest.mark.parametrize(
    ("share", "verdict", "status"), [(1.1, "FITS", 0), (1.05, "TIGHT", 3), (0.95, "TIGHT", 3), (0.9, "NO", 4)]
)
def test_a_verdict_regards_the_error_of_the_plan_and_is_the_status_of_a_check(
    share: float, verdict: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("t5-small", "--technique", "none", "--pods", "1", "--batch-size", "8", "--precision", "fp32",
            "--gradient-checkpointing", "False")  # fmt: skip
    (planned,) = document(capsys, *argv)["techniques"]
    size = str(share * planned["bytes"]["total"] / GIB)
    found = document(capsys, *argv, "--gpu-memory", size)
    assert (found["verdict"], found["techniques"][0]["verdict"]) == (verdict, verdict)
    assert f": {verdict}\n" in shown(capsys, *argv, "--gpu-memory", size)
    assert f": {verdict}\n" in shown(capsys, *argv, "--gpu-memory", size, "--check", status=status)
    assert found["techniques"][0]["fits"] == (share > 1)


def test_too_little_memory_of_a_host_is_no_tight_fit(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("t5-large", "--technique", "zero3_offload", "--host-memory", "5", "--check")
    assert ": NO\n" in shown(capsys, *argv, status=4)


# At first sight.


def test_at_first_sight_there_are_seven_columns_of_what_fits_the_fastest_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("llama-8b", "--pods", "8", "--slots", "8", "--gpu", "H100", "--seq-length", "4096", "--steps", "100")
    rows = [line for line in shown(capsys, *argv).splitlines() if line.startswith("|")]
    header, _, *lines = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert header == [
        "technique", "checkpointing", "memory (GiB)", "host (GiB)", "batch size (rows)", "step (s)", "samples/s",
    ]  # fmt: skip
    rates = [float(line[-1].replace(",", "")) for line in lines]
    assert rates == sorted(rates, reverse=True) and len(lines) > 5
    assert all(float(line[2].lstrip("~")) < 80 for line in lines)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = shown(capsys, *argv)
    assert max(map(len, narrow.splitlines())) <= 80 and narrow.count("technique ") == 1
    assert "activations" in shown(capsys, *argv, "--all") and "activations" not in narrow
    assert "2 B x 8.03 G" in shown(capsys, *argv, "--formulas", "--technique", "zero1", "--precision", "bf16")


def test_what_a_flag_says_is_kept_in_the_table_and_the_best_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("llama-8b", "--pods", "1", "--slots", "4", "--gpu", "A10G", "--seq-length", "2048", "--precision", "bf16")
    advice = document(capsys, *argv, "--batch-size", "1")["advice"]
    batches_shown = {(way["batch_size"], way["gradient_accumulation"]) for way in advice["ways"]}
    assert batches_shown == {(1, 1)}
    assert {way["gradient_checkpointing"] for way in advice["ways"]} == {False, True}
    assert advice["best"]["samples_per_second"] > 2 * advice["ways"][0]["samples_per_second"]
    kept = document(capsys, *argv, "--gradient-checkpointing", "True")["advice"]
    assert {way["gradient_checkpointing"] for way in kept["ways"]} == {True}


def test_a_way_that_is_planned_only_has_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "mistral-7b", "--gpu", "4090", "--pods", "1", "--adapter", "lora", "--precision", "bf16")
    assert "--adapter lora: planned only" in text and "zeropods launch" not in text and "Best: none" in text


@pytest.mark.parametrize(
    ("argv", "not_given"),
    [
        (("--gpu-memory", "24"), ["gpu", "bandwidth", "pcie-bandwidth", "host-memory"]),
        (("--gpu", "T4", "--pods", "1"), ["pcie-bandwidth", "host-memory"]),
        (("--gpu", "T4", "--pods", "1", "--slots", "2"), ["peer-bandwidth", "pcie-bandwidth", "host-memory"]),
        (("--gpu", "T4", "--bandwidth", "3", "--technique", "zero2"), []),
        (("--gpu", "T4", "--technique", "zero2_offload"), ["bandwidth", "pcie-bandwidth", "host-memory"]),
        # The cheapest alone, on one pod, depends on the link between its GPUs.
        (("--gpu", "T4", "--pods", "2", "--slots", "2", "--samples", "10000", "--technique", "ddp",
          "--bandwidth", "0.1"), ["peer-bandwidth", "pcie-bandwidth"]),
    ],
)  # fmt: skip
def test_a_speed_that_nobody_gave_is_named_where_it_is_used_and_nowhere_else(
    argv: tuple[str, ...], not_given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, "t5-small", *argv)
    assert re.findall(r"\(no --([a-z-]+)\)", text) == not_given
    assert ("Times assume" in text) == (not_given != [])


def test_an_assumed_speed_is_named_with_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "t5-small", "--gpu-memory", "24")
    assert "3 pods of 1 GPU (24 GiB each)" in text
    assert "the speed of an A100-40GB (no --gpu), a network of 10 Gbit/s between pods (no --bandwidth)" in text
    assert "PCIe of 24 GB/s (no --pcie-bandwidth)" in text


@pytest.mark.parametrize(
    "argv",
    [
        ("gpt-tiny", "--pods", "1", "--slots", "2", "--gpu", "A100"),
        ("llama-8b", "--pods", "1", "--slots", "4", "--gpu", "A10G", "--seq-length", "1024"),
        ("Qwen/Qwen3-0.6B", "--pods", "1", "--gpu", "T4", "--technique", "zero2"),
        ("bloom-560m", "--pods", "1", "--gpu", "L4", "--global-batch", "48"),
    ],
)
def test_the_printed_command_is_one_that_a_launch_takes(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad").mkdir()
    best = document(capsys, *argv)["advice"]["best"]
    text = shown(capsys, *argv)
    printed = text[text.index("zeropods launch") :].split("\n\n")[0]
    words = shlex.split(printed.replace("\\\n", ""))
    assert words[:2] == ["zeropods", "launch"]
    assert main(["launch", "--dry-run", "--json", *words[2:]]) == 0
    launch = json.loads(capsys.readouterr().out)
    assert launch["hosts"][0]["slots"] == best["slots"]
    flags = dict(zip(launch["arguments"][::2], launch["arguments"][1::2], strict=True))
    assert flags.get("--deepspeed") == best["file"] and (best["file"] is None or f"by {best['file']}:" in text)
    assert flags["--precision"] == best["precision"]
    assert int(flags["--per_device_train_batch_size"]) == best["batch_size"]
    assert int(flags["--gradient_accumulation_steps"]) == best["gradient_accumulation"]
    assert flags["--gradient_checkpointing"] == str(best["gradient_checkpointing"])


def test_several_pods_are_launched_on_and_a_configuration_alone_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, "t5-small", "--pods", "3", "--technique", "zero2").replace(" \\\n    ", " ")
    assert "zeropods launch --num-pods 3 -- textsql_train.py --model_id google-t5/t5-small" in text
    config = tmp_path / "config.json"
    config.write_text(json.dumps(known_config("t5-tiny")))
    assert model_to_train(str(config)) is model_to_train(str(tmp_path)) is None
    (tmp_path / "model.safetensors").touch()
    assert model_to_train(str(config)) == model_to_train(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b-instruct", "Llama-3.1-8B-Instruct"])
def test_a_tuned_model_is_trained_by_its_hub_id_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--pods", "1", "--gpu", "H100", "--slots", "8")
    text = shown(capsys, name, *argv)
    assert "zeropods launch" not in text
    assert f"{name}: for the command to train it give its hub id, --model ORGANISATION/{name}.\n" in text
    assert f"--model_name_or_path Qwen/{name} " in shown(capsys, f"Qwen/{name}", *argv).replace(" \\\n    ", " ")


# Rows of a step.


def test_the_rows_of_a_step_give_its_passes(capsys: pytest.CaptureFixture[str]) -> None:
    # 1,024 = 2 processes x 8 rows x 64 passes.
    argv = ("llama-tiny", "--pods", "1", "--slots", "2", "--batch-size", "8", "--steps", "10")
    by_rows = document(capsys, *argv, "--global-batch", "1024")["techniques"]
    by_passes = document(capsys, *argv, "--gradient-accumulation", "64")["techniques"]
    assert by_rows[1:] == by_passes[1:]
    # One process takes all of them itself, in as many steps.
    alone = by_rows[0]
    assert alone["technique"] == "none"
    assert alone["total_seconds"] == pytest.approx(10 * alone["step_seconds"])
    assert alone["step_seconds"] == pytest.approx(2 * by_passes[0]["step_seconds"], rel=0.05)


def test_rows_of_a_pass_that_nobody_gave_divide_those_of_a_step() -> None:
    # Each of 2 processes takes 45 of 90 rows, at most 32 at a time.
    request = request_for("t5-small", machines=Machines(pods=2), global_batch=90)
    assert (request.batch_size, request.passes_of(2)) == (15, 3)
    with pytest.raises(UserError, match="7 processes of 1 row a pass cannot reach it; give 84 or 91"):
        request_for("t5-small", machines=Machines(pods=7), global_batch=90)


# Known names.


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("openai-community/gpt2-xl", 1_557_611_200),
        ("opt-1.3b", 1_315_758_080),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ],
)
def test_a_model_that_people_train_is_known_by_its_name(name: str, parameters: int) -> None:
    # As published on the models' pages of the hub.
    assert request_for(name).shape.parameters == parameters


# How often to save.

P = 60_506_624
"""Parameters of t5-small."""


def test_a_mean_time_between_failures_gives_how_often_to_save(capsys: pytest.CaptureFixture[str]) -> None:
    # Young: sqrt(2 x 30 s x 86,400 s) = 2,277 s. Daly's corrections: x (1 + 0.0132 / 3 + 0.00017 / 9), - 30 s: 2,257 s.
    argv = ("t5-small", "--technique", "ddp", "--precision", "fp32", "--mtbf", "24", "--save-seconds", "30")
    saving = document(capsys, *argv)["saving"]
    assert saving["interval_seconds"] == pytest.approx(2_257, abs=1)
    # A restart loads libraries in 20 s, and weights, model and moments at 0.5 GB/s.
    restart = 20 + (4 + 4 + 8) * P / 5e8
    assert saving["restart_seconds"] == pytest.approx(restart)
    # 30 of 2,287 s go into a save, and half of 2,287 s of each 86,400 s is done again.
    lost = (1_143.5 + restart) / 86_400
    assert saving["goodput"] == pytest.approx((1 - 30 / 2_287) * (1 - lost), abs=1e-5)
    text = shown(capsys, *argv)
    assert f"Save every 2,257 s, {saving['steps']:,} steps of {saving['technique']}: 97." in text


def test_the_plan_knows_how_long_a_save_takes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("t5-small", "--technique", "ddp", "--precision", "fp32", "--mtbf", "24")
    saving = document(capsys, *argv)["saving"]
    seconds = (4 + 8) * P / 5e8
    assert saving["save_seconds"] == pytest.approx(seconds)
    part = seconds / 2 / 86_400
    daly = math.sqrt(2 * seconds * 86_400) * (1 + math.sqrt(part) / 3 + part / 9) - seconds
    assert saving["interval_seconds"] == pytest.approx(daly)
    assert "times are planned, of a checkpoint of 0.676 GiB" in shown(capsys, *argv)


def test_a_run_says_how_long_its_saves_and_its_start_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [a_rank(number, save_seconds=[4.0, 4.0 + 2 * number], start_seconds=30.0) for number in (0, 1)]
    run = write_run(tmp_path / "run", a_record(ranks=ranks))
    argv = ("t5-small", "--mtbf", "24", "--save-seconds", str(run))
    saving = document(capsys, *argv)["saving"]
    assert (saving["save_seconds"], saving["restart_seconds"]) == (5.0, 30.0)
    assert f"times are those of {run}" in shown(capsys, *argv)
    write_run(tmp_path / "none", a_record(ranks=[a_rank(0, save_seconds=[])]))
    assert main(["plan", "--model", *argv[:-1], str(tmp_path / "none")]) == 1
    assert re.search(r"none: this run saved nothing; give seconds, or another run", capsys.readouterr().err)
