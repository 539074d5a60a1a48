"""The table of docs/cloud.md is what the commands above it say."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from tests.pages import ROOT, blocks
from zeropods.cli import main

PAGE = (ROOT / "docs" / "cloud.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE[PAGE.index("| job |") :].splitlines()[2:]
]
HOURS = {"s": 1 / 3600, "h": 1.0}


def commands() -> dict[str, list[str]]:
    """The page's calls of the plan by their models, without variables."""
    (block,) = [block for block in blocks(PAGE) if "zeropods plan" in block]
    variables = dict(re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE))
    calls = [
        re.sub(r"\$(\w+)", lambda name: variables[name[1]], line) for line in block.splitlines() if " plan " in line
    ]
    return {re.findall(r"--model (\S+)", call)[0]: shlex.split(call)[1:] for call in calls}


def number(text: str) -> float:
    return float(re.findall(r"[\d,.]+", text)[0].replace(",", ""))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_what_the_plan_says(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    job, _, technique, memory, rate, time, price = row
    assert main([*commands()[job.split()[0].rstrip(",")], "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    wanted = {"technique": technique.split("`")[1]}
    if "checkpointing" in technique:
        wanted["gradient_checkpointing"] = "without" not in technique
    (each,) = [t for t in planned["techniques"] if all(t[name] == value for name, value in wanted.items())]
    assert each["fits"] and number(memory) == round(each["bytes"]["total"] / 2**30, 1)
    unit = "tokens_per_second" if "tokens" in rate else "samples_per_second"
    assert number(rate) == pytest.approx(each[unit], rel=0.01)
    assert number(time) * HOURS[time.split()[1]] == pytest.approx(each["total_seconds"] / 3600, rel=0.1)
    assert number(price) == pytest.approx(each["cost"], abs=0.005, rel=0.02)
    if " as " not in job:
        fitting: list[dict[str, Any]] = [t for t in planned["techniques"] if t["fits"]]
        assert each["samples_per_second"] == max(t["samples_per_second"] for t in fitting)
