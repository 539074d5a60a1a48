"""A report of the flops profiler: what is read of it, what is wrong with it, and how people see it."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.made import a_rank, a_record, as_record, write_run
from zeropods.cli import parser
from zeropods.errors import UserError
from zeropods.measure.profile import Report, parse_report
from zeropods.measure.profile_contradictions import Fault
from zeropods.measure.profile_corrections import check_report
from zeropods.report.profile import ProfileReport

DATA = Path(__file__).parents[1] / "data"
ZERO1, ZERO3 = DATA / "profile-zero1.txt", DATA / "profile-zero3-offload.txt"
PATH = Path("a/profile.txt")
T5_TINY_MACS = 568_328_192 + 33_947_648
"""16 rows, 52 source and 20 target tokens, 304 labels, by hand: encoder and cross-attention's keys and values
458,752 x 832, decoder 458,752 x 320, output layer 131,072 x 304; 2 layers x 2 x 16 rows x 128 x (52 x 52 + 20 x 20 +
20 x 52) of attention."""
SUMMARY_ALONE = ["world size", "data parallel size", "model parallel size", "batch size per GPU", "samples/second"]
NO_ENGINE = dict.fromkeys(SUMMARY_ALONE, "")
real = cache(ProfileReport.read)
"""A committed report, read once."""


def made(kind: str = "plain", lines: Mapping[str, str] = MappingProxyType({})) -> str:
    """A report in the form of deepspeed 0.19.8, of a small language model whose figures are known.

    Args:
        kind: `plain`, 2 rows of 4 tokens and a width of 8; `wide`, 16 tokens and 64; `wide-twice`, whose linear layers
            are counted twice, as under ZeRO-3; `sharded`, whose embedding lies on other ranks; `clockless`, whose
            root's latency is no time of day.
        lines: figures of the summary to change, by their label; left out where empty.
    """
    text = (DATA / f"made-{kind}.txt").read_text()
    for label, figure in lines.items():
        line = f"{label}: {figure}\n" if figure else ""
        text, changed = re.subn(rf"^{re.escape(label)}: .*\n", line, text, flags=re.MULTILINE)
        assert changed == 1, label
    return text


MORE_MACS = made().replace("7.68 KMACs", "8.45 KMACs")
"""A report whose model does a tenth more than its layers imply."""


def read(text: str) -> Report:
    return parse_report(PATH, text)


def found(text: str, record: dict[str, Any] | None = None) -> dict[str, Fault]:
    return {fault.name: fault for fault in check_report(read(text), as_record(record) if record else None).faults}


def profile(*arguments: str | Path) -> tuple[dict[str, Any], str]:
    """What the verb answers to programs and to people."""
    given = parser().parse_args(["profile", *map(str, arguments)])
    result = given.run(given)
    json.dumps(result, allow_nan=False)
    return result, given.readable(result)


def a_profiled_record(**values: Any) -> dict[str, Any]:
    """Of the made report: one process, two rows; each step took 0.08 s, the profiled one 0.3 s."""
    rank = a_rank(step_seconds=[0.5, 0.3, *[0.08] * 9], warmup_steps=2)
    profiler = {"flops_profiler": {"enabled": True, "profile_step": 1}}
    return a_record(**{"ranks": [rank], "effective_batch_size": 2, "deepspeed": profiler, **values})


def test_depths_and_modules_have_their_figures_and_sizes() -> None:
    report = real(ZERO1).checked.report
    assert (report.missing, report.tree_is_whole) == ("", True)
    assert [each.depth for each in report.depths] == list(range(7))
    assert report.depths[5].parameters == {"T5LayerFF": 524_800.0}
    assert report.root is not None
    modules = dict(report.root.walk())
    wi, block = modules["encoder.block.0.layer.1.DenseReluDense.wi"], modules["encoder.block"]
    assert (wi.class_name, wi.parameters, wi.macs, wi.latency_seconds) == ("Linear", 65_540.0, 54_530_000.0, 0.00141)
    assert wi.details == {"in_features": 128, "out_features": 512, "bias": False}
    assert modules["shared"].details == {"rows": 1_024, "dimension": 128}
    # A list of modules has none.
    assert (block.parameters, block.macs, block.latency_seconds) == (None, None, None)


def test_the_last_report_of_a_log_of_pdsh_is_read_without_the_pods_name() -> None:
    lines = [f"pod1: {line}" for line in (made("wide") + made()).splitlines()]
    lines[-30:-30] = ["pod2: loss 3.1"]
    report = read("\n".join(lines))
    assert (report.reports_in_file, report.summary["forward_macs"], report.missing) == (2, 7_680.0, "")


def test_a_report_of_a_version_before_0_10_is_read() -> None:
    """As deepspeed 0.8 printed it: commas for equals signs, one behind the last figure, no unit of the MACs."""
    now = made(lines={"fwd MACs per GPU": "7.68 K"}).replace("per GPU: ", "per gpu: ")
    commas = re.sub(r" = ([\d.]+%)", r", \1", now.replace("Top 1 modules", "Top modules"))
    older = read(re.sub(r"(% latency, \S+ \w+)(\)?)$", r"\1, \2", commas, flags=re.MULTILINE))
    assert "% latency, 1.14 MFLOPS, \n" in older.text
    assert (older.summary, older.depths, older.root) == (read(now).summary, read(now).depths, read(now).root)


def test_modules_of_megatron_and_of_llama_are_read() -> None:
    tree = """GPTModel(
  38.89 M, 100.00% Params, 103.62 GMACs, 100.00% MACs, 33.25 ms, 100.00% time, 6.2 TFLOPS,
  (word_embeddings): VocabParallelEmbedding(25.76 M, 66.23% Params, 0 MACs, 0.00% MACs, 130.41 us, 0.39% time, 0.0 \
FLOPS, )
  (layers): ModuleList(
    (0-1): 2 x LlamaDecoderLayer(
      6.56 M = 16.9% Params, 51.81 GMACs = 50% MACs, 16 ms = 48% latency, 4.4e+01 TFLOPS
      (query_key_value): ColumnParallelLinear(3.1 M = 8% Params, 9 GMACs = 9% MACs, 5 ms = 15% latency, 3.6 TFLOPS)
      (norm): LlamaRMSNorm(4.1 K = 0% Params, 0 MACs = 0% MACs, 200 us = 1% latency, 0 FLOPS, (4096,), eps=1e-05)
    )
  )
)
"""
    whole = made()
    report = read(whole[: whole.index("TinyLM(\n")] + tree + whole[whole.rindex("-" * 78) :])
    assert (report.missing, report.tree_is_whole) == ("", True) and report.root is not None
    modules = dict(report.root.walk())
    assert modules["word_embeddings"].parameters == 25.76e6
    assert modules["layers.1.query_key_value"].macs == 9e9
    # What is corrected in one of two equal layers must not be corrected again in the other.
    assert modules["layers.1.query_key_value"] is not modules["layers.0.query_key_value"]
    assert modules["layers.0.norm"].details == {"0": (4096,), "eps": 1e-05}
    assert check_report(report).closed_form_macs is None  # its linear layers do not say their sizes


def test_what_is_pasted_from_a_page_is_read_and_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    """As the published report of t5-small on three pods: no tree, no end, and the page goes on."""
    whole = made(lines={"params per GPU": "60.51 M"}).replace("{'TinyLM': '912'}", "{'T5Stack': '76.96 M'}")
    page = tmp_path / "README.md"
    page.write_text(f"# Results\n```\n{whole[: whole.index('--- Detailed') - 24]}```\n\n- Time by worker:\n0%| | 0/9\n")
    result, text = profile(page)
    assert result["missing"] == "it lacks the tree of modules, the closing line of dashes"
    assert text.count("incomplete: it lacks the tree of modules") == 1
    assert result["aggregated"][0]["parameters"] == {"T5Stack": 76.96e6}
    assert "shared_parameters" in {fault["name"] for fault in result["faults"]}
    assert (result["tree"], result["classes"]) == (None, [])


@pytest.mark.parametrize("cut", range(12, 62))
def test_a_report_that_is_cut_off_anywhere_is_read_as_far_as_it_goes(cut: int) -> None:
    whole = made().splitlines()
    report = read("\n".join(whole[:cut]))
    assert "the closing line of dashes" in report.missing
    checked = check_report(report)
    expected = {key: value for key, value in read("\n".join(whole)).summary.items() if key in report.lines}
    assert {key: report.summary[key] for key in report.lines} == expected
    # Nothing is worked out from a tree of which the end is missing.
    assert checked.root is None or report.tree_is_whole
    assert {fault.name for fault in checked.faults} <= {"profiled_step", "root_latency", "root_flops_per_second"}
    json.dumps(checked.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("20 ms", "20 min", "it lacks fwd latency; 1 of its lines cannot be read; the first is line 17, 'fwd"),
        ("batch size per GPU", "rows", "1 of its lines cannot be read; the first is line 11, 'rows: 2'"),
        ("at step 2", "at step two", "the first is line 3, 'Profile Summary at step two:'"),
        ("step latency: ", "fwd latency: ", "the first is line 22, 'fwd latency: 10 ms'"),
        ("'912'}", "912'}", 'the first is line 30, "params - '),
        ("params      - {", "params      {", 'the first is line 30, "params {'),
        ("depth 0:", "", "it lacks the part by depth; 3 of its lines cannot be read; the first is line 30"),
        ("100% latency", "100% hours", "lacks a part of the tree; 1 of its lines cannot be read; the first is line 43"),
        ("(q): Linear(64 = ", "(q): Linear(...)", "it lacks a part of the tree; 1 of its lines"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_named_and_the_others_are_read(old: str, new: str, missing: str) -> None:
    lines = made().splitlines()
    number = next(number for number, line in enumerate(lines) if old in line)
    lines[number] = lines[number].replace(old, new) if "..." not in new else f"          {new}"
    report = read("\n".join(lines))
    assert missing in report.missing and "\n" not in report.missing
    assert report.summary["forward_macs"] == 7_680.0 and report.root is not None


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "heading.txt").write_text(made()[:110])
    (tmp_path / "other.txt").write_text("hello\nworld\n")
    for name, message in (
        ("heading.txt", r"heading\.txt:2: there is a heading but no figure below it; give the report exactly as"),
        ("other.txt", r"other\.txt:1: no '--- DeepSpeed Flops Profiler ---' in 2 lines; give a profile\.txt"),
        ("nowhere", "nowhere: no such file; give a report's file, or the folder of a run"),
        (".", r"profile\.txt: no such file; give a report's file, or the folder of a run"),
    ):
        with pytest.raises(UserError, match=message):
            profile(tmp_path / name)
    with pytest.raises(UserError, match=r"^--top 0; expected at least 1"):
        profile(ZERO1, "--top", "0")


@pytest.mark.parametrize(
    ("text", "name", "said", "corrected"),
    [
        # The time of day is no latency of the root: the summary's 20 ms are.
        (made(), "root_latency", 1.79e9, 0.02),
        (made(), "root_flops_per_second", None, 15_360 / 0.02),
        # 1 ms + 9.5 ms + 1 ms inside the model.
        (made(lines={"fwd latency": "1.8 Gs", "iter latency": "", "samples/second": ""}),
         "forward_latency", 1.8e9, 0.0115),
        # 32 tokens x (12 x 64 x 64 + 64 x 16) and attention's 2 x 2 x 16 x 16 x 64.
        (made("wide-twice"), "linear_counted_twice", 3_280_000.0, 1_605_632 + 65_536),
        # sqrt(2 rows / 6) is no double count.
        (made("wide", {"batch size per GPU": "6"}), "tokens_contradict", None, None),
        (MORE_MACS, "differs_from_closed_form", 8_450.0, 7_680.0),
        # 16 x 8 more: embedding and output layer are one matrix.
        (made("sharded"), "sharded_parameters", 784.0, 912.0),
        (made(lines={"iter latency": "60 ms"}), "contradicts_itself", 0.06, 0.05),
        (made(), "profiled_step", 2, None),
    ],
)  # fmt: skip
def test_a_fault_of_a_made_report(text: str, name: str, said: float | None, corrected: float | None) -> None:
    fault = found(text)[name]
    assert said is None or fault.said == said
    assert fault.corrected == (None if corrected is None else pytest.approx(corrected, rel=0.01))


def test_faults_say_where_and_a_report_without_any_says_only_what_its_step_means() -> None:
    faults = found(MORE_MACS * 3)
    assert faults["root_latency"].line == 42 + 2 * 66 and faults["several_reports"].said == 3
    assert "requested by 'profile_step: 1'" in faults["profiled_step"].reason
    assert "+10.0 %" in faults["differs_from_closed_form"].reason
    assert set(found(made("clockless"))) == {"profiled_step"} and not found(made("clockless", NO_ENGINE))


def test_a_real_zero3_report_is_mended_to_what_zero1_says_and_arithmetic_by_hand() -> None:
    wrong, right = real(ZERO3), real(ZERO1)
    assert wrong.checked.figures["forward_macs"] == pytest.approx(right.checked.figures["forward_macs"], rel=1e-4)
    assert wrong.checked.figures["parameters_per_gpu"] == pytest.approx(1_050_368, rel=1e-4)
    for report in (wrong, right):
        faults = {fault.name: fault for fault in report.checked.faults}
        assert report.checked.closed_form_macs == pytest.approx(T5_TINY_MACS, rel=0.001)
        assert "differs_from_closed_form" not in faults
    # T5-tiny has 1,050,368 parameters, all of them in its two stacks, and the embedding of 131,072 in both.
    assert (faults["shared_parameters"].where, faults["shared_parameters"].said) == ("depth 1, T5Stack", 1_180_000.0)


@pytest.mark.parametrize(("seconds", "name"), [(0.08, "unusual_step"), (0.03, "profiler_overhead")])
def test_figures_of_an_unusual_step_are_corrected_to_those_of_the_run(seconds: float, name: str) -> None:
    """2 rows / the median of the steps after warm-up; the report says 2 / 0.05 s."""
    record = a_profiled_record(ranks=[a_rank(step_seconds=[0.5, 0.3, *[seconds] * 9], warmup_steps=2)])
    checked = check_report(read(made()), as_record(record))
    faults = {fault.where: fault for fault in checked.faults if fault.name == name}
    assert {where: (fault.said, fault.corrected) for where, fault in faults.items()} == {
        "iter latency": (0.05, pytest.approx(seconds)),
        "samples/second": (40.0, pytest.approx(2 / seconds)),
    }
    table = {line: corrected for line, _, corrected in ProfileReport(checked, "made").summary().rows if corrected}
    assert set(table) == {"iter latency", "FLOPS per GPU", "samples/second"}
    pair = ProfileReport(check_report(read(made())), "unmended").against(ProfileReport(checked, "made"))
    ratios = {line["name"]: line["ratio"] for line in pair.to_json()["compared"]}
    assert ratios["iteration_seconds"] == pytest.approx(seconds / 0.05)
    assert ratios["samples_per_second"] == ratios["flops_per_second"] == pytest.approx(0.05 / seconds)


def test_a_run_shows_passes_another_run_and_recomputation() -> None:
    record = a_profiled_record(per_device_train_batch_size=2, effective_batch_size=8, gradient_accumulation_steps=4)
    assert "one pass of 4" in found(made(), record)["profiler_overhead"].reason
    # Nothing is corrected by the times of another run.
    faults = found(made(), a_profiled_record(per_device_train_batch_size=3))
    fault = faults["another_run"]
    assert (fault.where, fault.said, fault.corrected) == ("batch size per GPU", 2, 3) and "unusual_step" not in faults
    fault = found(made(), a_profiled_record(gradient_checkpointing=True))["recomputation_left_out"]
    assert fault.corrected == pytest.approx(3 * 15_360 / 0.02)


@pytest.mark.parametrize(
    ("record", "run"),
    [(a_profiled_record(), "compared with record.json beside it"), ({"schema_version": 1}, "schema_version 1;")],
)
def test_the_record_beside_a_report_is_found_and_an_old_one_does_no_harm(
    tmp_path: Path, record: dict[str, Any], run: str
) -> None:
    folder = write_run(tmp_path / "run", record)
    (folder / "profile.txt").write_text(made())
    result, text = profile(folder)
    assert run in result["run"] and run in text
    assert ("unusual_step" in {fault["name"] for fault in result["faults"]}) == ("ranks" in record)


def test_plots_say_in_words_what_they_show() -> None:
    tree, alone, pair = real(ZERO3).icicle(), real(ZERO1).shares(), real(ZERO1).against(real(ZERO3)).plot()
    assert all(plot._repr_mimebundle_()[0]["image/png"] for plot in (tree, alone, pair))
    assert "MACs: encoder 58 %, decoder 35 %, lm_head 7 %; latency: encoder 46 %" in tree.text
    assert "forward 364.2 ms" in pair.text and pair.text.startswith("profile-zero1.txt: ")
    without_tree = re.sub(r"^-+ Detailed Profile(?s:.*)^\)$", "", made(), flags=re.MULTILINE)
    with pytest.raises(UserError, match=r'profile\.txt: no module tree; profile with "detailed": true'):
        ProfileReport(check_report(read(without_tree)), "made").icicle()


def test_the_verb_answers_plain_numbers_and_names_each_fault_in_tables_with_their_units() -> None:
    result, text = profile(ZERO3, "--top", "3", "--depth", "1")
    assert (result["summary"]["forward_macs"], result["missing"]) == (1.17e9, None)
    assert result["corrected"]["forward_macs"] == pytest.approx(602_276_000, rel=1e-5)
    assert result["tree"]["children"][1]["name"] == "encoder"
    assert "linear counted twice, line 17:" in text and "| encoder | T5Stack" in text
    said = profile(ZERO1, "--depth", "1")[1]
    for line in (
        r"\| part of an iteration +\| time \(ms\) +\| share \(%\) +\|",
        r"\| forward +\| 55\.98 +\| 37\.0 +\|",
        r"\| Linear +\| 33 +\| 568\.3 +\| 94\.4 +\| 34\.88 +\|",
    ):
        assert re.search(line, said)


def test_two_reports_have_ratios_of_corrected_figures_where_they_are_of_one_setting(tmp_path: Path) -> None:
    result, text = profile(ZERO1, "--against", ZERO3)
    ratios = {line["name"]: line["ratio"] for line in result["against"]["compared"]}
    assert ratios["forward_macs"] == pytest.approx(1, rel=1e-4)
    assert ratios["iteration_seconds"] == pytest.approx(714.12 / 151.45, rel=0.001)
    assert (result["against"]["differences"], "| ratio |" in text) == ([], True)
    (tmp_path / "other.txt").write_text(made())
    result, text = profile(ZERO1, "--against", tmp_path / "other.txt")
    assert {line["ratio"] for line in result["against"]["compared"]} == {None}
    assert "no ratios: world_size 3, 1; batch_size_per_gpu 16, 2" in text
