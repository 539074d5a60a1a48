"""The reader reads what this version of DeepSpeed writes, and finds the faults that it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.full.profiled_t5 import ROWS, SOURCE, STAGES, TARGET
from zeropods.measure.profile_checks import Checked, check

ROOT = Path(__file__).resolve().parents[2]
LINEAR_MACS = 458_752 * ROWS * SOURCE + 458_752 * ROWS * TARGET + 131_072 * ROWS * TARGET
"""T5-tiny by hand: encoder with cross-attention's keys and values, decoder, output layer over every label."""
ATTENTION_MACS = 2 * 2 * ROWS * 128 * (SOURCE**2 + TARGET**2 + SOURCE * TARGET)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    command = [sys.executable, "-m", "tests.full.profiled_t5", str(folder)]
    subprocess.run(command, check=True, timeout=180, capture_output=True, cwd=ROOT)
    return folder


@pytest.fixture(params=STAGES, ids=["zero1", "zero3"])
def profiled(request: pytest.FixtureRequest, reports: Path) -> tuple[int, Checked]:
    return request.param, check(reports / f"{request.param}.txt")


def test_the_mended_macs_are_those_of_arithmetic(profiled: tuple[int, Checked]) -> None:
    _, checked = profiled
    assert checked.mended.figures["forward_macs"] == pytest.approx(LINEAR_MACS + ATTENTION_MACS, rel=0.005)


def test_the_mended_parameters_are_those_of_t5_tiny(profiled: tuple[int, Checked]) -> None:
    _, checked = profiled
    assert checked.mended.figures["parameters_per_gpu"] == pytest.approx(1_050_368, rel=0.005)


def test_the_known_faults_are_found_where_they_are(profiled: tuple[int, Checked]) -> None:
    stage, checked = profiled
    always = {"root_latency", "root_flops_per_second", "profiled_step"}
    of_stage = {1: {"shared_parameters"}, 3: {"linear_counted_twice", "sharded_parameters"}}
    assert {fault.name for fault in checked.faults} == always | of_stage[stage]


def test_every_line_of_the_report_was_read(profiled: tuple[int, Checked]) -> None:
    _, checked = profiled
    known = {key for line in checked.report.lines for key in line.keys}
    silent = {"step", "expert_tensor_parallelism", "non_expert_parameters", "expert_parameters"}
    assert known == set(vars(checked.report.summary)) - silent
