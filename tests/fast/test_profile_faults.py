"""What is wrong with a report of the flops profiler, and the figure that is right: by hand, for known models."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_profile_read import PATH, ZERO1, ZERO3
from tests.made import a_rank, a_record, as_record, write_run
from tests.made_profile import Model
from zeropods.measure.profile import parse_report
from zeropods.measure.profile_checks import (
    Fault,
    Mended,
    check,
    closed_form,
    compare,
    differences,
    faults,
    mended,
)

T5_TINY_LINEAR_MACS = 568_328_192
"""16 rows, 52 source and 20 target tokens, 304 labels, by hand: encoder and cross-attention's keys and values
458,752 x 832 = 381,681,664; decoder 458,752 x 320 = 146,800,640; output layer 131,072 x 304 = 39,845,888."""
T5_TINY_ATTENTION_MACS = 33_947_648
"""2 layers x 2 x 16 rows x 128 x (52 x 52 + 20 x 20 + 20 x 52)."""
NO_ENGINE = dict.fromkeys(
    ["world size", "data parallel size", "model parallel size", "batch size per GPU", "samples/second"], ""
)
real = cache(check)
"""A committed report, read once."""


def found(model: Model | str, record: dict[str, Any] | None = None) -> dict[str, Fault]:
    report = parse_report(PATH, model if isinstance(model, str) else model.report())
    made = faults(report, mended(report), None if record is None else as_record(record))
    return {fault.name: fault for fault in made}


def mend(model: Model) -> Mended:
    return mended(parse_report(PATH, model.report()))


def a_profiled_record(**values: Any) -> dict[str, Any]:
    """Of the made report: one process, two rows; each step took 0.08 s, the profiled one 0.3 s."""
    rank = a_rank(step_seconds=[0.5, 0.3, *[0.08] * 9], warmup_steps=2)
    profiler = {"flops_profiler": {"enabled": True, "profile_step": 1}}
    return a_record(**{"ranks": [rank], "effective_batch_size": 2, "deepspeed": profiler, **values})


@pytest.mark.parametrize(
    ("model", "name", "said", "corrected"),
    [
        # The time of day is no latency of the root: the summary's 20 ms are.
        (Model(), "root_latency", 1.79e9, 0.02),
        (Model(), "root_flops_per_second", None, 15_360 / 0.02),
        # 1 ms + 9.5 ms + 1 ms inside the model.
        (Model(lines={"fwd latency": "1.8 Gs", "iter latency": "", "samples/second": ""}),
         "forward_latency", 1.8e9, 0.0115),
        # 32 tokens x (12 x 64 x 64 + 64 x 16) and attention's 2 x 2 x 16 x 16 x 64.
        (Model(width=64, tokens=16, twice=True), "linear_counted_twice", 3_280_000.0, 1_605_632 + 65_536),
        # sqrt(2 rows / 6) is no double count.
        (Model(width=64, tokens=16, lines={"batch size per GPU": "6"}), "tokens_contradict", None, None),
        (Model(lines={"fwd MACs per GPU": "8.45 KMACs"}), "differs_from_closed_form", 8_450.0, 7_680.0),
        # 16 x 8 more: embedding and output layer are one matrix.
        (Model(sharded=True), "sharded_parameters", 784.0, 912.0),
        (Model(lines={"iter latency": "60 ms"}), "contradicts_itself", 0.06, 0.05),
        (Model(), "profiled_step", 2, None),
    ],
)  # fmt: skip
def test_a_fault_of_a_made_report(model: Model, name: str, said: float | None, corrected: float | None) -> None:
    fault = found(model)[name]
    assert said is None or fault.said == said
    assert fault.corrected == (None if corrected is None else pytest.approx(corrected, rel=0.01))


def test_faults_say_where_and_why() -> None:
    assert found(Model())["root_latency"].line == 42
    assert "'profile_step: 1' asked for it" in found(Model())["profiled_step"].reason
    assert "+10.0 %" in found(Model(lines={"fwd MACs per GPU": "8.45 KMACs"}))["differs_from_closed_form"].reason
    assert found(Model().report() * 3)["several_reports"].said == 3


def test_a_report_without_faults_has_only_the_step_to_be_known_and_without_an_engine_not_even_that() -> None:
    assert set(found(Model(clock=False))) == {"profiled_step"}
    assert not found(Model(clock=False, lines=NO_ENGINE))


def test_a_real_zero3_report_is_mended_to_what_zero1_says() -> None:
    wrong, right = (real(path).mended.figures for path in (ZERO3, ZERO1))
    assert wrong["forward_macs"] == pytest.approx(right["forward_macs"], rel=1e-4)
    assert wrong["parameters_per_gpu"] == pytest.approx(1_050_368, rel=1e-4)


@pytest.mark.parametrize("path", [ZERO1, ZERO3])
def test_the_closed_form_of_a_t5_is_that_of_arithmetic_by_hand(path: Path) -> None:
    root = real(path).mended.root
    assert root is not None
    form = closed_form(root, rows=16)
    assert form is not None
    assert (form.linear_macs, form.planned_macs, form.model) == (T5_TINY_LINEAR_MACS, T5_TINY_LINEAR_MACS, "t5-tiny")
    assert form.attention_macs == pytest.approx(T5_TINY_ATTENTION_MACS, rel=0.005)
    assert "differs_from_closed_form" not in {fault.name for fault in real(path).faults}


def test_a_matrix_in_several_modules_is_counted_once() -> None:
    fault = {fault.name: fault for fault in real(ZERO1).faults}["shared_parameters"]
    # T5-tiny has 1,050,368 parameters, all of them in its two stacks, and the embedding of 131,072 in both.
    assert (fault.where, fault.said, fault.corrected) == ("depth 1, T5Stack", 1_180_000.0, pytest.approx(1_050_368))


def test_a_run_shows_the_profilers_own_cost() -> None:
    fault = found(Model(), a_profiled_record())["profiler_overhead"]
    # 2 rows / 0.08 s, the median of the steps after warm-up; the report says 2 / 0.05 s.
    assert (fault.where, fault.said, fault.corrected) == ("samples/second", 40.0, pytest.approx(25.0))
    record = a_profiled_record(effective_batch_size=8, gradient_accumulation_steps=4)
    assert "one pass of 4" in found(Model(), record)["profiler_overhead"].reason


def test_a_record_shows_another_run_and_recomputation() -> None:
    fault = found(Model(), a_profiled_record(per_device_train_batch_size=3))["another_run"]
    assert (fault.where, fault.said, fault.corrected) == ("batch_size_per_gpu", 2, 3)
    fault = found(Model(), a_profiled_record(gradient_checkpointing=True))["recomputation_left_out"]
    assert fault.corrected == pytest.approx(3 * 15_360 / 0.02)


@pytest.mark.parametrize(
    ("record", "run"),
    [(a_profiled_record(), "compared with record.json beside it"), ({"schema_version": 1}, "schema_version 1")],
)
def test_the_record_beside_a_report_is_found_and_an_old_one_does_no_harm(
    tmp_path: Path, record: dict[str, Any], run: str
) -> None:
    folder = write_run(tmp_path / "run", record)
    (folder / "profile.txt").write_text(Model().report())
    checked = check(folder)
    assert run in checked.run
    assert ("profiler_overhead" in {fault.name for fault in checked.faults}) == ("ranks" in record)


def test_two_reports_have_ratios_where_they_are_of_one_setting() -> None:
    one, two, other = (mend(model).figures for model in (Model(), Model(layers=2), Model(rows=4, world_size=3)))
    ratio = next(each.ratio for each in compare(one, two) if each.name == "forward_macs")
    assert ratio == pytest.approx((7_680 + 6_656) / 7_680, rel=0.005)  # a block more: 6,656
    assert differences(one, other) == ["world_size 1, 3", "batch_size_per_gpu 2, 4"]
    assert {each.ratio for each in compare(one, other)} == {None}


def test_a_report_without_its_detailed_part_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "profile.txt").write_text(Model().report(detailed=False))
    found = check(tmp_path).to_json()
    assert (found["tree"], found["classes"]) == (None, [])
