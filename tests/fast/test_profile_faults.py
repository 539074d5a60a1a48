"""What is wrong with a report of the flops profiler, and the figure that is right: by hand, for known models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_profile_read import PATH, ZERO1, ZERO3
from tests.made import a_rank, a_record, as_record, write_run
from tests.made_profile import Model
from zeropods.measure.profile import parse_report
from zeropods.measure.profile_checks import (
    Checked,
    Fault,
    Mended,
    by_class,
    check,
    closed_form,
    compare,
    differences,
    faults,
    mended,
    shares,
)

T5_TINY_LINEAR_MACS = 568_328_192
"""16 rows, 52 source and 20 target tokens, 304 labels, by hand: encoder and cross-attention's keys and values
458,752 x 832 = 381,681,664; decoder 458,752 x 320 = 146,800,640; output layer 131,072 x 304 = 39,845,888."""
T5_TINY_ATTENTION_MACS = 33_947_648
"""2 layers x 2 x 16 rows x 128 x (52 x 52 + 20 x 20 + 20 x 52)."""


real = cache(check)
"""A committed report, read once."""


def found(model: Model | str, record: dict[str, Any] | None = None) -> dict[str, Fault]:
    said = None if record is None else as_record(record)
    report = parse_report(PATH, model if isinstance(model, str) else model.report())
    return {fault.name: fault for fault in faults(report, mended(report), said)}


def mend(model: Model) -> Mended:
    return mended(parse_report(PATH, model.report()))


def a_profiled_record(**values: Any) -> dict[str, Any]:
    """Of the made report: one process, two rows; each step took 0.08 s, the profiled one 0.3 s."""
    rank = a_rank(step_seconds=[0.5, 0.3, *[0.08] * 9], warmup_steps=2)
    profiler = {"flops_profiler": {"enabled": True, "profile_step": 1}}
    return a_record(**{"ranks": [rank], "effective_batch_size": 2, "deepspeed": profiler, **values})


def test_a_report_without_faults_has_only_the_step_to_be_known() -> None:
    assert set(found(Model(clock=False))) == {"profiled_step"}


def test_the_time_of_day_is_no_latency_of_the_root() -> None:
    fault = found(Model())["root_latency"]
    assert (fault.said, fault.corrected, fault.line) == (1.79e9, 0.02, 42)  # the summary's 20 ms


def test_the_roots_flops_a_second_follow_its_mended_latency() -> None:
    assert found(Model())["root_flops_per_second"].corrected == pytest.approx(15_360 / 0.02)


def test_shares_of_latency_are_computed_anew() -> None:
    root = mend(Model()).root
    assert root is not None
    assert dict(root.walk())["blocks.0.attention"].latency_percent == pytest.approx(100 * 4.5 / 20)


def test_a_summary_that_says_the_time_of_day_is_mended_by_what_is_inside() -> None:
    model = Model(lines={"fwd latency": "1.8 Gs", "iter latency": "", "samples/second": ""})
    fault = found(model)["forward_latency"]
    assert (fault.said, fault.corrected) == (1.8e9, pytest.approx(0.0115))  # 1 ms + 9.5 ms + 1 ms


def test_linear_layers_that_were_counted_twice_are_seen_by_attention() -> None:
    model = Model(width=64, tokens=16, twice=True)
    fault = found(model)["linear_counted_twice"]
    # 32 tokens x (12 x 64 x 64 + 64 x 16) and attention's 2 x 2 x 16 x 16 x 64
    assert (fault.said, fault.corrected) == (3_280_000.0, pytest.approx(1_605_632 + 65_536, rel=0.01))


def test_layers_counted_once_are_not_taken_for_twice() -> None:
    assert mend(Model(width=64, tokens=16)).times_counted == pytest.approx(1.0, abs=0.02)


def test_layers_counted_twice_give_a_factor_of_two() -> None:
    assert mend(Model(width=64, tokens=16, twice=True)).times_counted == pytest.approx(2.0, abs=0.1)


def test_flops_lose_two_for_each_mac_that_was_counted_twice() -> None:
    once, twice = mend(Model(width=64, tokens=16)), mend(Model(width=64, tokens=16, twice=True))
    assert twice.figures["forward_flops"] == pytest.approx(once.figures["forward_flops"], rel=0.01)


def test_a_batch_that_is_not_the_summarys_is_no_double_count() -> None:
    fault = found(Model(width=64, tokens=16, lines={"batch size per GPU": "6"}))["tokens_contradict"]
    assert (fault.corrected, "0.58 times" in fault.reason) == (None, True)  # sqrt(2 rows / 6)


def test_real_zero3_has_the_macs_of_real_zero1() -> None:
    wrong, right = (real(path).mended.figures["forward_macs"] for path in (ZERO3, ZERO1))
    assert wrong == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("path", [ZERO1, ZERO3])
def test_the_closed_form_of_a_t5_is_that_of_arithmetic_by_hand(path: Path) -> None:
    root = real(path).mended.root
    assert root is not None
    form = closed_form(root, rows=16)
    assert form is not None
    assert (form.linear_macs, form.planned_macs, form.model) == (T5_TINY_LINEAR_MACS, T5_TINY_LINEAR_MACS, "t5-tiny")
    assert form.attention_macs == pytest.approx(T5_TINY_ATTENTION_MACS, rel=0.005)


@pytest.mark.parametrize("path", [ZERO1, ZERO3])
def test_a_mended_report_agrees_with_the_closed_form(path: Path) -> None:
    assert "differs_from_closed_form" not in {fault.name for fault in real(path).faults}


def test_a_count_that_differs_from_the_closed_form_is_named_with_its_share() -> None:
    fault = found(Model(lines={"fwd MACs per GPU": "8.45 KMACs"}))["differs_from_closed_form"]
    assert (fault.corrected, "+10.0 %" in fault.reason) == (7_680.0, True)  # 8,450 / 7,680


def test_layers_that_are_neither_linear_nor_attention_have_no_closed_form() -> None:
    text = Model().report().replace("(norm): Norm(8 = 0.88% Params, 0 MACs", "(norm): Conv(8 = 0.88% Params, 9 MACs")
    root = mended(parse_report(PATH, text)).root
    assert root is not None and closed_form(root, rows=2) is None


def test_parameters_on_other_ranks_are_put_back_once_by_their_size() -> None:
    fault = found(Model(sharded=True))["sharded_parameters"]
    assert (fault.said, fault.corrected) == (784.0, 912.0)  # 16 x 8 more: embedding and output layer are one matrix


def test_parameters_of_a_real_zero3_report_are_those_of_t5_tiny() -> None:
    assert real(ZERO3).mended.figures["parameters_per_gpu"] == pytest.approx(1_050_368, rel=1e-4)


def test_a_matrix_in_several_modules_is_counted_once() -> None:
    fault = {fault.name: fault for fault in real(ZERO1).faults}["shared_parameters"]
    # T5-tiny has 1,050,368 parameters, all of them in its two stacks, and the embedding of 131,072 in both.
    assert (fault.where, fault.said, fault.corrected) == ("depth 1, T5Stack", 1_180_000.0, pytest.approx(1_050_368))


def test_the_profiled_step_is_named_with_the_setting_that_asked_for_it() -> None:
    assert "'profile_step: 1' asked for it" in found(Model())["profiled_step"].reason


def test_a_model_that_was_profiled_without_an_engine_has_no_step() -> None:
    lines = dict.fromkeys(["world size", "data parallel size", "model parallel size", "batch size per GPU"], "")
    assert "profiled_step" not in found(Model(lines={**lines, "samples/second": ""}))


def test_a_summary_that_contradicts_itself_is_seen() -> None:
    fault = found(Model(lines={"iter latency": "60 ms"}))["contradicts_itself"]
    assert (fault.where, fault.said, fault.corrected) == ("iter latency", 0.06, pytest.approx(0.05))


def test_several_reports_in_a_file_are_told() -> None:
    assert found(Model().report() * 3)["several_reports"].said == 3


def test_a_run_shows_the_profilers_own_cost() -> None:
    fault = found(Model(), a_profiled_record())["profiler_overhead"]
    # 2 rows / 0.08 s, the median of the steps after warm-up; the report says 2 / 0.05 s.
    assert (fault.where, fault.said, fault.corrected) == ("samples/second", 40.0, pytest.approx(25.0))


def test_a_run_as_fast_as_its_profiled_step_is_no_fault() -> None:
    rank = a_rank(step_seconds=[0.5, 0.3, 0.05, 0.051], warmup_steps=2)
    assert "profiler_overhead" not in found(Model(), a_profiled_record(ranks=[rank]))


def test_a_run_that_was_never_timed_says_nothing_about_speed() -> None:
    rank = a_rank(step_seconds=[0.5, 0.3], warmup_steps=2)
    assert "profiler_overhead" not in found(Model(), a_profiled_record(ranks=[rank]))


def test_one_pass_of_several_is_told() -> None:
    record = a_profiled_record(effective_batch_size=8, gradient_accumulation_steps=4)
    assert "one pass of 4" in found(Model(), record)["profiler_overhead"].reason


def test_a_report_of_another_run_is_told() -> None:
    fault = found(Model(), a_profiled_record(per_device_train_batch_size=3))["another_run"]
    assert (fault.where, fault.said, fault.corrected) == ("batch_size_per_gpu", 2, 3)


def test_recomputation_makes_a_backward_pass_three_forward_ones() -> None:
    fault = found(Model(), a_profiled_record(gradient_checkpointing=True))["recomputation_left_out"]
    assert fault.corrected == pytest.approx(3 * 15_360 / 0.02)


def test_the_record_beside_a_report_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", a_profiled_record(per_device_train_batch_size=2))
    (folder / "profile.txt").write_text(Model().report())
    checked = check(folder)
    assert checked.run == "compared with record.json beside it"
    assert "profiler_overhead" in {fault.name for fault in checked.faults}


def test_a_record_of_another_version_does_not_keep_a_report_from_being_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"schema_version": 1})
    (folder / "profile.txt").write_text(Model().report())
    assert "schema_version 1" in check(folder).run


def test_parts_of_an_iteration_sum_to_one() -> None:
    assert shares(mend(Model()).figures) == pytest.approx({"forward": 0.4, "backward": 0.4, "step": 0.2})


def test_an_iteration_that_was_not_timed_has_no_shares() -> None:
    lines = {
        label: "" for label in Model().summary(Model().tree()) if label.startswith(("bwd", "fwd+", "step", "iter"))
    }
    assert shares(mend(Model(lines=lines)).figures) is None


def test_own_figures_of_classes_leave_out_the_modules_inside() -> None:
    root = mend(Model(clock=False)).root
    assert root is not None
    own = {share.class_name: share for share in by_class(root)}
    assert own["Attention"].macs == 512  # its products, 2 x 2 rows x 4 x 4 x 8, without its four layers
    assert (own["Linear"].modules, own["Linear"].latency_seconds) == (7, pytest.approx(0.007))


def test_two_reports_of_one_setting_have_ratios() -> None:
    one, two = mend(Model()).figures, mend(Model(layers=2)).figures
    ratio = next(each.ratio for each in compare(one, two) if each.name == "forward_macs")
    assert ratio == pytest.approx((7_680 + 6_656) / 7_680, rel=0.005)  # a block more: 6,656


def test_reports_of_other_settings_have_no_ratio() -> None:
    one, two = mend(Model()).figures, mend(Model(rows=4, world_size=3)).figures
    assert differences(one, two) == ["world_size 1, 3", "batch_size_per_gpu 2, 4"]
    assert {each.ratio for each in compare(one, two)} == {None}


def test_a_report_without_its_detailed_part_is_checked_as_far_as_it_goes() -> None:
    report = parse_report(PATH, Model().report(detailed=False))
    checked = Checked(report=report, mended=mended(report), faults=tuple(faults(report, mended(report))), run="")
    assert (checked.to_json()["tree"], checked.to_json()["classes"]) == (None, [])


def test_the_tree_is_cut_at_a_depth() -> None:
    tree = real(ZERO1).to_json(depth=1)["tree"]
    assert [child["children"] for child in tree["children"]] == [[], [], [], []]


def test_the_result_is_json_without_infinities() -> None:
    json.dumps([real(path).to_json() for path in (ZERO1, ZERO3)], allow_nan=False)
