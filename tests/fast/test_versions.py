"""Versions in records and manifests are there without an installed package: a checkout alone runs, too."""

from __future__ import annotations

import importlib.metadata

import pytest

from zeropods import __version__
from zeropods.data import prepare
from zeropods.measure import environment


def only_others(name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise importlib.metadata.PackageNotFoundError(name)
    return known[name]


def test_a_set_is_made_by_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"tokenizers": "1", "sentencepiece": "2", "datasets": "3"}
    monkeypatch.setattr(prepare, "version", lambda name: only_others(name, others))
    assert prepare.versions() == {"zeropods": __version__, **others}


def test_a_record_names_the_version_of_the_code_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda name: only_others(name, {"torch": "2.13.0"}))
    found = environment.versions()
    assert (found["zeropods"], found["torch"], found["deepspeed"]) == (__version__, "2.13.0", None)
