"""A profiler report for people: tables, plots, the command line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_profile_read import ZERO1, ZERO3
from tests.made_profile import Model
from zeropods.cli import parser
from zeropods.errors import UserError
from zeropods.report.profile import MEANING, ProfileReport, written

PNG = b"\x89PNG"


@cache
def zero1() -> ProfileReport:
    return ProfileReport.read(ZERO1)


@cache
def zero3() -> ProfileReport:
    return ProfileReport.read(ZERO3)


def profile(*arguments: str | Path) -> tuple[dict[str, Any], str]:
    """What the verb answers to programs and to people."""
    given = parser().parse_args(["profile", *map(str, arguments)])
    result = given.run(given)
    return result, given.readable(result)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (602_280_000, "MACs", "602.28 MMACs"),
        (1_050_000, "parameters", "1.05 M parameters"),
        (0, "MACs", "0 MACs"),
        (316.94, "samples/s", "316.94 samples/s"),
        (None, "s", ""),
    ],
)
def test_a_figure_is_written_for_people(value: float | None, unit: str, text: str) -> None:
    assert written(value, unit) == text


def test_every_figure_of_a_summary_has_a_meaning() -> None:
    assert set(MEANING) == set(vars(zero1().checked.report.summary))


def test_the_summary_is_explained_line_by_line_and_what_is_right_has_nothing_beside_it() -> None:
    rows = zero3().line_by_line().rows
    assert len(rows) == len(zero3().checked.report.lines) + 1  # and the heading
    assert {row[0]: row[3] for row in rows}["fwd MACs per GPU"] == "602.27 MMACs"
    assert {row[2] for row in zero1().summary().rows} == {""}


def test_tables_of_classes_and_of_the_tree() -> None:
    assert [row[0] for row in zero3().classes(top=2).rows] == ["Linear", "T5Attention"]
    assert [row[0] for row in zero1().tree(1).rows] == ["(root)", "shared", "encoder", "decoder", "lm_head"]


def test_plots_say_in_words_what_they_show() -> None:
    tree, pair = zero3().icicle(), zero1().against(zero3()).plot()
    assert tree.png.startswith(PNG) and pair.png.startswith(PNG)
    assert "MACs: encoder 58 %, decoder 35 %, lm_head 7 %; latency: encoder 46 %" in tree.text
    assert "forward 364.2 ms" in pair.text and pair.text.startswith("zero1.txt: ")


def test_a_ratio_is_of_corrected_figures_and_other_settings_have_none(tmp_path: Path) -> None:
    ratios = {row[0]: row[3] for row in zero1().against(zero3()).table().rows}
    assert (ratios["forward MACs"], ratios["iteration seconds"]) == ("1", "4.72")  # 714.12 / 151.45
    other = tmp_path / "other.txt"
    other.write_text(Model().report())
    table = zero1().against(ProfileReport.read(other)).table()
    assert table.title == "no ratios: world_size 3, 1; batch_size_per_gpu 16, 2"


def test_the_verb_answers_plain_numbers_and_names_each_fault() -> None:
    result, text = profile(ZERO3, "--top", 3, "--depth", 1)
    assert result["summary"]["forward_macs"] == 1.17e9
    assert result["corrected"]["forward_macs"] == pytest.approx(602_276_000, rel=1e-5)
    assert result["tree"]["children"][1]["name"] == "encoder"
    assert "| fwd MACs per GPU        | 1170   | 602.27    | MMACs        |" in text
    json.dumps(result, allow_nan=False)
    assert "linear counted twice, line 17:" in text and "| encoder | T5Stack" in text


def test_the_verb_compares_two_reports() -> None:
    result, text = profile(ZERO1, "--against", ZERO3)
    assert (result["against"]["differences"], "| ratio |" in text) == ([], True)


@pytest.mark.parametrize(("flag", "value"), [("--depth", "-1"), ("--top", "0")])
def test_a_number_out_of_range_is_refused(flag: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^{flag} {value}; expected at least"):
        profile(ZERO1, flag, value)


def test_a_report_without_a_tree_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "profile.txt").write_text(Model().report(detailed=False))
    with pytest.raises(UserError, match=r'profile\.txt: no module tree; profile with "detailed": true'):
        ProfileReport.read(tmp_path).icicle()
