"""Imports point one way: drawn from the code by `tools/house.py`."""

from tools.house import House


def test_no_import_points_upwards_or_in_a_circle_and_no_two_classes_have_one_name() -> None:
    house = House()
    assert (house.upward(), house.circles(), house.shared_class_names()) == ([], [], [])
