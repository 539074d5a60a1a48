"""The rules of `tools/house.py` hold here, and each of them finds what it forbids."""

from pathlib import Path

import pytest

from tools.house import FORBIDDEN, House, broken_rules

FORMS = {
    "a conditional expression as a statement": "print(1) if x else print(2)",
    "a conditional expression as a condition": "if (a if x else b):\n    pass",
    "a conditional expression in a `for` line": "for i in a if x else b:\n    pass",
    "a conditional expression in another": "y = a if x else b if z else c",
    "an f-string in an f-string": "y = f'{f\"{x}\"}'",
    "arithmetic with truth values": "y = 3 * (x > 1)",
    "a tuple assignment of unlike values": "y, z = 1, [x]",
}


def house_of(folder: Path, **modules: str) -> House:
    """A project whose package has these modules; two underscores in a name stand for a dot."""
    for name, text in modules.items():
        path = folder / "zeropods" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return House(folder)


def test_no_rule_is_broken() -> None:
    assert broken_rules(House()) == []


@pytest.mark.parametrize("form", FORBIDDEN)
def test_each_form_is_found_and_named_with_its_place(form: str, tmp_path: Path) -> None:
    house = house_of(tmp_path, plan__memory=f"x = 1\n{FORMS[form]}\n")
    assert house.forbidden(["plan"]) == [f"zeropods/plan/memory.py:2: {form}"]
    assert house.forbidden(["pods"]) == []


def test_arrows_upwards_circles_and_shared_names_are_found(tmp_path: Path) -> None:
    house = house_of(
        tmp_path,
        plan__memory="from zeropods.report import plots\nclass Row: ...\nROWS = 1\n",
        report__plots="import zeropods.plan.memory\nclass Row: ...\nROWS = 2\n",
        pods__agent="FORKS = 'zeropods.launch.forks'\n",
        launch__forks="from zeropods.pods.agent import FORKS\n",
    )
    assert house.upward() == ["zeropods.plan.memory -> zeropods.report.plots"]
    broken = broken_rules(house)
    assert broken[0] == "upwards: zeropods.plan.memory -> zeropods.report.plots"
    assert broken[1].startswith("a circle of imports: zeropods.")
    assert broken[2] == "more than one class is named Row"
    assert house.namesakes() == {"ROWS"}


def test_an_arrow_in_a_string_closes_a_circle_that_is_shown(tmp_path: Path) -> None:
    house = house_of(
        tmp_path,
        pods__agent="FORKS = 'zeropods.launch.forks'\n",
        launch__forks="from zeropods.pods.agent import FORKS\n",
    )
    assert house.circle_of_imports() == []
    modules, rooms = house.circles()
    assert modules.startswith("a circle of modules: zeropods.")
    assert rooms.startswith("a circle of rooms: ")


def test_a_room_is_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    text = '"""About it."""\n\n# why\nx = 1\nif x and x > 0:\n    y = 2 if x else 3\n'
    (room,) = house_of(tmp_path, plan__memory=text).rooms()
    assert (room.name, room.lines, room.tokens, room.branches) == ("plan", 3, 17, 3)
    assert room.conditional_expressions == 1
