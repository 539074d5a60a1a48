"""`zeropods plan`: its document and tables, and what if: each answer is a plan of its own, and a run adds up."""

import json
import re
import shlex
from functools import cache
from typing import Any

import pytest

from zeropods.cli import parser
from zeropods.plan.estimate import Estimate, plan, request_for
from zeropods.plan.machines import Machines
from zeropods.report.plan import length_plans
from zeropods.tables import GIB, MIB

PARTS = {"parameters", "gradients", "optimizer", "buffers", "activations", "context", "total"}


@cache
def result(*argv: str) -> dict[str, Any]:
    """The document, and its text; a plan that was asked for before is not made again."""
    arguments = parser().parse_args(["plan", "--model", *argv])
    found = json.loads(json.dumps(arguments.run(arguments), allow_nan=False))
    return {**found, "text": arguments.readable(found)}


def by_name(*argv: str) -> dict[str, dict[str, Any]]:
    return {each["technique"]: each for each in result(*argv)["techniques"]}


def estimate(model: str, technique: str, **asked: Any) -> Estimate:
    return plan(request_for(model, techniques=(technique,), **asked)).estimates[0]


def test_every_technique_has_the_promised_keys() -> None:
    techniques = result("t5-small")["techniques"]
    assert [each["technique"] for each in techniques] == [
        "none", "ddp", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload",
    ]  # fmt: skip
    promised = {"technique", "fits", "bytes", "host_bytes", "largest_batch_size", "step_seconds"}
    assert all(promised <= set(each) and set(each["bytes"]) == PARTS for each in techniques)


def test_zeropp_is_planned_where_it_divides_anything_otherwise_or_is_named() -> None:
    assert "zero3++" not in result("t5-small", "--all")["text"]
    assert "zero3++" in by_name("t5-small", "--slots", "2")
    alone = result("t5-small", "--technique", "zero3++", "--technique", "zero3")["techniques"]
    assert alone[0]["bytes"] == alone[1]["bytes"]


def test_all_promised_options_are_taken() -> None:
    request = result(
        "google-t5/t5-large", "--pods", "2", "--slots", "4", "--gpu-memory", "24", "--host-memory", "128",
        "--batch-size", "8", "--source-length", "128", "--target-length", "64", "--precision", "bf16", "--latency", "0",
        "--gradient-checkpointing", "True", "--bucket-size", "5e8", "--bandwidth", "10", "--price-per-hour", "2.5",
    )["request"]  # fmt: skip
    machines = request["machines"]
    assert (machines["pods"], machines["slots"], machines["bandwidth"], machines["latency_seconds"]) == (2, 4, 10e9, 0)
    assert (request["gpu_memory_bytes"], request["host_memory_bytes"]) == (24 * GIB, 128 * GIB)
    assert (request["source_length"], request["target_length"], "seq_length" in request) == (128, 64, False)
    assert (request["zero"]["reduce_elements"], request["gradient_checkpointing"]) == (500_000_000, True)


def test_host_memory_is_of_all_processes_of_a_pod() -> None:
    found = estimate("t5-large", "zero2_offload", machines=Machines(pods=1, slots=4))
    assert found.host_bytes == 4 * found.memory.host_bytes
    assert not by_name("t5-3b", "--gpu-memory", "80", "--host-memory", "16")["zero3_offload"]["fits"]


def test_time_and_cost_of_a_whole_training() -> None:
    found = by_name("t5-small", "--pods", "3", "--samples", "1000", "--epochs", "2", "--price-per-hour", "6")["ddp"]
    # 1,000 samples are eleven steps of 96 rows.
    assert found["total_seconds"] == pytest.approx(22 * found["step_seconds"])
    assert found["cost"] == pytest.approx(3 * 6 * 22 * found["step_seconds"] / 3600)
    # Steps of all pods are equal samples of every technique.
    found = by_name("t5-small", "--pods", "3", "--steps", "100")
    for name, steps in (("none", 300), ("zero1", 100)):
        assert found[name]["total_seconds"] == pytest.approx(steps * found[name]["step_seconds"])
        assert found[name]["cost"] is None


def test_a_step_of_several_passes_takes_more_samples() -> None:
    one, four = (estimate("distilgpt2", "none", samples=1_000, gradient_accumulation=passes) for passes in (1, 4))
    assert four.time.compute_seconds == pytest.approx(4 * one.time.compute_seconds)
    # 250 steps of 4 rows; 63 of 16.
    assert (one.total_seconds, four.total_seconds) == pytest.approx((250 * one.time.seconds, 63 * four.time.seconds))


