"""Versions in records are there without an installed package: a checkout alone runs, too."""

from __future__ import annotations

import importlib.metadata

import pytest

from zeropods import __version__
from zeropods.measure import environment


def test_a_record_names_the_version_of_the_code_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.13.0"

    monkeypatch.setattr(environment, "version", version)
    found = environment.versions()
    assert (found["zeropods"], found["torch"], found["deepspeed"]) == (__version__, "2.13.0", None)
