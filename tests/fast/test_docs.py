"""The pages hang together: links lead somewhere, and everything that is there is in some page."""

from __future__ import annotations

import re

import pytest

from tests.pages import ROOT, anchors, pages
from zeropods.cli import parser

PAGES = pages()
ALL = "\n".join(PAGES.values())
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links() -> list[tuple[str, str, str]]:
    """Page, target's path from the project's folder, anchor; of every link that stays in the project."""
    found = []
    for page, text in PAGES.items():
        for target in LINK.findall(text):
            if not re.match(r"[a-z]+:", target):
                path, _, anchor = target.partition("#")
                place = (ROOT / page).parent / path if path else ROOT / page
                found.append((page, str(place.resolve().relative_to(ROOT)), anchor))
    return found


def test_every_link_leads_to_a_file_or_a_folder_and_every_anchor_to_a_heading() -> None:
    broken = [(page, path) for page, path, _ in links() if not (ROOT / path).exists()]
    assert len(links()) > 60 and broken == []
    wanted = [(page, path, anchor) for page, path, anchor in links() if anchor and path in PAGES]
    assert wanted and [each for each in wanted if each[2] not in anchors(PAGES[each[1]])] == []


def test_every_page_is_in_the_index() -> None:
    index = {path for page, path, _ in links() if page == "docs/README.md"}
    assert [page for page in PAGES if page != "docs/README.md" and page not in index] == []


def test_every_verb_is_in_some_page() -> None:
    (verbs,) = [action.choices for action in parser()._actions if action.choices]
    assert [verb for verb in verbs if not re.search(rf"zeropods {verb}\b", ALL)] == []


@pytest.mark.parametrize("pattern", ["dsconfig/*.json", "notebooks/*.ipynb", "cml/*.py", "matrices/*.yaml"])
def test_every_file_for_users_is_in_some_page(pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files and [path.name for path in files if not re.search(rf"\b{path.stem}\b", ALL)] == []


def test_the_walk_through_the_house_names_every_room_and_module_beside_them_and_no_other() -> None:
    walk = PAGES["CONTRIBUTING.md"]
    # What the README makes, and git ignores.
    hidden = ("build", "data", "runs", "wikisql_tok_dataset", "__pycache__", "zeropods", "zeropods.egg-info")
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."} - {*hidden}
    rooms = [f"zeropods/{path.parent.name}" for path in (ROOT / "zeropods").glob("*/__init__.py")]
    assert [folder for folder in (*sorted(folders), *rooms) if f"`{folder}/`" not in walk] == []
    modules = [path.name for path in (ROOT / "zeropods").glob("[a-z]*.py")]
    assert [name for name in modules if f"`{name}`" not in walk and f"`zeropods/{name}`" not in walk] == []
    named = re.findall(r"`((?:zeropods|tests|docs)/[\w/]*/)`", walk)
    assert named and [name for name in named if not (ROOT / name).is_dir()] == []
