"""`zeropods plan`: its document, its table, and what it refuses."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from zeropods.cli import plan as cli_plan
from zeropods.cli import root
from zeropods.errors import UserError
from zeropods.plan.estimate import plan
from zeropods.plan.machines import Machines
from zeropods.plan.request import GIB, Request

PARTS = {"parameters", "gradients", "optimizer", "buffers", "activations", "context", "total"}


def result(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verbs = parser.add_subparsers()

    def add(verbs: Any, name: str, help_: str, run: Any) -> Any:
        verb = verbs.add_parser(name, help=help_)
        verb.set_defaults(run=run)
        return verb

    cli_plan.add_verbs(verbs, add)
    arguments = parser.parse_args(["plan", *argv])
    found = json.loads(json.dumps(arguments.run(arguments), allow_nan=False))
    return {**found, "text": arguments.readable(found)}


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["technique"]: each for each in document["techniques"]}


def test_every_technique_has_the_promised_keys() -> None:
    techniques = result("--model", "t5-small")["techniques"]
    assert [each["technique"] for each in techniques] == [
        "none", "ddp", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload",
    ]  # fmt: skip
    promised = {"technique", "fits", "bytes", "host_bytes", "largest_batch_size", "step_seconds"}
    assert all(promised <= set(each) and set(each["bytes"]) == PARTS for each in techniques)


def test_all_promised_options_are_taken() -> None:
    found = result(
        "--model", "google-t5/t5-large", "--pods", "2", "--slots", "4", "--gpu-memory", "24", "--host-memory", "128",
        "--batch-size", "8", "--source-length", "128", "--target-length", "64", "--precision", "bf16",
        "--gradient-checkpointing", "True", "--bucket-size", "5e8", "--bandwidth", "10", "--price-per-hour", "2.5",
    )  # fmt: skip
    request = found["request"]
    assert (request["machines"]["pods"], request["machines"]["slots"]) == (2, 4)
    assert (request["gpu_memory_bytes"], request["host_memory_bytes"]) == (24 * GIB, 128 * GIB)
    assert (request["zero"]["reduce_elements"], request["machines"]["bandwidth"]) == (500_000_000, 10e9)
    assert request["gradient_checkpointing"] is True


def test_the_largest_batch_fits_and_one_row_more_does_not() -> None:
    asked = {"model": "t5-large", "techniques": ("zero1",)}
    rows = plan(Request(**asked)).estimates[0].largest_batch_size
    assert rows is not None
    fits = [plan(Request(batch_size=size, **asked)).estimates[0].fits for size in (rows, rows + 1)]
    assert fits == [True, False]


def test_what_does_not_fit_with_one_row_has_no_largest_batch() -> None:
    found = by_name(result("--model", "t5-3b", "--gpu-memory", "8", "--technique", "none"))["none"]
    assert found["fits"] is False and found["largest_batch_size"] is None


def test_states_that_exceed_the_host_do_not_fit() -> None:
    techniques = by_name(result("--model", "t5-3b", "--gpu-memory", "80", "--host-memory", "16", "--precision", "bf16"))
    assert not techniques["zero3_offload"]["fits"]


def test_host_memory_is_of_all_processes_of_a_pod() -> None:
    request = Request(model="t5-large", techniques=("zero2_offload",), machines=Machines(pods=1, slots=4))
    estimate = plan(request).estimates[0]
    assert estimate.host_bytes == 4 * estimate.memory.host_bytes


def test_none_is_one_process_however_many_pods_there_are() -> None:
    one, eight = (by_name(result("--model", "t5-small", "--pods", pods))["none"] for pods in ("1", "8"))
    assert one == eight and eight["pods"] == 1


def test_time_and_cost_of_a_whole_training() -> None:
    found = by_name(
        result("--model", "t5-small", "--pods", "3", "--samples", "1000", "--epochs", "2", "--price-per-hour", "6")
    )["ddp"]
    # 1,000 samples are eleven steps of 96 rows.
    assert found["total_seconds"] == pytest.approx(22 * found["step_seconds"])
    assert found["cost"] == pytest.approx(3 * 6 * 22 * found["step_seconds"] / 3600)


def test_without_a_price_there_is_no_cost() -> None:
    assert all(each["cost"] is None for each in result("--model", "t5-small", "--steps", "10")["techniques"])


def test_of_those_that_fit_the_fastest_is_named() -> None:
    found = result("--model", "t5-small", "--bandwidth", "100")
    fastest = max(found["techniques"], key=lambda each: each["samples_per_second"])
    assert found["best"] == fastest["technique"] and f"Choose {found['best']}" in found["text"]


def test_the_published_run_stands_beside_with_the_cache_named() -> None:
    found = result("--model", "t5-large", "--gradient-checkpointing", "True", "--technique", "zero3_offload")
    assert [row["technique"] for row in found["reference"]] == ["zero3_offload"]
    assert "allocator's cache" in found["reference"][0]["remark"]


def test_a_published_run_is_planned_with_its_own_settings() -> None:
    asked = ("--model", "t5-large", "--technique", "zero1")
    one, other = (result(*asked, "--batch-size", rows)["reference"] for rows in ("8", "64"))
    assert one == other and one[0]["remark"] == "within 15%"


def test_the_published_5_gb_of_t5_small_on_three_pods_are_within_15_percent() -> None:
    found = result("--model", "t5-small", "--technique", "zero1")["reference"][0]
    assert found["planned_gigabytes"] == pytest.approx(5, rel=0.15) and found["remark"] == "within 15%"


def test_the_published_9_gb_of_zero3_offload_are_planned_as_5_and_a_half() -> None:
    found = result("--model", "t5-large", "--technique", "zero3_offload")["reference"][0]
    assert found["planned_gigabytes"] == pytest.approx(5.4, rel=0.05)


def test_every_formula_is_printed_where_asked() -> None:
    assert "4 B x 60.51 M / 3 ranks" in result("--model", "t5-small", "--technique", "zero3", "--formulas")["text"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "t6-huge"), "t6-huge.*t5-tiny"),
        (("--model", "t5-small", "--pods", "0"), "--pods 0; expected more than 0"),
        (("--model", "t5-small", "--batch-size", "-1"), "--batch-size -1"),
        (("--model", "t5-small", "--gpu-memory", "0"), "--gpu-memory 0"),
        (("--model", "t5-small", "--gpu-memory", "-1"), "--gpu-memory -1; expected more than 0"),
        (("--model", "t5-small", "--flops", "-2.5"), "--flops -2.5; expected more than 0"),
        (("--model", "t5-small", "--epochs", "2"), "--epochs 2 without --samples"),
        (("--model", "t5-small", "--bandwidth", "-2"), "--bandwidth"),
        (("--model", "t5-small", "--precision", "fp16"), "--precision fp16; expected fp32 or bf16"),
        (("--model", "t5-small", "--technique", "zero9"), "zero9.*zero3_offload"),
        (("--model", "t5-small", "--gpu", "Abacus"), "Abacus.*--flops"),
        (("--model", "t5-small", "--steps", "1", "--samples", "2"), "give one of them"),
    ],
)
def test_bad_input_is_one_line(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        result(*argv)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--pods", "many", "'many'; expected a number"),
        ("--pods", "", "''; expected a number"),
        ("--pods", "1.5", "1.5; expected a whole number"),
        ("--gpu-memory", "nan", "nan; expected a finite number"),
        ("--batch-size", "1e300", "1e300; expected 1e-15 to 1e+15"),
        ("--flops", "1e-300", "1e-300; expected 1e-15 to 1e+15"),
        ("--bandwidth", "9" * 400, "99; expected a finite number"),
    ],
)
def test_what_is_no_number_is_one_line(flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        root.main(["plan", "--model", "t5-small", flag, value])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zeropods plan: argument {flag}: ") and said in line


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_gradient_checkpointing_is_true_or_false(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        result("--model", "t5-small", "--gradient-checkpointing", value)
    assert "expected True or False" in capsys.readouterr().err
