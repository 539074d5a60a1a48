"""`zeropods launch --global-batch`: rows of a step, from which the passes follow."""

import json
from pathlib import Path

import pytest

from zeropods.cli import main

SCRIPT = "causal_train.py --model_name_or_path llama-tiny --init random --data raw"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with raw data, as far as a launch looks at them."""
    (tmp_path / "raw").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("where", ["--launcher none --slots 16", "--launcher slurm --num-pods 2 --slots 8"])
def test_the_rows_of_a_step_set_the_passes(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    # 1,024 = 16 processes x 8 rows x 8 passes.
    words = f"launch {where} --dry-run --json --global-batch 1024 -- {SCRIPT} --per_device_train_batch_size 8"
    assert main(words.split()) == 0
    arguments = json.loads(capsys.readouterr().out)["arguments"]
    assert arguments[-2:] == ["--gradient_accumulation_steps", "8"]


@pytest.mark.parametrize(
    ("rows", "flags", "line"),
    [
        ("100", "--per_device_train_batch_size 8", "3 processes of 8 rows a pass cannot reach it; give 96 or 120, or"),
        ("5", "", "3 processes of 4 rows a pass cannot reach it; give 12, or another --per_device_train_batch_size"),
        ("96", "--gradient_accumulation_steps 2", "sets --gradient_accumulation_steps 2 too; leave one of them out"),
    ],
)
def test_rows_that_no_passes_reach_are_refused(
    rows: str, flags: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"launch --launcher none --slots 3 --dry-run --global-batch {rows} -- {SCRIPT} {flags}"
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"zeropods: --global-batch {rows}: {line}") and error.count("\n") == 1


def test_a_script_of_others_says_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").touch()
    launch = ["launch", "--launcher", "none", "--slots", "2", "--dry-run", "--json"]
    words = [*launch, "--global-batch", "8", "--", "mine.py"]
    assert main(words) == 1
    assert "mine.py says no --per_device_train_batch_size; give it" in capsys.readouterr().err
    assert main([*words, "--per_device_train_batch_size", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["arguments"][-1] == "2"
