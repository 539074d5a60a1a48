"""README.md is short, begins with what to do, and states what results/ holds."""

from __future__ import annotations

import re
import runpy

from tests.pages import ROOT, blocks

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MODULE = runpy.run_path(str(ROOT / "tools" / "readme.py"))
MOST_WORDS = 750


def prose() -> str:
    """What is read: without code, tables, pictures and what a demo has said."""
    text = re.sub(r"^```.*?^```|^<!-- demo:.*?^<!-- /demo -->", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(\|.*|!\[.*|<!--.*)$", "", text, flags=re.MULTILINE)


def test_figures_of_every_page_are_those_of_the_results() -> None:
    pages = MODULE["pages"]()
    assert len(pages) == 2 and [path.name for path, text in pages.items() if path.read_text("utf-8") != text] == []


def test_it_is_read_in_two_or_three_minutes() -> None:
    assert len(prose().split()) <= MOST_WORDS


def test_the_two_commands_come_first() -> None:
    assert re.findall(r"^make \w+", blocks(TEXT)[0], flags=re.MULTILINE) == ["make demo", "make test"]


def test_it_shows_a_plot_of_a_real_run() -> None:
    (plot,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", TEXT)
    assert plot.startswith("results/demo/") and (ROOT / plot).is_file()