@pytest.mark.parametrize(
    ("argv", "gigabytes", "remark"),
    [
        (("t5-large", "--technique", "zero3_offload"), 5.4, "the published figure is 3.2 GiB higher: it"),
        # Planned with its own settings, whatever is asked.
        (("t5-large", "--technique", "zero1", "--batch-size", "8", "--pods", "2"), 14.5, "within 10%"),
        (("t5-small", "--technique", "zero1"), 5, "within 10%"),
    ],
)
def test_the_published_run_stands_beside_and_says_how_it_differs(
    argv: tuple[str, ...], gigabytes: float, remark: str
) -> None:
    found = result(*argv, "--all")
    (row,) = found["reference"]
    assert f"Memory of {row['technique']} on {row['pods']} pods: {remark}"[:60] in found["text"]
    assert row["planned_gigabytes"] == pytest.approx(gigabytes, rel=0.1) and row["remark"].startswith(remark)


def test_every_formula_is_printed_where_asked() -> None:
    assert "4 B x 60.51 M / 3 ranks" in result("t5-small", "--technique", "zero3", "--formulas")["text"]


def test_attention_and_checkpointing_are_axes_of_the_table() -> None:
    found = result(
        "qwen3-0.6b", "--precision", "bf16", "--attention", "all", "--gradient-checkpointing", "both",
        "--technique", "zero1", "--technique", "zero3", "--seq-length", "2048", "--all",
    )  # fmt: skip
    ways = [(each["technique"], each["attention"], each["gradient_checkpointing"]) for each in found["techniques"]]
    assert len(set(ways)) == 12 and found["request"]["seq_length"] == 2_048
    assert {"attention", "checkpointing", "tokens/s"} <= {cell.strip() for cell in found["text"].split("|")}
    fastest = max(found["techniques"], key=lambda each: each["samples_per_second"] if each["fits"] else 0)
    assert (found["best"], found["best_labels"]["attention"]) == (fastest["technique"], fastest["attention"])
    assert f"Recommended: technique {found['best']}, {found['best_labels']['attention']}" in found["text"]


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "ways"),
    [
        ("llama-8b", "A100", "bf16", ["eager", "sdpa", "flash_attention_2"]),
        ("llama-8b", "A100", "fp32", ["eager", "sdpa"]),
        ("llama-8b", "T4", "fp16", ["eager", "sdpa"]),
        ("bloom-560m", "A100", "fp32", ["eager"]),
    ],
)
def test_all_attentions_are_those_that_can_run(model: str, gpu: str, precision: str, ways: list[str]) -> None:
    request = request_for(model, precision=precision, attention="all", machines=Machines(gpu=gpu))
    assert request.attentions == ways


def test_a_length_beyond_the_trained_one_is_planned_with_a_note() -> None:
    text = result("llama-8b", "--seq-length", "16384", "--technique", "zero3", "--precision", "bf16")["text"]
    assert "llama-8b was trained on rows of 8192 tokens" in text


def test_a_plan_by_length_has_a_line_for_each_way_and_length() -> None:
    made = length_plans("llama-tiny", [128, 256], attention="all", precision="bf16", techniques=("zero3",))
    assert len(made.table.rows) == 6
    assert made.plot.text == "planned memory of one GPU at 128, 256 tokens"


def test_every_heading_of_a_plan_has_its_unit_and_no_number_an_exponent() -> None:
    text = result("t5-tiny", "--steps", "9", "--price-per-hour", "0.001", "--all")["text"]
    header = next(line for line in text.splitlines() if "technique" in line)
    headings = [cell.strip() for cell in header.strip("| ").split("|")]
    counts = {"technique", "fits", "samples/s", "cost", "cost of 1 M samples"}
    assert all(re.search(r" \((GiB|s|h|rows)\)$", heading) for heading in headings if heading not in counts)
    assert "context is what CUDA itself uses" in text and "host is a pod's main memory" in text
    large = result("t5-large", "--batch-size", "1", "--pods", "1", "--all")["text"]
    assert "1 row of 96 + 96 tokens per process" in large and not re.search(r"\b1 (rows|pods|processes)\b", large)
    assert not re.search(r"\de[-+]\d", text + large) and " GB" not in large and "published (GiB)" in large


