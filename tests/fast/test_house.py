"""Imports point one way: drawn from the code by `tools/house.py`."""

from tools.house import House

HOUSE = House()


def test_no_import_points_to_a_higher_floor() -> None:
    assert HOUSE.upward() == []


def test_no_imports_go_in_a_circle() -> None:
    assert HOUSE.circles() == []


def test_no_two_classes_have_one_name() -> None:
    assert HOUSE.shared_class_names() == []
