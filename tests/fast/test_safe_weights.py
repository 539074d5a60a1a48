"""Which weight files a model folder may name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.files import has_weights, refuse_other_weights


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))


def test_pickled_weights_alone_are_none(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert not has_weights(tmp_path)


def test_an_index_that_names_a_pickle_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "m-1.safetensors", "b": "m-2.bin"}})
    with pytest.raises(UserError, match=r"index.json: names 'm-2.bin' as weights; expected \*.safetensors"):
        refuse_other_weights(tmp_path)


def test_a_configuration_that_names_a_pickle_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"transformers_weights": "adapter_model.bin"})
    with pytest.raises(UserError, match=r"config\.json: names 'adapter_model\.bin'"):
        refuse_other_weights(tmp_path)


def test_safetensors_and_files_that_name_none_are_taken(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors"}})
    write(tmp_path / "config.json", {"d_model": 8})
    refuse_other_weights(tmp_path)


def test_what_is_no_json_is_left_to_who_loads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refuse_other_weights(tmp_path)