@pytest.mark.parametrize(
    ("gpu", "mib"), [("T4", 15_360), ("A100-40GB", 40_960), ("3090", 24_576), ("NVIDIA H100 80GB HBM3", 81_559)]
)
def test_a_gpu_brings_its_memory(gpu: str, mib: int) -> None:
    assert result("t5-small", "--gpu", gpu)["request"]["gpu_memory_bytes"] == mib * MIB
    assert result("t5-small", "--gpu", gpu, "--gpu-memory", "7")["request"]["gpu_memory_bytes"] == 7 * GIB


# What if.

JOBS = (
    ("t5-large", "--samples", "10000", "--epochs", "3", "--host-memory", "64", "--bucket-size", "5e8"),
    ("llama-8b", "--precision", "bf16", "--pods", "2", "--slots", "8", "--gpu", "A100-80GB", "--batch-size", "1",
     "--attention", "all", "--gradient-checkpointing", "both", "--technique", "zero1", "--technique", "zero3"),
    ("distilgpt2", "--latency", "0", "--flops", "9", "--trust-remote-code"),
)  # fmt: skip
QUESTIONS = 9
P = 1_050_368
"""Parameters of t5-tiny."""


def asked(*argv: str) -> dict[str, dict[str, Any]]:
    """The answers by question."""
    return {each["question"]: each for each in result(*argv, "--what-if")["what_if"]}


def planned(command: str, *more: str) -> dict[str, Any]:
    """The one technique of a command line that was answered with."""
    program, verb, flag, *argv = shlex.split(command)
    assert (program, verb, flag) == ("zeropods", "plan", "--model")
    (found,) = result(*argv, *more)["techniques"]
    return found


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[0])
def test_every_answer_is_what_its_command_plans(job: tuple[str, ...]) -> None:
    answers = asked(*job)
    assert len(answers) == QUESTIONS
    possible = [each for each in answers.values() if "technique" in each]
    assert len(possible) >= len(answers) - 1
    for each in possible:
        found = planned(each["command"])
        assert (found["technique"], found["fits"]) == (each["technique"], each["fits"])
        assert found["step_seconds"] == pytest.approx(each["step_seconds"])
        assert (found["bytes"]["total"], found["host_bytes"]) == (each["device_bytes"], each["host_bytes"])


@pytest.mark.parametrize("job", JOBS[:2], ids=lambda job: job[0])
def test_a_limit_is_one_beyond_which_nothing_fits(job: tuple[str, ...]) -> None:
    answers = asked(*job)
    for question, flag in (("largest batch", "--batch-size"), ("longest row", "--s")):
        words = shlex.split(answers[question]["command"])
        at = next(n for n, word in enumerate(words) if word.startswith(flag) and word.endswith(("size", "length")))
        more = str(int(words[at + 1]) + 1)
        assert answers[question]["fits"] and answers[question]["binds"].startswith("memory: activations")
        assert not planned(shlex.join(words), words[at], more)["fits"]


def test_fewer_pods_than_the_fewest_do_not_fit() -> None:
    job = ("t5-3b", "--technique", "zero3", "--gpu-memory", "24", "--batch-size", "4", "--pods", "8")
    found = asked(*job)["fewest pods"]
    pods = int(found["answer"].split()[0])
    assert 1 < pods < 8 and found["fits"]
    assert not planned(found["command"], "--pods", str(pods - 1))["fits"]


@pytest.mark.parametrize(
    ("job", "question", "answer", "binds"),
    [
        (("distilgpt2",), "longest row", "1,024 tokens", "distilgpt2 has 1024 positions"),
        *(
            ((model, "--gpu", "T4"), "BF16, not FP32", "not possible: --precision bf16: T4 has no BF16 arithmetic", "")
            for model in ("distilgpt2", "t5-small")
        ),
        (("t5-3b", "--technique", "ddp"), "fewest pods", "no number of pods is enough", "memory"),
        (("t5-3b", "--technique", "ddp"), "largest batch", "not even 1 row fits", "memory"),
        (("t5-3b", "--technique", "ddp"), "longest row", "no length fits", "memory"),
        (("t5-large",), "zero2_offload, not none", "memory 26.5", "time: network"),
        (("t5-large", "--gpu", "T4", "--gpu-memory", "40"), "a cheaper GPU", "no slower known GPU", "memory"),
    ],
)
def test_an_answer_says_what_binds(job: tuple[str, ...], question: str, answer: str, binds: str) -> None:
    found = asked(*job)[question]
    assert answer in found["answer"] and binds in found["binds"]


