"""`zeropods plan --what-if`: each answer is a plan of its own, and the life of a run adds up."""

import shlex
from typing import Any

import pytest

from tests.fast.test_plan_verb import result

JOBS = (
    ("t5-large", "--samples", "10000", "--epochs", "3", "--host-memory", "64", "--bucket-size", "5e8"),
    ("llama-8b", "--precision", "bf16", "--pods", "2", "--slots", "8", "--gpu", "A100-80GB", "--batch-size", "1",
     "--attention", "all", "--gradient-checkpointing", "both", "--technique", "zero1", "--technique", "zero3"),
    ("distilgpt2", "--latency", "0", "--flops", "9", "--trust-remote-code"),
    ("t5-tiny", "--device", "cpu", "--host-memory", "1.5", "--pods", "2", "--slots", "2"),
)  # fmt: skip
QUESTIONS = {"gpu": 9, "cpu": 7}
"""Without a GPU nobody asks for another one, nor for a faster link."""
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
    assert len(answers) == QUESTIONS["cpu" if "cpu" in job else "gpu"]
    possible = [each for each in answers.values() if "technique" in each]
    assert len(possible) >= len(answers) - 1
    for each in possible:
        found = planned(each["command"])
        assert (found["technique"], found["fits"]) == (each["technique"], each["fits"])
        assert found["step_seconds"] == pytest.approx(each["step_seconds"])
        assert (found["bytes"]["total"], found["host_bytes"]) == (each["device_bytes"], each["host_bytes"])


@pytest.mark.parametrize("job", (*JOBS[:2], JOBS[3]), ids=lambda job: job[0])
def test_a_limit_is_one_beyond_which_nothing_fits(job: tuple[str, ...]) -> None:
    answers = asked(*job)
    for question, flag in (("largest batch", "--batch-size"), ("longest row", "--s")):
        words = shlex.split(answers[question]["command"])
        at = next(n for n, word in enumerate(words) if word.startswith(flag) and word.endswith(("size", "length")))
        more = str(int(words[at + 1]) + 1)
        assert answers[question]["fits"] and answers[question]["binds"].startswith(
            ("memory: activations", "memory: context")
        )
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
        (("t5-3b", "--technique", "ddp"), "longest row", "none fits", "memory"),
        (("t5-large",), "zero2_offload, not none", "memory 26.5", "time: network"),
        (("t5-large", "--gpu", "T4", "--gpu-memory", "40"), "a cheaper GPU", "no slower one", "memory"),
    ],
)
def test_an_answer_says_what_binds(job: tuple[str, ...], question: str, answer: str, binds: str) -> None:
    found = asked(*job)[question]
    assert answer in found["answer"] and binds in found["binds"]


def test_people_get_both_tables_and_only_where_they_ask() -> None:
    assert "What if" not in result("t5-small")["text"]
    found = result("t5-small", "--gpu", "T4", "--what-if")
    assert "## What if" in found["text"] and "## The whole life of the run" in found["text"]
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


def test_without_a_gpu_the_host_holds_all_of_a_process() -> None:
    found = result("t5-tiny", "--device", "cpu", "--technique", "zero1", "--pods", "2", "--slots", "2", "--what-if")
    start, steps, _, saving, _ = found["life"]
    (technique,) = found["techniques"]
    assert (
        steps["host_bytes"] == 2 * technique["bytes"]["total"] and saving["host_bytes"] == steps["host_bytes"] + 4 * P
    )
    assert start["host_bytes"] == 2 * (technique["bytes"]["context"] + 4 * P)
