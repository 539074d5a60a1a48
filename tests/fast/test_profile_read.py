"""Reading a report of the flops profiler: its numbers, its tree, and what is no report."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made_profile import Model, printed
from zeropods.errors import UserError
from zeropods.measure.profile import Module, Report, amount, parse_report, read_report

DATA = Path(__file__).with_name("data")
ZERO1, ZERO3 = DATA / "profile-zero1.txt", DATA / "profile-zero3-offload.txt"
PATH = Path("a/profile.txt")


real = cache(read_report)
"""A committed report, read once."""


def read(text: str) -> Report:
    return parse_report(PATH, text)


def root(report: Report) -> Module:
    assert report.root is not None
    return report.root


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("602.28 MMACs", "MACs", 602_280_000.0),
        ("1.17 GMACs", "MACs", 1.17e9),
        ("1.05 M", "params", 1_050_000.0),
        ("16.38 K", "params", 16_380.0),
        ("128", "params", 128.0),
        ("1e+06 T", "flops", 1e18),
        ("21.54 GFLOPS", "FLOPS", 21.54e9),
        ("670 mFLOPS", "FLOPS", 0.67),
        ("55.98 ms", "s", 0.05598),
        ("1.8 Gs", "s", 1.8e9),
        ("316.94", "", 316.94),
    ],
)
def test_a_figure_is_read_in_its_unit(text: str, kind: str, number: float) -> None:
    assert amount(text, kind, "f:1") == number


@pytest.mark.parametrize(
    ("text", "kind"), [("55.98 min", "s"), ("1.05 G", "params"), ("3 MMAC", "MACs"), ("1 B", "flops")]
)
def test_an_unknown_unit_is_refused_with_its_line_and_value(text: str, kind: str) -> None:
    with pytest.raises(UserError, match=f"^f:7: '{text}': unknown unit '{text.split()[1]}'; expected "):
        amount(text, kind, "f:7")


@given(st.floats(min_value=1e-3, max_value=1e15))
def test_a_printed_figure_is_read_within_its_rounding(number: float) -> None:
    assert amount(f"{printed(number)}FLOPS", "FLOPS", "f:1") == pytest.approx(number, rel=0.005)


def test_depths_and_modules_have_their_figures_and_sizes() -> None:
    depths, modules = real(ZERO1).depths, dict(root(real(ZERO1)).walk())
    assert [each.depth for each in depths] == list(range(7))
    assert (depths[5].parameters, depths[5].seconds) == ({"T5LayerFF": 524_800.0}, {"T5LayerSelfAttention": 0.02069})
    wi, block = modules["encoder.block.0.layer.1.DenseReluDense.wi"], modules["encoder.block"]
    assert (wi.class_name, wi.parameters, wi.macs, wi.latency_seconds) == ("Linear", 65_540.0, 54_530_000.0, 0.00141)
    assert wi.details == {"in_features": 128, "out_features": 512, "bias": False}
    assert modules["shared"].details == {"rows": 1_024, "dimension": 128}
    # A list of modules has none.
    assert (block.parameters, block.macs, block.latency_seconds) == (None, None, None)


def test_the_last_of_several_reports_is_read() -> None:
    report = read(Model().report() + "a line of training\n" + Model(layers=2).report())
    assert (report.reports, report.summary.forward_macs) == (2, 14_340.0)


def test_a_report_in_a_log_of_pdsh_is_read_without_the_pods_name() -> None:
    lines = [f"pod1: {line}" for line in Model().report().splitlines()]
    lines[9:9] = ["pod2: loss 3.1"]
    assert read("\n".join(lines)).summary.forward_macs == 7_680.0


def test_a_report_of_a_version_before_0_10_is_read() -> None:
    """As deepspeed 0.8 printed it: commas for equals signs, one behind the last figure, no unit of the MACs."""
    now = Model(lines={"fwd MACs per GPU": "7.68 K"}).report().replace("per GPU: ", "per gpu: ")
    commas = re.sub(r" = ([\d.]+%)", r", \1", now.replace("Top 1 modules", "Top modules"))
    older = read(re.sub(r"(% latency, \S+ \w+)(\)?)$", r"\1, \2", commas, flags=re.MULTILINE))
    assert "% latency, 1.14 MFLOPS, \n" in older.text
    assert (vars(older.summary), older.depths) == (vars(read(now).summary), read(now).depths)
    assert older.root == read(now).root


@pytest.mark.parametrize("cut", range(4, 60, 10))
def test_a_report_that_is_cut_off_is_refused_with_its_last_line(cut: int) -> None:
    lines = Model().report().splitlines()[:cut]
    with pytest.raises(UserError, match=rf"^a/profile\.txt:{cut}: the report ends without its closing line"):
        read("\n".join(lines))


def test_a_tree_that_does_not_close_is_refused_with_the_module_that_is_open() -> None:
    text = Model().report()
    last = text.rindex("\n)\n")
    with pytest.raises(UserError, match=r"^a/profile\.txt:\d+: ends inside the module of line 42; give a report"):
        read(text[:last] + text[last + 2 :])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("20 ms", "20 min", r"'20 min': unknown unit 'min'; expected Ts \| Gs"),
        ("batch size per GPU", "rows", r"'rows: .*; expected a line of the summary"),
        ("at step 2", "at step two", r"'two'; expected a whole number"),
        ("step latency: ", "fwd latency: ", r"a second 'fwd latency'"),
        ("'912'}", "912'}", r".*; expected \{'CLASS': 'FIGURE'\}"),
        ("params      -", "people      -", r".*; expected \"params - "),
        ("      (norm): ", "     (norm): ", r".*; expected 6 blanks before it"),
        ("100% latency", "100% time", r".*; expected 'PARAMS = P% Params"),
    ],
)
def test_a_line_that_is_of_no_report_is_refused(old: str, new: str, message: str) -> None:
    lines = Model().report().splitlines()
    number = next(number for number, line in enumerate(lines) if old in line)
    lines[number] = lines[number].replace(old, new)
    with pytest.raises(UserError, match=rf"^a/profile\.txt:{number + 1}: {message}"):
        read("\n".join(lines))


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^a/profile\.txt:1: no '--- DeepSpeed Flops Profiler ---' in 2 lines; "):
        read("hello\nworld\n")
    with pytest.raises(UserError, match="nowhere: not there; give a report's file or a run folder"):
        read_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"profile\.txt: not there; train with a profiled configuration"):
        read_report(tmp_path)