def words_of(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


def test_people_get_both_tables_and_only_where_they_ask() -> None:
    assert "What if" not in result("t5-small")["text"]
    found = result("t5-small", "--gpu", "T4", "--what-if")
    assert "## What if" in found["text"] and "## The whole life of the run" in found["text"]
    # They are about the batch that was asked for, not about the best one.
    about = "The tables below are about ddp in FP32, 32 rows on 3 pods of 1 process: "
    assert f"{about}the fastest of --all that fits." in words_of(found["text"])
    nothing_fits = result("t5-3b", "--technique", "ddp", "--what-if")["text"]
    assert f"{about}the one of --all with the least memory, since none fits." in words_of(nothing_fits)
    commands = [each["command"] for each in found["what_if"] if "technique" in each]
    assert [line for line in found["text"].splitlines() if line.startswith("zeropods plan")] == commands


@pytest.mark.parametrize(
    ("job", "files"),
    [
        # Bytes of weights and optimizer states in checkpoints of runs of t5-tiny.
        (("--technique", "none"), 4_206_848 + 8_441_739),
        (("--technique", "none", "--precision", "bf16"), 4_206_848 + 12_655_819),
        (("--technique", "zero1", "--pods", "2"), 4_206_848 + 4_219_941 + 6_309_823 + 6_309_311),
        (("--technique", "zero3", "--pods", "2", "--precision", "bf16"), 4_206_848 + 2 * 6_307_845 + 57_474),
    ],
)
def test_a_checkpoint_takes_what_those_of_runs_take(job: tuple[str, ...], files: int) -> None:
    *_, whole = result("t5-tiny", *job, "--what-if")["life"]
    # The trained model lies beside the checkpoint.
    assert whole["disk_bytes"] == pytest.approx(files + 4_206_848, rel=0.01)


MISTRAL_P = 7_241_732_096
"""Parameters of mistral-7b."""
LORA_A = 32 * 16 * (2 * (4_096 + 4_096) + 2 * (4_096 + 1_024) + 3 * (4_096 + 14_336))
"""Elements of adapters of rank 16 beside all linear layers of it."""


@pytest.mark.parametrize(
    ("job", "checkpoint", "model"),
    [
        # peft's adapters are FP32, and so are their moments.
        (("--technique", "ddp", "--adapter", "lora"), (4 + 8) * LORA_A, 4 * LORA_A),
        (("--technique", "none", "--adapter", "qlora"), (4 + 8) * LORA_A, 4 * LORA_A),
        # DeepSpeed makes them BF16, and saves those a second time beside FP32 masters and moments.
        (("--technique", "zero2", "--adapter", "lora"), (2 + 12 + 2) * LORA_A, 2 * LORA_A),
        (("--technique", "fsdp2"), (4 + 8) * MISTRAL_P, 4 * MISTRAL_P),
        (("--technique", "none", "--masters", "none"), (2 + 4) * MISTRAL_P, 2 * MISTRAL_P),
        (("--technique", "zero3", "--masters", "bf16"), (2 + 6) * MISTRAL_P, 2 * MISTRAL_P),
        (("--technique", "none", "--optimizer", "adamw_8bit"), (4 + 4 + 2 + 8 / 256) * MISTRAL_P, 4 * MISTRAL_P),
    ],
)
def test_a_checkpoint_holds_what_its_method_trains(job: tuple[str, ...], checkpoint: float, model: int) -> None:
    *_, saving, whole = result("mistral-7b", "--precision", "bf16", *job, "--what-if")["life"]
    assert whole["disk_bytes"] == round(checkpoint + model)
    assert saving["seconds"] == pytest.approx((checkpoint + model) / 5e8)


def test_phases_of_a_run_add_up() -> None:
    found = result(
        "t5-tiny", "--technique", "zero2_offload", "--samples", "960", "--epochs", "2", "--save-seconds", "7",
        "--mtbf", "9", "--what-if",
    )  # fmt: skip
    start, steps, evaluation, saving, whole = found["life"]
    (technique,) = found["techniques"]
    assert steps["seconds"] == pytest.approx(technique["total_seconds"])
    assert 0 < evaluation["seconds"] < 0.1 * steps["seconds"] and saving["seconds"] == pytest.approx(14, abs=0.1)
    assert whole["seconds"] == pytest.approx(sum(each["seconds"] for each in (start, steps, evaluation, saving)))
    assert start["host_bytes"] == 2 * 2**30 + 4 * P and saving["host_bytes"] == steps["host_bytes"] + 4 * P
    assert "rounding of pinned memory" in steps["formula"]
