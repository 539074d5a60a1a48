"""The base model that comes with the package: its weights, its card, and what it has never seen."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from zeropods.data.sample import FactTable, read_facts
from zeropods.errors import UserError
from zeropods.files import check_digests
from zeropods.shipped_models import MODELS, SHIPPED, model_source

ROOT = Path(__file__).parents[3]
FOLDER = MODELS / "t5-tiny"
PARAMETERS = 1_050_368
HEADER_BYTES = 64 * 1024


def subjects(tables: list[FactTable]) -> set[str]:
    """What the rows of tables are about: the names in their first column."""
    return {str(row[0]).lower() for table in tables for row in table.rows}


def test_its_weights_are_a_million_numbers_of_two_bytes() -> None:
    weights = FOLDER / "model.safetensors"
    with safe_open(str(weights), framework="np") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        numbers = 0
        for tensor in tensors.values():
            rows, *columns = tensor.get_shape()
            numbers += rows * (columns[0] if columns else 1)
            assert tensor.get_dtype() == "F16"
    assert numbers == PARAMETERS
    assert 2 * PARAMETERS < weights.stat().st_size < 2 * PARAMETERS + HEADER_BYTES


def test_a_byte_that_has_changed_is_refused(tmp_path: Path) -> None:
    check_digests(FOLDER)
    copy = shutil.copytree(FOLDER, tmp_path / "t5-tiny")
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        check_digests(copy)


def test_a_folder_of_its_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHIPPED == ("t5-tiny",)
    monkeypatch.chdir(tmp_path)
    assert model_source("t5-tiny") == str(FOLDER)
    assert model_source("t5-small") == "t5-small"
    (tmp_path / "t5-tiny").mkdir()
    assert model_source("t5-tiny") == "t5-tiny"


def test_it_has_never_seen_a_table_of_the_sample_and_its_card_names_them() -> None:
    of_sample = read_facts()
    of_base = read_facts(ROOT / "tools" / "base_facts")
    assert {table.id for table in of_sample}.isdisjoint(table.id for table in of_base)
    assert {table.header for table in of_sample}.isdisjoint(table.header for table in of_base)
    assert subjects(of_sample).isdisjoint(subjects(of_base))
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    (held_out,) = re.findall(r"\*\*Held out\*\*.*?: ([a-z0-9_,\s]+)\.", card, flags=re.DOTALL)
    assert re.split(r",\s+", held_out.strip()) == sorted(table.id for table in of_sample)


def test_its_card_says_licence_data_command_revision_and_scores() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: bsd-3-clause\n")
    assert "matrices/wikisql.yaml" in card and "matrices/wikisql_second.yaml" in card and "tools/base_facts" in card
    assert re.search(r"revision\s+[0-9a-f]{40}\b", card)
    (score,) = re.findall(r"^\| dev \| ([\d,]+) \| (0\.\d{3}) \[", card, flags=re.MULTILINE)
    questions, logical_form = score
    assert questions == "8,421"
    assert float(logical_form) > 0.65
